"""`FederatedTask`: data and model on the device, whether they fit, how the model is evaluated.

Who the clients of a run are: their ids, their order, their population; what they hold back.

Clients get ids here, so that a ledger recognises them in every run (`Roster`):

| where clients come from | a client's id | the population's own name |
|---|---|---|
| a split by people (`writer`) | `writer:` and their number or name | one for all the people |
| any other split | a digest of its list of sample numbers | a digest of all the ids |
| your own lists, with ids | the id you gave | none: you name it |
| your own lists, without | none: its place in the list | none: you name it |

Options do not enter an id: two configurations that deal the samples alike make the same
clients, and one that deals them otherwise makes others.  Nor does the content of a sample: only
sample numbers and the numbers of people.  (`dirichlet` and `shards` deal by label, so
their lists follow from everybody's labels, as the clients themselves do.)
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import trees
from fedquilt.common.errors import FedquiltError, InvalidValueError
from fedquilt.common.randomness import generator
from fedquilt.config import CondenseConfig, RunConfig, option_fields
from fedquilt.config.choices import NARROW_METHODS
from fedquilt.config.modes import MODE_TABLE
from fedquilt.data import DATASETS, Samples
from fedquilt.data.holdings import Holdings, salted_digest, shared_sample
from fedquilt.data.load import SHARED_PEOPLE
from fedquilt.method import Method, MethodParts, RemoteEngine
from fedquilt.models import FeatureModel
from fedquilt.models.features import precompute, refuse_mixing, tell_done
from fedquilt.models.features.drawn import Describes, remembered
from fedquilt.population import Availability, CohortSelector, propensities
from fedquilt.population.fleet import BufferedSelector, device_seconds
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.ledger import check_ids, roster_name
from fedquilt.setup.mechanism import Build, check_mode
from fedquilt.setup.own_parts import parts_digest
from fedquilt.slices.slicing import smallest_model
from fedquilt.slices.static_norm import make_static, make_tracking
from fedquilt.training import (
    Engine,
    FlatModel,
    MakeMetric,
    Objective,
    Task,
    auto_loss,
    evaluate,
    fit,
    freeze_others,
    make_metrics,
    measure,
    public_inputs,
    shifts_labels,
)
from fedquilt.training.attacks import hostile_clients, poisoned
from fedquilt.training.metrics import OwnMetric, refuse_metrics_of_classes
from fedquilt.training.objective import OwnLoss
from fedquilt.training.optimizers import Factory
from fedquilt.training.trainers import Trainer

Parts = Sequence[NDArray[np.int64]]


@dataclass(frozen=True)
class Roster:
    """The clients of a run, in its order.

    Attributes
    ----------
    ids
        One for each client; None where clients are known by their place only.
    name
        What their population is called unless somebody names it; None: it must be named.
    given
        Whether the user gave the ids.
    digest
        Stands for who holds which samples, in order.  It depends on what clients hold, so
        it is kept for the owner only.
    """

    ids: tuple[str, ...] | None
    name: str | None
    given: bool
    digest: str


def roster_of_split(dataset: str, parts: Parts, people: Sequence[str] | None = None) -> Roster:
    """Return the roster of a split of a named data set; `people`: whose samples each part is."""
    if people is not None:
        ids = check_ids(f"writer:{person}" for person in people)
        # Whoever is drawn, it is one of these people: all draws share their accounts.
        return Roster(ids, f"{dataset}-writers", False, roster_digest(ids, parts))
    ids = tuple(f"{dataset}:{_part_digest(dataset, part)}" for part in parts)
    return Roster(ids, roster_name(dataset, ids), False, roster_digest(ids, parts))


def roster_of_own(parts: Parts, client_ids: Iterable[str] | None) -> Roster:
    """Return the roster of a user's own index lists."""
    ids = None if client_ids is None else check_ids(client_ids)
    if ids is not None and len(ids) != len(parts):
        raise InvalidValueError(
            f"client_ids must hold one id for each of {len(parts)} clients; it holds {len(ids)}"
        )
    return Roster(ids, None, ids is not None, roster_digest(ids, parts))


def _part_digest(dataset: str, part: NDArray[np.int64]) -> str:
    numbers = np.sort(part).astype("<i8").tobytes()
    return hashlib.sha256(dataset.encode() + b"\0" + numbers).hexdigest()[:16]


def roster_digest(ids: tuple[str, ...] | None, parts: Parts) -> str:
    """Return what stands for who holds which samples, in order."""
    digest = hashlib.sha256()
    for value in ids or ():
        digest.update(len(value.encode()).to_bytes(8, "big") + value.encode())
    held = parts if isinstance(parts, Holdings) else Holdings(parts)
    for content in held.as_bytes():
        digest.update(content)
    return digest.hexdigest()


def hold_back(
    clients: Parts, fraction: float, seed: int
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Return what each client trains on, and the share of its samples that it holds back.

    At least one sample is left for training; a client with one sample holds back none.
    """
    train, held = [], []
    for client, part in enumerate(clients):
        count = min(max(0, len(part) - 1), round(fraction * len(part)))
        order = generator(seed, "client test", client).permutation(len(part))
        held.append(np.sort(part[order[:count]]))
        train.append(part[np.sort(order[count:])])
    return train, held


def check_client_tests(
    clients: Parts, tests: Parts, *, allow_overlap: bool
) -> list[NDArray[np.int64]]:
    """Return the samples that clients were given to evaluate on, or raise."""
    if len(tests) != len(clients):
        raise InvalidValueError(
            f"client_tests must hold one list for each of {len(clients)} clients; it holds "
            f"{len(tests)}"
        )
    for client, (part, test) in enumerate(zip(clients, tests, strict=True)):
        both = np.intersect1d(part, test)
        if both.size:
            raise InvalidValueError(
                f"client_tests[{client}] must hold samples that the client does not train on; "
                f"it holds sample {int(both[0])}, which it does"
            )
    everything = [np.concatenate(pair) for pair in zip(clients, tests, strict=True)]
    found = None if allow_overlap else shared_sample(everything)
    if found is not None:
        raise InvalidValueError(
            f"clients {found[1]} and {found[2]} must not both hold sample {found[0]}, to train or "
            "to evaluate on; if they do share samples, say allow_overlap=True (--allow-overlap)"
        )
    return list(tests)


_LOG = logging.getLogger("fedquilt")

_TRIED_SAMPLES = 256  # of the test set, by metrics of somebody's own
_ON_TEST = ("test_", "tiers")
"""How the names of what is measured on test samples begin."""

Pair = tuple[Any, Any]
"""Inputs and targets: tensors, or trees of them."""

BuildMethod = Callable[[MethodParts], Method]
"""Makes a method from the parts of a run; a user may bring one."""

BuildEngine = Callable[[MethodParts], Engine]
"""Makes an engine from the parts of a run; a user may bring one."""


Working = Callable[[str, float], None]
"""Is told the step that is running and the share of it that is done."""


@dataclass(frozen=True, eq=False)
class UserComponents:
    """Parts that a user brings instead of naming them in the configuration."""

    method: BuildMethod | None = None
    mechanism: Build | type[Certified] | None = None
    engine: Engine | BuildEngine | None = None
    loss: OwnLoss | None = None
    optimizer: Factory | None = None
    metrics: Sequence[str | OwnMetric] | Mapping[str, str | OwnMetric] | OwnMetric | None = None
    remote: RemoteEngine | None = None

    @property
    def brought(self) -> tuple[Any, ...]:
        """What of them makes another experiment."""
        return (self.method, self.mechanism, self.loss, self.optimizer, self.metrics)


@dataclass(frozen=True, eq=False)
class FederatedTask:
    """Data on the device, the samples of each client, and the initial model.

    `model_width` is the width of this model as a share of the one that was asked for:
    below 1 when a run trains the smallest slice only.  `withheld`: measures that begin so are of
    samples that clients have made.  `lends_memory`: it is used for one run,
    whose engine may train in the memory of `flat`.
    """

    task: Task
    test: tuple[Any, Any] | None
    validation: tuple[torch.Tensor, torch.Tensor] | None
    flat: FlatModel
    num_classes: int
    selector: CohortSelector
    roster: Roster
    input_shape: tuple[int, ...]
    front: nn.Module | None = None
    model_width: str = "1"
    own: UserComponents = UserComponents()
    lends_memory: bool = False
    metrics: Mapping[str, MakeMetric] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    client_tests: Parts | None = None
    data: Mapping[str, Samples] = field(default_factory=dict, repr=False)
    engine_choice: str = ""
    trainer: Trainer | None = field(default=None, repr=False)
    withheld: tuple[str, ...] = ()
    left_out: frozenset[int] = field(default=frozenset(), repr=False)
    """Who trains on nothing, because of samples that the model cannot take: for the owner alone."""
    parts: str = ""
    """A digest of model and own parts (`own_parts`), before any of them has seen a sample."""

    def data_digests(self, salt: bytes) -> dict[str, str]:
        """Return a salted digest of each data set as it was given, before any front."""
        return {
            name: salted_digest([data.inputs, data.targets], salt)
            for name, data in self.data.items()
        }

    @property
    def test_data(self) -> tuple[Any, Any]:
        """The test set, where one is needed."""
        if self.test is None:
            raise InvalidValueError("test=None must be a test set here: (inputs, labels)")
        return self.test

    def whole_model(self) -> nn.Module:
        """Return a copy of the model as it stands, on the CPU, its front included."""
        module = copy.deepcopy(self.flat.module).cpu()
        make_tracking(module)
        if self.front is not None:
            module.front = copy.deepcopy(self.front).cpu()
        return module

    def evaluate(self) -> dict[str, float]:
        """Step 9: evaluate the model as it stands; test data are used nowhere else."""
        measured = {f"test_{name}": value for name, value in self.score(self.flat.module).items()}
        if self.validation is not None:
            measured["validation_accuracy"], _ = evaluate(self.flat.module, *self.validation)
        return measured

    def score(self, module: nn.Module) -> dict[str, float]:
        """Return what any model reaches on the test data; nothing without them."""
        if self.test is None:
            return {}
        return measure(module, self.task.objective, self.metrics, *self.test)

    def metadata(self) -> dict[str, Any]:
        """Return what is needed to build the model again."""
        return {
            "input_shape": list(self.input_shape),
            "num_classes": self.num_classes,
            "model_width": self.model_width,
            "loss": self.task.objective.name,
            "metrics": list(self.metrics),
            "data_notes": list(self.notes),
            "parts": self.parts,
        }


@dataclass(frozen=True, eq=False)
class GivenData:
    """The samples of a run as they were given, and who holds which.

    `held_out` are samples of `train` that no client holds, `client_tests` those that clients
    evaluate on.
    """

    train: Samples
    test: Samples | None
    clients: Parts
    roster: Roster
    held_out: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    client_tests: Parts | None = None
    validation: Samples | None = None

    @property
    def by_name(self) -> dict[str, Samples]:
        """The data sets that there are."""
        named = (("training", self.train), ("test", self.test), ("validation", self.validation))
        return {name: samples for name, samples in named if samples is not None}


@dataclass(eq=False)
class _Placed:
    """Model and samples on the device; inputs are features where a frozen extractor made them."""

    model: nn.Module
    front: nn.Module | None
    train: Pair
    test: Pair | None
    validation: Pair | None


def make_task(
    config: RunConfig,
    model: nn.Module,
    given: GivenData,
    own: UserComponents,
    working: Working | None = None,
) -> FederatedTask:
    """Put data and model on the device, and find out whether they fit.

    `working` is told how far the features of a frozen extractor are.
    """
    _refuse_unknown(config, own)
    clients, client_tests = _held_back(config, given.clients, given.client_tests)
    placed = _place(config, model, _attacked(config, given, clients), working)
    inputs, targets = placed.train
    flat, model_width = _flat_model(config, placed.model, inputs, len(clients))
    check_mode(config, flat, len(clients))
    parts = parts_digest(flat.module, own.brought)
    task = Task(inputs, targets, clients)
    task, outputs, notes = _with_objective(config, task, flat.module, own)
    scores = _check_fit(config, task, placed.test, flat.module, outputs, given.train)
    task, left_out = _without_unfit(config, task, placed, flat.module, outputs)
    wanted = config.metrics if own.metrics is None else own.metrics
    metrics = make_metrics(wanted, task.objective, outputs, task.public().targets)
    # A mistake in a metric must not cost a round; samples of clients are not tried.
    by_clients = SHARED_PEOPLE in given.train.notes
    if placed.test is not None and not by_clients:
        refuse_metrics_of_classes(metrics, placed.test[1])
        if own.metrics is not None:
            _try_metrics(flat.module, task.objective, metrics, placed.test)
    flat.restore()  # the trials above may have left something behind
    for note in given.train.notes:
        _LOG.warning("%s", note)
    index = torch.from_numpy(given.held_out)
    # Of samples that are dealt otherwise no client is the one who made them.
    by_people = config.partition == "writer" or config.dataset == "custom"
    return FederatedTask(
        task=task,
        test=placed.test,
        client_tests=client_tests,
        validation=(inputs[index], targets[index]) if len(index) else placed.validation,
        flat=flat,
        # What classes there are is public knowledge: the model's, not the largest label's.
        num_classes=given.train.num_classes or scores,
        model_width=model_width,
        selector=build_selector(config, len(clients)),
        roster=given.roster,
        input_shape=tuple(trees.leaves(given.train.inputs)[0].shape[1:]),
        front=placed.front,
        own=own,
        metrics=metrics,
        notes=(*given.train.notes, *notes),
        withheld=_ON_TEST if by_clients and by_people else (),
        left_out=left_out,
        data=given.by_name,
        parts=parts,
    )


def _attacked(config: RunConfig, given: GivenData, clients: Parts) -> GivenData:
    """Return the data with those of hostile clients as their attack has them, where it is one."""
    if config.attack not in ("label_flip", "backdoor"):
        return given
    train, who = given.train, hostile_clients(len(clients), config.attackers, config.seed)
    held = [clients[client] for client in sorted(who)]
    inputs, targets = poisoned(config.attack, train.inputs, train.targets, train.num_classes, held)
    return dataclasses.replace(
        given, train=dataclasses.replace(train, inputs=inputs, targets=targets)
    )


def _place(
    config: RunConfig, model: nn.Module, given: GivenData, working: Working | None
) -> _Placed:
    """Put samples and a copy of the model on the device, without a frozen feature extractor."""
    device = pick_device(config.device)
    test, validation = (
        None if samples is None else _on_device(samples, device)
        for samples in (given.test, given.validation)
    )
    placed = _Placed(copy.deepcopy(model), None, _on_device(given.train, device), test, validation)
    if isinstance(placed.model, FeatureModel) and not isinstance(config, CondenseConfig):
        # A frozen front says the same of a sample in every round: ask it once.
        front = placed.front = placed.model.front.to(device)
        refuse_mixing(front, public_inputs(placed.train[0], 3), type(front).__name__)

        def described(images: Any) -> torch.Tensor:
            compute = partial(precompute, images=images, working=working)
            by_name = config.model != "custom" and config.dataset in DATASETS
            if isinstance(front, Describes) and by_name:
                return remembered(front, images, compute, partial(tell_done, working))
            return compute(front)

        placed.train = described(placed.train[0]), placed.train[1]
        if test is not None:
            placed.test = described(test[0]), test[1]
        if validation is not None:
            placed.validation = described(validation[0]), validation[1]
        placed.model = placed.model.on_features()
    return placed


def _flat_model(
    config: RunConfig, model: nn.Module, inputs: Any, num_clients: int
) -> tuple[FlatModel, str]:
    """Return the model that travels, and its width as a share of the one that was given."""
    freeze_others(model, config.patterns("trainable"))
    sample = public_inputs(inputs, 2)  # what is tried on the model is decided for all clients
    model_width = "1"
    if config.method == "smallest":
        model, width = smallest_model(config, model, sample, num_clients)
        model_width = str(width)
    if config.method in NARROW_METHODS:
        make_static(model)
    return FlatModel(model, sample, adopt=True), model_width


def _without_unfit(
    config: RunConfig,
    task: Task,
    placed: _Placed,
    module: nn.Module,
    outputs: torch.Tensor | None,
) -> tuple[Task, frozenset[int]]:
    """Refuse samples that the model cannot take; under noise, leave out who holds some."""
    ranges = fit.accepted(module, task, outputs)
    open_ended = (n for n, r in ranges.items() if n.startswith("inputs") and r.is_open)
    task = dataclasses.replace(task, unranged=frozenset(open_ended))
    if placed.test is not None:
        fit.refuse_outside(*placed.test, ranges, task.objective, "test")
    if placed.validation is not None:
        _check_validation(task, module, placed.validation)
        fit.refuse_outside(*placed.validation, ranges, task.objective, "validation")
    # A loss may leave out samples of a label that counts for nothing; class statistics cannot.
    ignores = not isinstance(config, CondenseConfig)
    if MODE_TABLE[config.mode].noised:
        return fit.drop_invalid_clients(task, ranges, ignores=ignores)
    fit.refuse_outside(*placed.train, ranges, task.objective, "training", ignores=ignores)
    return task, frozenset()


def _try_metrics(
    module: nn.Module,
    objective: Objective,
    metrics: Mapping[str, MakeMetric],
    tests: tuple[Any, Any],
) -> None:
    """Measure the initial model on some test samples, so that a metric that fails fails here."""
    some = [trees.take(part, slice(0, _TRIED_SAMPLES)) for part in tests]
    for name, make in metrics.items():
        try:
            measure(module, objective, {name: make}, *some)
        except FedquiltError:
            raise
        except Exception as error:
            raise InvalidValueError(
                f"metric {name!r} must return a number of (outputs, targets); on {len(some[1])} "
                f"test samples it fails: {type(error).__name__}: {error}"
            ) from error


def _refuse_unknown(config: RunConfig, own: UserComponents) -> None:
    """Refuse `custom` where nobody brought anything: a run of somebody's own parts, resumed."""
    brings = [name for name, item in option_fields().items() if item.metadata["rule"].get("own")]
    for name in brings:
        brought = getattr(own, name)
        if name == "engine" and brought is None:
            brought = own.remote
        if getattr(config, name) == "custom" and brought is None:
            raise InvalidValueError(
                f"{name}='custom' must be passed as an object: fedquilt.run(..., {name}=yours)"
            )


def pick_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is the GPU when there is one.

    A GPU other than the first becomes torch's current one: kernels and graphs run there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise InvalidValueError(f"device={name!r} must be 'cpu' or 'auto': torch finds no GPU here")
    number = int(name.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise InvalidValueError(
            f"device={name!r} must be below cuda:{torch.cuda.device_count()}: torch finds "
            f"{torch.cuda.device_count()} GPUs here"
        )
    if number:
        torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _on_device(samples: Samples, device: torch.device) -> Pair:
    pair = (samples.inputs, samples.targets)
    inputs, targets = (trees.mapped(part, lambda tensor: tensor.to(device)) for part in pair)
    return inputs, targets


def _held_back(
    config: RunConfig, clients: Parts, given: Parts | None
) -> tuple[Parts, Parts | None]:
    """Return what clients train on and what they evaluate on, None where they do not."""
    fraction = config.client_test_fraction
    if (fraction or given is not None) and isinstance(config, CondenseConfig):
        raise InvalidValueError(
            f"client_test_fraction={fraction:g} must be 0 and client_tests be left out of a "
            "condensation: its clients send statistics and evaluate no model"
        )
    if fraction and given is not None:
        raise InvalidValueError(
            f"client_test_fraction={fraction:g} must be 0 beside client_tests: give one of them"
        )
    if config.evaluation_share and config.mode != "certified":
        raise InvalidValueError(
            f"evaluation_share={config.evaluation_share:g} must be 0 in mode={config.mode!r}: it "
            "is a part of the budget of mode 'certified'"
        )
    if config.evaluation_share and not fraction and given is None:
        raise InvalidValueError(
            f"evaluation_share={config.evaluation_share:g} needs samples that clients hold back: "
            "client_test_fraction, or client_tests"
        )
    if fraction:
        train, held = hold_back(clients, fraction, config.seed)
        return Holdings(train), Holdings(held)
    return clients, given


def _with_objective(
    config: RunConfig, task: Task, module: nn.Module, own: UserComponents
) -> tuple[Task, torch.Tensor | None, tuple[str, ...]]:
    """Return the task with what clients minimise, the model's public outputs, and notes."""
    loss = config.loss if own.loss is None else own.loss
    given = None if loss == "auto" else Objective(loss, config.ignore_index)
    inputs = task.public().inputs
    outputs = fit.trial_outputs(module, given, inputs, "training")
    if given is None:
        name = auto_loss(outputs, task.public().targets)
        given = Objective(name, config.ignore_index)
    if given.loss == "model" and shifts_labels(module, inputs, task.public().targets):
        given = Objective("model", config.ignore_index, shifts=True)
    task = dataclasses.replace(task, objective=given.to(task.device))
    note = fit.warn_of_softmax(given, outputs)
    return task, outputs, () if note is None else (note,)


def _check_fit(
    config: RunConfig,
    task: Task,
    test: tuple[Any, Any] | None,
    module: nn.Module,
    outputs: torch.Tensor | None,
    train: Samples,
) -> int:
    """Try public and test samples, so that a misfit is an error here and not in round 0.

    Returns how many scores the model gives; 0 where targets are not classes.
    """
    objective, public = task.objective, task.public()
    if test is not None:
        fit.trial_outputs(module, objective, trees.take(test[0], slice(0, 1)), "test")
    scores = 0
    if objective.has_classes and outputs is not None:
        plain = objective.name in ("cross_entropy", "nll") and task.targets.dim() == 1
        if plain and outputs.dim() != 2:
            raise InvalidValueError(
                "the model must return one score for each class of the training data; it returns "
                f"a tensor of shape {tuple(outputs.shape)}"
            )
        scores = fit.num_classes(objective, outputs)
        if train.num_classes is not None and train.num_classes > scores:
            raise InvalidValueError(
                f"the model must return one score for each of {train.num_classes} classes of the "
                f"training data; it returns a tensor of shape {tuple(outputs.shape)}"
            )
    fit.check_loss(module, objective, public.inputs, public.targets)
    if test is not None:
        _check_targets("test", test[1], task)
    return scores


def _check_targets(what: str, targets: Any, task: Task) -> None:
    if trees.structure(targets) != trees.structure(task.targets):
        raise InvalidValueError(
            f"{what} targets of shape {trees.described(targets, typed=True)} must have the form "
            f"of the training targets, {trees.described(task.targets, typed=True)}"
        )


def _check_validation(task: Task, module: nn.Module, data: tuple[Any, Any]) -> None:
    """Refuse validation data on which no accuracy can be measured."""
    if not task.objective.has_classes:
        raise InvalidValueError(
            f"validation must be left out with loss={task.objective.name!r}: early stopping looks "
            "at an accuracy, and there are no classes"
        )
    fit.trial_outputs(module, task.objective, trees.take(data[0], slice(0, 1)), "validation")
    _check_targets("validation", data[1], task)


def build_selector(config: RunConfig, num_clients: int) -> CohortSelector:
    """Build step 1: availability and selection."""
    draws = propensities(num_clients, generator(config.seed, "propensity"))
    make: Callable[..., CohortSelector] = CohortSelector
    if config.buffer_size is not None:
        make = functools.partial(
            BufferedSelector,
            buffer_size=min(config.buffer_size, num_clients),
            in_flight=config.in_flight or 2 * config.buffer_size,
            seconds=device_seconds(num_clients, config.device_spread, config.seed),
        )
    return make(
        Availability.make(config.availability, num_clients, draws),
        draws,
        rule=config.selection,
        limit=config.cohort_limit(num_clients),
        seed=config.seed,
        secret=config.mode == "certified" and config.amplification,
        window=config.rounds_per_release,
        num_rounds=config.num_rounds,
    )
