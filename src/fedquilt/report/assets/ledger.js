// The ledger for its operator: populations, who is near the end, runs, a plan, one client's past.
const LEDGER_COLUMNS = [
  { key: "client", name: "client", show: (v) => String(v) },
  { key: "id", name: "client", text: true, show: (v) => v ?? "-" },
  { key: "epsilon", name: "ε spent", show: (v) => (v === Infinity ? "∞" : bound(v)) },
  { key: "share", name: "of its allowance", show: percent },
  { key: "left", name: "can still pay ε", show: (v) => number(v, 3) },
  { key: "joins", name: "joins", show: (v) => String(v) },
  { key: "last", name: "last release", text: true, show: (v) => v ?? "-" },
];

function ledgerRows(people) {
  return people.joins.map((joins, client) => ({
    client, joins, id: people.ids ? people.ids[client] : null, left: people.left[client], share: people.shares[client],
    epsilon: people.epsilons[client] === "inf" ? Infinity : people.epsilons[client], last: people.last[client],
  }));
}

function populationsSection(ledger) {
  const columns = [{ name: "population" }, ...["clients", "joined", "allowance ε", "most spent", "median", "near the end", "used up", "everybody can still pay ε"].map((name) => ({ name, kind: "number" }))];
  return [table(columns, ledger.populations.map((p) => [p.name, String(p.num_clients), String(p.joined), bound(p.allowance), bound(p.epsilon_max), bound(p.epsilon_median), String(p.near_end), String(p.exhausted), number(p.payable, 3)]), "Populations"),
    el("p", { class: "note" }, "Head of the ledger: ", el("code", {}, ledger.head))];
}

function peopleSection(people) {
  const cells = new Map();
  people.epsilons.forEach((e, i) => { if (known(e)) { const key = `${people.joins[i]}|${e.toPrecision(3)}`; cells.set(key, (cells.get(key) || 0) + 1); } });
  const points = [...cells].map(([key, n]) => [...key.split("|").map(Number), n]).sort((a, b) => a[0] - b[0]);
  const bars = Array.from({ length: 10 }, (_, i) => ({ label: `${10 * i} %`, value: 0 }));
  people.shares.forEach((share) => { bars[Math.min(9, Math.floor(10 * share))].value += 1; });
  return [facts([["Allowance of each", `ε ≤ ${bound(people.allowance)} at δ = ${tiny(people.delta)}, ${people.adjacency}`], ["Open reservations", people.open_reservations], ["Without any bound", people.unbounded]].filter((fact) => fact[1])),
    el("div", { class: "charts" },
      lineChart({ title: "Spend against joins", note: "A dot for each client; a larger one for several alike.", noTable: true, xName: "joins", xLabel: "joins", wholeX: true, yRange: [0],
        references: [{ y: people.allowance, label: `allowance ${bound(people.allowance)}` }],
        series: [{ name: "clients", color: "blue", dots: true, x: points.map((p) => p[0]), y: points.map((p) => p[1]), size: points.map((p) => p[2]) }] }),
      barChart({ title: "How much of the allowance is spent", note: "Clients by the share of their allowance, in units that add up.", xLabel: "share spent, from", bars }))];
}

function runsSection(people) {
  const columns = [{ name: "run" }, ...["asked ε", "releases", "clients", "sat out"].map((name) => ({ name, kind: "number" })), { name: "first release" }, { name: "last release" }];
  return table(columns, people.runs.map((r) => [r.name, r.epsilon === null ? "no bound" : bound(r.epsilon), String(r.releases), String(r.clients), String(r.sits_out), r.first ?? "-", r.last ?? "-"]), "Runs of this population");
}

async function ask(address, host, fill) {
  try {
    const answer = await fetch(address, { cache: "no-store", credentials: "omit" });
    const found = await answer.json();
    host.replaceChildren(...[fill(found)].flat());
  } catch {
    host.replaceChildren(el("p", { class: "note" }, "The server does not answer."));
  }
}

function planSection(live, chosen) {
  const said = el("div", { role: "status" });
  const input = el("input", { type: "number", id: "plan", min: "0", step: "any", value: "1" });
  const form = el("form", { class: "controls", onsubmit: (event) => {
    event.preventDefault();
    const query = new URLSearchParams({ population: chosen().name, epsilon: input.value });
    ask(`${live.plan}?${query}`, said, (plan) => (plan.error ? el("p", { class: "note" }, plan.error) : facts([
      ["Can pay", `${plan.can_pay} clients`], ["Cannot", plan.cannot ? `${plan.cannot}: ${plan.who.join(", ")}${plan.cannot > plan.who.length ? ", ..." : ""}` : "nobody"],
      ["Left afterwards", plan.left_after === null ? "-" : `everybody who paid can still pay ε = ${number(plan.left_after, 3)}`],
      ["Runs like it", `${plan.runs} in all, for those who can pay`], ["Largest for everybody", `ε = ${number(plan.payable, 3)}`]])));
  } }, el("label", { for: "plan" }, "A run that asks ε of every client", input), el("button", { type: "submit" }, "What would it cost?"));
  return [form, said];
}

function ledgerPage(first) {
  let data = first;
  const own = { filter: "", sort: "share", down: true, client: null, population: null };
  const main = document.getElementById("main"), past = el("div", { role: "status" });
  const chosen = () => data.ledger.populations.find((p) => p.name === own.population) || data.ledger.populations[0];
  const select = el("select", { id: "population", onchange: () => { own.population = select.value; own.client = null; past.replaceChildren(); update(data); } });
  const clients = clientTable(own, () => history(), { all: LEDGER_COLUMNS, rowsOf: ledgerRows, byName: true, note: "", find: "a name, or joins, eps, share, left" });
  const near = el("button", { type: "button", onclick: () => { const box = document.getElementById("filter"); box.value = `share>=${chosen().near_share * 100}%`; box.dispatchEvent(new Event("input")); } }, "Who is near the end");
  const slots = { populations: slot(populationsSection), people: slot(peopleSection), runs: slot(runsSection) };
  const titles = [["populations", "Populations"], ["people", "Spend"], ["clients", "Clients"], ["history", "History of a client"], ["runs", "Runs"], ["planned", "What a planned run would cost"]];
  const content = { populations: slots.populations.host, people: slots.people.host, clients: [el("div", { class: "controls" }, near), clients.host], runs: slots.runs.host,
    history: [el("p", { class: "note" }, "Choose a client in the table."), past], planned: data.live ? planSection(data.live, chosen) : null };
  const sections = Object.fromEntries(titles.map(([id, title]) => [id, section(id, title, content[id])]));
  const chooser = el("div", { class: "controls" }, el("label", { for: "population" }, "The sections below show", select));
  main.replaceChildren(sections.populations, chooser, ...titles.slice(1).map(([id]) => sections[id]));
  document.getElementById("contents").replaceChildren(...titles.map(([id, title]) => el("a", { href: `#${id}` }, title)));

  function history() {
    if (own.client === null || !data.live) { past.replaceChildren(); return; }
    const query = new URLSearchParams({ population: chosen().name, client: String(own.client) });
    ask(`${data.live.history}?${query}`, past, (found) => (found.error ? el("p", { class: "note" }, found.error) : [
      el("p", {}, `${found.id || `Client ${found.client}`}: ${found.count} releases${found.count > found.rows.length ? `, the last ${found.rows.length} below` : ""}.`),
      lineChart({ title: "Its spend, release by release", series: [{ name: "ε spent", color: "blue", x: found.rows.map((_, i) => i + 1), y: found.rows.map((r) => r.epsilon) }], xLabel: "release", xName: "release", wholeX: true, yRange: [0],
        references: [{ y: chosen().allowance, label: `allowance ${bound(chosen().allowance)}` }], noTable: true }),
      table([{ name: "run" }, { name: "round", kind: "number" }, { name: "when" }, { name: "charge (μ²)", kind: "number" }, { name: "ε afterwards", kind: "number" }],
        found.rows.map((r) => [r.run, String(r.round), r.time, number(r.charge), bound(r.epsilon)]).reverse(), "Releases of this client")])).then(() => sections.history.scrollIntoView({ block: "nearest" }));
  }

  function update(now) {
    data = { ...now, live: data.live };
    const people = chosen();
    document.getElementById("sub").textContent = data.ledger.populations.length === 1 ? "1 population" : `${data.ledger.populations.length} populations`;
    if (!people) { main.hidden = false; slots.populations.update(data.ledger, data.ledger); return; }
    const names = data.ledger.populations.map((p) => p.name);
    if (names.join("\n") !== [...select.options].map((o) => o.value).join("\n")) select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    select.value = people.name;
    chooser.hidden = names.length < 2;
    slots.populations.update(data.ledger.populations.map((p) => [p.name, p.epsilons, p.runs.length]).concat(data.ledger.head), data.ledger);
    slots.people.update([people.name, people.epsilons, people.joins], people);
    slots.runs.update([people.name, people.runs], people);
    clients.update(people);
    document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn || 0) + 1);
  }

  update(first);
  return update;
}
