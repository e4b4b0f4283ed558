"""`CondenseConfig`: a run in which clients never train.

Clients send class statistics, the server grows a synthetic data set from them and
trains the model on it.  The names are those of the FedNum document and the code published
with it; where the package has another name for the same thing, both are understood.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError
from fedquilt.config import choices
from fedquilt.config.documents import STATED
from fedquilt.config.modes import CONDENSE_MODES, MODES
from fedquilt.config.option import AnyBut, Case, Flag, declare, declare_again
from fedquilt.config.run import (
    CERTIFIED,
    OF_SPLIT,
    RunConfig,
    old_names,
    option_fields,
    option_names,
)

# The FedNum document's name on the left, the package's on the right.
ALIASES = {
    "communication_rounds": "num_rounds",
    "join_ratio": "clients_per_round",
    "eval_gap": "eval_every",
}
# A quarter of a smaller image has too few pixels to be a picture.
_LEAST_SIDE = 24
_STATISTICS, _MATCHING, _MODEL = "Statistics", "Synthetic images", "Training"
_BOUNDED = "Certified condensation"

F = Flag
_RUN = option_fields(RunConfig)
_FEDNUM: tuple[Case, ...] = ({"mode": ("fednum",)},)
_TRAINED_POOL: tuple[Case, ...] = ({"mode": ("fednum",), "feature_model": ("trained_pool",)},)
# What serves a condensation where nobody said otherwise.  Noise is shared by all clients,
# so a bound wants many; groups need clients with enough samples of a class.
FEDNUM_DEFAULTS: dict[str, Any] = {"num_clients": 20}
# Tried on held-out training images of CIFAR-10; at 10 images of a class more than ten points above
# the plain form at fewer bytes.  On the 8 x 8 digits five points below it in one short run.
COLOUR_DEFAULTS: dict[str, Any] = {
    "tiles": 0,
    "moments": 2,
    "row_bits": 8,
    "image_optimizer": "adam",
    "init_method": "leaves",
    "model_schedule": "cosine",
    "cutmix": 0.5,
    "model_families": 3,
}
COLOURED = ("cifar10", "cifar100", "tiny-imagenet")
"""The data sets by name that `COLOUR_DEFAULTS` are for."""
CERTIFIED_DEFAULTS: dict[str, Any] = {
    "num_clients": 100,
    "model": "hog-linear",
    "num_rounds": 40,
    "eval_every": 20,
    "model_epochs": 1000,
    "model_lr": 0.2,
    "model_weight_decay": 2e-3,
    "augmentation": "none",
    "normalise_updates": True,
}
CONDENSE_PRESETS: dict[str, dict[str, Any]] = {
    "colour": COLOUR_DEFAULTS,
    "fednum-document": STATED["fednum-document"],
}
"""The settings of the FedNum document's published code, and those for colour images."""

DEFAULTS_BY_MODE = {"fednum": FEDNUM_DEFAULTS, "certified": CERTIFIED_DEFAULTS}


@dataclass(frozen=True, kw_only=True)
class CondenseConfig(RunConfig):
    """One condensation on one data set."""

    # A table of options: one argument a line would take four screens more.
    # fmt: off
    method: str = declare_again(_RUN["method"], "condense", _MODEL, "Fixed.", choices=("condense",))
    mode: str = declare_again(
        _RUN["mode"], "fednum", _MODEL,
        "fednum sends means over groups and claims nothing; certified sends one bounded vector, "
        "in 40 rounds and for the model hog-linear unless said otherwise.", choices=CONDENSE_MODES)
    model: str = declare_again(
        _RUN["model"], "convnet-64", _MODEL,
        "The model: convnet (width 128), convnet-64, or any of `run`.")
    embed_layer: str | None = declare(
        None, _MODEL, "Layer whose output is the embedding, for models without embed().", F.NODES,
        uses=_FEDNUM)
    num_rounds: int = declare_again(
        _RUN["num_rounds"], 8, _MODEL, "Communication rounds.", at_least=1)
    clients_per_round: int | float = declare_again(
        _RUN["clients_per_round"], 1.0, _MODEL,
        "Share of the clients that join a round, or their number.")
    availability: str = declare_again(
        _RUN["availability"], "always", "Population",
        "Who is there: always, beta, uniform, or a FILE.csv.")
    batch_size: int = declare_again(
        _RUN["batch_size"], 256, _MODEL, "Batch size of training on the images.", at_least=1)
    model_epochs: int = declare(
        600, _MODEL, "Epochs on the synthetic set.", F.COMMON_CONDENSE, at_least=1)
    model_lr: float = declare(0.01, _MODEL, "Learning rate; a tenth from half way on.", above=0)
    model_weight_decay: float = declare(5e-4, _MODEL, "Weight decay of that training.", at_least=0)
    model_schedule: str = declare(
        "step", _MODEL,
        "How that rate falls: step (a tenth from half way on), cosine (to 0), or constant.",
        choices=choices.MODEL_SCHEDULES)
    cutmix: float = declare(
        0.0, _MODEL, "Share of the batches whose images are cut together.", at_least=0, at_most=1)
    model_families: int = declare(
        1, _MODEL,
        "Families of augmentation that a batch of that training goes through, others each time.",
        at_least=1, at_most=6, uses=({"augmentation": AnyBut(("none",))},))
    eval_every: int = declare_again(
        _RUN["eval_every"], 4, "Run", "Evaluate after every so many rounds.", at_least=1)

    avg_num: int = declare(
        64, _STATISTICS, "Samples that are averaged into one group.", F.NODES, at_least=1,
        uses=_FEDNUM)
    min_group: int = declare(
        8, _STATISTICS, "A class with fewer samples is not sent at all.", F.NODES, at_least=1,
        uses=_FEDNUM)
    max_samples: int = declare(
        64, _STATISTICS, "Samples of a class a client looks at with one model; 0: all.", F.NODES,
        at_least=0, uses=_FEDNUM)
    feature_model: str = declare(
        "random_pool", _STATISTICS, "What clients look at samples with.",
        F.NODES | F.COMMON_CONDENSE, choices=choices.FEATURE_MODELS, uses=_FEDNUM)
    model_n: int | None = declare(
        None, _STATISTICS,
        "Feature models a round; absent: 8, with two moments 4, with 8 bits thrice that, for "
        "global 1.", F.NODES, at_least=1, uses=_FEDNUM)
    trained_n: int = declare(
        1, _STATISTICS, "Models of a trained_pool that are sent in a round.", F.NODES, at_least=1,
        uses=_TRAINED_POOL)
    pool_epochs: int = declare(
        50, _STATISTICS, "Epochs that the server trains them for on its images.", at_least=1,
        uses=_TRAINED_POOL)
    moments: int = declare(
        1, _STATISTICS, "1: clients send means; 2: means and variances.", F.NODES, at_least=1,
        at_most=2, uses=_FEDNUM)
    row_bits: int = declare(
        32, _STATISTICS, "Bits of a number that clients send: 32, 12 or 8.", F.NODES, at_least=1,
        uses=_FEDNUM)
    rho: float = declare(
        5.0, _STATISTICS, "Distance of perturbed models.", F.NODES, at_least=0,
        uses=({"mode": ("fednum",), "feature_model": ("perturbed",)},
              {"mode": ("fednum",), "init_method": ("dm",)}))
    augmentation: str = declare(
        "auto", _STATISTICS,
        "Families joined by '_' (color, crop, cutout, flip, scale, rotate), none, or auto.",
        F.NODES)

    ipc: int = declare(10, _MATCHING, "Synthetic images per class.", F.COMMON_CONDENSE, at_least=1)
    tiles: int = declare(
        1, _MATCHING,
        "Each image holds tiles x tiles smaller ones; 0: 2 for images of 24 x 24 pixels or more.",
        at_least=0, uses=_FEDNUM)
    init_method: str = declare(
        "random", _MATCHING,
        "First images: noise, smooth noise, or drawings (leaves); for comparison only real_sample, "
        "which takes the clients' own, and dm, which takes what they condense of them.",
        choices=choices.INIT_METHODS, uses=_FEDNUM)
    dc_iterations: int = declare(
        600, _MATCHING, "Matching steps a round.", F.COMMON_CONDENSE, at_least=1, uses=_FEDNUM)
    batch_num: int | None = declare(
        None, _MATCHING, "Samples of a class that a step is matched to; absent: all.", at_least=1,
        uses=_FEDNUM)
    image_optimizer: str = declare(
        "sgd", _MATCHING, "How images are moved.", choices=choices.IMAGE_OPTIMIZERS, uses=_FEDNUM)
    image_lr: float | None = declare(
        None, _MATCHING,
        "Step of the images; absent: 0.5 ipc pixels / features with sgd, 0.02 with adam.", above=0,
        uses=_FEDNUM)
    image_momentum: float = declare(
        0.5, _MATCHING, "Momentum of the images.", at_least=0, below=1,
        uses=({"mode": ("fednum",), "image_optimizer": ("sgd",)},))
    logit_loss_type: str = declare(
        "auto", _MATCHING, "Distance of mean logits; auto: none for random_pool, else l2.", F.NODES,
        choices=("auto", *choices.LOGIT_LOSSES), uses=_FEDNUM)
    loss_computation: str = declare(
        "avg-loss", _MATCHING, "Match the mean of the groups, or each.",
        choices=choices.LOSS_COMPUTATIONS, uses=_FEDNUM)

    discrimination: float = declare(
        0.0, _MATCHING, "Weight of the classes' separation under trained models.", at_least=0,
        uses=_TRAINED_POOL)

    feature_extractor: str = declare(
        "hog-linear", _BOUNDED,
        "The fixed feature extractor that certified statistics are taken through; chosen on MNIST.",
        F.NODES, was="front", choices=choices.FEATURE_EXTRACTORS, uses=CERTIFIED)
    mean_rounds: int | None = declare(
        None, _BOUNDED, "First rounds, which ask for class means; absent: a fifth.", F.NODES,
        at_least=1, uses=CERTIFIED)
    head_step: float = declare(
        0.8, _BOUNDED, "Step of the head in the other rounds.", F.NODES, above=0, uses=CERTIFIED)
    synthetic_images: int = declare(
        15000, _BOUNDED, "Public drawings that the condensed images begin as.", was="drawings",
        at_least=1, uses=CERTIFIED)

    split_file: str | None = declare(
        None, "Data", "Who holds which samples, in the published FedNum code's JSON form.",
        uses=OF_SPLIT)
    pixel_mean: str | None = declare(
        None, "Data",
        "What was subtracted from your own data's pixels: one number a channel, 0.5,0.4.")
    pixel_std: str | None = declare(
        None, "Data", "What your own data's pixels were divided by afterwards, in the same form.")

    # fmt: on

    def __post_init__(self) -> None:
        """Say why a mode that trains is none of a condensation, then check every field."""
        if self.mode in MODES and self.mode not in CONDENSE_MODES:
            raise InvalidValueError(
                f"mode={self.mode!r} must be one of {', '.join(map(repr, CONDENSE_MODES))} with "
                "method='condense': clients of a condensation do not train"
            )
        super().__post_init__()

    def _check_method(self) -> None:
        self._check_foreign()
        if self.engine in ("local", "batched", "processes"):
            raise InvalidValueError(
                f"engine={self.engine!r} must be left out of a condensation, whose clients do not "
                "train, or be one of those whose clients are elsewhere"
            )
        self.pixels(None)
        if self.split_file is not None and self.early_stopping:
            raise InvalidValueError(
                "split_file must be left out with early_stopping=True, which holds samples back"
            )
        if self.feature_model == "global" and self.model_n not in (None, 1):
            raise InvalidValueError(
                f"model_n={self.model_n} must be 1 with feature_model='global': there is one"
            )
        if self.row_bits not in choices.ROW_BITS:
            raise InvalidValueError(
                f"row_bits={self.row_bits} must be one of {', '.join(map(str, choices.ROW_BITS))}"
            )
        least = min(self.avg_num, self.min_group)
        if 0 < self.max_samples < least:
            raise InvalidValueError(
                f"max_samples={self.max_samples} must be 0 (all) or at least {least}, the smaller "
                f"of avg_num={self.avg_num} and min_group={self.min_group}"
            )
        if self.mode != "certified":
            return
        if self.init_method != "random":
            raise InvalidValueError(
                f"init_method={self.init_method!r} must be 'random' with mode='certified': "
                "no image of a client may leave it"
            )
        if self.moments != 1 or self.tiles != 1:
            raise InvalidValueError(
                f"moments={self.moments} and tiles={self.tiles} must both be 1 with "
                "mode='certified': its bound is about class means and residuals, and its images "
                "are whole ones"
            )
        if self.row_bits != 32:
            raise InvalidValueError(
                f"row_bits={self.row_bits} must be 32 with mode='certified': what travels is "
                "clipped and noised as it is"
            )
        if self.rounds_of_means > self.num_rounds:
            raise InvalidValueError(
                f"mean_rounds={self.mean_rounds} must be <= num_rounds={self.num_rounds}"
            )
        if self.clipping == "quantile" and self.normalise_updates:
            raise InvalidValueError(
                "clipping='quantile' must be 'fixed' with normalise_updates=True: every vector "
                "is scaled to the clip, and its own length plays no part"
            )
        if self.synthetic_images < self.ipc:
            raise InvalidValueError(
                f"synthetic_images={self.synthetic_images} must be >= ipc={self.ipc}"
            )

    def _check_foreign(self) -> None:
        """Refuse options that would do nothing, rather than take them silently."""
        fields = option_fields(type(self))
        for name in option_names(F.NOT_CONDENSE, type(self)):
            value = getattr(self, name)
            if value != fields[name].default:
                raise InvalidValueError(
                    f"{name}={value!r} must be left out of a condensation, where it says nothing"
                )

    def pixels(self, channels: int | None) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Return mean and standard deviation of the pixels as they were given.

        None when they were not; with `channels`, one number each for so many.
        """
        if (self.pixel_mean is None) != (self.pixel_std is None):
            raise InvalidValueError("pixel_mean and pixel_std must be given together")
        if self.pixel_mean is None or self.pixel_std is None:
            return None
        mean = _numbers("pixel_mean", self.pixel_mean, channels)
        std = _numbers("pixel_std", self.pixel_std, channels, above=0)
        return mean, std

    def tiles_in(self, height: int, width: int) -> int:
        """Return how many smaller images stand beside each other in one of so many pixels."""
        return self.tiles or (2 if min(height, width) >= _LEAST_SIDE else 1)

    @property
    def rounds_of_means(self) -> int:
        """How many rounds of a certified condensation ask for class means."""
        return self.mean_rounds or max(1, round(self.num_rounds / 5))

    @property
    def feature_models(self) -> int:
        """Feature models of a round: with any moments and bits about as many bytes are sent."""
        if self.model_n is not None or self.feature_model == "global":
            return self.model_n or 1
        return 8 * {32: 1, 12: 2, 8: 3}[self.row_bits] // self.moments

    def image_step(self, pixels: int, features: int) -> float:
        """Return the step of the images, for images and embeddings of so many numbers.

        A class's mean is over ipc images, so the gradient of one falls with ipc; the
        loss sums over features, so that of one pixel grows with features / pixels.
        The default of SGD makes up for both; Adam does so itself.
        """
        if self.image_lr is not None:
            return self.image_lr
        return 0.02 if self.image_optimizer == "adam" else 0.5 * self.ipc * pixels / features

    @property
    def logit_loss(self) -> str:
        """The distance of logits; a random model's say nothing that its embedding does not."""
        if self.logit_loss_type != "auto":
            return self.logit_loss_type
        return "none" if self.feature_model in ("random_pool", "trained_pool") else "l2"


def _numbers(
    name: str, text: str, count: int | None, above: float | None = None
) -> tuple[float, ...]:
    """Read numbers joined by commas; a single one serves all of `count`."""
    try:
        read = [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidValueError(f"{name}={text!r} must be numbers joined by commas") from None
    numbers = tuple(checks.number(name, one, above=above) for one in read)
    if count is None or len(numbers) == count:
        return numbers
    if len(numbers) > 1:
        raise InvalidValueError(f"{name}={text!r} must be one number, or {count}: one a channel")
    return numbers * count


def package_names(
    kind: type[RunConfig], settings: Mapping[str, Any], *, warns: bool = False
) -> dict[str, Any]:
    """Return settings of a kind of configuration under the names that its options have now.

    Names of the FedNum document and of the version before are understood; the latter `warns`.
    """
    condenses, old = issubclass(kind, CondenseConfig), old_names(kind)
    others = {**(ALIASES if condenses else {}), **old}
    renamed: dict[str, Any] = {}
    for key, value in settings.items():
        name = others.get(key, key)
        if name in renamed:
            other = next(word for word in settings if others.get(word) == name)
            raise InvalidValueError(
                f"{other}={settings[other]!r} must not be given beside "
                f"{name}={settings[name]!r}: they are one option"
            )
        if condenses and key == "join_ratio":
            # A share of 1 is everybody; as a whole number it would be one client.
            value = checks.number(key, value, above=0, at_most=1)
        if warns and key in old:
            warnings.warn(
                f"{key} is now {name}; the next version will not know {key}",
                FutureWarning,
                stacklevel=2,
            )
        renamed[name] = value
    return renamed
