"""Noise of the clients: bounds of what they send, what is charged for it, what is refused."""

from __future__ import annotations

import itertools
import math
import runpy
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import ComposedDpEvent, GaussianDpEvent, get_epsilon_gaussian, get_sigma_gaussian
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from typer.testing import CliRunner

from certified_samples import (
    SIZE,
    Sending,
    joining,
    make_federation,
    make_problem,
    memory_folder,
    plan_of,
)
from fedquilt.cli.app import app
from fedquilt.common import optional
from fedquilt.common.errors import InvalidValueError, MissingPackageError
from fedquilt.config import build_config
from fedquilt.experiment.api import RunResult, run_config
from fedquilt.federation import Federation
from fedquilt.privacy import secure as module
from fedquilt.privacy.accounting.gaussian import gaussian_delta
from fedquilt.privacy.ledger import Ledger
from fedquilt.privacy.mechanism import Contribution, RoundTally
from fedquilt.privacy.secure import (
    SecureCertified,
    round_within,
    settled_share,
    skellam_mu,
    variance_for,
)
from fedquilt.round import run_round
from fedquilt.training import ClientUpdate
from run_samples import same_tensors, tiny

SECURE: dict[str, Any] = {"secure_aggregation": "simulated", "policy": "worst_case"}


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


def federation_of(
    folder: Path,
    update: Callable[[int, int], torch.Tensor] = lambda c, t: torch.zeros(SIZE),
    clients: int = 10,
    **changes: Any,
) -> Federation:
    config, problem = make_problem(clients, **{**SECURE, **changes})
    return make_federation(config, problem, folder / "ledger", update=update)


def mechanism_of(federation: Federation) -> SecureCertified:
    assert isinstance(federation.mechanism, SecureCertified)
    return federation.mechanism


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=40),
    st.integers(0, 2**32),
    st.floats(0.0, 0.25),
)
def test_rounding_never_exceeds_the_declared_norm(
    numbers: list[float], seed: int, room: float
) -> None:
    vector = np.array(numbers)
    limit = float(vector @ vector) * (1 + 1e-12) + room * len(numbers) + 1e-12
    rounded = round_within(vector, limit, np.random.default_rng(seed))
    assert rounded.dtype == np.int64
    assert int(rounded @ rounded) <= limit
    assert np.all(np.abs(rounded - vector) < 1)


def test_rounding_has_no_bias_where_there_is_room() -> None:
    vector = np.array([0.1, -0.1, 2.5, -7.9, 0.0])
    coins = np.random.default_rng(1)
    drawn = np.stack([round_within(vector, 1e3, coins) for _ in range(20_000)])
    assert np.abs(drawn.mean(axis=0) - vector).max() < 0.02
    assert np.all(drawn[:, 4] == 0)


@pytest.mark.parametrize("length", [0.0, 1e-161, 1e-5, 1.0, 1e30, 1e160, math.nan])
def test_what_a_client_sends_is_within_what_it_is_charged(
    folder: Path, length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The noise is left out, so that what is sent is the rounded vector itself.
    monkeypatch.setattr(module, "skellam", lambda v, size, words: np.zeros(size, dtype=np.int64))
    sent: list[torch.Tensor] = []
    real = SecureCertified.noise_client

    def noting(self: Any, *args: Any) -> Contribution:
        sent.append(real(self, *args).sent)
        return real(self, *args)

    monkeypatch.setattr(SecureCertified, "noise_client", noting)
    draws = np.random.default_rng(3)
    federation = federation_of(
        folder, lambda c, t: torch.from_numpy(draws.normal(size=SIZE)) * length
    )
    run_round(federation, 0)
    assert federation.account is not None
    charges = federation.account.population.spent()
    # Skellam noise of variance v under a shift of norm D: mu about D / sqrt(v) (1 + 1 / 6v).
    variance = mechanism_of(federation).secure.variance * 10 // 7  # ten add what seven must have
    for vector, charge in zip(sent, charges, strict=True):
        assert torch.equal(vector, vector.round())
        cost = float(vector @ vector) / variance * (1 + 1 / (6 * variance)) ** 2
        assert cost <= charge
        if length in (1.0, 1e30):  # squares of 1e160 are infinite: such a vector counts as zero
            assert cost > 0.7 * charge, "and not far from it"


@pytest.mark.parametrize("lost", [0, 1, 3])
@pytest.mark.parametrize("colluding", [0, 2])
def test_the_charge_is_that_of_clip_and_rounding_under_the_noise_of_who_survived(
    folder: Path, lost: int, colluding: int
) -> None:
    # Even parts: of the first round the fewest survivors must be paid, of later ones all.
    federation = federation_of(folder, num_rounds=8, colluding_clients=colluding)
    federation.method.engine = Losing(range(lost))
    budget, before = get_sigma_gaussian(3.0, 1e-5) ** -2, 0.0
    for index in range(4):
        run_round(federation, index)
        plan, variance = plan_of(federation), mechanism_of(federation).secure.variance
        assert plan.charges is not None
        grid = plan.noise_std / math.sqrt(variance)
        square = (plan.clips[9] / grid) ** 2 + SIZE / 4
        shares = Fraction(variance, 7 - colluding)  # seven of ten, and more than half of twelve
        known = float(shares * (10 - lost - colluding))  # by whoever has the noise of two of them
        spent = federation.account.population.spent()[9] - before
        assert spent == pytest.approx(square / known * (1 + 1 / (6 * known)) ** 2, rel=2e-4)
        assert spent <= plan.charges[9] * (1 + 1e-6), "no more than was reserved"
        assert plan.clips[9] == pytest.approx(1.0, rel=1e-3), "C, of a typical client"
        before += spent
        assert before + (7 - index) * budget / 8 <= budget * (1 + 1e-4), "later parts are whole"
    if not lost and not colluding:
        assert spent == pytest.approx(budget / 8, rel=0.01)
    assert grid**2 * SIZE / 4 < 0.011, "rounding takes one hundredth"


def test_where_all_answer_the_noise_is_that_of_a_server_and_the_budget_is_used_up(
    tmp_path: Path,
) -> None:
    # What is planned is what a join costs if all answer; adaptive parts spread the rest.
    rounds = {"num_rounds": 12, "clients_per_round": 10, "policy": "adaptive"}
    clients = certify(tmp_path / "clients", **rounds)
    server = certify(tmp_path / "server", secure_aggregation="off", **rounds)
    noise = [run.result["history"]["noise_levels"] for run in (clients, server)]
    assert noise[0][:-1] == pytest.approx(noise[1][:-1], rel=0.008)
    assert noise[0][-1] == pytest.approx(noise[1][-1] * math.sqrt(10 / 7), rel=0.008)
    # Of the last join alone nothing comes after it that the rest could be for.
    assert 2.6 < clients.statement.epsilon_max <= 3.0


@pytest.mark.parametrize("policy", ["worst_case", "cap", "adaptive", "paper"])
def test_who_survives_never_costs_more_than_there_is(folder: Path, policy: str) -> None:
    # Clients are lost at random, down to too few: even parts last for all rounds all the same.
    changes: dict[str, Any] = {"max_joins": 12} if policy == "cap" else {}
    federation = federation_of(folder, policy=policy, num_rounds=12, **changes)
    draws = np.random.default_rng(3)
    for index in range(12):
        lost = draws.choice(10, draws.integers(0, 5), replace=False)
        federation.method.engine = Losing(lost.tolist())
        record = run_round(federation, index)
        assert len(record.cohort) == 10
    epsilons = federation.account.epsilons()
    assert epsilons is not None
    assert 1.0 < epsilons.max() <= 3.0


def certify(folder: Path, **changes: Any) -> RunResult:
    usual = {"mode": "certified", "noise_seed": None, "secure_aggregation": "simulated"}
    return run_config(tiny(**{**usual, **changes, "output_dir": str(folder)}))


def spent(result: RunResult) -> list[float]:
    assert result.folder is not None
    with Ledger.open(Path(result.folder) / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok
        (population,) = ledger.export()["populations"]
    return [float(row["mu2_spent"]) for row in population["client_rows"]]


def test_the_noise_of_a_sum_is_what_was_stated(folder: Path) -> None:
    federation = federation_of(folder, num_rounds=60)
    noise, stated = [], 0.0
    for index in range(60):
        before = federation.weights.clone()
        record = run_round(federation, index)
        noise.append((federation.weights - before).double().numpy())
        stated = float(record.noise.noise_std or 0)
    drawn = np.concatenate(noise) / stated
    assert stats.kstest(drawn, "norm").pvalue > 1e-4
    assert stats.kstest(drawn * 1.5, "norm").pvalue < 1e-4, "the test has power"
    plan, secure = plan_of(federation), mechanism_of(federation).secure
    # Ten clients add the noise of which seven are enough.
    assert stated * 10 == pytest.approx(plan.noise_std * math.sqrt(10 / 7))
    assert plan.least == 7
    assert secure.honest(10) == 7


def test_whoever_may_collude_makes_the_shares_of_the_others_larger(folder: Path) -> None:
    federation = federation_of(folder, colluding_clients=2)
    record = run_round(federation, 0)
    plan = plan_of(federation)
    assert plan.least == 7  # seven of ten, and more than half of twelve
    assert (record.noise.noise_std or 0) * 10 == pytest.approx(plan.noise_std * math.sqrt(10 / 5))


def test_sums_do_not_wrap_at_their_largest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All clients push one coordinate as far as they may, in one direction.
    def released(taken: int) -> float:
        monkeypatch.setattr(module, "modulus_bits", lambda *args: bits(*args) - taken)
        update = torch.zeros(SIZE)
        update[4] = -1e6
        place = folder / str(taken)
        place.mkdir()
        federation = federation_of(place, lambda c, t: update.clone(), 40, epsilon=200.0)
        before = federation.weights.clone()
        run_round(federation, 0)
        return float((federation.weights - before)[4])

    bits = module.modulus_bits
    assert released(0) == pytest.approx(-1.0, abs=0.05)
    assert abs(released(3) + 1.0) > 0.1, "with three bits less it wraps"


def test_the_modulus_leaves_room_for_the_noise() -> None:
    from fedquilt.privacy.secure import SecureSettings

    settings = SecureSettings(size=1000, variance=2**12, share=0.7, colluding=0, simulated=True)
    room = 2 ** (module.modulus_bits(settings, 20, 500.0) - 1) - 500.0
    variance = 20 * 2**12 / 14
    tail = 2 * 1000 * stats.skellam.sf(room, variance / 2, variance / 2)
    assert tail < 2**-40
    with pytest.raises(InvalidValueError, match="clients_per_round=20 must be fewer"):
        module.modulus_bits(settings, 20, 2.0**33)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_the_protocol_releases_what_was_simulated(tmp_path: Path, engine: str) -> None:
    simulated, masked = (
        certify(tmp_path / kind, secure_aggregation=kind, noise_seed=5, engine=engine)
        for kind in ("simulated", "protocol")
    )
    assert same_tensors(simulated.model.state_dict(), masked.model.state_dict())
    plain = certify(tmp_path / "plain", secure_aggregation="off", noise_seed=5, engine=engine)
    assert not same_tensors(simulated.model.state_dict(), plain.model.state_dict())


def test_a_sum_under_masks_goes_through_keys_and_letters(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedquilt.aggregation.secure import client

    opened = []
    real = client.MaskingClient.unmask

    def noting(self: Any, signatures: Any) -> Any:
        opened.append(real(self, signatures))
        return opened[-1]

    monkeypatch.setattr(client.MaskingClient, "unmask", noting)
    federation = federation_of(folder, secure_aggregation="protocol", clients=5)
    run_round(federation, 0)
    assert len(opened) == 5
    assert all(set(answer.seeds) == {0, 1, 2, 3, 4} and not answer.keys for answer in opened)


def test_the_masks_of_clients_that_were_lost_with_their_letters_sent_are_taken_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedquilt.aggregation.secure import client

    steps: dict[str, set[int]] = {}
    for name in ("advertise", "share", "mask"):
        real = getattr(client.MaskingClient, name)

        def noting(self: Any, *told: Any, name: str = name, real: Any = real) -> Any:
            steps.setdefault(name, set()).add(self.client)
            return real(self, *told)

        monkeypatch.setattr(client.MaskingClient, name, noting)
    weights = []
    for kind in ("simulated", "protocol"):
        (folder / kind).mkdir()
        federation = federation_of(folder / kind, secure_aggregation=kind, noise_seed=4)
        federation.method.engine = Losing([1, 5, 7])
        federation.weights = torch.zeros(SIZE)
        run_round(federation, 0)
        weights.append(federation.weights)
    assert torch.equal(*weights)
    assert [len(steps[name]) for name in ("advertise", "share", "mask")] == [9, 8, 7]


@pytest.mark.parametrize(("fewest", "colluding"), [(7, 0), (5, 2), (13, 1)])
def test_what_survivors_add_is_within_the_settled_charge_on_the_whole_curve(
    fewest: int, colluding: int
) -> None:
    # The shares of all honest ones convolved, as they are drawn: no closure under sums is used.
    variance, reach, above = 16, np.arange(-200, 201), 0.0
    share = special.ive(np.abs(reach), variance / fewest)
    for more in range(5):
        noise = np.array([1.0])
        for _ in range(fewest + more):  # of the survivors, those who collude tell theirs
            noise = np.convolve(noise, share)
        for shift in (1, 5, 25):
            unit = skellam_mu(variance) ** 2 * settled_share(variance, fewest + more, fewest)
            paid_less = unit * (fewest + more) / (fewest + more + max(1, colluding))
            for mu2 in (unit, paid_less):
                mu = shift * math.sqrt(mu2)
                for epsilon in np.linspace(0.0, mu * mu / 2 + 4 * mu, 20):
                    part = noise[shift:] - math.exp(epsilon) * noise[:-shift]
                    excess = np.clip(part, 0, None).sum() - gaussian_delta(float(epsilon), mu)
                    if mu2 == unit:
                        assert excess <= 1e-13
                    else:
                        above = max(above, excess)
    assert above > 1e-3, "noise of one client more would be seen not to be there"


def test_runs_of_both_kinds_share_a_ledger_whose_lifetime_epsilon_is_right(tmp_path: Path) -> None:
    shared = {"ledger": str(tmp_path / "shared.sqlite"), "population": "both", "allowance": 6.0,
              "clients_per_round": 10, "policy": "worst_case", "num_rounds": 4}  # fmt: skip
    sigmas: list[float] = []
    for kind in ("off", "simulated"):
        result = certify(
            tmp_path / kind, secure_aggregation=kind, new_population=kind == "off", **shared
        )
        sigmas += [10 * noise for noise in result.result["history"]["noise_levels"]]  # clip 1
    with Ledger.open(tmp_path / "shared.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok
        (population,) = ledger.populations()
        lifetime, delta = population.epsilons(), population.info.delta
    assert CliRunner().invoke(app, ["ledger", "verify", shared["ledger"]]).exit_code == 0
    accountant = PLDAccountant()
    accountant.compose(ComposedDpEvent([GaussianDpEvent(sigma) for sigma in sigmas]))
    independent = accountant.get_epsilon(delta)
    # Rounding, which the Gaussians of the public noise do not have, takes one hundredth at most.
    assert np.all(lifetime > independent * (1 - 1e-3))
    assert lifetime == pytest.approx(np.full(10, independent), rel=6e-3)
    assert 4.0 < lifetime[0] < 6.0, "above what either run was given"


def test_the_page_shows_the_kept_runs() -> None:
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "benchmarks" / "secure_aggregation.py"))
    table = str(script["table"]())
    page = (root / "docs" / "secure-aggregation.md").read_text()
    assert table in page
    assert page.count("\n| 6 |") == table.count("\n| 6 |") == len(script["ARMS"]), "and no other"
    cells = script["read_cells"]()
    every = itertools.product(("mnist", "digits"), (6.0, 3.0, 1.0), script["ARMS"], range(3))
    assert not set(every) - cells.keys(), "three seeds of each"
    kept = list(cells.items())

    def below(dataset: str, epsilon: float, lost: str) -> float:
        server, clients = (
            np.mean([c["accuracy"] for k, c in kept if k[:3] == (dataset, epsilon, who + lost)])
            for who in ("the server", "clients")
        )
        return float(server - clients)

    shares = ("", ", 10% lost", ", 30% lost")
    assert max(below("mnist", e, s) for e in (6.0, 3.0, 1.0) for s in shares) < 0.2
    beyond = {(e, s) for e in (6.0, 3.0) for s in shares if below("digits", e, s) > 1}
    assert beyond == {(6.0, ", 30% lost")}, "within a point, as the page says, but here"
    assert {c["bits"] for k, c in cells.items() if k[2].startswith("clients")} == {17, 18}


class Losing(Sending):
    """An engine of whose clients some never answer."""

    def __init__(self, lost: Iterable[int]) -> None:
        super().__init__(lambda client, index: torch.ones(SIZE))
        self.lost = set(lost)

    def train(self, *args: Any) -> Iterator[ClientUpdate]:
        return (update for update in super().train(*args) if update.client not in self.lost)


@pytest.mark.parametrize("kind", ["simulated", "protocol"])
def test_only_survivors_are_charged_and_below_the_fewest_nobody(folder: Path, kind: str) -> None:
    federation = federation_of(folder, secure_aggregation=kind)
    assert federation.account is not None
    federation.method.engine = Losing([1, 5, 7])
    before = federation.weights.clone()
    record = run_round(federation, 0)
    spent = federation.account.population.spent()
    assert record.absent == [1, 5, 7]
    assert np.flatnonzero(spent == 0).tolist() == [1, 5, 7]
    assert not torch.equal(federation.weights, before)
    # Seven of ten have the noise that is charged, and no more of it.
    assert (record.noise.noise_std or 0) * 10 == pytest.approx(plan_of(federation).noise_std)

    federation.method.engine = Losing([1, 5, 7, 8])
    before = federation.weights.clone()
    record = run_round(federation, 1)
    assert record.absent == [1, 5, 7, 8]
    assert np.array_equal(federation.account.population.spent(), spent)
    assert torch.equal(federation.weights, before), "six of ten are too few"


@pytest.mark.parametrize("kind", ["simulated", "protocol"])
def test_the_sum_of_one_client_is_never_opened(folder: Path, kind: str) -> None:
    federation = federation_of(folder, secure_aggregation=kind)
    joining(federation, lambda index: [3])
    assert federation.account is not None
    before = federation.weights.clone()
    run_round(federation, 0)
    assert torch.equal(federation.weights, before)
    assert not federation.account.population.spent().any()


def test_cohorts_of_every_size_keep_to_their_charges(folder: Path) -> None:
    federation = federation_of(folder, lambda c, t: torch.ones(SIZE) * 1e3, policy="adaptive")
    joining(federation, lambda index: range(index))
    for index in range(9):
        run_round(federation, index)
    assert federation.account is not None
    epsilons = federation.account.epsilons()
    assert 0 < epsilons.max() <= 3.0
    assert epsilons[9] == 0.0


def test_a_client_whose_charge_pays_no_rounding_sends_noise_alone(folder: Path) -> None:
    mechanism = mechanism_of(federation_of(folder, policy="adaptive"))
    left = np.full(10, 0.5)
    left[3] = 1e-9
    plan = mechanism.plan_round(0, np.arange(10), left, np.zeros(10), 0)
    assert plan.charges is not None
    assert plan.clips[3] == plan.charges[3] == 0.0
    assert plan.clips[2] > 0
    contribution = mechanism.receive(plan, 3, torch.ones(SIZE), 1)
    clipped = mechanism.clip(plan, contribution, RoundTally())
    assert not clipped.vector.any()


REFUSED: dict[str, dict[str, Any]] = {
    "amplification": {
        "amplification": True, "selection": "poisson", "policy": "worst_case",
        "clients_per_round": 0.5,
    },
    "noise_bands": {"noise_bands": 2},
    "rounds_per_release": {"rounds_per_release": 2},
    "clipping": {"clipping": "quantile"},
    "evaluation_share": {"evaluation_share": 0.1, "client_test_fraction": 0.2},
    "method": {"method": "heterofl"},
    "engine": {"engine": "flower-ray"},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_go_with_a_sum_alone_is_refused(name: str) -> None:
    settings = {"mode": "certified", "secure_aggregation": "simulated", **REFUSED[name]}
    with pytest.raises(InvalidValueError, match=f"must be 'off' with {name}="):
        build_config(settings)


def test_other_modes_and_options_without_effect_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="secure_aggregation='simulated' must be left out"):
        build_config({"mode": "fedavg", "secure_aggregation": "simulated"})
    with pytest.raises(InvalidValueError, match=r"least_survivors=0\.9 must be left out"):
        build_config({"mode": "certified", "least_survivors": 0.9})


def test_a_model_that_is_too_large_to_round_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidValueError, match="650 released parameters must be at most 354 "):
        certify(tmp_path, epsilon=0.1, num_rounds=400)
    assert list(tmp_path.iterdir()) == []
    assert variance_for(100, 100.0) == 32
    assert variance_for(3_920, 0.0286) == 2**22


def test_rounds_of_one_client_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="clients_per_round=1 must be two clients at least"):
        certify(tmp_path, clients_per_round=1)
    assert list(tmp_path.iterdir()) == []


def test_more_colluding_clients_than_a_round_can_bear_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="colluding_clients=10 must be at most 9 of 10"):
        certify(tmp_path, colluding_clients=10, clients_per_round=10)
    assert list(tmp_path.iterdir()) == []
    certify(tmp_path, colluding_clients=9, clients_per_round=10)


def test_a_missing_package_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(optional.importlib, "import_module", missing)
    with pytest.raises(MissingPackageError, match=r"fedquilt\[secure\]"):
        certify(tmp_path, secure_aggregation="protocol")
    assert list(tmp_path.iterdir()) == []


def test_sums_that_are_not_plain_are_refused(folder: Path) -> None:
    config, problem = make_problem(4, **SECURE)
    federation = make_federation(config, problem, folder / "ledger")
    federation.method.holds_parts = True
    from fedquilt.setup.federation import build_federation

    with pytest.raises(InvalidValueError, match="can only add them up"):
        build_federation(config, problem, federation.account, federation.method)


def test_the_statement_says_who_is_trusted_with_what(tmp_path: Path) -> None:
    result = certify(tmp_path, colluding_clients=1, clients_per_round=10)
    text = result.statement.as_text()
    assert "server need not be trusted" in text
    assert "sum of at least 0.7 of its clients" in text
    assert "if 1 of them side with the server" in text
    assert "one process was server and clients, without the keys and masks" in text
    assert result.statement.is_bounded
    epsilon = get_epsilon_gaussian(max(spent(result)) ** -0.5, 1e-5)
    assert result.statement.epsilon_max == pytest.approx(epsilon, rel=1e-6)
