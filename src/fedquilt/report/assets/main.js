// What answers a second question is folded; a link to it opens it.
const FOLDED = new Set(["loss", "roster", "noise", "groups", "config"]);

// The page: built once, updated when new data come.
const state = { run: null, filter: "", sort: "client", down: false, client: null, frame: null };

function chosenRun(data) {
  return data.runs.find((run) => run.name === state.run) || data.runs[data.lead] || data.runs[0];
}

function theme() {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const button = el("button", { type: "button", onclick: () => { root.dataset.theme = dark() ? "light" : "dark"; name(); repaintAll(); } });
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); repaintAll(); });
  name();
  return button;
}

function page(first) {
  let data = first;
  const main = document.getElementById("main");
  const select = el("select", { id: "run", onchange: () => { state.run = select.value; state.client = null; state.frame = null; update(data); } });
  const table = clientTable(state, () => update(data));
  const key = () => chosenRun(data);
  const slots = {
    claim: slot(claimSection), comparison: slot(comparisonSection), loss: slot(lossSection), spend: slot(spendSection),
    roster: slot(rosterSection), noise: slot(noiseSection), groups: slot(groupsSection), images: slot(imagesSection), attacks: slot(attacksSection), config: slot(configSection), ledgers: slot(ledgersSection),
  };
  const chooser = el("div", { class: "controls" }, el("label", { for: "run" }, "The sections below show", select));
  const parts = [["claim", "At a glance"], ["comparison", "Runs compared"], ["ledgers", "Ledgers"], ["loss", "Loss"]];
  const own = [["images", "Synthetic images"], ["spend", "Privacy spend"], ["clients", "Clients"], ["roster", "Roster"], ["noise", "Clip, noise, cost"], ["groups", "Groups and tiers"], ["attacks", "Attacks (private)"], ["config", "Configuration"]];
  const sections = Object.fromEntries([...parts, ...own].map(([id, title]) => [id, (FOLDED.has(id) ? folded : section)(id, title, id === "clients" ? table.host : slots[id].host)]));
  main.replaceChildren(...parts.map(([id]) => sections[id]), chooser, ...own.map(([id]) => sections[id]));
  document.getElementById("contents").replaceChildren(...[...parts, ...own].map(([id, title]) => el("a", { href: `#${id}`, "data-section": id, onclick: () => { const fold = sections[id].querySelector(":scope > details"); if (fold) fold.open = true; } }, title)));

  function update(now) {
    if (!now.runs.length) return;
    data = now;
    const run = key();
    state.run = run.name;  // and no other one because it comes to be better
    const names = data.runs.map((r) => r.name);
    if (names.join("\n") !== [...select.options].map((o) => o.value).join("\n")) {
      select.replaceChildren(...data.runs.map((r) => el("option", { value: r.name }, `${data.series[r.series].label}, seed ${r.seed}: ${r.name}`)));
    }
    select.value = run.name;
    chooser.hidden = data.runs.length < 2;
    slots.claim.update([data.figures, data.together, data.runs.map((r) => [r.name, r.claim, r.rounds, r.alive, r.touched]), data.series.map((s) => [s.label, s.curve])], data);
    slots.comparison.update(data.series.map((s) => [s.label, s.runs.length, s.mean, s.epsilon]), data);
    slots.loss.update(data.series.map((s) => [s.label, s.curve.loss]), data);
    slots.spend.update([run.name, run.spend, state.client, run.rounds], run, state.client);
    slots.roster.update([run.name, run.rounds], run);
    slots.noise.update([run.name, run.per_round], run);
    slots.groups.update([run.name, run.rounds, run.finished], run);
    slots.images.update([run.name, run.images.length], run, state);
    slots.attacks.update([run.name, run.attacks], run);
    slots.config.update([run.name, run.finished], run);
    table.update(run);
    slots.ledgers.update((data.ledgers || []).map((l) => [l.name, l.head]), data.ledgers || []);
    show("ledgers", Boolean(data.ledgers && data.ledgers.length));
    show("images", run.images.length > 0);
    show("comparison", data.runs.length > 1);
    show("loss", data.series.some((s) => s.curve.loss.some(known)));
    show("spend", Boolean(run.spend));
    show("attacks", Boolean(run.attacks));
    show("noise", slots.noise.host.hasChildNodes());
    document.getElementById("sub").textContent = headline();
    document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn || 0) + 1);
  }

  function show(id, wanted) {
    sections[id].hidden = !wanted;
    document.querySelector(`[data-section="${id}"]`).hidden = !wanted;
  }

  function headline() {
    const running = data.runs.filter((r) => !r.finished).length;
    if (data.runs.length === 1) return `${data.runs[0].name}${running ? "; not finished" : ""}`;
    const seeds = [...new Set(data.runs.map((r) => r.seed))].sort((a, b) => a - b);
    return `${data.series.map((s) => s.label).join("; ")}; ${seeds.length === 1 ? "seed" : "seeds"} ${seeds.join(", ")}` + (running ? `; ${running} not finished` : "");
  }

  update(first);
  return update;
}

// Where a run is only expected, the page waits for it.
function waiting(first) {
  let update = null;
  const next = (data) => {
    if (update) update(data);
    else if (data.runs.length) update = page(data);
  };
  document.getElementById("sub").textContent = "No run yet";
  put(document.getElementById("main"), el("p", { class: "note" }, "No run has begun here yet. The page fills itself when one does."));
  document.documentElement.dataset.drawn = "0";
  next(first);
  return next;
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  put(document.getElementById("tools"), theme());
  followPaper();
  document.getElementById("foot").textContent = `Made by fedquilt ${data.fedquilt}. ${data.live ? "Served by this machine, for this machine." : "One file, nothing is fetched."} Bounds are rounded up.`;
  const update = data.ledger ? ledgerPage(data) : waiting(data);
  if (data.live) follow(data.live, update);
}

start();
