"""A site's policy: what its data may be used for, decided by whoever holds them.

    apps = ["5f2c..."]          # hashes that `fedquilt flower trust` prints; []: the one of --trust
    modes = ["certified"]
    methods = ["full"]
    epsilon = 6.0               # what this site gives away in its life, at delta
    delta = 1e-5
    adjacency = "zero_out"
    run_epsilon = 2.0           # at most, in one run
    round_epsilon = 1.0         # at most, in one round
    clip_norm = 1.0             # at most; the site clips by itself to what the order says
    client = "key:2f5a..."      # who this site is in the roster: a name or an account
    roster = ["clinic-07"]      # who else must be in it: names or accounts
    min_roster = 5              # how many clients the run must have
    min_cohort = 3              # how many must be asked in the same round
    secure_aggregation = "allowed"  # "required": no update leaves but under masks
    min_survivors = 1           # fewest clients whose masked sum may be opened
    colluding_clients = 0       # so many of a round may side with the server
    may_send = []               # beside the update: "loss", "count", "monitor", "evaluation"
    hours = ["00:00", "24:00"]  # when orders are taken, UTC; from 20:00 to 06:00: over midnight
    dry_run = false             # check and tell, and send nothing
    account = "site.sqlite"     # what was given away; from the folder of this file

    [options]                   # what else a run must have, or one of a list
    local_epochs = [1, 2]

The file is read anew for every order, by the node's own process, before the app is loaded.  An
order is compared with it before a sample is read.  Whatever it does not name has the value above,
but for `apps`, `run_epsilon` and `round_epsilon` (the site's epsilon), the clip norm and the
smallest numbers of clients (any), `client`, `roster` and `[options]` (none).
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.common import checks
from fedquilt.common.errors import DataError, FedquiltError, InvalidValueError
from fedquilt.common.formatting import printable
from fedquilt.common.storage import write_file
from fedquilt.common.untrusted import parse_toml, read_bytes
from fedquilt.config import MODE_TABLE, RunConfig
from fedquilt.config.choices import ADJACENCIES, METHODS
from fedquilt.config.option import Flag
from fedquilt.config.run import option_names
from fedquilt.privacy.accounting import Adjacency, gaussian_mu

if TYPE_CHECKING:
    from fedquilt.flower.wire import Order

POLICY = "site.toml"
_FILE_BYTES = 1 << 20
EVALUATION = "evaluation"
"""What a client measures of a model on samples that it holds back: nothing bounds what it tells."""
_LEAVES = ("loss", "count", "monitor", EVALUATION)
_MASKS = ("allowed", "required")
_CERTIFIED = "certified"
_CONDENSE = "condense"  # class statistics in the place of a model's update
ACCOUNT = "/var/lib/fedquilt/site.sqlite"
"""Where the account of a site is under the units, to whom /etc is read-only."""
LIFE: float = MODE_TABLE[_CERTIFIED].defaults["epsilon"]
"""What a site gives away in its life where nothing is said: what a usual certified run asks."""


class SiteRefusal(FedquiltError):  # noqa: N818
    """A site does not take an order; says why, from the order, the policy and the account alone."""


@dataclass(frozen=True, kw_only=True)
class SitePolicy:
    """What a site lets its data be used for; the fields are those of the file."""

    apps: tuple[str, ...] = ()
    modes: tuple[str, ...] = (_CERTIFIED,)
    methods: tuple[str, ...] = ("full",)
    epsilon: float = LIFE
    delta: float = 1e-5
    adjacency: str = ADJACENCIES[0]
    run_epsilon: float | None = None
    round_epsilon: float | None = None
    clip_norm: float | None = None
    client: str = ""
    roster: tuple[str, ...] = ()
    min_roster: int = 1
    min_cohort: int = 1
    secure_aggregation: str = _MASKS[0]
    min_survivors: int = 1
    colluding_clients: int = 0
    may_send: tuple[str, ...] = ()
    hours: tuple[str, ...] = ("00:00", "24:00")
    dry_run: bool = False
    account: str = "site.sqlite"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_texts("modes", self.modes, MODE_TABLE)
        _check_texts("methods", self.methods, (*METHODS, _CONDENSE))
        _check_texts("may_send", self.may_send, _LEAVES)
        _check_texts("roster", self.roster, None)
        _check_texts("apps", self.apps, None)
        for value in self.apps:
            if not re.fullmatch("[0-9a-f]{64}", value):
                raise InvalidValueError(
                    f"apps: {value!r} must be the hash of an app, 64 hex digits"
                )
        checks.text("client", self.client or "none")
        checks.number("epsilon", self.epsilon, above=0)
        checks.number("delta", self.delta, above=0, below=1)
        checks.choice("adjacency", self.adjacency, ADJACENCIES)
        for name in ("run_epsilon", "round_epsilon"):
            value = getattr(self, name)
            if value is not None:
                checks.number(name, value, above=0, at_most=self.epsilon)
        if self.clip_norm is not None:
            checks.number("clip_norm", self.clip_norm, above=0)
        for name in ("min_roster", "min_cohort", "min_survivors"):
            checks.integer(name, getattr(self, name), at_least=1)
        checks.integer("colluding_clients", self.colluding_clients, at_least=0)
        checks.choice("secure_aggregation", self.secure_aggregation, _MASKS)
        checks.flag("dry_run", self.dry_run)
        checks.path("account", self.account)
        _minutes(self.hours)
        if not isinstance(self.options, Mapping):
            raise InvalidValueError("options must be a table: [options]")
        for name in self.options:
            checks.choice("options", name, _pinnable())

    @property
    def most_in_a_round(self) -> float:
        """The largest charge of a round, in squared GDP units of the policy's adjacency."""
        return gaussian_mu(self.round_epsilon or self.epsilon, self.delta) ** 2

    def charge(self, order: Order) -> float:
        """Return what an order costs this site, in squared GDP units of its own adjacency.

        A client whose vector is at most c long moves a sum by c when it is taken out, and by 2 c
        when it is exchanged; under noise of standard deviation s that is (c / s)^2, or four
        times as much.  What the server says it has charged counts where it is more, as with
        correlated noise, and is not believed where it is less.
        """
        own = (order.clip / order.noise_std) ** 2
        return max(own, order.charge) * Adjacency.of(self.adjacency).sensitivity_factor ** 2

    def check(
        self,
        order: Order,
        config: RunConfig,
        app: str,
        trusted: str | None = None,
        survivors: int | None = None,
        *,
        evaluates: bool = False,
    ) -> None:
        """Raise `SiteRefusal` for what the policy does not allow.

        `survivors` are the fewest whose sum is opened where the update leaves under masks.
        What `evaluates` asks for no update, so it promises no noise.
        """
        allowed = self.apps or (() if trusted is None else (trusted,))
        require(app in allowed, f"app {app[:16]!r} is not one that this site runs")
        self.check_settings(config)
        for name, least in (("num_clients", self.min_roster), ("cohort", self.min_cohort)):
            value = getattr(order, name)
            require(value >= least, f"{name}={value} is fewer than {least}")
        if survivors is None:
            plain = self.secure_aggregation != "required"
            require(plain, "it asks for a plain update, and they leave here under masks only")
        else:
            require(self.is_bounded(config), f"mode={config.mode!r} has no masked sums")
            least = self.min_survivors
            require(survivors >= least, f"survivors={survivors} is fewer than {least}")
        require(order.cohort <= order.num_clients, "the cohort is larger than the roster")
        self._check_roster(order)
        require(not order.monitor or "monitor" in self.may_send, "it asks for resource figures")
        if self.is_bounded(config) and not evaluates:
            self._check_promise(order)
        now = datetime.datetime.now(datetime.UTC)
        require(self._is_open(now), f"orders are taken from {' to '.join(self.hours)} UTC")
        require(not self.dry_run, "dry run: the order would have been taken")

    def check_settings(self, config: RunConfig) -> None:
        """Raise `SiteRefusal` for what a run's configuration alone says is not allowed."""
        _require_one_of("mode", config.mode, self.modes)
        _require_one_of("method", config.method, self.methods)
        for name, wanted in self.options.items():
            any_of = wanted if isinstance(wanted, list) else [wanted]
            _require_one_of(name, getattr(config, name), any_of)
        if self.is_bounded(config):
            most = self.run_epsilon or self.epsilon
            require(
                config.epsilon <= most, f"epsilon={config.epsilon:g} of a run is above {most:g}"
            )
            require(config.delta <= self.delta, f"delta={config.delta:g} is above {self.delta:g}")
        elif not MODE_TABLE[config.mode].noised:
            require("count" in self.may_send, f"mode={config.mode!r} weighs by numbers of samples")

    @staticmethod
    def is_bounded(config: RunConfig) -> bool:
        """Tell whether the account can bound what a run takes; of any other it takes everything."""
        return config.mode == _CERTIFIED

    def _check_roster(self, order: Order) -> None:
        """Compare who is in the run, as far as the server says it."""
        members = order.members()
        whole = not order.roster or len(members) == order.num_clients
        require(whole, f"the roster has {len(members)} clients, not {order.num_clients}")
        known = {text for member in members for text in member}
        for wanted in self.roster:
            require(wanted in known, f"{printable(wanted)} is not in the roster")
        if self.client:
            asked = members[order.client] if 0 <= order.client < len(members) else ()
            require(self.client in asked, "the order is for another client of the roster")

    def _check_promise(self, order: Order) -> None:
        promised = (order.clip, order.noise_std, order.charge)
        require(
            all(math.isfinite(value) and value > 0 for value in promised),
            "the order names no clip and noise that hold before a client trains",
        )
        longest = self.clip_norm or math.inf
        require(order.clip <= longest, f"clip={order.clip:g} is above {longest:g}")
        charge, most = self.charge(order), self.most_in_a_round
        require(charge <= most, f"the round costs mu^2={charge:.4g}, above {most:.4g}")

    def _is_open(self, now: datetime.datetime) -> bool:
        begin, end = _minutes(self.hours)
        minute = now.hour * 60 + now.minute
        return begin <= minute < end if begin < end else minute >= begin or minute < end


def read_policy(path: Path) -> SitePolicy:
    """Read a site's policy; what it does not know is refused."""
    try:
        given = parse_toml(read_bytes(path, _FILE_BYTES))
        known = [entry.name for entry in dataclasses.fields(SitePolicy)]
        for name in given:
            checks.choice("the key", name, known)
        texts: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
        }
        return SitePolicy(**texts)
    except InvalidValueError as error:
        raise InvalidValueError(f"{error} (in {printable(path)})") from error
    except ValueError as error:
        raise DataError(f"{printable(path)} must be TOML: {printable(error)[:200]}") from error


def policy_text(**chosen: Any) -> str:
    """Return the file of a policy: certified alone, and what was chosen."""
    policy = SitePolicy(**chosen)
    lines = ["# Read anew for every order.  What each line means: docs/site.md."]
    for entry in dataclasses.fields(SitePolicy):
        value = getattr(policy, entry.name)
        if entry.name != "options" and value not in (None, ""):
            lines.append(f"{entry.name} = {_toml(value)}")
    return "\n".join([*lines, "", "[options]", ""])


def write_policy(path: Path, **chosen: Any) -> bool:
    """Write a policy for its owner alone, unless there is one; tell whether it was written."""
    text = policy_text(**chosen)
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_file(path, text.encode(), 0o600)
    return True


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{entry}"' for entry in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def require(holds: bool, reason: str) -> None:
    """Raise `SiteRefusal` with a reason, unless something holds."""
    if not holds:
        raise SiteRefusal(reason)


def _require_one_of(name: str, value: object, allowed: Collection[Any]) -> None:
    # True equals 1, and is another setting all the same.
    same = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
    require(same, f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def _pinnable() -> list[str]:
    """Return the options that orders name, and that have no line of their own in a policy."""
    return [name for name in option_names(Flag.NODES) if name not in ("mode", "method")]


def _check_texts(name: str, values: object, allowed: Any) -> None:
    if not isinstance(values, tuple) or not all(isinstance(value, str) for value in values):
        raise InvalidValueError(f"{name}={values!r} must be a list of texts")
    for value in values:
        if allowed is not None:
            checks.choice(name, value, allowed)


def _minutes(hours: object) -> tuple[int, int]:
    """Return the first minute of the day at which orders are taken, and the first after."""
    if isinstance(hours, tuple) and len(hours) == 2:
        found = [re.fullmatch(r"(\d\d):(\d\d)", str(hour)) for hour in hours]
        begin, end = (int(m[1]) * 60 + int(m[2]) if m else -1 for m in found)
        if 0 <= begin < 1440 and 0 <= end <= 1440 and begin != end:
            return begin, end
    raise InvalidValueError(f'hours={hours!r} must be two times of a day: ["20:00", "06:00"]')
