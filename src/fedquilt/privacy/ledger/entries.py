"""The entries of the ledger: their hash chain, cohorts as bytes, clients' ids, unit of account.

An entry is what happened, never what it adds up to; balances are folds over the
entries.  Its hash is SHA-256 over the hash of the entry before it and everything
it says:

    hash_n = SHA-256(tag ‖ hash_{n−1} ‖ length ‖ JSON of the fields ‖ clients ‖ charges)

where the JSON is one array in a fixed order, without spaces and in ASCII, that also
holds the lengths of the two byte strings, so that no two entries share an encoding.
The hash carries no secret.  It finds damage and edits; somebody who rewrites every
later entry too is found only by a head kept outside, which is why each run keeps
its own.

A cohort is stored as bytes: clients are sorted and stored as differences in the narrowest
unsigned width that holds them all (one byte says which); charges are one float64 when they
are all the same, else one for each client.  A cohort of 10,000 out of 1,000,000 takes 20 kB,
and 80 kB more when the charges differ.  Everything is little-endian, and equal cohorts have
equal bytes.

A client's id is a text that stands for it in every run: the name of a hospital, the
number of a writer.  It says nothing about what the client holds.  The ledger keeps ids
in entries of their own ("members"), appended when a population is made and when clients
join it later; balances are kept by number, so a client's account is found by its id
wherever it stands in a run's list.

**The unit of account** are squared GDP units, kept exactly in float64.  A release with noise of
standard deviation s, in which client i is bounded by c_i, costs that client μ² = (c_i/s)² and costs
nobody else anything (zero-out adjacency).  Releases compose as μ_i² = Σ (c_i/s)², exactly and in
any order, also when later ones are chosen from earlier results (Dong, Roth & Su 2022; Smith &
Thakurta 2022 for the filter).  An allowance (ε, δ) is therefore one number, μ_L² with μ_L =
gaussian_mu(ε, δ), and keeping every client's sum at or below it keeps every client at (ε, δ).

Epsilons do not add up and cannot be subtracted.  What a client has left is
μ_L² − μ_i², and the largest epsilon a new run may still ask for is

    gaussian_epsilon(√(μ_L² − μ_i²), δ).

After one run at ε = 3 of an allowance of ε = 6, δ = 1e-5, that is 4.86, not 3.

Sums are exact, not merely accurate.  Every charge is rounded up to a multiple of
the allowance's last binary place; multiples of one power of two that stay below
2^53 of it add and subtract in float64 without any rounding.  So the order of
charges cannot matter, a balance computed again is the same bit for bit, and what
stands in the ledger is never less than what was released.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from fedquilt.common import checks
from fedquilt.common.errors import DataError, InvalidValueError, LedgerCorruptError
from fedquilt.common.schema import (
    ANY_TEXT,
    COUNT,
    POSITIVE,
    TEXT,
    ListOf,
    Object,
    Scalar,
    Schema,
    check,
    maybe,
)
from fedquilt.common.untrusted import parse_json
from fedquilt.config.choices import ADJACENCIES
from fedquilt.privacy.accounting.gaussian import (
    gaussian_epsilon,
    gaussian_epsilon_many,
    gaussian_mu,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MARGIN = 1e-12
"""An allowance is lowered by this share, so that a sum at the limit is below it."""

TOLERANCE = 1e-11
"""A charge above what is left by at most this share of the allowance (and at most
a millionth of itself) is lowered to what is left: K charges of 1/K pass."""

_SHARP_VALUES = 512  # up to so many different values, epsilon is computed one by one


LEAST_MU2 = 1e-290
"""A smaller allowance is refused: below it float64 keeps fewer digits, then none."""


def allowance_mu2(epsilon: float, delta: float) -> float:
    """Return the squared GDP units that (epsilon, delta) allows, on the safe side."""
    try:
        allowed = gaussian_mu(epsilon, delta) ** 2 * (1.0 - MARGIN)
    except OverflowError:
        allowed = math.inf
    if not LEAST_MU2 <= allowed < math.inf:
        raise InvalidValueError(
            f"epsilon={epsilon!r} at delta={delta!r} must be an amount that can be counted: it "
            f"allows mu²={allowed:g}, which must be >= {LEAST_MU2:g} and finite"
        )
    return allowed


def grid_unit(limit_mu2: float) -> float:
    """Return the power of two of which every amount under `limit_mu2` is a multiple."""
    return math.ulp(limit_mu2)


def round_up(mu2: FloatArray, unit: float) -> FloatArray:
    """Return the smallest multiples of `unit`, a power of two, that are >= `mu2`."""
    with np.errstate(over="ignore"):
        return np.asarray(np.ceil(mu2 / unit) * unit, dtype=np.float64)


def round_down(mu2: float, unit: float) -> float:
    """Return the largest multiple of `unit`, a power of two, that is <= `mu2`."""
    return math.floor(mu2 / unit) * unit


def granted(asked: FloatArray, left: FloatArray, limit_mu2: float) -> FloatArray:
    """Return the charges to record: `asked` on the grid, never above `left`.

    A charge that does not fit is NaN.  One that misses by rounding only (see
    `TOLERANCE`) is lowered to what is left; a client with nothing left gets
    nothing, however small the charge.
    """
    charges = round_up(asked, grid_unit(limit_mu2))
    excess = charges - left
    rounding = (excess <= TOLERANCE * limit_mu2) & (excess <= 1e-6 * asked)
    return np.where(excess <= 0, charges, np.where(rounding, left, np.nan))


def falls_short(asked: float, left: FloatArray, limit_mu2: float) -> npt.NDArray[np.bool_]:
    """Return where `left` is less than `asked` by more than rounding."""
    return np.asarray(left < asked - TOLERANCE * limit_mu2, dtype=np.bool_)


def epsilon_spent(mu2: FloatArray, delta: float) -> FloatArray:
    """Return the epsilon of every amount, never below the exact one; inf stays inf."""
    joined = np.flatnonzero(mu2)  # of a million clients most were never in a release
    values, places = np.unique(mu2[joined], return_inverse=True)
    if values.size + (joined.size < mu2.size) > _SHARP_VALUES:
        return gaussian_epsilon_many(mu2, delta)
    sharp = [gaussian_epsilon(math.sqrt(v), delta) if v < math.inf else v for v in values]
    epsilons = np.zeros(mu2.shape)
    epsilons[joined] = np.array(sharp, dtype=np.float64)[places]
    return epsilons


def epsilon_left(mu2: FloatArray, delta: float) -> FloatArray:
    """Return the largest epsilon that every amount pays for, never above the exact one.

    `gaussian_epsilon_many` promises at most 0.1 % plus 1e-9 above the exact
    value; taking that off again gives a bound from below.
    """
    values, places = np.unique(mu2, return_inverse=True)
    if values.size > _SHARP_VALUES:
        many = gaussian_epsilon_many(mu2, delta)
        return np.maximum(many / 1.001 - 1e-9, 0.0)
    sharp = np.array([_payable_epsilon(float(v), delta) for v in values], dtype=np.float64)
    return sharp[places]


def _payable_epsilon(mu2: float, delta: float) -> float:
    """Return an epsilon with allowance_mu2(epsilon, delta) <= mu2, as large as can be told."""
    if mu2 < LEAST_MU2:
        return 0.0
    epsilon = gaussian_epsilon(math.sqrt(mu2), delta)
    while epsilon > 0 and gaussian_mu(epsilon, delta) ** 2 * (1.0 - MARGIN) > mu2:
        epsilon *= 1.0 - 1e-9
    return epsilon


LEDGER = "ledger"
POPULATION = "population"
MEMBERS = "members"
RUN = "run"
RESUME = "resume"
RESERVE = "reserve"
SETTLE = "settle"
RELEASE = "release"
UNBOUNDED = "unbounded"
FINISH = "finish"
KINDS = (*(LEDGER, POPULATION, MEMBERS, RUN, RESUME, RESERVE, SETTLE, RELEASE, UNBOUNDED), FINISH)

_TAG = b"fedquilt ledger 1\n"
GENESIS = bytes(32)
"""The hash before the first entry."""


@dataclass(frozen=True)
class Entry:
    """One line of the ledger.

    ========== ==================================================================
    kind       what it says
    ========== ==================================================================
    ledger     the file was made; `digest` is its random identity
    population clients share an allowance; `body` has their number, epsilon, delta
    members    clients joined the population; `body` has their ids, in the order of
               their numbers, which go on from those before them
    run        a run may spend so much of it; `clients` sit out
    resume     the run goes on; its open reservations are dropped, nothing had left
    reserve    `charges` of `clients` count as spent, replacing the same round's
    settle     a release is about to be used; `reservation` becomes spent
    release    nothing left in that round; `reservation` is dropped
    unbounded  a release without a bound; `clients` are at infinity from now on
    finish     the run is over; its open reservations are dropped
    ========== ==================================================================

    `population` and `run` are the `seq` of the entry that made them.
    """

    seq: int
    kind: str
    time: str
    population: int | None = None
    run: int | None = None
    round: int | None = None
    reservation: int | None = None
    name: str | None = None
    digest: str | None = None
    body: str | None = None
    clients: bytes | None = None
    charges: bytes | None = None

    @classmethod
    def of(cls, row: Sequence[Any]) -> Entry:
        """Read the columns of a row; SQLite keeps any type in any column, this does not."""
        for column, value in zip(COLUMNS, row, strict=True):
            allowed = _TYPES[column]
            if not isinstance(value, allowed) or isinstance(value, bool):
                raise LedgerCorruptError(f"entry {row[0]!r} is damaged: {column}={value!r:.80}")
        return cls(*row)

    def values(self) -> tuple[Any, ...]:
        """Return the fields in the order of `COLUMNS`."""
        return tuple(getattr(self, column) for column in COLUMNS)

    def chained(self, previous: bytes) -> bytes:
        """Return this entry's hash, given the hash of the entry before it."""
        fields: list[Any] = [*self.values()[:-2]]
        fields += [None if blob is None else len(blob) for blob in (self.clients, self.charges)]
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=True).encode("ascii")
        digest = hashlib.sha256(_TAG + previous + len(text).to_bytes(8, "big") + text)
        digest.update(self.clients or b"")
        digest.update(self.charges or b"")
        return digest.digest()


COLUMNS = tuple(Entry.__dataclass_fields__)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(COLUMNS, (str, NoneType)),
    **dict.fromkeys(("kind", "time"), (str,)),
    **dict.fromkeys(("population", "run", "round", "reservation"), (int, NoneType)),
    **dict.fromkeys(("clients", "charges"), (bytes, NoneType)),
    "seq": (int,),
}


def read_row(row: Sequence[Any], last: int, previous: bytes) -> tuple[Entry | None, list[str]]:
    """Read the columns of an entry and its hash; return it and what is wrong with it.

    `last` and `previous` are the number and the hash of the entry before it.
    """
    problems = [] if row[0] == last + 1 else [f"entry {last + 1} is missing"]
    try:
        entry = Entry.of(row[:-1])
    except LedgerCorruptError as error:
        return None, [*problems, str(error)]
    if entry.chained(previous) != row[-1]:
        problems.append(
            f"entry {entry.seq} ({entry.kind}) was edited, or does not follow the entry before it"
        )
    if entry.kind not in KINDS:
        problems.append(f"entry {entry.seq} has no place here: {entry.kind!r}")
    return entry, problems


def make_body(**values: object) -> str:
    """Return the canonical JSON of an entry's further values; floats survive exactly."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_body(entry: Entry, what: str, schema: Schema) -> dict[str, Any]:
    """Return the further values of an entry, which must follow this schema."""
    try:
        body: dict[str, Any] = parse_json(entry.body or "", "its body")
        check(body, schema, "its body", DataError)
    except DataError as error:
        raise LedgerCorruptError(f"entry {entry.seq} is not {what}: {error}") from error
    return body


_WIDTHS = (1, 2, 4)


def encode_clients(clients: IntArray) -> bytes:
    """Return the bytes of strictly increasing client numbers."""
    if clients.size == 0:
        return b""
    steps = np.diff(clients, prepend=0)
    width = next(w for w in _WIDTHS if int(steps.max()) < 256**w)
    return bytes([width]) + steps.astype(f"<u{width}").tobytes()


def decode_clients(blob: bytes, num_clients: int) -> IntArray:
    """Return the client numbers in `blob`; they increase and stay below `num_clients`."""
    if not blob:
        return np.empty(0, dtype=np.int64)
    width = blob[0]
    if width not in _WIDTHS or (len(blob) - 1) % width or len(blob) == 1:
        raise LedgerCorruptError("an entry's list of clients cannot be read")
    clients = np.cumsum(np.frombuffer(blob, dtype=f"<u{width}", offset=1), dtype=np.int64)
    if clients[-1] >= num_clients or not np.all(np.diff(clients) > 0):
        raise LedgerCorruptError("an entry's list of clients is out of order or out of range")
    return clients


def encode_charges(charges: FloatArray) -> bytes:
    """Return the bytes of one charge for each client."""
    same = charges.size > 0 and np.all(charges == charges[0])
    return (charges[:1] if same else charges).astype("<f8").tobytes()


def decode_charges(blob: bytes, count: int) -> FloatArray:
    """Return `count` charges; every one is a number >= 0, or infinity."""
    if len(blob) not in (8 * min(count, 1), 8 * count):
        raise LedgerCorruptError("an entry's charges do not match its clients")
    charges = np.frombuffer(blob, dtype="<f8").astype(np.float64)
    if not np.all(charges >= 0):
        raise LedgerCorruptError("an entry holds a charge that is not a number >= 0")
    return charges if charges.size == count else np.full(count, charges[0])


def check_clients(clients: npt.ArrayLike, num_clients: int) -> IntArray:
    """Return `clients` as whole numbers, each once, all in the population; or raise."""
    return checks.indices("clients", clients, num_clients, unique=True)


def check_charges(charges_mu2: npt.ArrayLike, count: int) -> FloatArray:
    """Return one finite charge >= 0 for each of `count` clients, or raise."""
    array = np.asarray(charges_mu2)
    if array.ndim == 0:
        return np.full(count, checks.number("charges_mu2", array.item(), at_least=0))
    if array.shape != (count,) or array.dtype.kind not in "iuf":
        raise InvalidValueError(
            f"charges_mu2 of type {array.dtype} and shape {array.shape} must be one number "
            f"for each of the {count} clients, or one for all"
        )
    array = array.astype(np.float64)
    wrong = ~(np.isfinite(array) & (array >= 0))
    if np.any(wrong):
        raise InvalidValueError(f"charges_mu2={float(array[wrong][0])!r} must be finite and >= 0")
    return array


MAX_CLIENTS = 100_000_000
"""More clients than this would not fit one SQLite value."""

_NUMBERS = frozenset({int, float})
_TINY = math.ulp(0.0)
_POSITIVE = Scalar("a finite number > 0", _NUMBERS, least=_TINY)
_POPULATION = Object(
    {
        "num_clients": dataclasses.replace(POSITIVE, most=MAX_CLIENTS),
        "epsilon": _POSITIVE,
        "delta": Scalar("a number > 0 and < 1", _NUMBERS, least=_TINY, most=math.nextafter(1, 0)),
        "allowance_mu2": _POSITIVE,
    },
    {
        "adjacency": dataclasses.replace(TEXT, texts=ADJACENCIES),
        "named": Scalar("true or false", frozenset({bool})),
    },
)
_RUN = Object(
    {"epsilon": maybe(_POSITIVE), "budget_mu2": dataclasses.replace(_POSITIVE, least=0)},
    {"roster": ANY_TEXT, "enrolled": COUNT},
)


@dataclass(frozen=True)
class PopulationInfo:
    """Clients 0 … num_clients − 1, each with the same lifetime allowance.

    `allowance_mu2` is gaussian_mu(epsilon, delta)² on the safe side, fixed when the
    population is made, as is the adjacency its charges are counted under.  A `named`
    population knows its clients by id and may grow; any other knows them by number.
    """

    key: int
    name: str
    num_clients: int
    epsilon: float
    delta: float
    allowance_mu2: float
    adjacency: str = ADJACENCIES[0]
    named: bool = False

    @classmethod
    def of(cls, entry: Entry) -> PopulationInfo:
        """Read a "population" entry."""
        body = read_body(entry, "a population", _POPULATION)
        return cls(
            key=entry.seq,
            name=str(entry.name),
            num_clients=body["num_clients"],
            epsilon=float(body["epsilon"]),
            delta=float(body["delta"]),
            allowance_mu2=float(body["allowance_mu2"]),
            adjacency=body.get("adjacency", ADJACENCIES[0]),
            named=body.get("named", False),
        )


@dataclass(frozen=True, eq=False)
class RunInfo:
    """What a run may spend of each client's allowance; None: it has no bound to state.

    `roster` is the digest of the ids of its clients, in the run's order, where it named
    them; `enrolled` of them had been in no release of the population before it.
    """

    key: int
    name: str
    population: int
    epsilon: float | None
    budget_mu2: float
    sits_out: IntArray
    roster: str | None = None
    enrolled: int = 0

    @classmethod
    def of(cls, entry: Entry, num_clients: int) -> RunInfo:
        """Read a "run" entry."""
        body = read_body(entry, "a run", _RUN)
        epsilon = None if body["epsilon"] is None else float(body["epsilon"])
        budget = float(body["budget_mu2"])
        roster, enrolled = body.get("roster"), body.get("enrolled", 0)
        sits_out = decode_clients(entry.clients or b"", num_clients)
        name, population = str(entry.name), int(entry.population or 0)
        return cls(entry.seq, name, population, epsilon, budget, sits_out, roster, enrolled)


@dataclass(frozen=True, eq=False)
class Reservation:
    """A round's charges, counted as spent until they are settled or released.

    `charges_mu2` is what was granted to `clients`, in the order they were given.
    It is what was asked, rounded up to the ledger's grid, except that a client at
    the very end of its allowance may be granted up to a millionth less.  A release
    whose bounds are c_i = noise_std·√charges_mu2 keeps the allowance exactly.
    """

    entry: int
    run: int
    round_index: int
    clients: IntArray
    charges_mu2: FloatArray


UNKNOWN = -1
"""Stands for the number of a client that is not in the population."""

_LONGEST = 200

# What Unicode calls default-ignorable and Python printable, and the blank Braille pattern.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)


def check_ids(client_ids: Iterable[str]) -> tuple[str, ...]:
    """Return the ids when each is a short text that reads one way, and no two read alike.

    Reading one way: in Unicode's composed form (NFC), without characters that print
    nothing and without blanks around it.  Reading alike: see `alike`.
    """
    ids = _as_texts(client_ids)
    for value in ids:
        if not unicodedata.is_normalized("NFC", value):
            raise InvalidValueError(
                f"client id {value!a} must be in Unicode's composed form (NFC): "
                f"{unicodedata.normalize('NFC', value)!a}"
            )
        if unseen := _UNSEEN.search(value):
            raise InvalidValueError(
                f"client id {value!a} must not hold {unseen[0]!a}, which prints nothing"
            )
    firsts: dict[str, str] = {}
    for value in ids:
        first = firsts.setdefault(alike(value), value)
        if first != value:
            raise InvalidValueError(
                f"client ids {first!r} and {value!r} must differ in more than letter case, width "
                "of letters or blanks"
            )
    return ids


def alike(client_id: str) -> str:
    """Return what ids have in common that people take for one another.

    That is the id under compatibility forms (NFKC) and case folding, without blanks.

    >>> alike("Ward 7") == alike("ward７")
    True
    >>> alike("07") == alike("7")
    False
    """
    folded = unicodedata.normalize("NFKC", client_id).casefold()
    return "".join(unicodedata.normalize("NFKC", folded).split())


def _as_texts(client_ids: Iterable[str]) -> tuple[str, ...]:
    """Return the ids when each is a short text without blanks around it, and all differ."""
    if isinstance(client_ids, str):
        raise InvalidValueError(f"client_ids={client_ids!r} must be a list of texts, not a text")
    ids = tuple(client_ids)
    if not ids:
        raise InvalidValueError("client_ids=[] must name at least one client")
    for value in ids:
        if (
            not isinstance(value, str)
            or not 0 < len(value) <= _LONGEST
            or value != value.strip()
            or not value.isprintable()
        ):
            raise InvalidValueError(
                f"client id {value!r} must be a text of 1 to {_LONGEST} printable characters "
                "without blanks around it"
            )
    if len(set(ids)) < len(ids):
        seen: set[str] = set()
        twice = next(value for value in ids if value in seen or seen.add(value))  # type: ignore[func-returns-value]
        raise InvalidValueError(f"client id {twice!r} must be given only once")
    return ids


def ids_digest(ids: Iterable[str]) -> str:
    """Return what stands for these ids in this order."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def roster_name(dataset: str, ids: Iterable[str]) -> str:
    """Return the name of the population of these clients, in whatever order.

    >>> roster_name("digits", ["b", "a"]) == roster_name("digits", ["a", "b"])
    True
    >>> roster_name("digits", ["a", "b"])
    'digits-2-f30a0f21996fa08f'
    """
    ordered = sorted(ids)
    return f"{dataset}-{len(ordered)}-{ids_digest([dataset, *ordered])[:16]}"


def members_body(ids: Iterable[str]) -> str:
    """Return the body of a "members" entry."""
    return make_body(ids=list(ids))


def members_of(entry: Entry) -> list[str]:
    """Read a "members" entry."""
    try:
        ids = read_body(entry, "a list of members", Object({"ids": ListOf(TEXT)}))["ids"]
        return list(_as_texts(ids))  # an older fedquilt let more ids pass
    except InvalidValueError as error:
        raise LedgerCorruptError(f"entry {entry.seq} is not a list of members: {error}") from error


def numbers_of(ids: Iterable[str], known: Mapping[str, int]) -> IntArray:
    """Return the number of each id, `UNKNOWN` for those that have none."""
    return np.fromiter((known.get(value, UNKNOWN) for value in ids), dtype=np.int64)
