"""Running a replay: what is compared between the worlds after each round, and what was found."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.audit.cases import (
    CASES,
    FAMILIES,
    Case,
    KnownNoise,
    World,
    known_noise,
    make_worlds,
    prescribed,
)
from fedquilt.common import checks
from fedquilt.common.formatting import text_table
from fedquilt.common.vectors import norm
from fedquilt.observe.progress import StepsProgress
from fedquilt.privacy.certified import AmplifiedCertified, Certified
from fedquilt.privacy.secure import SecureCertified, skellam, skellam_mu

# What float64 rounding may add, relative to the numbers that were added and subtracted.
_ROUNDING = 1e-11


class Comparison(NamedTuple):
    """One number that was declared beside the one that was measured."""

    check: str
    declared: float
    measured: float
    ok: bool
    detail: str


def rounding(declared: float, total: torch.Tensor) -> float:
    """Return what float64 may add to the move of a sum that was added and subtracted."""
    return _ROUNDING * (declared + norm(total))


def coefficients(bands: int) -> list[float]:
    """Return binom(2j, j) / 4^j for j < bands, the diagonals of C."""
    return [math.comb(2 * j, j) / 4**j for j in range(bands)]


class ExpectedNoise:
    """The noise a round should have, from the seed and by linear algebra.

    Rounds without a release break the sequence; since then, Y = C^-1 Z.
    """

    def __init__(self, noise: KnownNoise, bands: int) -> None:
        self.known = noise
        self._bands = bands
        self._drawn: list[NDArray[np.float64]] = []
        self._last = -1

    def of(self, index: int, size: int) -> NDArray[np.float64]:
        """Return row `index` of C^-1 Z; rounds must be asked for in order."""
        if index != self._last + 1:
            self._drawn.clear()
        self._last = index
        self._drawn.append(self.known.stream(index).normal(size))
        toeplitz = np.zeros((len(self._drawn),) * 2)
        for offset, value in enumerate(coefficients(self._bands)):
            toeplitz += value * np.eye(len(toeplitz), k=-offset)
        return np.asarray(np.linalg.solve(toeplitz, np.stack(self._drawn))[-1])


def compare_sum(base: World, neighbour: World) -> Iterator[Comparison]:
    """Compare the move of the released sum with the clip that the ledger charged."""
    victim = neighbour.victim
    joined = victim in base.record.cohort
    declared = declared_clip(base, int(victim or 0)) if joined else 0.0
    ours, theirs = base.server.released, neighbour.server.released
    where = _where(base, neighbour)
    if ours is None or theirs is None:
        same = ours is theirs
        yield Comparison("sum", declared, 0.0 if same else math.inf, same, where)
        return
    moved = norm((ours - theirs) * _divisor(base))
    slack = rounding(declared, ours * _divisor(base))
    yield Comparison("sum", declared, moved, moved <= declared + slack, where)


def compare_noise(base: World, silent: World, expected: ExpectedNoise) -> Iterator[Comparison]:
    """Compare the noise in the released sum with the stated one."""
    ours, without = base.server.released, silent.server.released
    if ours is None or without is None:
        return
    stated = _noise_std(base)
    if isinstance(base.federation.mechanism, SecureCertified):
        yield _compare_shares(base, (ours - without) * _divisor(base), expected.known)
        return
    row = torch.from_numpy(expected.of(base.record.round, ours.numel()))
    row = torch.where(_shares(base) > 0, row, 0.0)
    noise = (ours - without) * _divisor(base)
    measured = float(noise @ row / (row @ row))
    apart = norm(noise - stated * row)
    slack = _ROUNDING * (stated * norm(row) + norm(without * _divisor(base)))
    yield Comparison("noise", stated, measured, apart <= slack, f"round {base.record.round}")


def _compare_shares(base: World, noise: torch.Tensor, known: KnownNoise) -> Comparison:
    """Compare the noise in a sum with the shares that its clients have to add, drawn again.

    The worlds round with coins of their own: each client may be one step of the grid apart.
    """
    mechanism: Any = base.federation.mechanism
    secure, cohort, index = mechanism.secure, base.record.cohort, base.record.round
    needed = max(
        math.ceil(secure.share * len(cohort) - 1e-9), (len(cohort) + secure.colluding) // 2 + 1
    )
    share = Fraction(secure.variance, needed - secure.colluding)
    row = torch.zeros_like(noise)
    for client in cohort:
        stream = known.stream(index, 3, client)
        stream.words(4)
        row += torch.from_numpy(skellam(share, noise.numel(), stream.words).astype(float))
    stated = _noise_std(base)
    grid = stated / math.sqrt(share * len(cohort))
    measured = float(noise @ row / (row @ row)) / grid * stated
    ok = float((noise / grid - row).abs().max()) <= len(cohort) * (1 + _ROUNDING)
    return Comparison("noise", stated, measured, ok, f"round {index}")


def compare_bit_noise(base: World, silent: World, noise: KnownNoise) -> Iterator[Comparison]:
    """Compare the noise in the released fraction with the one its cost is computed from."""
    quantile = _quantile(base)
    if quantile is None or base.server.released is None:
        return
    drawn = float(noise.stream(base.record.round, 1).normal(1)[0])
    moved = (_fraction(base) - _fraction(silent)) * quantile.expected_cohort
    stated = 0.5 / math.sqrt(quantile.cost) if quantile.cost > 0 else math.inf
    ok = abs(moved - stated * drawn) <= _ROUNDING * (1 + abs(stated * drawn))
    yield Comparison("bit noise", stated, moved / drawn, ok, f"round {base.record.round}")


def compare_joins(cohorts: Sequence[Sequence[int]], bands: int) -> Iterator[Comparison]:
    """Compare the smallest distance of two joins of one client with the bands of the noise."""
    if bands == 1:
        return
    last: dict[int, int] = {}
    gaps = [(math.inf, "nobody joined twice")]
    for index, cohort in enumerate(cohorts):
        gaps += [(index - last[c], f"client {c}, round {index}") for c in cohort if c in last]
        last |= dict.fromkeys(cohort, index)
    smallest, where = min(gaps)
    yield Comparison("separation", bands, smallest, smallest >= bands, where)


def compare_fractions(base: World, neighbour: World) -> Iterator[Comparison]:
    """Compare the move of the released fraction with half a client, which its cost assumes."""
    quantile = _quantile(base)
    if quantile is None or base.server.released is None:
        return
    joined = neighbour.victim in base.record.cohort
    declared = 0.5 / quantile.expected_cohort if joined else 0.0
    moved = abs(_fraction(base) - _fraction(neighbour))
    ok = moved <= declared + _ROUNDING
    yield Comparison("fraction", declared, moved, ok, _where(base, neighbour))


def compare_bits(silent: World, update: Callable[[int, int], torch.Tensor]) -> Iterator[Comparison]:
    """Compare the fraction without noise with the share of whole updates inside the bound.

    Updates that are zero or not finite have no bit to count.
    """
    quantile, record = _quantile(silent), silent.record
    if quantile is None or silent.server.released is None or record.clip_value is None:
        return
    lengths = [norm(update(client, record.round)) for client in record.cohort]
    bits = [0.5 if length <= record.clip_value else -0.5 for length in lengths if length > 0]
    expected = sum(bits) / quantile.expected_cohort + 0.5
    measured = _fraction(silent)
    ok = abs(measured - expected) <= _ROUNDING
    yield Comparison("bits", expected, measured, ok, f"round {record.round}")


def compare_public(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str
) -> Iterator[Comparison]:
    """Count the public facts that differ."""
    differ = [key for key in ours if not _same(ours[key], theirs.get(key))]
    detail = f"{where}: {', '.join(differ)}" if differ else where
    yield Comparison("public", 0.0, float(len(differ)), not differ, detail)


def released_sum(world: World) -> torch.Tensor | None:
    """Return the sum that the newest round released, in the units of the clip."""
    released = world.server.released
    return None if released is None else released * _divisor(world)


def released_fraction(world: World) -> tuple[float | None, float]:
    """Return the fraction a private quantile released, and how far one client may move it."""
    quantile = _quantile(world)
    if quantile is None or world.server.released is None:
        return None, 0.0
    return _fraction(world), 0.5 / float(quantile.expected_cohort)


def _where(base: World, neighbour: World) -> str:
    return f"client {neighbour.victim}, round {base.record.round}"


def _same(ours: object, theirs: object) -> bool:
    return repr(ours) == repr(theirs)  # NaN is the same as NaN


def _divisor(world: World) -> torch.Tensor:
    """Return what each coordinate of the sum was divided by, in the units of the clip.

    With slices max(1, D k / m), where k of the m clients of the public cohort hold it.
    """
    mechanism, record, shares = world.federation.mechanism, world.record, _shares(world)
    if not isinstance(mechanism, Certified):
        rate = world.federation.learning_rate_at(record.round)
        return torch.full_like(shares, len(record.cohort) / rate)
    if not world.federation.method.holds_parts:
        return torch.full_like(shares, mechanism.settings.divisor)
    return torch.clamp(mechanism.settings.divisor * shares, min=1.0)


def _shares(world: World) -> torch.Tensor:
    """Return the share of the public cohort that holds each coordinate, by counting them."""
    method, record = world.federation.method, world.record
    held = torch.zeros(method.new_sum().total.numel(), dtype=torch.float64)
    for client in record.cohort:
        place: Any = method.place(client, record.round)
        if place is None:
            held += 1.0
        else:
            held[place.index()] += 1.0
    return held / max(1, len(record.cohort))


def _noise_std(world: World) -> float:
    """Return s_t, the stated standard deviation on the sum."""
    mechanism, record = world.federation.mechanism, world.record
    on_mean = math.nan if record.noise.noise_std is None else record.noise.noise_std
    if isinstance(mechanism, Certified):
        return on_mean * mechanism.settings.divisor
    return on_mean * len(record.cohort)


def declared_clip(world: World, client: int) -> float:
    """Return the bound on a client that its charge, or its calibrated noise, pays for."""
    mechanism = world.federation.mechanism
    if isinstance(mechanism, AmplifiedCertified):
        return _noise_std(world) / mechanism.noise_multiplier
    if isinstance(mechanism, SecureCertified):
        return _declared_on_grid(world, mechanism, float(world.charges[client]))
    bit, factor = 0.0, 1.0
    if isinstance(mechanism, Certified):
        bit = mechanism.bit_cost
        factor = sum(value**2 for value in coefficients(mechanism.noise.bands))
    return _noise_std(world) * math.sqrt(max(0.0, float(world.charges[client]) - bit) / factor)


def _declared_on_grid(world: World, mechanism: SecureCertified, charge: float) -> float:
    """Return the bound on a rounded update that its charge pays for under the charged noise."""
    secure, count = mechanism.secure, len(world.record.cohort)
    came = count - len(world.record.absent)
    grid = _noise_std(world) / math.sqrt(secure.variance * came / secure.honest(count))
    honest = secure.variance * (came - secure.colluding) // secure.honest(count)
    return grid * math.sqrt(charge) / skellam_mu(honest)


def _quantile(world: World) -> Any:
    mechanism = world.federation.mechanism
    return mechanism.quantile if isinstance(mechanism, Certified) else None


def _fraction(world: World) -> float:
    """Return the released fraction, from C_(t+1) = C_t exp(-eta (fraction - gamma))."""
    quantile, before = _quantile(world), world.record.clip_value
    if before is None:
        return math.nan
    return float(quantile.target - math.log(quantile.bound / before) / quantile.learning_rate)


@dataclass(frozen=True)
class ReplayFinding:
    """One check of one case: what was declared and what was measured, at its worst."""

    case: str
    declared: float
    measured: float
    ok: bool
    detail: str


def replay(
    cases: Sequence[str] | None = None, seed: int = 0, *, progress: bool = False
) -> list[ReplayFinding]:
    """Replay some of `CASES`, or all of them, and return what was found.

    There is one finding for each case and check, the worst of all victims and rounds.
    With `progress` the error stream shows which case it is at, and the time left.
    """
    names = list(CASES) if cases is None else [checks.choice("case", c, CASES) for c in cases]
    seed = checks.integer("seed", seed, at_least=0)
    found: list[ReplayFinding] = []
    with StepsProgress("audit: case", len(names), shown=progress) as steps:
        for name in names:
            steps.begin(name)
            found += _findings(name, seed)
            steps.end()
    return found


def replay_table(findings: Sequence[ReplayFinding], *, verbose: bool = True) -> str:
    """Return the verdict and the findings as a table.

    Without `verbose` there is one line for each family of cases, and the checks that failed.
    """
    failed = [finding for finding in findings if not finding.ok]
    many = f"{len(findings)} checks"
    verdict = f"{len(failed)} of {many} failed" if failed else f"every check holds ({many})"
    if verbose:
        return f"{verdict}\n\n{_rows(findings)}"
    parts = [verdict, *([_rows(failed)] if failed else []), _families(findings)]
    return "\n\n".join(parts)


def _rows(findings: Sequence[ReplayFinding]) -> str:
    head = ("case: check", "declared", "measured", "", "where")
    rows = [
        (f.case, f"{f.declared:.6g}", f"{f.measured:.6g}", "ok" if f.ok else "FAILED", f.detail)
        for f in findings
    ]
    return text_table(head, rows)


def _families(findings: Sequence[ReplayFinding]) -> str:
    """Return a line for each family: how near its sums came to what was declared."""
    rows = []
    for family, cases in FAMILIES.items():
        own = [f for f in findings if f.case.partition(": ")[0] in cases]
        if not own:
            continue
        used = [f.measured / f.declared for f in own if f.case.endswith(": sum") and f.declared]
        bad = sum(not f.ok for f in own)
        rows.append(
            (
                family,
                len({f.case.partition(": ")[0] for f in own}),
                len(own),
                f"{max(used):.0%}" if used else "-",
                f"{bad} FAILED" if bad else "ok",
            )
        )
    head = ("family", "cases", "checks", "largest move / charged", "")
    return text_table(head, rows, right=(1, 2, 3))


def _findings(name: str, seed: int) -> list[ReplayFinding]:
    with (
        tempfile.TemporaryDirectory(dir=scratch_folder()) as folder,
        contextlib.ExitStack() as stack,
    ):
        try:
            compared = list(_comparisons(CASES[name], seed, Path(folder), stack))
        except Exception as error:
            # A round that stops because of what a client sent tells what it sent.
            reason = f"{type(error).__name__}: {error}"
            compared = [Comparison("runs", 0.0, math.inf, False, reason)]
    return [
        ReplayFinding(f"{name}: {worst.check}", *worst[1:]) for worst in _worst_of_each(compared)
    ]


def scratch_folder() -> str | None:
    """Return a folder in memory where there is one: these ledgers need not survive a crash."""
    memory = "/dev/shm"
    return memory if os.access(memory, os.W_OK) else None


def _worst_of_each(compared: Iterable[Comparison]) -> Iterator[Comparison]:
    """Yield one comparison of each check: one that failed, else the one that moved most."""
    groups: dict[str, list[Comparison]] = {}
    for comparison in compared:
        groups.setdefault(comparison.check, []).append(comparison)
    for group in groups.values():
        yield max(group, key=lambda c: (not c.ok, math.isnan(c.measured), c.measured))


def _comparisons(
    case: Case, seed: int, folder: Path, stack: contextlib.ExitStack
) -> Iterator[Comparison]:
    """Run the worlds of a case side by side and yield every comparison."""
    base, silent, neighbours = make_worlds(case, seed, folder, stack)
    mechanism = base.federation.mechanism
    bands = mechanism.noise.bands if isinstance(mechanism, Certified) else 1
    known = known_noise(seed)
    expected = ExpectedNoise(known, bands)
    cohorts: list[list[int]] = []
    for index in range(case.num_releases):
        for world in (base, silent, *neighbours):
            world.run(index)
        public = base.public()
        cohorts.append(base.record.cohort)
        yield from compare_noise(base, silent, expected)
        yield from compare_bit_noise(base, silent, known)
        if case.norms:
            sent = prescribed(case, seed, base.federation.method)
            yield from compare_bits(silent, sent)
        for neighbour in neighbours:
            where = f"client {neighbour.victim}, round {index}"
            yield from compare_sum(base, neighbour)
            yield from compare_fractions(base, neighbour)
            yield from compare_public(public, neighbour.public(), where)
        for world in (silent, *neighbours):
            world.follow(base)
    yield from compare_joins(cohorts, bands)
    ending = base.ending()
    for neighbour in neighbours:
        where = f"client {neighbour.victim}, at the end"
        yield from compare_public(ending, neighbour.ending(), where)
