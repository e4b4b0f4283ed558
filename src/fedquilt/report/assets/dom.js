// Elements, numbers in words, what is remembered between two drawings.
const SVG = "http://www.w3.org/2000/svg";

function put(parent, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) parent.append(child);
  }
  return parent;
}

function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) {
      made.setAttribute(key, value === true ? "" : value);
    }
  }
  return put(made, ...children);
}

function svg(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  return put(made, ...children);
}

const color = (name) => `var(--${name})`;
const known = (value) => typeof value === "number" && Number.isFinite(value);

function number(value, digits = 4) {
  if (value === "inf") return "∞";
  if (!known(value)) return "-";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) {
    return value.toExponential(2).replace("e+", "e");
  }
  return String(Number(value.toPrecision(digits)));
}

// A bound is never shown smaller than it is.
function bound(value) {
  if (value === "inf") return "∞";
  if (!known(value)) return "-";
  if (value === 0) return "0";
  const scale = 10 ** (2 - Math.floor(Math.log10(value)));
  return String(Number((Math.ceil(value * scale - 1e-9) / scale).toPrecision(12)));
}

// A delta as statements print it: 1e-05.
const tiny = (value) => (known(value) ? (value >= 1e-4 ? String(value) : value.toExponential().replace(/e-(\d)$/, "e-0$1")) : "-");

const percent = (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : "-");

function section(id, title, ...children) {
  const heading = el("h2", { id: `${id}-title` }, title);
  return el("section", { id, "aria-labelledby": `${id}-title` }, heading, ...children);
}

function folded(id, title, ...children) {
  const heading = el("summary", {}, el("h2", { id: `${id}-title` }, title));
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("details", { class: "paper fold" }, heading, ...children));
}

function facts(pairs) {
  return el("dl", {}, pairs.map(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
}

function table(columns, rows, caption) {
  const kind = (column) => ({ class: column.kind || null });
  return el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption },
    el("table", {}, el("caption", { class: "quiet" }, caption),
      el("thead", {}, el("tr", {}, columns.map((c) => el("th", { scope: "col", ...kind(c) }, c.name)))),
      el("tbody", {}, rows.map((row) => row.level
        ? el("tr", { class: "level" }, el("th", { scope: "colgroup", colspan: String(columns.length) }, el("span", {}, row.level)))
        : el("tr", {}, row.map((cell, i) => el("td", kind(columns[i]), cell)))))));
}

// A host that is emptied and filled again whenever what it shows has changed.
function slot(fill) {
  const host = el("div", {});
  let last;
  return {
    host,
    update(key, ...given) {
      const now = JSON.stringify(key);
      if (now === last) return;
      last = now;
      host.replaceChildren();
      put(host, fill(...given));
    },
  };
}

// Paper has no scroll bar, no dark side and nothing to click: while a page is printed, lists are
// in full, what is folded and marked for paper is open, and colours are those of daylight.
const paper = { on: false, listeners: new Set() };
function followPaper() {
  const root = document.documentElement;
  let theme, opened = [];
  addEventListener("beforeprint", () => {
    if (paper.on) return;
    theme = root.dataset.theme;
    root.dataset.theme = "light";
    opened = [...document.querySelectorAll("details.paper:not([open])")];
    turn(true);
  });
  addEventListener("afterprint", () => {
    if (theme === undefined) delete root.dataset.theme; else root.dataset.theme = theme;
    turn(false);
  });
  function turn(on) {
    paper.on = on;
    opened.forEach((details) => { details.open = on; });
    repaintAll();
    paper.listeners.forEach((listener) => listener());
  }
}
