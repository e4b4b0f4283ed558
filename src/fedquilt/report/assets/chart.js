// Line, scatter and bar charts as SVG, without a library.
const MARGIN = { left: 52, right: 14, top: 10, bottom: 38 };

function ticks(low, high, wanted) {
  const span = high - low || 1;
  const raw = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw;
  const found = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) {
    found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  }
  return found;
}

function extent(values, given) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (!known(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) [low, high] = [0, 1];
  if (given && known(given[0])) low = Math.min(given[0], low);
  if (given && known(given[1])) high = Math.max(given[1], high);
  if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  return [low, high];
}

function frame(spec, width, xs, ys) {
  const height = spec.height || Math.max(190, Math.min(300, width * 0.5));
  let [x0, x1] = extent(xs, spec.xRange);
  if (spec.series && spec.series.every((s) => s.dots)) [x0, x1] = [x0 - (x1 - x0) * 0.02, x1 + (x1 - x0) * 0.02];
  let [y0, y1] = extent(ys, spec.yRange);
  if (spec.leastSpan) [y0, y1] = [Math.max(0, y0), Math.min(1, y1)]; // shares lie between 0 and 1
  if (spec.leastSpan && y1 - y0 < spec.leastSpan) { // a hundredth must not look like a climb
    const middle = (y0 + y1) / 2;
    y0 = Math.max(0, Math.min(1 - spec.leastSpan, middle - spec.leastSpan / 2));
    y1 = y0 + spec.leastSpan;
  }
  const room = (y1 - y0) * 0.05;
  y1 += room;
  if (!(spec.yRange && y0 === spec.yRange[0])) y0 -= room;
  const right = spec.right || MARGIN.right, inner = width - MARGIN.left - right;
  const tall = height - MARGIN.top - MARGIN.bottom;
  return {
    width, height, right, x0, x1, y0, y1,
    x: (value) => MARGIN.left + ((value - x0) / (x1 - x0)) * inner,
    y: (value) => MARGIN.top + (1 - (value - y0) / (y1 - y0)) * tall,
  };
}

function axes(at, spec) {
  const group = svg("g", {});
  for (const t of ticks(at.y0, at.y1, 5)) {
    const y = at.y(t);
    put(group, svg("line", { class: "grid", x1: MARGIN.left, x2: at.width - at.right, y1: y, y2: y }),
      svg("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, number(spec.log ? 10 ** t : t, spec.log ? 2 : 3)));
  }
  const bottom = at.height - MARGIN.bottom;
  for (const t of ticks(at.x0, at.x1, at.width < 420 ? 4 : 8)) {
    if (spec.wholeX && Math.abs(t - Math.round(t)) > 1e-9) continue;
    const x = at.x(t);
    put(group, svg("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }),
      svg("text", { x, y: bottom + 17, "text-anchor": "middle" }, number(t, 4)));
  }
  return put(group, svg("line", { class: "axis", x1: MARGIN.left, x2: at.width - at.right, y1: bottom, y2: bottom }),
    svg("text", { x: (MARGIN.left + at.width - at.right) / 2, y: at.height - 3, "text-anchor": "middle" }, spec.xLabel || ""));
}

function pathOf(at, xs, ys) {
  let drawn = "", pen = false;
  xs.forEach((x, i) => {
    if (!known(x) || !known(ys[i])) { pen = false; return; }
    drawn += `${pen ? "L" : "M"}${at.x(x).toFixed(1)} ${at.y(ys[i]).toFixed(1)}`;
    pen = true;
  });
  return drawn;
}

function bandOf(at, series) {
  const there = series.x.map((_, i) => i).filter((i) => known(series.low[i]) && known(series.high[i]));
  if (!there.length) return "";
  const point = (i, side) => `${at.x(series.x[i]).toFixed(1)} ${at.y(series[side][i]).toFixed(1)}`;
  return `M${there.map((i) => point(i, "high")).join("L")}L${there.reverse().map((i) => point(i, "low")).join("L")}Z`;
}

const SHAPES = {
  square: "M-1-1H1V1H-1Z", diamond: "M0-1.4L1.4 0L0 1.4L-1.4 0Z", up: "M0-1.3L1.3 1H-1.3Z", down: "M0 1.3L1.3-1H-1.3Z",
  plus: "M-.5-1.3H.5V-.5H1.3V.5H.5V1.3H-.5V.5H-1.3V-.5H-.5Z", cross: "M-1.3-.7L-.7-1.3L0-.6L.7-1.3L1.3-.7L.6 0L1.3.7L.7 1.3L0 .6L-.7 1.3L-1.3.7L-.6 0Z",
};
function marker(series, x, y, r) {
  const shape = SHAPES[series.marker];
  if (!shape) return svg("circle", { cx: x, cy: y, r, fill: color(series.color) });
  return svg("path", { d: shape, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) scale(${r})`, fill: color(series.color) });
}

// Heights moved as little as needed for neighbours to be so far apart, inside the frame.
function spreadApart(heights, gap, low, high) {
  const order = heights.map((_, i) => i).sort((a, b) => heights[a] - heights[b]), pools = [];
  order.forEach((index, place) => {
    let mean = heights[index] - gap * place, size = 1;
    while (pools.length && pools[pools.length - 1][0] > mean) {
      const [before, count] = pools.pop();
      mean = (mean * size + before * count) / (size + count);
      size += count;
    }
    pools.push([mean, size]);
  });
  const flat = pools.flatMap(([mean, size]) => Array(size).fill(mean)), top = high - gap * (order.length - 1), found = [];
  order.forEach((index, place) => { found[index] = Math.max(low, Math.min(top, flat[place])) + gap * place; });
  return found;
}

// The name of every line at its end: nobody has to look up a colour.
function endLabels(at, series) {
  const ends = series.map((s) => {
    const last = s.y.map(known).lastIndexOf(true);
    return last < 0 ? null : { s, x: at.x(s.x[last]), y: at.y(s.y[last]) };
  }).filter(Boolean);
  const heights = spreadApart(ends.map((e) => e.y), 15, MARGIN.top + 4, at.height - MARGIN.bottom);
  const left = at.width - at.right + 16;
  const names = shortNames(ends.map((e) => e.s.name));
  return ends.map((e, i) => [
    svg("line", { class: "leader", x1: e.x + 3, y1: e.y, x2: left - 4, y2: heights[i], stroke: color(e.s.color) }),
    svg("text", { class: "end", x: left, y: heights[i] + 4 }, names[i])]);
}
// Where a name is too long, what all begin with is left out: what tells them apart is at their ends.
function shortNames(names, most = 28) {
  if (names.every((name) => name.length <= most)) return names;
  const parts = names.map((name) => name.split(/(?<=, )/));
  const shared = parts[0].findIndex((part, i) => parts.some((one) => one[i] !== part || one.length === i + 1));
  return parts.map((one) => one.slice(names.length > 1 ? shared : 0).join(""))
    .map((name) => (name.length > most ? `${name.slice(0, most / 2)}…${name.slice(1 - most / 2)}` : name));
}

function drawSeries(at, series) {
  const group = svg("g", {});
  if (series.low) put(group, svg("path", { d: bandOf(at, series), fill: color(series.color), opacity: 0.18 }));
  if (series.dots) {
    series.x.forEach((x, i) => {
      if (!known(x) || !known(series.y[i])) return;
      const r = series.size ? Math.min(9, 2.5 + Math.sqrt(series.size[i])) : 3;
      const drawn = marker(series, at.x(x), at.y(series.y[i]), r);
      drawn.setAttribute("opacity", "0.7");
      put(group, drawn);
    });
    return group;
  }
  put(group, svg("path", { d: pathOf(at, series.x, series.y), fill: "none", stroke: color(series.color),
    "stroke-width": series.thin ? 1.2 : 2, "stroke-dasharray": series.dash || null, "stroke-linejoin": "round" }));
  const few = series.y.filter(known).length;
  if (few > 0 && few <= 30) {
    series.x.forEach((x, i) => {
      if (known(series.y[i])) put(group, marker(series, at.x(x), at.y(series.y[i]), 2.8));
    });
  }
  return group;
}

function references(at, spec) {
  const shown = (spec.references || []).filter((r) => known(r.y));
  const heights = spreadApart(shown.map((r) => at.y(r.y) - 7), 13, 0, at.height - MARGIN.bottom - 4);
  return shown.map((r, i) => [
    svg("line", { class: "reference", x1: MARGIN.left, x2: at.width - at.right, y1: at.y(r.y), y2: at.y(r.y) }),
    svg("text", { x: at.width - at.right - 2, y: heights[i], "text-anchor": "end" }, r.label),
  ]);
}

// A logarithmic axis is an ordinary one of logarithms; what is not positive is not drawn.
function logarithms(series) {
  const log = (values) => values && values.map((v) => (known(v) && v > 0 ? Math.log10(v) : null));
  return { ...series, y: log(series.y), low: log(series.low), high: log(series.high) };
}

function lineChart(spec) {
  const hidden = new Set();
  const plot = el("div", { class: "plot" });
  const tip = el("div", { class: "tip", hidden: true });
  const said = el("p", { class: "quiet", "aria-live": "polite" });
  const legend = el("ul", { class: "legend" });
  const figure = el("figure", { class: spec.wide ? "chart wide" : "chart" },
    el("figcaption", {}, spec.title, spec.note ? el("span", { class: "note" }, spec.note) : null),
    plot, said, legend, spec.noTable ? null : dataTable(spec));
  let at, place = null;
  const shown = () => spec.series.filter((s) => !hidden.has(s.name));
  const stops = () => [...new Set(shown().flatMap((s) => s.x))].sort((a, b) => a - b);

  function draw() {
    const width = Math.max(280, plot.clientWidth || 560);
    const live = spec.log ? shown().map(logarithms) : shown();
    const ys = live.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]);
    const named = spec.endLabels && width >= 460 && live.length <= 12 && live.length > 1;
    const right = named ? 30 + 6.6 * Math.max(...shortNames(live.map((s) => s.name)).map((name) => name.length)) : MARGIN.right;
    at = frame({ ...spec, right }, width, live.flatMap((s) => s.x), ys.concat((spec.references || []).map((r) => r.y)));
    const drawn = svg("svg", { viewBox: `0 0 ${width} ${at.height}`, tabindex: "0", role: "img",
      "aria-label": `${spec.title}. ${spec.note || ""} Arrow keys read the values.` },
    axes(at, spec), live.map((s) => drawSeries(at, s)), references(at, spec), named ? endLabels(at, live) : null, svg("g", { class: "here" }));
    drawn.addEventListener("pointermove", (event) => {
      const box = drawn.getBoundingClientRect();
      const x = at.x0 + ((event.clientX - box.left) * (width / box.width) - MARGIN.left) / (at.x(1) - at.x(0));
      point(stops().reduce((best, s) => (Math.abs(s - x) < Math.abs(best - x) ? s : best), Infinity), false);
    });
    drawn.addEventListener("pointerleave", () => point(null, false));
    drawn.addEventListener("keydown", (event) => {
      const all = stops(), step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || !all.length) return;
      event.preventDefault();
      const index = place === null ? (step > 0 ? 0 : all.length - 1) : all.indexOf(place) + step;
      point(all[Math.max(0, Math.min(all.length - 1, index))], true);
    });
    plot.replaceChildren(drawn, tip);
  }

  function point(x, aloud) {
    place = known(x) ? x : null;
    const mark = plot.querySelector(".here");
    mark.replaceChildren();
    tip.hidden = place === null;
    if (place === null) return;
    put(mark, svg("line", { class: "cursor", x1: at.x(x), x2: at.x(x), y1: MARGIN.top, y2: at.height - MARGIN.bottom }));
    const lines = shown().flatMap((s) => {
      const i = s.x.indexOf(x);
      if (i < 0 || !known(s.y[i])) return [];
      const range = s.low && known(s.low[i]) ? ` (${number(s.low[i])} to ${number(s.high[i])})` : "";
      return [`${s.name}: ${number(s.y[i])}${range}`];
    });
    tip.replaceChildren(...[`${spec.xName || "round"} ${number(x)}`, ...lines].map((text) => el("div", {}, text)));
    const right = at.x(x) > at.width / 2;
    tip.style.left = right ? "" : `${(100 * at.x(x)) / at.width + 2}%`;
    tip.style.right = right ? `${100 - (100 * at.x(x)) / at.width + 2}%` : "";
    tip.style.top = "6px";
    if (aloud) said.textContent = [`${spec.xName || "round"} ${x}`, ...lines].join("; ");
  }

  function name() {
    if (spec.series.length < 2 && !spec.alwaysNamed) return;
    put(legend, spec.series.map((s) => {
      const button = el("button", { type: "button", "aria-pressed": "true", onclick: () => {
        hidden.has(s.name) ? hidden.delete(s.name) : hidden.add(s.name);
        button.setAttribute("aria-pressed", String(!hidden.has(s.name)));
        draw();
      } }, svg("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, s.dots
        ? marker(s, 13, 5, 4)
        : svg("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: color(s.color), "stroke-width": 2, "stroke-dasharray": s.dash || null }), s.marker && !s.dots ? marker(s, 13, 5, 3.4) : null), s.name);
      return el("li", {}, button);
    }));
  }

  name();
  watchSize(plot, draw);
  return figure;
}

// Drawn once it has a width, and again when the width changes.
function watchSize(host, draw) {
  let width = -1;
  new ResizeObserver(() => {
    if (host.clientWidth === width || !host.clientWidth) return;
    width = host.clientWidth;
    draw();
  }).observe(host);
}

function dataTable(spec) {
  const details = el("details", {}, el("summary", {}, "Data as a table"));
  details.addEventListener("toggle", () => {
    if (!details.open || details.children.length > 1) return;
    const stops = [...new Set(spec.series.flatMap((s) => s.x))].sort((a, b) => a - b);
    const columns = [{ name: spec.xLabel || "x", kind: "number" }, ...spec.series.map((s) => ({ name: s.name, kind: "number" }))];
    const places = spec.series.map((s) => new Map(s.x.map((x, i) => [x, i])));
    put(details, table(columns, stops.slice(0, 500).map((x) => [number(x), ...spec.series.map((s, k) => {
      const i = places[k].get(x);
      return i === undefined ? "" : number(s.y[i]);
    })]), spec.title));
  });
  return details;
}

function barChart(spec) {
  const plot = el("div", { class: "plot" });
  function draw() {
    const width = Math.max(280, plot.clientWidth || 560);
    const at = frame({ ...spec, yRange: spec.yRange || [0] }, width, [0, spec.bars.length], spec.bars.map((b) => b.value));
    const bottom = at.height - MARGIN.bottom;
    const wide = (at.x(1) - at.x(0)) * 0.72;
    const every = Math.ceil(spec.bars.length / (width / 46));
    const drawn = svg("svg", { viewBox: `0 0 ${width} ${at.height}`, role: "img", "aria-label": `${spec.title}: ` +
      spec.bars.map((b) => `${b.label} ${number(b.value)}`).slice(0, 40).join(", ") });
    for (const t of ticks(at.y0, at.y1, 4)) {
      put(drawn, svg("line", { class: "grid", x1: MARGIN.left, x2: width - at.right, y1: at.y(t), y2: at.y(t) }),
        svg("text", { x: MARGIN.left - 6, y: at.y(t) + 4, "text-anchor": "end" }, number(t, 3)));
    }
    spec.bars.forEach((bar, i) => {
      const x = at.x(i + 0.5) - wide / 2, y = at.y(known(bar.value) ? bar.value : 0);
      put(drawn, svg("rect", { x, y, width: wide, height: Math.max(0, bottom - y), fill: color(spec.color || "blue") },
        svg("title", {}, `${bar.label}: ${number(bar.value)}`)));
      if (i % every === 0) put(drawn, svg("text", { x: x + wide / 2, y: bottom + 16, "text-anchor": "middle" }, bar.label));
    });
    put(drawn, svg("text", { x: width / 2, y: at.height - 3, "text-anchor": "middle" }, spec.xLabel || ""));
    plot.replaceChildren(drawn);
  }
  watchSize(plot, draw);
  return el("figure", { class: "chart" },
    el("figcaption", {}, spec.title, spec.note ? el("span", { class: "note" }, spec.note) : null), plot);
}
