"""`CondenseConfig`: the document's names and the package's, defaults, files, errors."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from config_samples import written

from fedquilt.config import CondenseConfig, build_config, plain_config
from fedquilt.config.condense import ALIASES, CONDENSE_PRESETS, package_names
from fedquilt.errors import InvalidValueError

DOCUMENT = {"communication_rounds": 7, "join_ratio": 0.5, "eval_gap": 2}


def build(**settings: Any) -> CondenseConfig:
    config = build_config({"method": "condense", **settings})
    assert isinstance(config, CondenseConfig)
    return config


def file_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return path


def test_the_documents_names_in_python() -> None:
    config = build(**DOCUMENT)
    assert (config.num_rounds, config.clients_per_round, config.eval_every) == (7, 0.5, 2)
    assert config == build(num_rounds=7, clients_per_round=0.5, eval_every=2)


@pytest.mark.parametrize("method", ["", 'method = "condense"\n'])
def test_the_documents_names_in_a_file(tmp_path: Path, method: str) -> None:
    """What the file is read for says the method where the file does not."""
    lines = "".join(f"{key} = {value}\n" for key, value in DOCUMENT.items())
    path = file_of(tmp_path, method + lines + "ipc = 3\n")
    assert build_config({"method": "condense"}, file=path) == build(**DOCUMENT, ipc=3)


def test_keywords_win_over_a_file_whatever_their_names(tmp_path: Path) -> None:
    path = file_of(tmp_path, 'method = "condense"\njoin_ratio = 1\nnum_rounds = 9\n')
    config = build_config({"clients_per_round": 3, "communication_rounds": 4}, file=path)
    assert (config.clients_per_round, config.num_rounds) == (3, 4)


@pytest.mark.parametrize("share", [1, 1.0])
def test_a_join_ratio_of_one_is_everybody(tmp_path: Path, share: float) -> None:
    path = file_of(tmp_path, f"join_ratio = {share}\n")
    for config in (build(join_ratio=share), build_config({"method": "condense"}, file=path)):
        assert [config.cohort_limit(count) for count in (1, 4, 100)] == [1, 4, 100]
    assert build(clients_per_round=1).cohort_limit(100) == 1


@pytest.mark.parametrize("value", [0, -1, 2, 1.5, "half", None, True, float("nan"), [1]])
def test_join_ratio_is_a_share(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"^join_ratio="):
        build(join_ratio=value)


@pytest.mark.parametrize("document", sorted(ALIASES))
def test_both_names_at_once_are_refused(tmp_path: Path, document: str) -> None:
    ours = ALIASES[document]
    for pair in ({document: 1, ours: 2}, {ours: 2, document: 1}):
        with pytest.raises(InvalidValueError, match=rf"^{document}=1 .* beside {ours}=2: .* one"):
            build(**pair)
    text = f'method = "condense"\n{document} = 1\n{ours} = 2\n'
    with pytest.raises(InvalidValueError, match=f"^{document}=1"):
        build_config(file=file_of(tmp_path, text))


def test_renaming_leaves_its_argument_alone() -> None:
    settings = dict(DOCUMENT)
    assert package_names(CondenseConfig, settings) == {
        "num_rounds": 7,
        "clients_per_round": 0.5,
        "eval_every": 2,
    }
    assert settings == DOCUMENT


def test_the_documents_names_are_not_those_of_a_run() -> None:
    with pytest.raises(InvalidValueError, match="unknown key 'join_ratio'"):
        build_config({"join_ratio": 1.0})


@pytest.mark.parametrize("key", ["ipc", "join_ratio", "model_epochs"])
def test_an_option_of_condensations_in_another_run_is_named_as_such(key: str) -> None:
    with pytest.raises(InvalidValueError, match=f"{key}.*an option of method='condense'") as error:
        build_config({key: 3})
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        *[("ipcs", "ipc"), ("dc_iteration", "dc_iterations"), ("join_ration", "join_ratio")],
        *[("communication_round", "communication_rounds"), ("eval_gaps", "eval_gap")],
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, key: str, nearest: str) -> None:
    with pytest.raises(InvalidValueError, match=f"unknown key '{key}'.*'{nearest}'"):
        build(**{key: 3})
    path = file_of(tmp_path, f'method = "condense"\n{key} = 3\n')
    with pytest.raises(InvalidValueError, match=rf"'{key}' in .*settings\.toml.*'{nearest}'"):
        build_config(file=path)


def test_certified_has_defaults_of_its_own() -> None:
    plain, bounded = build(), build(mode="certified")
    assert (plain.model, plain.num_rounds, plain.augmentation) == ("convnet-64", 8, "auto")
    assert plain.normalise_updates is False
    assert (bounded.model, bounded.num_rounds, bounded.eval_every) == ("hog-linear", 40, 20)
    assert (bounded.model_lr, bounded.model_weight_decay) == (0.2, 2e-3)
    assert (bounded.augmentation, bounded.normalise_updates) == ("none", True)
    own = build(mode="certified", model="mlp", communication_rounds=5, normalise_updates=False)
    assert (own.model, own.num_rounds, own.normalise_updates) == ("mlp", 5, False)


@pytest.mark.parametrize(
    ("rounds", "asked", "means"), [(40, None, 8), (5, None, 1), (1, None, 1), (12, 5, 5)]
)
def test_a_fifth_of_the_rounds_asks_for_means(rounds: int, asked: int | None, means: int) -> None:
    config = build(mode="certified", num_rounds=rounds, mean_rounds=asked)
    assert config.rounds_of_means == means


ROUND_TRIPS: list[dict[str, Any]] = [
    {},
    {"mode": "certified"},
    {"mode": "certified", "model": "mlp", "normalise_updates": False, "model_lr": 0.01},
    {"mode": "certified", "augmentation": "auto", "mean_rounds": 3, "eval_every": 3},
    {"ipc": 3, "image_lr": 1e-7, "batch_num": 128, "model_n": 4, "embed_layer": "body.0"},
    {"join_ratio": 1, "feature_model": "perturbed", "rho": 0.0, "seed": 5},
    {"clients_per_round": 1, "image_lr": None, "batch_num": None},
    {"availability": "beta", "init_method": "real_sample", "max_samples": 0},
    {"embed_layer": 'quoted "layer" \\ \x7f'},
]


@pytest.mark.parametrize("settings", ROUND_TRIPS, ids=str)
def test_a_written_configuration_reads_back_equal(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = build(**settings)
    text = written(config)
    again = build_config(file=file_of(tmp_path, text))
    assert again == config
    assert isinstance(again, CondenseConfig)
    assert type(again.clients_per_round) is type(config.clients_per_round)
    absent = {key for key, value in config.as_dict().items() if value is None}
    assert tomllib.loads(text).keys() == config.as_dict().keys() - absent | {"schema_version"}


def test_image_steps_make_up_for_ipc_and_size() -> None:
    assert build(ipc=10).image_step(784, 392) == 0.5 * 10 * 784 / 392
    assert build(ipc=10, image_optimizer="adam").image_step(784, 392) == 0.02
    assert build(ipc=10, image_lr=0.3).image_step(784, 392) == 0.3


def test_models_and_logits_follow_the_feature_model() -> None:
    kinds = ("random_pool", "global", "perturbed")
    assert [build(feature_model=kind).feature_models for kind in kinds] == [8, 1, 8]
    assert build(moments=2).feature_models == 4
    assert [build(feature_model=kind).logit_loss for kind in kinds] == ["none", "l2", "l2"]
    assert build(logit_loss_type="kl").logit_loss == "kl"
    assert build(model_n=3).feature_models == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "quap_fl"}, "^mode='quap_fl' must be one of 'fednum', 'certified'"),
        ({"ipc": 0}, "^ipc=0 must be >= 1"),
        ({"mode": "certified", "moments": 2}, "^moments=2 and tiles=1 must both be 1 with"),
        ({"mode": "certified", "tiles": 2}, "^moments=1 and tiles=2 must both be 1 with"),
        ({"ipc": 1.5}, "^ipc=1.5 must be"),
        ({"communication_rounds": 0}, "^num_rounds=0 must be >= 1"),
        ({"eval_gap": 0}, "^eval_every=0 must be >= 1"),
        ({"image_lr": 0}, "^image_lr=0.* must be > 0|^image_lr=0 must be"),
        ({"image_lr": float("inf")}, "^image_lr=inf must be finite"),
        ({"image_momentum": 1.0}, "^image_momentum=1.0 must be"),
        ({"feature_model": "randompool"}, "^feature_model='randompool'.*'random_pool'"),
        ({"feature_model": "global", "model_n": 3}, "^model_n=3 must be 1 with"),
        ({"max_samples": 3}, "^max_samples=3 must be 0 .* or at least 8"),
        ({"mode": "certified", "mean_rounds": 41}, "^mean_rounds=41 must be <= num_rounds=40"),
        ({"mode": "certified", "synthetic_images": 9}, "^synthetic_images=9 must be >= ipc=10"),
        ({"mode": "certified", "init_method": "real_sample"}, "^init_method=.*may leave it"),
        (
            {"mode": "certified", "feature_extractor": "mlp"},
            "^feature_extractor='mlp' must be one of",
        ),
        ({"mode": "certified", "noise_seed": 1, "ledger": "x"}, "^noise_seed=1 must not"),
        ({"method": "condens"}, "^method='condens' must be one of"),
    ],
    ids=str,
)
def test_errors_name_the_option(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        build(**settings)


def test_an_error_of_a_file_names_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, 'method = "condense"\neval_gap = 0\n')
    with pytest.raises(InvalidValueError, match=r"^eval_every=0 .*\(in .*settings\.toml\)$"):
        build_config(file=path)


def test_a_file_of_a_run_does_not_know_images(tmp_path: Path) -> None:
    path = file_of(tmp_path, "ipc = 3\n")
    with pytest.raises(InvalidValueError, match="unknown key 'ipc'"):
        build_config(file=path)
    assert build_config({"method": "condense"}, file=path) == build(ipc=3)


def test_records_of_before_are_read_as_they_ran() -> None:
    """A record names every option that there was; what it lacks did not exist yet."""
    new = ("tiles", "moments", "image_optimizer", "model_schedule", "cutmix", "split_file")
    new += ("row_bits", "model_families")
    record = {k: v for k, v in build(dataset="cifar10").as_dict().items() if k not in new}
    there = plain_config({**record, "init_method": "random"})
    assert isinstance(there, CondenseConfig)
    assert (there.tiles, there.moments, there.image_optimizer) == (1, 1, "sgd")
    assert there.feature_models == 8


def test_colour_has_defaults_of_its_own() -> None:
    colour, grey = build(dataset="cifar10"), build(dataset="mnist")
    assert (colour.moments, colour.image_optimizer, colour.cutmix) == (2, "adam", 0.5)
    assert (colour.row_bits, colour.init_method, colour.model_families) == (8, "leaves", 3)
    assert (grey.moments, grey.image_optimizer, grey.tiles, grey.cutmix) == (1, "sgd", 1, 0.0)
    mine = build_config({"method": "condense", "dataset": "mnist"}, preset="colour")
    assert isinstance(mine, CondenseConfig)
    assert (mine.moments, mine.num_clients) == (2, 20)
    assert build(dataset="cifar10", mode="certified").moments == 1
    assert (grey.row_bits, grey.init_method, grey.model_families) == (32, "random", 1)


def test_small_images_hold_no_smaller_ones_unless_asked() -> None:
    config = build(dataset="cifar10")
    assert [config.tiles_in(side, side) for side in (8, 23, 24, 32)] == [1, 1, 2, 2]
    assert build(tiles=3).tiles_in(8, 8) == 3


# Number by number, typed from where it stands; not computed from the package.
FEDNUM_DOCUMENT = {
    # the published code's config.py, whose names the document's workflow uses
    "dataset": "cifar10",
    "num_clients": 50,  # client_num
    "dirichlet_alpha": 0.1,  # alpha
    "partition": "part",  # partition_method
    "model": "convnet",  # ConvNet of width 128
    "num_rounds": 20,  # communication_rounds
    "clients_per_round": 1.0,  # join_ratio
    "eval_every": 1,  # eval_gap
    "batch_size": 256,
    "model_epochs": 500,
    "ipc": 10,
    "dc_iterations": 1000,
    "image_lr": 1.0,
    "init_method": "real_sample",
    "batch_num": 128,
    "avg_num": 32,
    # its constructor's defaults, and what is fixed inside
    "logit_loss_type": "wasserstein_sorted",  # 'wasserstein', which sorts both sides
    "loss_computation": "avg-loss",
    "image_optimizer": "sgd",
    "image_momentum": 0.5,
    "model_lr": 0.01,
    "model_weight_decay": 5e-4,
    "model_schedule": "constant",
    # what it does not have: every sample of every class, plain means, whole images
    "mode": "fednum",
    "feature_model": "global",
    "augmentation": "none",
    "cutmix": 0.0,
    "model_families": 1,
    "min_group": 1,
    "max_samples": 0,
    "moments": 1,
    "row_bits": 32,
    "tiles": 1,
}


def test_the_preset_of_the_fednum_document_has_its_numbers() -> None:
    assert CONDENSE_PRESETS["fednum-document"] == FEDNUM_DOCUMENT
    config = build_config({"method": "condense"}, preset="fednum-document").as_dict()
    assert {key: config[key] for key in FEDNUM_DOCUMENT} == FEDNUM_DOCUMENT
