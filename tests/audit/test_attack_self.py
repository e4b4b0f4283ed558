"""Attacks on oneself: what they hold, what they find, what they leave alone."""

from __future__ import annotations

import dataclasses
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedquilt.audit import privacy_attacks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config import build_config
from fedquilt.experiment.api import run_config
from fedquilt.record.folder import RunFolder
from fedquilt.report.views.page import page_view
from fedquilt.setup.build_task import build_task
from tests.command_line import Said, cli, here

__all__ = ["cli", "here"]

SHARED: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "num_clients": 300,
    "partition": "iid",
    "availability": "always",
    "clients_per_round": 1.0,
    "num_rounds": 1,
    "local_epochs": 1,
    "batch_size": 64,
    "learning_rate": 0.1,
    "engine": "sequential",
}
CERTIFIED = {"mode": "certified", "epsilon": 6.0, "clip_norm": 0.2, "normalise_updates": True}
CLIENT = 7


def _run(folder: Path, **changes: Any) -> Path:
    settings = {**SHARED, "mode": "fedavg", **changes, "output_dir": str(folder)}
    done = run_config(build_config(settings))
    assert done.folder is not None
    return done.folder


def _gradient_step(**changes: Any) -> torch.Tensor:
    """Return one step of the client on all its images, by torch alone."""
    _, problem = build_task(build_config({**SHARED, "mode": "fedavg", **changes}))
    index = problem.task.index(CLIENT)
    module = problem.flat.module
    outputs = module(problem.task.inputs[index])
    loss = torch.nn.functional.cross_entropy(outputs, problem.task.targets[index])
    found = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([-0.1 * one.flatten() for one in found]).double()


def _held(**changes: Any) -> torch.Tensor:
    config, problem = build_task(build_config({**SHARED, "mode": "fedavg", **changes}))
    return privacy_attacks.held_of_first_round(config, problem, CLIENT).vector


def test_without_noise_the_attacker_holds_the_update_itself() -> None:
    torch.testing.assert_close(_held(), _gradient_step(), atol=1e-7, rtol=1e-4)


def test_under_a_bound_the_attacker_holds_the_clipped_update_and_the_noise_of_the_sum() -> None:
    step = _gradient_step()
    noise = _held(**CERTIFIED) - 0.2 * step / step.norm()
    # One round: the charge is all of mu^2, and so the deviation is clip / mu.
    from fedquilt.privacy.accounting import gaussian_mu

    assert float(noise.std()) == pytest.approx(0.2 / gaussian_mu(6.0, 1e-5), rel=0.1)
    assert abs(float(noise @ step / step.norm() / noise.norm())) < 0.1


def test_every_run_of_the_attack_draws_new_noise() -> None:
    assert not torch.equal(_held(**CERTIFIED), _held(**CERTIFIED))


def test_images_are_found_in_a_plain_update_and_not_in_a_noised_release(tmp_path: Path) -> None:
    options: dict[str, Any] = {"iterations": 80, "restarts": 1}
    plain = privacy_attacks.invert(_run(tmp_path), CLIENT, ["tv"], **options)
    bounded = privacy_attacks.invert(_run(tmp_path, **CERTIFIED), CLIENT, ["tv"], **options)
    assert plain.psnr["tv"] > plain.blank + 5
    assert bounded.psnr["tv"] < bounded.blank
    np.testing.assert_array_equal(plain.truth, bounded.truth)


def test_what_fednova_has_divided_by_its_steps_is_not_divided_again() -> None:
    def attacked(correction: str) -> torch.Tensor:
        changes = {"local_epochs": 4, "correction": correction}
        config, problem = build_task(build_config({**SHARED, "mode": "fedavg", **changes}))
        held = privacy_attacks.held_of_first_round(config, problem, CLIENT)
        labels = problem.task.targets[problem.task.index(CLIENT)]
        return privacy_attacks._Victim(problem, held, labels, 0.1)._target

    torch.testing.assert_close(attacked("fednova"), attacked("none"), atol=1e-6, rtol=1e-4)


def test_no_label_is_read_off_a_head_that_stays_with_its_client(tmp_path: Path) -> None:
    folder = _run(tmp_path, personal="fedper")
    with pytest.raises(InvalidValueError, match="must be one, and be sent; dlg needs none"):
        privacy_attacks.invert(folder, CLIENT, ["tv"])
    found = privacy_attacks.invert(folder, CLIENT, ["dlg"], iterations=60, restarts=1)
    assert found.psnr["dlg"] > found.blank + 3, "what is shared shows the images"


def test_psnr_and_order_are_those_of_their_definitions() -> None:
    truth = np.random.default_rng(0).random((3, 1, 4, 4))
    found = np.clip(truth[[2, 0, 1]] + 0.01, 0, 1)
    order = privacy_attacks.nearest(truth, found)
    assert order.tolist() == [1, 2, 0]
    errors = [np.mean((truth[i] - found[order[i]]) ** 2) for i in range(3)]
    wanted = np.mean([10 * np.log10(1 / error) for error in errors])
    assert privacy_attacks.psnr(truth, found[order]) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "hog-linear"}, "images themselves"),
        ({"method": "heterofl", "model": "digits", "tiers": "1,1/2"}, "must be 'full'"),
    ],
)
def test_what_cannot_be_inverted_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    folder = _run(tmp_path, num_clients=20, **changes)
    with pytest.raises(InvalidValueError, match=said):
        privacy_attacks.invert(folder)


def test_a_client_that_did_not_join_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="client=300 must join the first round"):
        privacy_attacks.invert(_run(tmp_path), 300)


def test_lira_is_the_ratio_of_two_normal_densities_with_shared_deviations() -> None:
    from scipy.stats import norm

    random = np.random.default_rng(1)
    seen, was_in = random.normal(size=(6, 40)), random.random((6, 40)) < 0.5
    was_in[0], was_in[1] = True, False
    confidence = random.normal(size=40)
    means = {side: np.array([seen[was_in[:, i] == side, i].mean() for i in range(40)])
             for side in (True, False)}  # fmt: skip
    spread = {side: np.std([seen[s, i] - means[side][i] for s in range(6) for i in range(40)
                            if was_in[s, i] == side]) for side in (True, False)}  # fmt: skip
    wanted = norm.logpdf(confidence, means[True], spread[True]) - norm.logpdf(
        confidence, means[False], spread[False]
    )
    np.testing.assert_allclose(
        privacy_attacks.likelihood_ratio(confidence, seen, was_in), wanted, rtol=1e-9
    )


def test_area_and_alarms_are_those_counted_pair_by_pair() -> None:
    random = np.random.default_rng(2)
    scores = random.integers(0, 30, size=500).astype(float)
    is_member = np.arange(500) < 300
    found = privacy_attacks._judged("loss", scores, is_member, float, 1.0)
    ours, others = scores[:300], scores[300:]
    pairs = (ours[:, None] > others).mean() + (ours[:, None] == others).mean() / 2
    assert found.auc == pytest.approx(pairs)
    for rate, right in found.right_alarms.items():
        levels = [level for level in np.unique(scores) if np.mean(others > level) <= rate]
        assert right == pytest.approx(max(np.mean(ours > level) for level in levels))


def test_the_most_a_bound_allows_counts_mu_twice_for_one_sample(tmp_path: Path) -> None:
    from scipy.stats import norm

    from fedquilt.privacy.accounting import gaussian_mu

    found = privacy_attacks.membership(_run(tmp_path, num_clients=20, **CERTIFIED), shadows=0)[0]
    mu = 2 * gaussian_mu(6.0, 1e-5)
    assert found.allowed_auc == pytest.approx(norm.cdf(mu / np.sqrt(2)), abs=1e-3)
    assert found.allowed_alarms[0.01] == pytest.approx(norm.cdf(norm.ppf(0.01) + mu), abs=1e-3)


def test_under_a_secret_coin_the_claim_itself_is_the_most() -> None:
    """Two steps of (1, 1e-3), against the best test of the two distributions that need as much."""
    from fedquilt.privacy.statement import Statement

    statement = Statement.without_bound(
        delta=1e-3, covered=(), uncovered=(), noise_source="", notes=()
    )
    coin = {"amplification": True, "selection": "poisson", "policy": "worst_case"}
    most, area = privacy_attacks._most(
        dataclasses.replace(statement, epsilon_max=1.0), build_config({**CERTIFIED, **coin})
    )
    # A bit that is flipped with odds of e^2, and shown outright with probability delta.
    delta, odds = 1e-3 + np.e * 1e-3, np.exp(2.0)
    with_it = np.array([delta, (1 - delta) * odds / (1 + odds), (1 - delta) / (1 + odds), 0.0])
    right, false = np.cumsum(with_it), np.cumsum(with_it[::-1])
    assert [most(rate) for rate in false] == pytest.approx(right.tolist())
    assert most(0.01) == pytest.approx(np.interp(0.01, false, right))
    pairs = sum(with_it[i] * with_it[3 - j] for i in range(4) for j in range(i, 4))
    assert area == pytest.approx(pairs - (with_it * with_it[::-1]).sum() / 2)


@pytest.mark.slow
def test_lira_finds_members_of_a_model_that_remembers_them(tmp_path: Path) -> None:
    long = {"num_clients": 20, "num_rounds": 40, "local_epochs": 5, "batch_size": 16}
    folder = _run(tmp_path, **long, learning_rate=0.5, eval_every=40)
    found = {one.attack: one for one in privacy_attacks.membership(folder)}
    assert found["lira"].auc > 0.53


def test_commands_leave_the_run_as_it_is_and_their_files_to_the_owner(
    cli: Callable[..., Said], tmp_path: Path
) -> None:
    folder = _run(tmp_path / "runs", num_clients=60, **CERTIFIED)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    said = cli("attack", "invert", folder, "--attack", "tv", "--iterations", 5, "--restarts", 1)
    assert said.code == 0, said.err
    assert "private: made with the clients' own samples" in said.words
    assert cli("attack", "membership", folder, "--shadows", 0).code == 0
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    new = {"attacks.json", "inversion.png"}
    assert {name: after[name] for name in after if name not in new} == before
    assert all(stat.S_IMODE((folder / name).stat().st_mode) == 0o600 for name in new)
    kept = RunFolder.open(folder).read_attacks()
    assert set(kept) == {"inversion", "membership"}
    shown, hidden = (page_view([folder], private=private, look=False) for private in (True, False))
    assert shown["runs"][0]["attacks"] == kept
    assert hidden["runs"][0]["attacks"] is None
    assert kept["inversion"]["png"] not in json.dumps(hidden)
