// The sections of the page, from the claim to how to repeat a run.
function claimCards(data) {
  const one = (run) => {
    const claim = run.claim;
    return el("article", { class: `claim ${claim.bounded ? "kept" : claim.finished ? "none" : "open"}` },
      el("p", { class: "head" }, claim.headline),
      el("p", { class: "who" }, `${data.series[run.series].label}, seed ${run.seed}: ${run.name}`),
      el("p", {}, claim.explained),
      facts(claim.facts),
      claim.notes.length ? el("details", { class: "paper", open: data.runs.length === 1 }, el("summary", {}, claim.notes.length === 1 ? "1 note" : `${claim.notes.length} notes`),
        el("ul", { class: "notes" }, claim.notes.map((note) => el("li", {}, note)))) : null,
      run.stopped ? el("p", { class: "note" }, `Ended after round ${run.rounds}: ${run.stopped}.`) : null);
  };
  return el("details", { class: "paper", open: data.runs.length === 1 }, el("summary", {}, data.runs.length === 1 ? "What may be claimed, in full" : `What may be claimed, run by run (${data.runs.length})`),
    el("div", { class: "claims" }, data.runs.map(one)));
}

// The first screen: three figures, the one chart that goes with them, and what is not in order.
function claimSection(data) {
  const large = el("div", { class: "figures" }, data.figures.map((f) => el("div", { class: `figure ${f.kind}` },
    el("p", { class: "name" }, f.name), el("p", { class: "large" }, f.figure), el("p", { class: "note" }, f.text))));
  return [data.runs.filter((run) => run.resume).map((run) => stateCard(run)),
    el("div", { class: "first" }, large, el("div", { id: "accuracy" }, leadCharts(data))),
    (data.together || []).map((t) => el("article", { class: `claim ${t.bounded ? "kept" : "none"}` }, el("p", { class: "head" }, t.headline), el("p", {}, t.text))), claimCards(data)];
}

// A run that has not ended: how far it is, whether somebody still works on it, how it goes on.
setInterval(() => document.querySelectorAll(".sign").forEach(tellAge), 1000);
function tellAge(sign) {
  const age = Math.max(0, Math.round(Date.now() / 1000 - Number(sign.dataset.touched)));
  sign.textContent = age < 120 ? `${age} s ago` : age < 7200 ? `${Math.round(age / 60)} min ago` : `${Math.round(age / 3600)} h ago`;
  return sign;
}

function stateCard(run) {
  const alive = run.alive === true, dead = run.alive === false;
  const said = alive ? "The run goes on" : dead ? "The run has stopped: no process works on it" : "The run has not ended";
  const bar = el("progress", { max: String(run.planned), value: String(run.rounds), "aria-label": "rounds" });
  const sign = known(run.touched) ? tellAge(el("span", { class: "sign", "data-touched": String(run.touched) })) : null;
  return el("article", { class: `claim ${alive ? "kept" : "none"} state-card` },
    el("p", { class: "head" }, `${said}: round ${run.rounds} of ${run.planned}`), el("p", { class: "who" }, run.name), bar, sign ? el("p", { class: "note" }, "Last sign of life: ", sign) : null,
    alive ? null : el("p", {}, dead ? "Go on with " : "Where this folder lies, go on with ", el("code", {}, run.resume), ". What was charged to clients stays charged; nothing is paid twice."));
}

// What runs are judged by, inside a sentence.
const metricOf = (data) => [...new Set(data.series.map((s) => s.metric.replace(/^[A-Z](?=[a-z])/, (c) => c.toLowerCase())))].join(" or ");

const ofShare = (s, value) => (s.share && known(value) ? value.toFixed(4) : number(value));

function comparisonSection(data) {
  const columns = [{ name: "what ran" }, { name: `${metricOf(data)}, mean`, kind: "number" }, { name: "sd", kind: "number" },
    { name: "95 % interval of the mean", kind: "number" }, { name: "seeds", kind: "number" }, { name: "worst client's ε", kind: "number" }];
  const rows = data.levels.flatMap((level) => [{ level: level.heading }, ...level.series.map((i) => data.series[i]).map((s) => [
    s.label, ofShare(s, s.mean), ofShare(s, s.sd), known(s.low) ? `${ofShare(s, s.low)} to ${ofShare(s, s.high)}` : "-", String(s.runs.length), bound(s.epsilon)])]);
  return [el("p", { class: "note" }, `Rows under one heading were asked to promise every client the same, best first: only those may be compared by ${metricOf(data)} alone.`), table(columns, rows, "Runs compared"),
    data.pairs && data.pairs.length ? el("details", { class: "paper" }, el("summary", {}, "Differences on the same seeds"), table(
      [{ name: "difference" }, { name: "mean", kind: "number" }, { name: "95 % interval", kind: "number" }, { name: "p", kind: "number" }, { name: "seeds", kind: "number" }],
      data.pairs.map((p) => [p.label, number(p.mean), known(p.low) ? `${number(p.low)} to ${number(p.high)}` : "-", number(p.p, 2), String(p.seeds)]), "Paired differences")) : null];
}

// Condensations show their images; settings that differ in ε show what it buys; others their curve.
function leadCharts(data) {
  const band = (s, side) => (s.runs.length > 1 ? s.curve[side] : null);
  const target = data.runs.map((r) => r.target).find(known), drawn = [];
  const grown = data.runs.length === 1 && data.runs[0].images.length ? data.runs[0].images.at(-1) : null;
  if (grown) drawn.push(el("figure", { class: "chart grown" }, el("figcaption", {}, `The images after round ${grown.round}`),
    el("img", { src: `data:image/png;base64,${grown.png}`, alt: `Synthetic images of ${grown.classes.length} classes` })));
  if (data.tradeoff && data.tradeoff.length) {
    drawn.push(lineChart({ title: `Test ${metricOf(data)} against the ε that was asked`, note: "Line: mean of the seeds; band: lowest to highest seed.", series: data.tradeoff, xLabel: "ε asked of every client", xName: "ε", endLabels: true, xRange: [0], leastSpan: data.series[0].share ? 0.1 : 0 }));
  }
  if (!drawn.length && !data.series.some((s) => s.curve.mean.some(known))) return el("p", { class: "note" }, "No measure on test data is there to be drawn.");
  const far = data.runs.every((r) => 10 * r.rounds >= r.planned); // else the line would be a stroke at the edge
  if (drawn.length && data.series.every((s) => s.curve.rounds.length < 2)) return drawn;
  drawn.push(lineChart({ title: `Test ${metricOf(data)} by round`, note: data.series.some((s) => s.runs.length > 1) ? "Line: mean of the seeds; band: lowest to highest seed." : "",
    series: data.series.map((s) => ({ name: s.label, color: s.color, dash: s.dash, marker: s.marker, x: s.curve.rounds, y: s.curve.mean, low: band(s, "low"), high: band(s, "high") })), xLabel: "round", wholeX: true, endLabels: true,
    xRange: far && data.runs.some((r) => r.resume) ? [1, Math.max(...data.runs.map((r) => r.planned))] : null,
    leastSpan: data.series[0].share ? 0.1 : 0, references: known(target) ? [{ y: target, label: `target ${number(target)}` }] : [], alwaysNamed: data.series.length > 1 }));
  return drawn;
}

function lossSection(data) {
  return el("div", { class: "charts" }, lineChart({ title: "Test loss by round", note: "Mean of the seeds; logarithmic.", log: true, endLabels: true, series: data.series.map((s) => ({ name: s.label, color: s.color, dash: s.dash, marker: s.marker, x: s.curve.rounds, y: s.curve.loss })), xLabel: "round", wholeX: true }));
}

const count = (length) => Array.from({ length }, (_, i) => i + 1);

// What one client has spent after each round, from an amount that it may have spent before.
function ownSpend(run, client, before = 0) {
  const spend = run.spend;
  if (!spend || !spend.charges || !known(before)) return null;
  const { mu2, epsilon } = spend.curve;
  let spent = before;
  const worth = (amount) => {
    if (amount === 0) return 0;
    let low = 0, high = mu2.length - 1;
    while (low < high) { const middle = (low + high) >> 1; if (mu2[middle] >= amount * (1 - 1e-5)) high = middle; else low = middle + 1; }
    return epsilon[low];
  };
  const rounds = rosterOf(run).map((members, r) => {
    const place = members.indexOf(client), charge = spend.charges[r];
    if (place >= 0) spent += Array.isArray(charge) ? charge[place] : charge;
    return worth(spent);
  });
  return [worth(before), ...rounds];
}

const clientName = (run, client) => (run.spend && run.spend.ids ? `client ${client} (${run.spend.ids[client]})` : `client ${client}`);

function spendChart(run, client, { title, levels, from, before, references, note }) {
  const spend = run.spend, x = levels.max.map((_, i) => i + from);
  const alike = levels.max.every((value, i) => value === levels.low[i]);
  const series = alike ? [{ name: "every client", color: "blue", x, y: levels.max }] : [
    { name: "the client that spent most", color: "vermilion", x, y: levels.max },
    { name: "median client (band: middle half)", color: "blue", x, y: levels.median, low: levels.low, high: levels.high }];
  const own = client === null ? null : ownSpend(run, client, before);
  if (own) series.push({ name: clientName(run, client), color: "green", dash: "7 3", x, y: own.slice(from) });
  return lineChart({ title, note: `ε at δ = ${tiny(spend.delta)}, ${spend.adjacency}; ${note}`, series, xLabel: "round", wholeX: true, yRange: [0], references, alwaysNamed: true });
}

function spendSection(run, client) {
  const spend = run.spend;
  if (!spend) return el("p", { class: "note" }, "This run keeps no ledger: no client's spend is bounded or counted.");
  if (spend.missing) return el("p", { class: "note" }, spend.missing);
  const allowance = { y: spend.allowance, label: `lifetime allowance ${bound(spend.allowance)}` };
  const references = [{ y: spend.budget, label: `budget of the run ${bound(spend.budget)}` }], past = spend.lifetime;
  if (spend.allowance !== spend.budget && !past) references.push(allowance);
  const parts = past ? [spendChart(run, client, { title: "Spend against the lifetime allowance, by round", levels: past, from: 0, before: client === null || !past.before ? null : past.before[client], references: [allowance],
    note: "all runs of the ledger together: round 0 is what was spent before this run." })] : [];
  parts.push(spendChart(run, client, { title: past ? "Spend in this run against its budget, by round" : "Spend against allowance, by round", levels: spend.rounds, from: 1, before: 0, references,
    note: "the ledger refuses what would pass the line." }));
  if (spend.epsilons) {
    const cells = new Map();
    spend.epsilons.forEach((e, i) => { if (known(e)) { const key = `${run.joins[i]}|${e.toPrecision(3)}`; cells.set(key, (cells.get(key) || 0) + 1); } });
    const points = [...cells].map(([key, n]) => [...key.split("|").map(Number), n]).sort((a, b) => a[0] - b[0]);
    parts.push(lineChart({ title: past ? "Spend in this run against joins" : "Spend against joins", note: "A dot for each client; a larger one for several alike.", noTable: true, xName: "joins", xLabel: "joins", wholeX: true, yRange: [0], references,
      series: [{ name: "clients", color: "blue", dots: true, x: points.map((p) => p[0]), y: points.map((p) => p[1]), size: points.map((p) => p[2]) }] }));
  }
  return [el("div", { class: "charts" }, parts),
    spend.unbounded ? el("p", { class: "note" }, "The ledger counts whoever had a part in this run as unbounded: its noise can be reproduced.") : null,
    run.roster_is === "available" ? el("p", { class: "note" }, "Under a secret coin the ledger counts the whole allowance from the first exposure; the claim above is what the noise is calibrated for.") : null];
}

function rosterSection(run) {
  const x = count(run.cohort_sizes.length);
  const series = [{ name: run.roster_is === "available" ? "clients available" : "clients in the round", color: "blue", x, y: run.cohort_sizes }];
  const out = run.per_round.without_allowance;
  if (out && out.some((n) => n > 0)) series.push({ name: "clients without allowance", color: "vermilion", dash: "7 3", x, y: out });
  const top = Math.max(...run.joins, 1), width = Math.max(1, Math.ceil(top / 24));
  const bars = [{ label: "0", value: 0 }, ...Array.from({ length: Math.ceil(top / width) }, (_, i) => ({ label: String(i * width + 1), value: 0 }))];
  run.joins.forEach((n) => { bars[Math.ceil(n / width)].value += 1; });  // who never came has a bar of its own
  return el("div", { class: "charts" }, rosterChart(run), lineChart({ title: "Cohorts", series, xLabel: "round", wholeX: true, yRange: [0] }),
    barChart({ title: `How often clients ${did(run)}`, xLabel: width === 1 ? "rounds" : `rounds, from (in steps of ${width})`, bars }));
}

function noiseSection(run) {
  const x = count(run.rounds), p = run.per_round;
  const line = (name, key, tint, dash) => (p[key] ? { name, color: tint, dash, x, y: p[key] } : null);
  const drawn = (title, note, series) => (series.filter(Boolean).length ? lineChart({ title, note, series: series.filter(Boolean), xLabel: "round", wholeX: true, yRange: [0], alwaysNamed: true }) : null);
  const against = (key, unit) => {  // what an accuracy cost, where rounds say so
    const { metric, rounds, values } = run.evaluation, at = p[key] ? rounds.map((r) => p[key][r - 1]) : [];
    const first = known(run.target) ? values.findIndex((v) => known(v) && v >= run.target) : -1;
    return at.length ? lineChart({ title: `Test ${metric} against ${unit}`, note: first < 0 ? "" : `${number(at[first])} ${unit} to the target.`, series: [{ name: metric, color: "blue", x: at, y: values }],
      xLabel: unit, xName: unit, xRange: [0], references: known(run.target) ? [{ y: run.target, label: `target ${number(run.target)}` }] : [] }) : null;
  };
  const charts = [
    against("joules", "joules of all clients"), against("clock", "simulated seconds"),
    drawn("Clip and noise", "The clip bound of a typical client; the noise on each number of the mean update.", [line("clip bound", "clip", "blue"), line("noise (standard deviation)", "noise", "vermilion", "7 3")]),
    run.noise_ratio && run.noise_ratio.some(known) ? lineChart({ title: "Noise against signal, all rounds so far", note: `Norm of the noise over the largest sum of updates the clip allows. ${run.finished ? `The last value, ${number(run.noise_ratio.at(-1), 3)}, is` : "After the last round it is"} the figure that a plan is judged by.`,
      series: [{ name: "noise to signal", color: "purple", x, y: run.noise_ratio }], xLabel: "round", wholeX: true, yRange: [0], references: (run.noise_limits || []).map((y, i) => ({ y, label: i ? `hopeless above ${y}` : `workable below ${y}` })) }) : null,
    drawn("Measured norms (private)", "Of the mean update and of the noise on it.", [line("signal", "signal_norm", "green"), line("noise", "noise_norm", "vermilion", "7 3")]),
    drawn("Training loss (private)", "Mean of the clients that trained.", [line("training loss", "train_loss", "purple")]),
    drawn("Share of clipped updates (private)", "", [line("clipped", "clipped", "orange")]),
    drawn("Nominal ε of one round", "A figure of the published method; not a guarantee.", [line("nominal ε", "budget", "green")]),
    drawn("Matching loss", "Of the synthetic images with what clients sent.", [line("matching loss", "matching_loss", "purple")]),
    drawn("Traffic", "Bytes of a round.", [line("up", "bytes_up", "blue"), line("down", "bytes_down", "vermilion", "7 3")]),
    drawn("Seconds of a round (private)", "", [line("seconds", "seconds", "grey")])].filter(Boolean);
  return charts.length ? el("div", { class: "charts" }, charts) : null;
}

// Under a secret coin a roster says who was there, not who was picked.
const did = (run) => (run.roster_is === "available" ? "were available" : "joined");

function tiersTable(run) {
  if (!run.slices) return null;
  const seen = (run.look && run.look.tiers) || {};
  const tierMetric = Object.keys(run.slices.tiers.map((t) => t.test).find(Boolean) || { accuracy: 0 })[0];
  const columns = [{ name: "width" }, ...["clients", "parameters", "bytes up", "bytes down", "multiply-adds", `test ${tierMetric}`].map((name) => ({ name, kind: "number" }))];
  const rows = run.slices.tiers.map((t) => [String(t.width), ...["clients", "parameters", "bytes_up", "bytes_down", "multiply_adds"].map((k) => t[k].toLocaleString("en")), number((t.test && t.test[tierMetric]) ?? seen[String(t.width)] ?? null)]);
  return [el("h3", {}, `Tiers (${run.slices.method})`), table(columns, rows, "Tiers")];
}

function tiersChart(run) {
  const tiers = run.tiers;
  if (!tiers || !Object.values(tiers.widths).flat().some(known)) return null;
  const series = Object.entries(tiers.widths).map(([width, y], i) => ({ name: `width ${width}`, ...tiers.looks[i], x: tiers.rounds, y }));
  return lineChart({ title: "Test accuracy of each tier", note: "Of the small model that a client of the tier holds, on data that no client holds.", series, xLabel: "round", wholeX: true, yRange: [0, 1], alwaysNamed: true });
}

function groupTable(run) {
  const order = run.joins.map((_, i) => i).sort((a, b) => run.joins[b] - run.joins[a] || a - b), size = Math.max(1, Math.round(order.length / 4));
  const groups = [["most frequent quarter", order.slice(0, size)], ["middle half", order.slice(size, order.length - size)], ["least frequent quarter", order.slice(order.length - size)]].filter((g) => g[1].length);
  const mean = (ids, of) => (ids.some((i) => !known(of[i])) ? null : ids.reduce((sum, i) => sum + of[i], 0) / ids.length);
  const epsilons = run.spend && run.spend.epsilons;
  const columns = [{ name: "clients" }, ...["how many", "joins, mean", "ε spent, mean", "ε spent, most"].map((name) => ({ name, kind: "number" }))];
  return [el("h3", {}, `By how often clients ${did(run)}`), table(columns, groups.map(([name, ids]) => [name, String(ids.length), number(mean(ids, run.joins), 3),
    epsilons ? bound(mean(ids, epsilons)) : "-", epsilons ? bound(Math.max(...ids.map((i) => (epsilons[i] === "inf" ? Infinity : epsilons[i])))) : "-"]), "Groups by participation")];
}

function groupsSection(run) {
  const look = run.look, parts = [groupTable(run), tiersTable(run)], charts = [tiersChart(run)].filter(Boolean);
  if (look && look.classes) charts.push(barChart({ title: "Test accuracy by class", note: "Of the released model, on data that no client holds.", xLabel: "class", yRange: [0, 1], bars: look.classes.map((c) => ({ label: String(c.label), value: c.accuracy })) }));
  if (run.holdings && run.holdings.counts) charts.push(holdingsChart(run.holdings));
  if (run.holdings && run.holdings.missing) parts.push(el("p", { class: "note" }, `What clients hold: ${run.holdings.missing}`));
  if (look && look.missing) parts.push(el("p", { class: "note" }, `No second look at the model: ${look.missing}`));
  parts.push(measuredTable(run));
  if (!run.private) parts.push(el("p", { class: "note" }, "What clients hold is not shown: it is covered by no statement. The owner sees it with --private."));
  return [parts, charts.length ? el("div", { class: "charts" }, charts) : null];
}

// What clients measured on samples of their own, by group: for the owner.
function measuredTable(run) {
  if (!run.measured) return null;
  const columns = [{ name: "group" }, ...[`${run.measured.metrics[0]}, mean`, "worst decile", "Gini"].map((name) => ({ name, kind: "number" }))];
  return [el("h3", {}, `What clients measured after round ${run.measured.rounds} on their own samples (private)`),
    table(columns, run.measured.groups.map((g) => [g.name, ...[g.mean, g.worst, g.gini].map((v) => number(v))]), "What clients measured, by group")];
}

function imagesSection(run, state) {
  if (!run.images.length) return null;
  const frames = run.images, at = Math.min(state.frame ?? frames.length - 1, frames.length - 1);
  const picture = el("img", { alt: "" }), label = el("output", { for: "frame" });
  const show = (i) => {
    const frame = frames[i];
    picture.src = `data:image/png;base64,${frame.png}`;
    picture.alt = `Synthetic images after ${frame.round} rounds, of ${frame.classes.length} classes`;
    label.textContent = frame.round ? `after round ${frame.round}` : "before the first round";
  };
  const slider = el("input", { type: "range", id: "frame", min: "0", max: String(frames.length - 1), step: "1", value: String(at),
    oninput: () => { state.frame = Number(slider.value); show(state.frame); } });
  show(at);
  return [el("p", { class: "note" }, "What the server has grown from what clients sent. No image of a client is among them unless the statement says so."),
    el("div", { class: "controls" }, el("label", { for: "frame" }, "Round", slider), label), el("div", { class: "frames" }, picture), baselinesTable(run)];
}

function configSection(run) {
  const rows = run.config.filter((c) => !c[2] && c[1] !== "(a path)");
  const shown = (list) => table([{ name: "option" }, { name: "value", kind: "wrap" }], list.map((c) => [c[0], c[1]]), "Options");
  return [el("p", {}, "Save the file below as ", el("code", {}, "run.toml"), " and run ", el("code", {}, run.repeat.command), ". Noise that protects is drawn afresh: figures of a private run differ from one to the next."),
    el("details", { class: "paper" }, el("summary", {}, "run.toml"), el("pre", { tabindex: "0" }, run.repeat.toml)),
    el("h3", {}, rows.length === 1 ? "1 option differs from the mode's defaults" : `${rows.length} options differ from the mode's defaults`), shown(rows),
    el("details", {}, el("summary", {}, `All ${run.config.length} options`), shown(run.config)),
    run.ledger ? [el("h3", {}, "Ledger"), facts(Object.entries(run.ledger).map(([k, v]) => [k.replaceAll("_", " "), v === null ? "-" : k === "delta" ? tiny(v) : k.includes("epsilon") ? bound(v) : typeof v === "number" ? number(v) : v]))] : null];
}

// What the owner's own attacks found: pictures of clients are among it.
function attacksSection(run) {
  if (!run.attacks) return null;
  const { inversion, membership } = run.attacks, parts = [];
  if (inversion) parts.push(el("h3", {}, "Inversion: images looked for in one client's first update"),
    el("p", { class: "note" }, `First row: the ${inversion.images} images of client ${inversion.client}; below it what each attack found. The mean test image alone reaches ${inversion.blank.toFixed(1)} dB.`),
    el("div", { class: "frames as-drawn" }, el("img", { src: `data:image/png;base64,${inversion.png}`, alt: "Truth and what attacks found" })),
    table([{ name: "attack" }, { name: "PSNR in dB", kind: "number" }], Object.entries(inversion.psnr).map(([name, value]) => [name, value.toFixed(1)]), "Inversion"));
  if (membership) {
    const rates = Object.keys(membership[0].right_alarms), of = (found, most) => `${found.toFixed(3)} of ${most.toFixed(3)}`;
    parts.push(el("h3", {}, "Membership: who trained the released model?"),
      el("p", { class: "note" }, "Area under the curve (0.5: nothing is learned) and right alarms at a share of false ones; behind each the most that the run's bound allows (1: no bound)."),
      table([{ name: "attack" }, { name: "AUC", kind: "number" }, ...rates.map((rate) => ({ name: `right at ${Number(rate) * 100} % false`, kind: "number" }))],
        membership.map((m) => [m.attack, of(m.auc, m.allowed_auc), ...rates.map((rate) => of(m.right_alarms[rate], m.allowed_alarms[rate]))]), "Membership"));
  }
  return parts;
}

// Ledgers that are watched beside runs.
function ledgersSection(ledgers) {
  return ledgers.map((one) => [el("h3", {}, one.name), populationsSection(one)]);
}

// What stands beside a condensation, computed from raw data: for the owner.
function baselinesTable(run) {
  if (!run.baselines) return null;
  const columns = [{ name: "beside it (private)" }, ...["accuracy", "rounds", "bytes up", "bytes down"].map((name) => ({ name, kind: "number" }))];
  const rows = Object.entries(run.baselines).map(([name, b]) => [name, number(b.accuracy), String(b.rounds ?? "-"), ...[b.bytes_up, b.bytes_down].map((n) => (known(n) ? n.toLocaleString("en") : "-"))]);
  return [el("h3", {}, "Beside it"), table(columns, rows, "Baselines")];
}
