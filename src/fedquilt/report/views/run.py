"""One run as a page shows it: what is on the public lists, and more only when it is asked for.

What a run has charged its clients, round by round, and all runs of its ledger before it, is shown
too.  Charges depend on participation only and are public (`record.schema.RESULT_KEYS`); when they
were made, and what clients are called, is not shown here.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedquilt.common.errors import FedquiltError
from fedquilt.config import (
    MODE_TABLE,
    RunConfig,
    build_config,
    option_fields,
    write_config_file,
)
from fedquilt.config.modes import RECIPE_KEYS
from fedquilt.privacy.feasibility import HOPELESS, WORKABLE, NoiseSoFar
from fedquilt.privacy.ledger import Charge, Ledger, Population, RunInfo, open_ledger
from fedquilt.privacy.ledger.entries import allowance_mu2, epsilon_spent, ids_digest
from fedquilt.privacy.ledger.rows import bounded_epsilons
from fedquilt.record.folder import RunFolder
from fedquilt.record.result import CUSTOM, published, split_private
from fedquilt.report.runs import parts_of
from fedquilt.report.series import headline, short, shorts, upward
from fedquilt.report.views.claim import claim_view

MOST_CHARGES = 120_000
"""More single charges than this are left out of a page: it stays small, and its sums stay."""
_CURVE = 256

LEVELS = {"max": 1.0, "high": 0.75, "median": 0.5, "low": 0.25}

Cohorts = Sequence[Sequence[int]]
Amounts = NDArray[np.float64]
Places = NDArray[np.int64]


def spend_view(
    folder: RunFolder, cohorts: Cohorts, num_clients: int, *, private: bool = False
) -> dict[str, Any] | None:
    """Return the spend of a run's clients, None for a run without a ledger.

    A ledger that cannot be read gives the reason under `missing` and nothing else.  With
    `private` the names that the ledger has for the clients are there too.
    """
    try:
        account = folder.read_account()
        if account is None:
            return None
        with open_ledger(Path(account["ledger"])) as ledger:
            return _spend(ledger, account["run_id"], folder, cohorts, num_clients, private)
    except (FedquiltError, OSError) as error:
        return {"missing": f"the ledger could not be read: {error}"}


def _spend(
    ledger: Ledger,
    run_id: str,
    folder: RunFolder,
    cohorts: Cohorts,
    num_clients: int,
    private: bool,
) -> dict[str, Any]:
    population = ledger.population_of(run_id)
    run = None if population is None else _named(population, run_id)
    if population is None or run is None:
        return {"missing": f"the ledger does not know the run {run_id!r}"}
    info, charges = population.info, population.charges(run)
    paid = [one for one in charges if np.isfinite(one.charges_mu2).all()]
    same = _same_numbers(paid, cohorts, num_clients)
    places = places_of_run(population, run, num_clients, same)
    lifetime = None if places is None else lifetime_view(population, run, places, len(cohorts))
    epsilon = info.epsilon if run.epsilon is None else run.epsilon
    return {
        "population": info.name,
        "allowance": upward(info.epsilon),
        "budget": upward(epsilon),
        "delta": info.delta,
        "adjacency": info.adjacency.replace("_", "-"),
        "unbounded": len(charges) - len(paid),
        "rounds": _by_round(paid, len(cohorts), num_clients, info.delta),
        **_by_client(paid, population, folder, num_clients, same, epsilon),
        "charges": _single(paid, cohorts, same),
        "lifetime": lifetime,
        "ids": _ids(population, places) if private else None,
        "curve": _curve(epsilon if lifetime is None else info.epsilon, info.delta),
        "total": _total(population, places),
        "settled": len({one.round_index for one in charges}),
    }


def _total(population: Population, places: Places | None) -> dict[str, Any]:
    """Return the worst client's epsilon over all runs of the ledger, and how many released.

    Where the run's clients cannot be told from others, it is the worst of the population.
    """
    epsilons = population.epsilons()
    own = epsilons if places is None else epsilons[places]
    charged = {one.run for one in population.charges()}
    return {"epsilon": upward(float(own.max(initial=0.0))), "runs": len(charged)}


def _named(population: Population, run_id: str) -> RunInfo | None:
    return next((run for run in population.runs() if run.name == run_id), None)


def _ids(population: Population, places: NDArray[np.int64] | None) -> list[str] | None:
    """Return what the ledger calls the clients of a run; None where it has numbers only."""
    if places is None or not population.info.named:
        return None
    names = population.ids()
    return [names[place] for place in places.tolist()]


def _same_numbers(paid: Sequence[Charge], cohorts: Cohorts, num_clients: int) -> bool:
    """Tell whether the ledger and the run number the clients alike."""
    for one in paid:
        if one.clients.size and one.clients[-1] >= num_clients:
            return False
        if one.round_index < len(cohorts):
            joined = np.sort(np.asarray(cohorts[one.round_index], dtype=np.int64))
            if not np.array_equal(joined, one.clients):
                return False
    return True


def _by_round(
    paid: Sequence[Charge], rounds: int, num_clients: int, delta: float
) -> dict[str, list[Any]]:
    """Return levels of the clients' epsilons after every round."""
    size = max([num_clients, *(int(one.clients[-1]) + 1 for one in paid if one.clients.size)])
    spent = np.zeros(size)
    reached = np.zeros((rounds, len(LEVELS)))
    by_round: dict[int, list[Charge]] = {}
    for one in paid:
        by_round.setdefault(one.round_index, []).append(one)
    for index in range(rounds):
        for one in by_round.get(index, ()):
            spent[one.clients] += one.charges_mu2
        reached[index] = levels_of(np.sort(spent)[-num_clients:])
    return as_epsilons(reached, delta)


def _by_client(
    paid: Sequence[Charge],
    population: Population,
    folder: RunFolder,
    num_clients: int,
    same: bool,
    epsilon: float,
) -> dict[str, list[Any] | None]:
    """Return each client's epsilon in this run and its share of the budget, in the run's order.

    Shares are of squared GDP units, which add up; None where charges are not known by client.
    """
    spent: NDArray[np.float64] | None = None
    if same:
        spent = np.zeros(num_clients)
        for one in paid:
            spent[one.clients] += one.charges_mu2
    else:
        saved = folder.load_checkpoint()
        spent = None if saved is None else saved.state.get("account.spent")
    if spent is None or spent.size != num_clients:
        return {"epsilons": None, "shares": None}
    budget = allowance_mu2(epsilon, population.info.delta)
    return {
        "epsilons": [upward(float(value)) for value in bounded_epsilons(spent, population.info)],
        "shares": [short(min(1.0, float(value) / budget), 4) for value in spent],
    }


def _single(paid: Sequence[Charge], cohorts: Cohorts, same: bool) -> list[Any] | None:
    """Return the charges of every round, clients in order; one number where all are equal."""
    if not same or sum(one.clients.size for one in paid) > MOST_CHARGES:
        return None
    charges: list[Any] = [0] * len(cohorts)
    seen: set[int] = set()
    for one in paid:
        if one.round_index >= len(cohorts):
            continue
        if one.round_index in seen:  # a round that ran again after a crash has two lists
            return None
        seen.add(one.round_index)
        equal = one.charges_mu2.size and np.all(one.charges_mu2 == one.charges_mu2[0])
        values = one.charges_mu2[:1] if equal else one.charges_mu2
        listed = [upward(float(value), 4) for value in values]
        charges[one.round_index] = listed[0] if equal else listed
    return charges


def _curve(epsilon: float, delta: float) -> dict[str, list[Any]]:
    """Return amounts up to a budget and what they mean, for a page to look up (upward)."""
    top = allowance_mu2(epsilon, delta)
    amounts = top * (np.arange(1, _CURVE + 1) / _CURVE) ** 2
    epsilons = np.minimum(epsilon_spent(amounts, delta), epsilon)
    return {
        "mu2": [short(value, 6) for value in amounts],
        "epsilon": [upward(float(value)) for value in epsilons],
    }


def levels_of(ordered: Amounts) -> Amounts:
    """Return the levels of ascending amounts; one between two clients is the upper one's."""
    last = ordered.size - 1
    return ordered[[min(last, int(np.ceil(q * last))) for q in LEVELS.values()]]


def as_epsilons(reached: Amounts, delta: float) -> dict[str, list[Any]]:
    """Return the epsilons of levels, by their names, from rows of amounts.

    Epsilon grows with what was charged, so the level of the epsilons is the epsilon of
    the level.
    """
    epsilons = epsilon_spent(reached.ravel(), delta).reshape(reached.shape)
    return {
        name: [upward(float(value)) for value in epsilons[:, place]]
        for place, name in enumerate(LEVELS)
    }


def places_of_run(
    population: Population, run: RunInfo, num_clients: int, same: bool
) -> Places | None:
    """Return the numbers that the run's clients have in its population, in the run's order.

    The ledger keeps a digest of who took part, in order: what fits it is the order.  None
    where no simple order does.
    """
    size = population.info.num_clients
    if run.roster is None:
        return np.arange(num_clients) if same and num_clients <= size else None
    names = population.ids()
    inside = np.setdiff1d(np.arange(size), run.sits_out)
    first = int(inside[0]) if inside.size else 0
    for tried in (np.arange(size), inside, np.arange(first, size)):
        places = tried[:num_clients]
        if places.size == num_clients and ids_digest([names[i] for i in places]) == run.roster:
            return places
    return None


def lifetime_view(
    population: Population, run: RunInfo, places: Places, rounds: int
) -> dict[str, Any] | None:
    """Return what the run's clients have spent in all runs; None for the first of a ledger.

    The first entry of every level is what was spent before the run's first release, the
    others after each of its rounds, other runs in between included.  `before` is each
    client's amount at the start, in units that add up; None where other runs were charged
    in between, so that nobody adds this run's charges to it and gets too little.
    """
    info, charges = population.info, population.charges()
    spent = np.zeros(info.num_clients)
    ends = {one.round_index: place + 1 for place, one in enumerate(charges) if one.run == run.key}
    own = (place for place, one in enumerate(charges) if one.run == run.key)
    began = counted = next(own, len(charges))
    _add(spent, charges[:counted])
    before = spent[places]
    if not before.any():
        return None
    reached = [levels_of(np.sort(before))]
    for index in range(rounds):
        upto = max(counted, ends.get(index, 0))
        _add(spent, charges[counted:upto])
        counted = upto
        reached.append(levels_of(np.sort(spent[places])))
    alone = all(one.run == run.key for one in charges[began:counted])
    shown = as_epsilons(np.asarray(reached), info.delta)
    return {**shown, "before": _plain(before) if alone else None}


def _add(spent: Amounts, charges: list[Charge]) -> None:
    for one in charges:
        spent[one.clients] += one.charges_mu2


def _plain(amounts: Amounts) -> list[Any]:
    return [upward(float(amount), 4) if amount else 0 for amount in amounts]


_COLUMNS = {
    "clip": "clip_value",
    "noise": "noise_std",
    "budget": "epsilon",
    "without_allowance": "without_allowance",
    "matching_loss": "matching_loss",
    "bytes_up": "bytes_up",
    "bytes_down": "bytes_down",
    "joules": "joules",
    "clock": "clock",
    # private, unless asked for
    "noise_norm": "noise_norm",
    "signal_norm": "signal_norm",
    "train_loss": "train_loss",
    "clipped": "clipped_fraction",
    "seconds": "seconds",
}
_MEASURED = "test_"
_PLACES = ("output_dir", "data_dir", "ledger")
"""Options that say where things lie on somebody's machine."""


def run_view(path: str | Path, *, private: bool = False) -> dict[str, Any]:
    """Return a run, finished or not, as plain data.

    Parameters
    ----------
    path
        Its folder.
    private
        Show also what is for the owner only: raw measurements and where files lie.
    """
    folder = RunFolder.open(path)
    config = folder.read_config()
    lines = read_lines(folder, private=private)
    found = folder.read_result()
    result = None if found is None else (found if private else published(found))
    cohorts = [list(line.get("cohort") or ()) for line in lines]
    num_clients = _num_clients(config, result, cohorts)
    spend = spend_view(folder, cohorts, num_clients, private=private)
    return {
        "name": folder.path.name,
        "folder": str(folder.path.resolve()) if private else folder.path.name,
        "mode": config.mode,
        "summary": MODE_TABLE[config.mode].summary,
        "method": config.method,
        "dataset": config.dataset,
        "parts": parts_of(result) if result is not None else "",
        "population": None if config.ledger is None or spend is None else spend.get("population"),
        "seed": config.seed,
        "finished": result is not None,
        "rounds": len(lines),
        "planned": config.num_releases,
        "resume": None
        if result is not None
        else resume_command(config, str(folder.path.resolve()) if private else folder.path.name),
        "stopped": None if result is None else result.get("stopped"),
        "roster_is": "available" if config.amplification else "joined",
        "claim": claim_view(
            result, len(lines), config, None if spend is None else spend.get("total"), private
        ),
        "evaluation": _evaluation(lines),
        "target": short(config.target_accuracy),
        "per_round": _per_round(lines),
        "noise_ratio": _noise_ratio(folder, lines, result),
        "noise_limits": [WORKABLE, HOPELESS],
        "num_clients": num_clients,
        "cohort_sizes": [len(cohort) for cohort in cohorts],
        "roster": [encode_roster(cohort, num_clients) for cohort in cohorts],
        "joins": _joins(cohorts, num_clients),
        "spend": spend,
        "slices": None if result is None else result.get("slices"),
        "tiers": _tiers(lines),
        "condensation": None if result is None else result.get("condensation"),
        "config": _settings(config, private),
        "repeat": _repeat(config, private),
        "ledger": _ledger(result, private),
        "private": private,
    }


def read_lines(folder: RunFolder, *, private: bool) -> list[dict[str, Any]]:
    """Return the rounds so far: what is on the public list, whatever the mode claims.

    A mode without a claim writes raw measurements into the same file; they are no less
    raw for that, and shown only with `private`.  What an evaluation on test data measured is
    public whatever the metric is called; where it is not, it is not in this file.
    """
    lines = folder.peek_rounds()
    if not private:
        measured = [[key for key in line if key.startswith(_MEASURED)] for line in lines]
        return [split_private(*pair)[0] for pair in zip(lines, measured, strict=True)]
    raw = {line["round"]: line for line in folder.peek_rounds("private.jsonl")}
    return [{**line, **raw.get(line["round"], {})} for line in lines]


def _num_clients(
    config: RunConfig, result: Mapping[str, Any] | None, cohorts: Sequence[Sequence[int]]
) -> int:
    """Return how many clients there are; of an unfinished run, at least who was seen."""
    if result is not None and isinstance(result.get("joins"), list):
        return max(1, len(result["joins"]))
    seen = max((max(cohort) + 1 for cohort in cohorts if cohort), default=1)
    return max(seen, config.num_clients or 1)


def _evaluation(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the run is judged by, and the test loss, at the rounds of its evaluations."""
    looked = [line for line in lines if any(key.startswith(_MEASURED) for key in line)]
    keys = dict.fromkeys(key for line in looked for key in line if key.startswith(_MEASURED))
    metric = headline({key: [line.get(key) for line in looked] for key in keys})
    return {
        "metric": metric.removeprefix(_MEASURED),
        "rounds": [line["round"] + 1 for line in looked],
        "values": shorts(line.get(metric) for line in looked),
        "loss": shorts(line.get("test_loss") for line in looked),
    }


def _tiers(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the test accuracy of each tier's own small model by round, widest first."""
    looked = [line for line in lines if line.get("tiers")]
    widths = dict.fromkeys(width for line in looked for width in line["tiers"])
    if not widths:
        return None
    values = {
        width: shorts(line["tiers"].get(width, {}).get("accuracy") for line in looked)
        for width in widths
    }
    return {"rounds": [line["round"] + 1 for line in looked], "widths": values}


def _per_round(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns that hold anything at all."""
    columns = {name: shorts(line.get(key) for line in lines) for name, key in _COLUMNS.items()}
    return {
        name: values
        for name, values in columns.items()
        if any(value is not None for value in values)
    }


def _noise_ratio(
    folder: RunFolder, lines: Sequence[Mapping[str, Any]], result: Mapping[str, Any] | None
) -> list[Any] | None:
    """Return the noise of all rounds so far (`NoiseSoFar`) after each of them.

    Where less than the whole model is noised it is not known from the folder, and neither for a
    condensation.
    """
    config = folder.read_config()
    covered = config.is_bounded(covered=config.patterns("noise_layers") == ("all",))
    size = _noised(folder, config, result) if covered and config.method != "condense" else 0
    noise = NoiseSoFar(size)
    return shorts((noise.after([line]) for line in lines), 4) if size else None


def resume_command(config: RunConfig, place: str) -> str:
    """Return how a run that has not ended goes on; `place` is its folder."""
    if CUSTOM in (config.model, config.method, config.dataset):
        return f"fedquilt.run(..., resume={place!r})"
    command = "condense" if config.method == "condense" else "run"
    return f"fedquilt {command} --resume {shlex.quote(place)}"


def _noised(folder: RunFolder, config: RunConfig, result: Mapping[str, Any] | None) -> int:
    """Return on how many numbers the noise falls, 0 where that is not known.

    A statement names the tensors; before it, those of the package's own models are known.
    """
    saved = folder.load_checkpoint()
    own = CUSTOM in (config.model, config.method) or config.trainable != "all"
    if saved is None or (result is None and own):
        return 0
    floats = [name for name, tensor in saved.model.items() if tensor.is_floating_point()]
    names = floats if result is None else (result.get("statement") or {}).get("covered") or ()
    if not set(names) <= saved.model.keys():
        return 0
    return sum(saved.model[name].numel() for name in names)


def _joins(cohorts: Sequence[Sequence[int]], num_clients: int) -> list[int]:
    counts = [0] * num_clients
    for cohort in cohorts:
        for client in cohort:
            if 0 <= client < num_clients:
                counts[client] += 1
    return counts


def _settings(config: RunConfig, private: bool) -> list[list[Any]]:
    """Return [option, value, whether it is what the mode has by default] for every option.

    What a default follows from (`config/modes.py`) is as it was said.
    """
    fields, values = option_fields(type(config)), config.as_dict()
    usual = {name: item.default for name, item in fields.items()}
    with contextlib.suppress(FedquiltError):  # a mode of somebody's own data may ask for more
        asked = {"mode": config.mode, "method": config.method, "dataset": config.dataset}
        usual = build_config(asked).as_dict()
        said = {name: values[name] for name in RECIPE_KEYS if values.get(name) != usual.get(name)}
        usual = build_config(asked | said).as_dict() | {name: usual[name] for name in said}
    chosen = ("mode", "method", "dataset", "seed")
    return [
        [
            name,
            _shown(name, values.get(name), private),
            name not in chosen and values.get(name) == usual.get(name),
        ]
        for name in fields
    ]


def _shown(name: str, value: Any, private: bool) -> str:
    if value is None:
        return "-"
    if name in _PLACES and not private:
        return str(value) if name == "output_dir" and value == "./results" else "(a path)"
    return str(value)


def _repeat(config: RunConfig, private: bool) -> dict[str, str]:
    """Return the configuration as a file, and the command that runs it again."""
    changes: dict[str, Any] = {} if private else {"output_dir": "./results", "data_dir": None}
    if not private and config.ledger is not None:
        changes["ledger"] = "LEDGER.sqlite"
    text = io.StringIO()
    write_config_file(config.replace(**changes), text)
    command = "condense" if config.method == "condense" else "run"
    return {"toml": text.getvalue(), "command": f"fedquilt {command} --config run.toml"}


def _ledger(result: Mapping[str, Any] | None, private: bool) -> dict[str, Any] | None:
    record = None if result is None else result.get("ledger")
    if not isinstance(record, Mapping):
        return None
    return {key: value for key, value in record.items() if private or key != "ledger"}


def encode_roster(cohort: Sequence[int], num_clients: int) -> str | list[int]:
    """Return who was there: a list, or one bit a client in base64 where that is shorter."""
    members = sorted(int(client) for client in cohort)
    digits = len(str(max(1, num_clients - 1))) + 1
    if len(members) * digits <= 4 * math.ceil(num_clients / 24):
        return members
    bits = np.zeros(num_clients, dtype=np.uint8)
    bits[[client for client in members if 0 <= client < num_clients]] = 1
    return base64.b64encode(np.packbits(bits).tobytes()).decode("ascii")
