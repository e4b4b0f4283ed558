// Who was there in which round: bits into pixels.
function membersOf(entry, count) {
  if (Array.isArray(entry)) return entry;
  const text = atob(entry), found = [];
  for (let byte = 0; byte < text.length; byte += 1) {
    const bits = text.charCodeAt(byte);
    if (!bits) continue;
    for (let bit = 0; bit < 8; bit += 1) {
      const client = 8 * byte + bit;
      if (bits & (128 >> bit) && client < count) found.push(client);
    }
  }
  return found;
}

const rosters = new WeakMap();
function rosterOf(run) {
  if (!rosters.has(run)) rosters.set(run, run.roster.map((entry) => membersOf(entry, run.num_clients)));
  return rosters.get(run);
}

const MOST_ROWS = 400, MOST_COLUMNS = 1200;

function heatMap(spec) {
  // values[row * columns + column] between 0 and 1
  const canvas = el("canvas", { width: String(spec.columns), height: String(spec.rows), role: "img", "aria-label": spec.label });
  canvas.style.height = `${Math.max(120, Math.min(420, spec.rows * 4))}px`;
  function paint() {
    const style = getComputedStyle(document.documentElement);
    const [from, to] = [style.getPropertyValue("--paper"), style.getPropertyValue("--blue")].map(parseColor);
    const context = canvas.getContext("2d"), picture = context.createImageData(spec.columns, spec.rows);
    spec.values.forEach((value, i) => {
      for (let c = 0; c < 3; c += 1) picture.data[4 * i + c] = from[c] + (to[c] - from[c]) * value;
      picture.data[4 * i + 3] = 255;
    });
    context.putImageData(picture, 0, 0);
  }
  paint();
  repaints.add(new WeakRef(paint));
  canvas.repaint = paint; // keeps it alive as long as the canvas
  return canvas;
}

const repaints = new Set();
function repaintAll() {
  for (const reference of repaints) {
    const paint = reference.deref();
    if (paint) paint(); else repaints.delete(reference);
  }
}

function parseColor(text) {
  const value = parseInt(text.trim().slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

function rosterChart(run) {
  const rounds = rosterOf(run), count = run.num_clients;
  const order = run.joins.map((_, i) => i).sort((a, b) => run.joins[b] - run.joins[a] || a - b);
  const row = new Int32Array(count);
  const perRow = Math.ceil(count / MOST_ROWS), perColumn = Math.max(1, Math.ceil(rounds.length / MOST_COLUMNS));
  order.forEach((client, i) => { row[client] = Math.floor(i / perRow); });
  const rows = Math.ceil(count / perRow), columns = Math.max(1, Math.ceil(rounds.length / perColumn));
  const values = new Float32Array(rows * columns);
  rounds.forEach((members, r) => members.forEach((client) => {
    values[row[client] * columns + Math.floor(r / perColumn)] += 1 / (perRow * perColumn);
  }));
  const never = run.joins.filter((n) => n === 0).length;
  const label = `${count} clients, most frequent first, against ${rounds.length} rounds; ${never} never ${run.roster_is}`;
  return el("figure", { class: "chart wide" },
    el("figcaption", {}, run.roster_is === "available" ? "Who was available when (who was picked is secret)" : "Who joined when",
      el("span", { class: "note" }, `Rounds from left to right, a line for ${perRow === 1 ? "each client" : `${perRow} clients`}, most frequent on top. ${label}.`)),
    el("div", { class: "plot" }, heatMap({ values, rows, columns, label })));
}

function holdingsChart(holdings) {
  const counts = holdings.counts, classes = holdings.classes;
  const perRow = Math.ceil(counts.length / MOST_ROWS), rows = Math.ceil(counts.length / perRow);
  const values = new Float32Array(rows * classes);
  counts.forEach((own, client) => own.forEach((n, label) => { values[Math.floor(client / perRow) * classes + label] += n; }));
  const top = values.reduce((a, b) => Math.max(a, b), 1);
  return el("figure", { class: "chart" },
    el("figcaption", {}, "What clients hold", el("span", { class: "note" }, `A line for ${perRow === 1 ? "each client" : `${perRow} clients`}, a column for each of ${classes} classes; darkest: ${top} samples.`)),
    el("div", { class: "plot" }, heatMap({ values: values.map((v) => v / top), rows, columns: classes, label: `Samples of ${counts.length} clients by class` })));
}
