"""The site decides: what its policy refuses, what its account says, what can leave at most."""

from __future__ import annotations

import copy
import datetime
import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord

from command_line import Said
from fedquilt.common.errors import InvalidValueError
from fedquilt.flower import internals, policy, prefork, wire
from fedquilt.flower import site as sites
from fedquilt.flower.metrics import site_metrics
from fedquilt.flower.node import client_app
from fedquilt.flower.policy import SitePolicy, policy_text, read_policy
from fedquilt.flower.run_notes import RunNotes
from fedquilt.flower.server import run_from
from fedquilt.flower.settings import FlowerSettings
from fedquilt.flower.simulate import InProcessGrid
from fedquilt.flower.site import REFUSALS, Site, account_path, site_account
from fedquilt.flower.template import run_configuration
from fedquilt.privacy.ledger import Ledger
from fedquilt.privacy.ledger.files import write_names
from fedquilt.privacy.ledger.rows import Paid, Short
from flower_samples import COUNT, client_data, make_model, run_federation, spent, test_data
from run_processes import environment

APP = "ab" * 32
RUN = 1


def site_in(folder: Path, **chosen: Any) -> Site:
    folder.mkdir(parents=True, exist_ok=True)
    usual = {"apps": (APP,), "epsilon": 8.0, "min_roster": COUNT, "min_cohort": 2}
    (folder / "site.toml").write_text(policy_text(**{**usual, **chosen}))
    return Site(folder / "site.toml")


def given_away(site: Site) -> float:
    """Return what the account of a site says, 0 when it has none yet."""
    chosen = read_policy(site.path)
    path = account_path(site.path, chosen)
    if not path.exists():
        return 0.0
    ledger, population = site_account(path, chosen, read_only=True)
    with ledger:
        return float(population.spent()[0])


class Sited(InProcessGrid):
    """A grid of nodes each of which has a site before its app."""

    def __init__(self, sites: list[Site], app: Any = None, **given: Any) -> None:
        self.inner = app or client_app(make_model, client_data)
        self.sites = sites
        self.sent: list[tuple[Message, Message]] = []
        super().__init__(self._guarded, len(sites), **given)  # type: ignore[arg-type]

    def _guarded(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query":  # who is at which place, in a simulation
            return client_app(make_model, client_data)(message, context)
        site = self.sites[int(context.node_config["partition-id"])]
        reply = site.answer(message, context, APP, lambda: self.inner)
        self.sent.append((message, reply))
        return reply


def vector_of(reply: Message, order: wire.Order) -> torch.Tensor:
    answer = wire.unpack_reply(reply.content, 1 << 30)
    return wire.decompress(order.compression, answer.arrays, order.size or None, torch.float64)


def test_the_account_of_every_site_says_what_the_servers_ledger_says(tmp_path: Path) -> None:
    grid = Sited([site_in(tmp_path / f"site{place}") for place in range(COUNT)])
    result = run_federation(grid, tmp_path / "runs", num_rounds=3)
    own = [given_away(site) for site in grid.sites]
    assert own == pytest.approx(spent(result), rel=1e-9)
    orders = [wire.unpack_order(order.content)[0] for order, _ in grid.sent]
    for place, site in enumerate(grid.sites):
        mine = [order for order in orders if order.client == place]
        assert len(mine) == 3
        sums = math.fsum((order.clip / order.noise_std) ** 2 for order in mine)
        assert given_away(site) == pytest.approx(sums, rel=1e-6)


def test_a_site_that_refuses_is_absent_and_not_charged_and_the_others_are_summed(
    tmp_path: Path,
) -> None:
    sites = [site_in(tmp_path / f"site{place}") for place in range(COUNT)]
    sites[2] = site_in(tmp_path / "site2", run_epsilon=1.0)
    result = run_federation(Sited(sites), tmp_path / "runs")
    charged = spent(result)
    assert charged[2] == 0
    assert given_away(sites[2]) == 0
    assert (charged[[0, 1, 3]] > 0).all()
    assert result.folder is not None
    lines = [json.loads(x) for x in (result.folder / "nodes.jsonl").read_text().splitlines()]
    reason = "by its site: epsilon=8 of a run is above 1"
    assert [line["refused"] for line in lines if "refused" in line] == [reason] * 2
    assert all(line["absent"] == [2] for line in lines if "absent" in line)
    told = (tmp_path / "site2" / REFUSALS).read_text().splitlines()
    assert len(told) == 2
    assert told[0].endswith("run 1 refused: epsilon=8 of a run is above 1")


def test_who_follows_a_run_is_told_once_why_a_site_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDQUILT_FLOWER_OUTPUT", str(tmp_path / "runs"))
    sites = [site_in(tmp_path / f"site{place}") for place in range(COUNT)]
    sites[2] = site_in(tmp_path / "site2", run_epsilon=1.0)
    options = {"mode": "certified", "epsilon": 8.0, "num_rounds": 2}
    run_from(Sited(sites), run_configuration(**options), make_model, test_data)
    told = [line for line in RunNotes(tmp_path / "runs", 1).words() if "refused" in line]
    reason = "refused by its site: epsilon=8 of a run is above 1"
    assert told == [f"a client stays away: {reason}"]


def test_a_new_app_is_one_that_enrolled_sites_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run of the usual epsilon is what a policy allows that says nothing of it."""
    monkeypatch.setenv("FEDQUILT_FLOWER_OUTPUT", str(tmp_path / "runs"))
    monkeypatch.delenv("FEDQUILT_FLOWER_ROSTER", raising=False)
    held = [site_in(tmp_path / f"site{place}") for place in range(COUNT)]
    for site in held:
        site.path.unlink()
        assert policy.write_policy(site.path, apps=(APP,))
    result = run_from(Sited(held), run_configuration(num_rounds=2), make_model, test_data)
    assert not list(tmp_path.glob(f"*/{REFUSALS}"))
    assert [given_away(site) for site in held] == pytest.approx(spent(result), rel=1e-9)
    assert (spent(result) > 0).all()


@pytest.fixture(scope="module")
def taken() -> tuple[Message, Context]:
    """Return an order of an honest run, and the context of its node."""
    orders: list[tuple[Message, Context]] = []
    app = client_app(make_model, client_data)

    def noted(message: Message, context: Context) -> Message:
        orders.append((message, context))
        return app(message, context)

    run_federation(InProcessGrid(noted, COUNT), None, num_rounds=10)  # type: ignore[arg-type]
    return next(pair for pair in orders if pair[0].metadata.message_type == "train")


def asked(
    site: Site, taken: tuple[Message, Context], change: Callable[[Message], None], app: str = APP
) -> tuple[wire.Reply, list[str]]:
    """Return what a site answers to a changed order, and which apps were loaded for it."""
    message, context = copy.deepcopy(taken[0]), copy.deepcopy(taken[1])
    change(message)
    loaded: list[str] = []

    def load() -> Any:
        loaded.append(app)
        return client_app(make_model, client_data)

    with internals.acting_as(RUN, context.node_id):
        reply = site.answer(message, context, app, load)
    return wire.unpack_reply(reply.content, 1 << 30), loaded


def said(message: Message, **facts: Any) -> None:
    config = message.content.config_records["config"]
    message.content["config"] = ConfigRecord({**dict(config), **facts})


def setting(**options: Any) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        given = json.loads(str(message.content["config"]["settings"]))
        said(message, settings=json.dumps({**given, **options}))

    return change


def fact(**facts: Any) -> Callable[[Message], None]:
    return lambda message: said(message, **facts)


def metadata(**values: Any) -> Callable[[Message], None]:
    def change(message: Message) -> None:
        for name, value in values.items():
            message.metadata.__dict__[f"_{name}"] = value

    return change


ROSTER = '{"a": "key:a", "b": "key:b", "c": "key:c", "z": "key:y"}'
NOTHING: Callable[[Message], None] = lambda message: None  # noqa: E731
ATTACKS: dict[str, tuple[Callable[[Message], None], dict[str, Any], str]] = {
    "another mode": (setting(mode="fedavg"), {"may_send": ("count",)}, "mode='fedavg'"),
    "noise on some layers": (setting(mode="quap_fl"), {}, "mode='quap_fl'"),
    "another method": (setting(method="heterofl"), {}, "method='heterofl'"),
    "a condensation": (
        fact(settings='{"mode": "certified", "method": "condense"}'),
        {},
        "method='condense'",
    ),
    "another option": (setting(local_epochs=50), {"options": {"local_epochs": 1}}, "local_epochs"),
    "more epsilon": (setting(epsilon=8.5), {}, "epsilon=8.5"),
    "more delta": (setting(delta=1e-3), {}, "delta=0.001"),
    "a longer clip": (fact(clip=0.3), {"clip_norm": 0.25}, "clip=0.3 is above"),
    "a dearer round": (fact(clip=50.0, charge=0.01), {}, "the round costs"),
    "a charge of the server's own": (fact(charge=1e6), {}, "the round costs"),
    "no noise": (fact(noise_std=0.0), {}, "no clip and noise"),
    "infinite noise": (fact(noise_std=math.inf), {}, "no clip and noise"),
    "a small cohort": (fact(cohort=1), {}, "cohort=1 is fewer"),
    "a cohort beyond the roster": (fact(cohort=100), {}, "larger than the roster"),
    "a shrunken roster": (fact(num_clients=3, cohort=3), {}, "num_clients=3 is fewer"),
    "a roster without a partner": (fact(roster=ROSTER), {"roster": ("d",)}, "d is not in the"),
    "a roster of fewer than it says": (fact(roster='{"a": "key:a"}'), {}, "the roster has 1 cl"),
    "another client's order": (fact(roster=ROSTER), {"client": "key:z"}, "another client of the"),
    "no roster for a site that wants one": (fact(), {"roster": ("a",)}, "a is not in the roster"),
    "resource figures": (fact(monitor=True), {}, "resource figures"),
    "outside the hours": (NOTHING, {"hours": ("00:00", "00:01")}, "orders are taken"),
    "a dry run": (NOTHING, {"dry_run": True}, "dry run"),
}
UNREADABLE: dict[str, tuple[Callable[[Message], None], str]] = {
    "an evaluation": (metadata(message_type="evaluate"), "type 'evaluate'"),
    "a query": (metadata(message_type="query"), "type 'query'"),
    "for another node": (metadata(dst_node_id=77), "another node"),
    "an older protocol": (fact(version="0.0.1"), "cannot be read"),
    "a fact of another type": (fact(round_index="0"), "cannot be read"),
    "an unknown fact": (fact(noise="much"), "cannot be read"),
    "no settings": (fact(settings="{"), "cannot be read"),
    "unknown settings": (setting(no_such_option=1), "cannot be read"),
}


@pytest.fixture
def fixed_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noon(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2026, 1, 5, 12, 0, tzinfo=tz)

    monkeypatch.setattr(datetime, "datetime", Noon)


def pinned(site: Site, options: dict[str, Any]) -> None:
    """Write the table of options, which `policy_text` leaves empty."""
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
    site.path.write_text(site.path.read_text() + lines)


@pytest.mark.usefixtures("fixed_hour")
@pytest.mark.parametrize("name", ATTACKS)
def test_an_order_beyond_the_policy_is_refused_before_the_app_is_loaded(
    name: str, tmp_path: Path, taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, chosen, words = ATTACKS[name]
    options = chosen.get("options", {})
    site = site_in(tmp_path, **{k: v for k, v in chosen.items() if k != "options"})
    pinned(site, options)
    reply, loaded = asked(site, taken, change)
    assert words in reply.refusal
    assert reply.failed
    assert not reply.arrays
    assert not loaded
    assert given_away(site) == 0
    assert words in (tmp_path / REFUSALS).read_text()

    # With this one reason taken out, nothing else refuses it: the test has found the check.
    taken_out(words, monkeypatch)
    if "noise" not in name:  # without noise there is no charge to compute
        assert words not in asked(site, taken, change)[0].refusal


def taken_out(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the check out whose reason has these words, and no other."""
    usual = policy.require
    for module in (policy, sites):
        monkeypatch.setattr(
            module, "require", lambda holds, reason: usual(holds or words in reason, reason)
        )


def without_account(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(run: Any, chosen: Any, order: wire.Order, credit: float) -> Any:
        return order.clip, lambda digest: None

    monkeypatch.setattr(sites, "_reserved", free)


def answered_again(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take out that the site remembers a round, and that its account takes no round twice."""
    taken_out(words, monkeypatch)
    without_account(words, monkeypatch)


def any_version(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "__version__", "0.0.1")


Mutant = Callable[[str, pytest.MonkeyPatch], None]
DEAR: dict[str, Any] = {"clip": 0.2, "noise_std": 0.125, "charge": 2.5}
CONDENSE = '{"mode": "certified", "method": "condense"}'
# What a malicious server tries: the order, the site's policy, words of the refusal, how its check
# is taken out, and whether the same site has answered an order before.
TWELVE: dict[str, tuple[Callable[[Message], None], dict[str, Any], str, Mutant, bool]] = {
    "another mode": (setting(mode="fedavg"), {"may_send": ("count",)}, "mode=", taken_out, False),
    "other options of the app": (
        setting(local_epochs=50),
        {"options": {"local_epochs": 1}},
        "local_epochs=50",
        taken_out,
        False,
    ),
    "a larger clip": (fact(clip=0.3), {"clip_norm": 0.25}, "clip=0.3", taken_out, False),
    "a forged cohort": (fact(cohort=1), {}, "cohort=1 is fewer", taken_out, False),
    "a repeated round": (fact(token="f" * 32), {}, "answered before", answered_again, True),
    "a shrunken roster": (
        fact(roster=ROSTER),
        {"roster": ("key:a", "key:partner")},
        "key:partner is not in the roster",
        taken_out,
        False,
    ),
    "a replayed order": (NOTHING, {}, "answered before", answered_again, True),
    "an order for another site": (metadata(dst_node_id=77), {}, "another node", taken_out, False),
    "an order after the lifetime": (
        fact(round_index=1, **DEAR),
        {"epsilon": 8.0},
        "used up",
        without_account,
        True,
    ),
    "an unbounded evaluation": (metadata(message_type="evaluate"), {}, "type", taken_out, False),
    "a condensation": (fact(settings=CONDENSE), {}, "method='condense'", taken_out, False),
    "an older protocol": (fact(version="0.0.1"), {}, "cannot be read", any_version, False),
}


@pytest.mark.parametrize("name", TWELVE)
def test_a_malicious_server_gets_nothing_and_would_without_the_check(
    name: str, tmp_path: Path, taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, chosen, words, mutant, answered = TWELVE[name]

    def tried(folder: Path) -> tuple[wire.Reply, list[str], float]:
        site = site_in(folder, **{k: v for k, v in chosen.items() if k != "options"})
        pinned(site, chosen.get("options", {}))
        if answered:
            assert asked(site, taken, fact(**DEAR) if "lifetime" in name else NOTHING)[0].arrays
        before = given_away(site)
        return *asked(site, taken, change), given_away(site) - before

    reply, loaded, charged = tried(tmp_path / "site")
    assert words in reply.refusal
    assert not reply.arrays
    assert not loaded, "no sample can have been read: the app was never unpacked"
    assert charged == 0
    mutant(words, monkeypatch)
    reply, loaded, _ = tried(tmp_path / "mutant")
    assert words not in reply.refusal
    assert loaded
    # The sample app itself has no evaluation, and nothing to condense.
    assert reply.arrays or name in ("an unbounded evaluation", "a condensation")


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_no_order_to_train_is_refused(name: str, tmp_path: Path, taken: Any) -> None:
    change, words = UNREADABLE[name]
    site = site_in(tmp_path)
    reply, loaded = asked(site, taken, change)
    assert words in reply.refusal
    assert not reply.arrays
    assert not loaded
    assert given_away(site) == 0


def test_a_message_without_content_is_refused_and_written_down(tmp_path: Path, taken: Any) -> None:
    order, context = taken
    site = site_in(tmp_path)
    with internals.acting_as(RUN, context.node_id):
        message = Message(Error(1, "no content"), reply_to=order)
        answer = site.answer(message, context, APP, lambda: pytest.fail("the app was loaded"))
    reply = wire.unpack_reply(answer.content, 1 << 20)
    assert (reply.refusal, reply.token) == ("this order cannot be read", "")
    assert "cannot be read" in (tmp_path / REFUSALS).read_text()
    assert given_away(site) == 0


def test_refusals_without_end_do_not_fill_a_disk(
    tmp_path: Path, taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "_REFUSALS_BYTES", 300)
    site = site_in(tmp_path, dry_run=True)
    for _ in range(20):
        assert asked(site, taken, NOTHING)[0].refusal
    kept = [path.stat().st_size for path in tmp_path.glob(f"{REFUSALS}*")]
    assert len(kept) == 2
    assert max(kept) < 500


def test_an_order_of_another_app_is_answered_and_the_app_never_unpacked(
    tmp_path: Path, taken: Any
) -> None:
    reply, loaded = asked(site_in(tmp_path), taken, NOTHING, app="cd" * 32)
    assert "not one that this site runs" in reply.refusal
    assert not loaded
    reply, loaded = asked(site_in(tmp_path, apps=()), taken, NOTHING)
    assert "not one that this site runs" in reply.refusal
    assert not loaded


def test_a_round_is_answered_once_in_a_run_and_charged_again_in_another(
    tmp_path: Path, taken: Any
) -> None:
    site = site_in(tmp_path)
    assert asked(site, taken, NOTHING)[0].arrays
    once = given_away(site)
    again, loaded = asked(site, taken, fact(token="f" * 32))
    assert "answered before" in again.refusal
    assert not loaded
    assert given_away(site) == once > 0
    message, context = taken
    other = copy.deepcopy(context)
    other.run_id = 2
    assert asked(site, (message, other), setting(epsilon=4.0))[0].arrays
    assert given_away(site) == pytest.approx(2 * once)


def test_a_run_cannot_change_its_epsilon_half_way(tmp_path: Path, taken: Any) -> None:
    site = site_in(tmp_path)
    assert asked(site, taken, setting(epsilon=4.0))[0].arrays

    def later(message: Message) -> None:
        said(message, round_index=1)
        setting(epsilon=6.0)(message)

    reply, loaded = asked(site, taken, later)
    assert "account" in reply.refusal
    assert not loaded


def test_nothing_leaves_when_the_life_of_a_site_is_used_up(tmp_path: Path, taken: Any) -> None:
    site = site_in(tmp_path)
    charges = 0
    for index in range(200):
        reply, _ = asked(site, taken, fact(round_index=index, clip=0.2, noise_std=0.4, charge=0.2))
        if reply.refusal:
            break
        charges += 1
    assert reply.refusal == "what this run, or this site in its life, may take is used up"
    with Ledger.open(tmp_path / "site.sqlite") as ledger:
        (population,) = ledger.populations()
        assert float(population.epsilons()[0]) <= 8.0
        assert float(population.spent()[0]) == pytest.approx(0.25 * charges)
        assert ledger.verify().ok


def test_a_run_that_asks_for_more_than_is_left_is_told_so(tmp_path: Path, taken: Any) -> None:
    site, (message, context) = site_in(tmp_path), taken
    dear = fact(clip=0.2, noise_std=0.2, charge=1.0)
    assert asked(site, taken, dear)[0].arrays
    other = copy.deepcopy(context)
    other.run_id = 2
    reply, loaded = asked(site, (message, other), NOTHING)
    assert reply.refusal == "epsilon=8 of a run is more than the site has left"
    assert not loaded
    assert asked(site, (message, other), setting(epsilon=4.0))[0].arrays, "less is taken"


def test_a_longer_life_in_the_file_is_no_longer_life_in_the_account(
    tmp_path: Path, taken: Any
) -> None:
    assert asked(site_in(tmp_path), taken, NOTHING)[0].arrays
    reply, _ = asked(site_in(tmp_path, epsilon=80.0), taken, fact(round_index=1))
    assert "account of this site" in reply.refusal


def test_under_replacement_a_round_costs_four_times_as_much(tmp_path: Path, taken: Any) -> None:
    site, twice = site_in(tmp_path / "a"), site_in(tmp_path / "b", adjacency="replace_one")
    for each in (site, twice):
        assert asked(each, taken, fact(clip=0.1, noise_std=1.0, charge=0.01))[0].arrays
    assert given_away(site) == pytest.approx(0.01)
    assert given_away(twice) == pytest.approx(0.04)


def big(value: float) -> Any:
    """Return an app that sends one number in every place, and a loss, a count and a secret."""

    def app(message: Message, context: Context) -> Message:
        order, _ = wire.unpack_order(message.content)
        vector = torch.full((order.size,), value)
        arrays, _ = wire.compress(order.compression, vector, 0, order.topk)
        content = wire.pack_reply(
            order.token, arrays, num_examples=24, loss=1.5, monitor={"cpu": 2.0}
        )
        content["diary"] = MetricRecord({"patients": 17})
        content["weights"] = ArrayRecord({"x": wire.as_array(np.arange(9, dtype=np.float32))})
        return Message(content, reply_to=message)

    return app


@pytest.mark.parametrize("compression", ["none", "bf16", "int8", "topk"])
@pytest.mark.parametrize("value", [1e-6, 3.0, 1e20, math.nan, math.inf])
def test_whatever_the_app_sends_no_more_leaves_than_was_charged(
    compression: str, value: float, tmp_path: Path
) -> None:
    sites = [site_in(tmp_path / f"site{place}") for place in range(COUNT)]
    grid = Sited(sites, big(value))
    run_federation(grid, None, FlowerSettings(compression=compression, topk=0.3), num_rounds=1)
    assert len(grid.sent) == COUNT
    for message, reply in grid.sent:
        order, _ = wire.unpack_order(message.content)
        vector = vector_of(reply, order)
        assert float(torch.linalg.vector_norm(vector)) <= order.clip * (1 + 1e-12)
        assert set(reply.content) == {"config", "arrays"}
        if value == 3.0:  # and as much as was paid for does leave
            assert float(torch.linalg.vector_norm(vector)) >= 0.98 * order.clip


def test_a_site_says_what_may_leave_beside_the_update(tmp_path: Path, taken: Any) -> None:
    site = site_in(tmp_path, may_send=("count",))
    message, context = copy.deepcopy(taken)
    with internals.acting_as(RUN, context.node_id):
        content = site.answer(message, context, APP, lambda: big(0.1)).content
    assert dict(content["metrics"]) == {"num-examples": 24}
    assert set(content) == {"config", "arrays", "metrics"}


def test_a_mode_that_bounds_nothing_is_allowed_by_name_and_ends_the_account(
    tmp_path: Path,
) -> None:
    chosen: dict[str, Any] = {"modes": ("fedavg", "certified"), "may_send": ("count",)}
    sites = [site_in(tmp_path / f"site{place}", **chosen) for place in range(COUNT)]
    run_federation(Sited(sites), None, mode="fedavg", num_rounds=1)
    assert given_away(sites[0]) == math.inf


def test_what_a_client_measures_leaves_where_its_policy_says_so_and_ends_the_account(
    tmp_path: Path,
) -> None:
    sites = [site_in(tmp_path / f"site{place}") for place in range(COUNT)]
    sites[1] = site_in(tmp_path / "site1", may_send=("evaluation",))
    given: dict[str, Any] = {"client_test_fraction": 0.25, "num_rounds": 4, "eval_every": 2}
    result = run_federation(Sited(sites), tmp_path / "runs", **given)
    assert result.folder is not None
    lines = (result.folder / "client_metrics.jsonl").read_text().splitlines()
    told = [[row["accuracy"] is not None for row in json.loads(x)["clients"]] for x in lines]
    assert told == [[False, True, False, False]] * 2
    assert [given_away(site) == math.inf for site in sites] == [False, True, False, False]
    assert "messages of type 'evaluate'" in (tmp_path / "site0" / REFUSALS).read_text()
    charged = spent(result)
    assert charged[1] == pytest.approx(charged[0] / 2), "no bound is left for rounds 2 and 3"
    account, _ = site_account(tmp_path / "site1" / "site.sqlite", read_policy(sites[1].path))
    with account:
        names = [run.name for run in account.populations()[0].runs()]
    assert names == ["flower-1", "flower-1-evaluation"]


def test_an_app_that_fails_is_charged_and_its_words_stay(tmp_path: Path, taken: Any) -> None:
    def fails(message: Message, context: Context) -> Message:
        raise ValueError("patient 17 of ward 3")

    site = site_in(tmp_path)
    message, context = copy.deepcopy(taken)
    with internals.acting_as(RUN, context.node_id):
        reply = site.answer(message, context, APP, lambda: fails)
    assert "patient" not in str(reply.content)
    assert not reply.has_error()
    assert wire.unpack_reply(reply.content, 1 << 20).failed
    assert given_away(site) > 0


STEPS = ("start_run", "reserve", "app", "settle", "after")


@pytest.mark.processes
@pytest.mark.parametrize("moment", STEPS)
@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_site_killed_at_any_moment_has_charged_what_it_sent(
    moment: str, when: str, tmp_path: Path, taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedquilt.privacy.ledger import Population, Run

    site = site_in(tmp_path)
    message, context = copy.deepcopy(taken)
    app = client_app(make_model, client_data)

    def killing(usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if when == "before":
                os._exit(9)
            usual(*given, **named)
            os._exit(9)

        return call

    def work() -> None:
        for kind, name in ((Population, "start_run"), (Run, "reserve"), (Run, "settle")):
            if name == moment:
                monkeypatch.setattr(kind, name, killing(getattr(kind, name)))
        with internals.acting_as(RUN, context.node_id):
            site.answer(message, context, APP, lambda: killing(app) if moment == "app" else app)
        (tmp_path / "sent").write_text("the reply has left")
        os._exit(9)

    child = prefork.fork(work, tmp_path / "log")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    sent = (tmp_path / "sent").exists()
    assert sent == (moment == "after")
    settled = moment == "after" or (moment, when) == ("settle", "behind")
    assert (given_away(site) > 0) == settled
    reply, _ = asked(site, taken, NOTHING)  # the next process: what was not settled is free again
    assert bool(reply.refusal) == settled
    path = tmp_path / "site.sqlite"
    with Ledger.open(path) as ledger:
        assert ledger.verify().ok
        assert int(ledger.populations()[0].joins()[0]) == 1


def test_a_policy_that_cannot_be_read_refuses_every_order(
    tmp_path: Path, taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_in(tmp_path)
    site.path.write_text("modes = 3")
    reply, loaded = asked(site, taken, NOTHING)
    assert "policy of this site cannot be read" in reply.refusal
    assert not loaded
    command = ["warm", "--runtime-api-address", "x", "--site", str(site.path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(InvalidValueError, match="must be a list of texts"):
        prefork.main()
    site.path.unlink()
    reply, loaded = asked(Site(site.path), taken, NOTHING)
    assert "policy of this site cannot be read" in reply.refusal
    assert not loaded


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('modes = ["best"]', "modes"),
        ('methods = ["best"]', "methods"),
        ('may_send = ["everything"]', "may_send"),
        ('apps = ["5f"]', "64 hex digits"),
        ("epsilon = -1.0", "epsilon"),
        ("epsilon = 2.0\nrun_epsilon = 3.0", "run_epsilon"),
        ("delta = 1.0", "delta"),
        ("min_cohort = 0", "min_cohort"),
        ('hours = ["8", "9"]', "hours"),
        ("dry_run = 1", "dry_run"),
        ("[options]\nno_such = 1", "options"),
        ("epsilom = 1.0", "epsilom"),
    ],
)
def test_a_slip_in_a_policy_is_refused_by_name(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(line)
    with pytest.raises(InvalidValueError, match=words):
        read_policy(tmp_path / "site.toml")


def test_a_policy_that_says_nothing_allows_certified_runs_alone(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text("")
    assert read_policy(tmp_path / "site.toml") == SitePolicy()
    assert SitePolicy().modes == ("certified",)
    assert SitePolicy().may_send == ()
    assert SitePolicy().apps == ()
    (tmp_path / "site.toml").write_text(policy_text())
    assert read_policy(tmp_path / "site.toml") == SitePolicy()


def test_hours_may_go_over_midnight() -> None:
    night = SitePolicy(hours=("20:00", "06:00"))
    times = [datetime.datetime(2026, 1, 5, hour, 30) for hour in (19, 20, 3, 6)]
    assert [night._is_open(time) for time in times] == [False, True, True, False]


def test_the_operator_of_a_site_is_told_what_it_has_given_away(
    tmp_path: Path, taken: Any, cli: Callable[..., Said]
) -> None:
    path = tmp_path / "site.toml"
    called = ["site", "init", str(path), "--app", APP, "--epsilon", "8"]
    assert cli(*called).code == 0
    assert cli(*called).code != 0  # a policy is never written over
    assert read_policy(path) == SitePolicy(apps=(APP,), epsilon=8.0)
    assert cli("site", "show", path).out.startswith("given away: nothing")
    assert cli("site", "verify", path).code == 0
    assert "given away: nothing" in cli("site", "statement", path).out
    assert cli("site", "page", path).code != 0
    site = Site(path)
    for index in range(3):
        order = fact(round_index=index, clip=0.1, noise_std=0.5, charge=0.04)
        assert asked(site, taken, order)[0].arrays
    assert asked(site, taken, setting(mode="fedavg"))[0].refusal
    told = json.loads(cli("site", "show", str(path), "--json").out)
    from dp_accounting import get_epsilon_gaussian

    exact = get_epsilon_gaussian(1 / math.sqrt(3 * 0.04), 1e-5)
    assert exact <= float(told["epsilon"]) <= 1.01 * exact
    assert told["replies"] == 3
    assert [run["rounds"] for run in told["runs"]] == ["1 to 3"], "as the server counts"
    assert len(told["refused"]) == 1
    text = cli("site", "show", str(path)).out
    assert text.startswith(f"given away: epsilon {told['epsilon']} of 8 at delta 1e-05 (zero_out)")
    assert "refused: mode='fedavg' is not one of 'certified'" in text
    assert cli("ledger", "verify", str(tmp_path / "site.sqlite")).code == 0
    figures = site_metrics(path)
    assert "fedquilt_replies_total 3\n" in figures
    assert "fedquilt_refusals_total 1\n" in figures
    (spent,) = [x for x in figures.splitlines() if x.startswith("fedquilt_epsilon_spent ")]
    assert float(spent.split()[1]) == pytest.approx(exact, rel=0.01)


def test_a_ledger_that_lacks_or_halves_charges_is_found_by_the_accounts_of_sites(
    tmp_path: Path, cli: Callable[..., Said]
) -> None:
    grid = Sited([site_in(tmp_path / f"site{place}") for place in range(COUNT)])
    ledger, old = tmp_path / "ledger.sqlite", tmp_path / "old.sqlite"
    named = {"ledger": str(ledger), "population": "wards", "allowance": 8.0}
    run_federation(grid, tmp_path / "runs", num_rounds=2, epsilon=2.0, **named)
    with Ledger.open(ledger) as opened:
        opened.backup(old)
    grid.run_id_here += 1
    for context in grid.contexts.values():
        context.run_id += 1
    run_federation(grid, tmp_path / "runs", num_rounds=3, epsilon=4.0, **named)

    def compared(path: Path, place: int = 0) -> Said:
        account = tmp_path / f"site{place}" / "site.sqlite"
        return cli("ledger", "reconcile", path, account, "--client", f"client {place}", "--json")

    for place in range(COUNT):
        assert json.loads(compared(ledger, place).out) == {"ok": True, "replies": 5, "short": []}
    rolled_back = compared(old)
    assert rolled_back.code == 1
    assert len(json.loads(rolled_back.out)["short"]) == 3  # every round of the second run

    def copied(name: str, part: float, *without: int, elsewhere: bool = False) -> Path:
        """Return a ledger of the same runs that charges a part, some releases not or elsewhere."""
        with Ledger.open(ledger) as opened, Ledger.open(tmp_path / name, create=True) as other:
            (true,) = opened.populations()
            ids = [f"client {place}" for place in range(COUNT)]
            made = other.population("wards", client_ids=ids, epsilon=8.0, delta=1e-5)
            another = made.start_run("another", epsilon=2.0, client_ids=ids) if elsewhere else None
            places = iter(range(5))
            for run in true.runs():
                own = made.start_run(run.name, epsilon=run.epsilon, client_ids=ids)
                for charge, index in zip(true.charges(run), places, strict=False):
                    into = another if index in without else own
                    if into is not None:
                        paid = charge.charges_mu2 * part
                        held = into.reserve(charge.round_index, charge.clients, paid)
                        into.settle(held, f"{index:064x}")
        return tmp_path / name

    halved = copied("halved.sqlite", 0.5)
    assert len(json.loads(compared(halved).out)["short"]) == 5
    # Killed between the replies and the release of its last round, by which nothing was released.
    killed = compared(copied("killed.sqlite", 1.0, 4))
    assert killed.code == 3
    (lost,) = json.loads(killed.out)["short"]
    assert (lost["round"], lost["charged_mu2"], lost["released"]) == (2, None, False)
    assert compared(copied("cheat.sqlite", 1.0, 2)).code == 1, "the run went on after it"
    swapped = compared(copied("swapped.sqlite", 1.0, 0, elsewhere=True))
    assert swapped.code == 1, "the same charge for a round 0 of another run is none for this one"

    def receipts(path: Path, place: int = 0) -> tuple[Path, list[dict[str, Any]]]:
        said = cli("ledger", "receipts", path, "--client", f"client {place}").out
        kept = tmp_path / f"receipts-{path.stem}-{place}.json"
        kept.write_text(said)
        return kept, json.loads(said)["receipts"]

    write_names(ledger, {"client 0": "clinic-07"})
    by_name = json.loads(cli("ledger", "receipts", ledger, "--client", "clinic-07").out)
    policy_file = tmp_path / "site0" / "site.toml"
    good, lines = receipts(ledger)
    assert cli("site", "verify", policy_file, "--receipts", good).code == 0
    assert by_name["receipts"] == lines
    assert [line["release"] for line in lines] == [
        line["release"] for line in receipts(ledger, 1)[1]
    ]
    assert len({line["release"] for line in lines}) == 5
    for path, missing in ((old, 3), (halved, 5)):
        said = cli("site", "verify", policy_file, "--receipts", receipts(path)[0], "--json")
        assert said.code == 1
        assert len(json.loads(said.out)["short"]) == missing
    notes = [tmp_path / f"site{place}" / "site.sqlite.notes.jsonl" for place in range(COUNT)]
    for one, other in ((good, receipts(ledger, 1)[0]), (notes[0], notes[3])):
        assert cli("ledger", "receipts", "--compare", one, other).code == 0
    told = notes[1].read_text().splitlines()
    kept = tmp_path / "other.notes.jsonl"
    note = json.loads(told[3])
    kept.write_text("\n".join([*told[:3], json.dumps({**note, "received": "0" * 64}), told[4]]))
    apart = cli("ledger", "receipts", "--compare", notes[0], kept)
    assert apart.code == 1
    assert f"round 2 of {note['run']}: the two sites were told different" in apart.out
    assert "4 of 5 rounds that both know are the same in both" in apart.out
    twice = json.loads(good.read_text())
    twice["receipts"].append(twice["receipts"][0])
    good.write_text(json.dumps(twice))
    assert cli("site", "verify", policy_file, "--receipts", good).code != 0, "one release, twice"
    assert "epsilon 8 in all" in cli("site", "statement", policy_file).out
    page = tmp_path / "page.html"
    assert cli("site", "page", policy_file, "-o", page).code == 0
    assert "FOR THE OPERATOR" in page.read_text()
    assert page.stat().st_mode & 0o077 == 0
    account = tmp_path / "site0" / "site.sqlite"
    text = cli("ledger", "reconcile", halved, account, "--client", "client 0")
    assert text.out.endswith("0 of 5 replies are in the ledger at no less\n")
    sent = Short(Paid("run", 0, math.inf), None, is_released=True)
    assert sent.words.endswith("(late replies and evaluations have none)")
    for command in (("reconcile", ledger, account), ("receipts", ledger)):
        nobody = cli("ledger", *command, "--client", "client O")
        assert nobody.code == 2
        assert "client='client O' must be the name or id of a client" in nobody.words
        assert nobody.out == ""


CAMPAIGN = Path(__file__).resolve().parents[2] / "benchmarks" / "site_campaign.py"


@pytest.mark.slow
@pytest.mark.processes
def test_sites_and_their_server_are_killed_together(tmp_path: Path) -> None:
    """The short form of the campaign: no account below what was sent, no ledger below a release."""
    ended = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--faults", "16", "--seed", "1", "--folder", str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = dict(re.findall(r"^(.+?)  +(\d+)$", ended.stdout, re.MULTILINE))
    assert int(rows["faults"]) >= 16
    assert int(rows["replies sent"]) > int(rows["releases"]) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_campaign_would_notice(
    tmp_path: Path, taken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checks fail for an account below what was sent, and for a changed one."""
    monkeypatch.syspath_prepend(str(CAMPAIGN.parent))
    campaign = importlib.import_module("site_campaign")
    for place in range(campaign.SITES):
        assert asked(site_in(tmp_path / f"site{place}"), taken, NOTHING)[0].arrays
    account = tmp_path / "site0" / "site.sqlite"
    (tmp_path / "ledger.sqlite").write_bytes(account.read_bytes())
    log, sent = tmp_path / "sent-2.log", given_away(site_in(tmp_path / "site2"))

    def found(text: str) -> list[int]:
        log.write_text(text)
        looked = campaign.Campaign(tmp_path, 0, 0)
        looked._check(tmp_path)
        return [looked.counts[name] for name in campaign.MUST_BE_ZERO]

    assert found(f"{sent!r}\n") == [0, 0, 0, 0]
    assert found(f"{sent!r}\n0.0001\n") == [1, 0, 0, 0], "one more reply than the account says"
    (tmp_path / "released.log").write_text(json.dumps({"cost": {"0": 2 * sent}}))
    assert found("") == [0, 1, 0, 0]
    account.write_bytes(account.read_bytes().replace(b"flower-1", b"flower-7"))
    assert found("") == [0, 1, 1, 0]
