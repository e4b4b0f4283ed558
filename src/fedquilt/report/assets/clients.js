// The table of clients: only the rows in sight are in the document, however many there are.
const ROW = 30, SPARE = 8, MOST_PRINTED = 200;

function clientRows(run) {
  const epsilons = run.spend && run.spend.epsilons, shares = run.spend && run.spend.shares;
  const last = new Int32Array(run.num_clients).fill(-1);
  rosterOf(run).forEach((members, r) => members.forEach((client) => { last[client] = r + 1; }));
  const held = run.holdings && run.holdings.counts, ids = run.spend && run.spend.ids;
  const measured = (run.measured && run.measured.clients) || null;
  return run.joins.map((joins, client) => {
    const spent = epsilons ? epsilons[client] : null;
    return {
      client, joins, last: last[client] < 0 ? null : last[client],
      rate: run.rounds ? joins / run.rounds : null,
      epsilon: spent === "inf" ? Infinity : spent,
      share: shares ? shares[client] : null,
      samples: held ? held[client].reduce((a, b) => a + b, 0) : null,
      id: ids ? ids[client] : null, ...(measured ? measured[client] || {} : {}),
    };
  });
}

const COLUMNS = [
  { key: "client", name: "client", show: (v) => String(v) },
  { key: "id", name: "name in the ledger", text: true, show: (v) => v ?? "-" },
  { key: "epsilon", name: "ε spent", show: (v) => (v === Infinity ? "∞" : bound(v)) },
  { key: "share", name: "of its budget", show: percent },
  { key: "joins", name: "joins", show: (v) => String(v) },
  { key: "rate", name: "share of rounds", show: percent },
  { key: "last", name: "last round", show: (v) => (v === null ? "-" : String(v)) },
  { key: "samples", name: "samples", show: (v) => (v === null ? "-" : String(v)) },
];
const measuredColumns = (run) => ((run.measured && run.measured.metrics) || []).map((key) => ({ key, name: `its own ${key.replaceAll("_", " ")}`, show: (v) => number(v, 3) }));
const NAMES = { left: "left", joins: "joins", rate: "rate", last: "last", round: "last", epsilon: "epsilon", eps: "epsilon", "ε": "epsilon", share: "share", client: "client", samples: "samples" };
const TESTS = { ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b, "=": (a, b) => a === b, "!=": (a, b) => a !== b };

// "17" finds clients whose number has 17 in it; "joins>=5 eps<2" compares.
function matcher(text) {
  const tests = text.trim().toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const found = /^([a-zε][a-zε_\d]*)(>=|<=|!=|>|<|=)(-?[\d.]+)(%?)$/.exec(word);
    if (found) {
      const wanted = Number(found[3]) / (found[4] ? 100 : 1), key = NAMES[found[1]] || found[1], test = TESTS[found[2]];
      return (row) => typeof row[key] === "number" && test(row[key], wanted);
    }
    return (row) => String(row.client).includes(word) || (row.id ? row.id.toLowerCase().includes(word) : false);
  });
  return (row) => tests.every((test) => test(row));
}

function clientTable(state, onPick, { all = COLUMNS, rowsOf = clientRows, note = "A client's number shows its own spend in the chart above. Shares are of mu², which adds up; ε does not.", find = "a number, or joins, rate, last, eps, share", byName = false } = {}) {
  let rows = [], chosen = [], columns = all, run = null;
  const count = el("p", { class: "note", role: "status" }), left = el("p", { class: "note" });
  const input = el("input", { type: "search", id: "filter", autocomplete: "off", spellcheck: "false", placeholder: `${byName ? "" : "17, or "}joins>=5 eps<2`,
    oninput: () => { state.filter = input.value; refresh(); } });
  const hint = el("p", { class: "note hint" }, note);
  const head = el("tr", {}), body = el("tbody", {});
  const grid = el("table", {}, el("caption", { class: "quiet" }, "Clients"), el("thead", {}, head), body);
  const box = el("div", { class: "rows", tabindex: "0", role: "region", "aria-label": "Clients, a table that scrolls" }, grid);
  box.addEventListener("scroll", () => requestAnimationFrame(paint), { passive: true });
  box.addEventListener("keydown", (event) => {
    const page = { PageDown: 1, PageUp: -1 }[event.key];
    if (page && event.target === box) { event.preventDefault(); box.scrollTop += page * (box.clientHeight - ROW); }
  });

  function header() {
    head.replaceChildren();
    put(head, columns.map((c) => el("th", { scope: "col", class: c.text ? null : "number", "aria-sort": state.sort === c.key ? (state.down ? "descending" : "ascending") : "none" },
      el("button", { type: "button", onclick: () => sortBy(c.key) }, `${c.name}${state.sort === c.key ? (state.down ? " ▾" : " ▴") : ""}`))));
  }

  function sortBy(key) {
    state.down = state.sort === key ? !state.down : key !== "client";
    state.sort = key;
    refresh();
    head.querySelectorAll("button")[columns.findIndex((c) => c.key === key)].focus();
  }

  function refresh() {
    const test = matcher(state.filter), key = state.sort, turn = state.down ? -1 : 1;
    const value = (row) => row[key] ?? -Infinity;
    chosen = rows.filter(test).sort((a, b) => turn * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) || a.client - b.client);
    count.textContent = `${chosen.length} of ${rows.length} clients`;
    grid.setAttribute("aria-rowcount", String(chosen.length + 1));
    header();
    box.scrollTop = Math.min(box.scrollTop, Math.max(0, chosen.length * ROW - box.clientHeight));
    paint();
  }

  function paint() {
    const first = paper.on ? 0 : Math.max(0, Math.floor(box.scrollTop / ROW) - SPARE);
    const end = Math.min(chosen.length, paper.on ? MOST_PRINTED : first + Math.ceil((box.clientHeight || 400) / ROW) + 2 * SPARE);
    left.textContent = paper.on && end < chosen.length ? `The first ${end} of ${chosen.length} clients; the page on a screen has them all.` : "";
    const held = document.activeElement && body.contains(document.activeElement) ? document.activeElement.dataset.client : null;
    const gap = (height) => {
      const row = el("tr", { class: "gap", "aria-hidden": "true" }, el("td", { colspan: String(columns.length) }));
      row.style.height = `${height}px`;
      row.firstChild.style.height = `${height}px`;
      return height > 0 ? row : null;
    };
    body.replaceChildren();
    put(body, gap(first * ROW), chosen.slice(first, end).map((row, i) => line(row, first + i + 2)), paper.on ? null : gap((chosen.length - end) * ROW));
    if (held !== null) body.querySelector(`[data-client="${Number(held)}"]`)?.focus({ preventScroll: true });
  }

  function line(row, index) {
    const name = columns[0].show(row[columns[0].key]);
    const pick = el("button", { type: "button", class: "pick", "data-client": String(row.client), "aria-label": `Show client ${name}`,
      onclick: () => { state.client = state.client === row.client ? null : row.client; paint(); onPick(); } }, name);
    return el("tr", { "aria-rowindex": String(index), "aria-selected": state.client === row.client ? "true" : null },
      el("th", { scope: "row", class: columns[0].text ? null : "number" }, pick), columns.slice(1).map((c) => el("td", { class: c.text ? null : "number" }, c.show(row[c.key]))));
  }

  paper.listeners.add(() => paint());
  return {
    host: el("div", {}, el("div", { class: "controls" }, el("label", { for: "filter" }, `Find clients: ${find} with < > =`, input), count), box, left,
      hint),
    update(now) {
      if (now === run) return;
      run = now;
      rows = rowsOf(run);
      hint.hidden = rowsOf === clientRows && !(run.spend && run.spend.charges);
      columns = [...all, ...measuredColumns(run)].filter((c) => rows.some((row) => (row[c.key] ?? null) !== null))
        .map((c) => (c.key === "joins" && run.roster_is === "available" ? { ...c, name: "rounds available" } : c));
      if (byName && columns[1].key === "id") columns = columns.slice(1);
      if (!columns.some((c) => c.key === state.sort)) { state.sort = columns[0].key; state.down = false; }
      input.value = state.filter;
      refresh();
    },
  };
}
