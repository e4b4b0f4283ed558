"""From a configuration to a federation: data, clients, model, method, mechanism.

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
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.assemble_mechanism import (
    Build,
    MechanismParts,
    check_mode,
    make_mechanism,
)
from fedquilt.client_evaluation import check_client_tests, hold_back
from fedquilt.common import trees
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.method import make_condensation
from fedquilt.config import TARGET_ACCURACY, CondenseConfig, RunConfig
from fedquilt.config.choices import NARROW_METHODS, WHOLE_METHODS
from fedquilt.config.modes import MODE_TABLE
from fedquilt.data import (
    Samples,
    as_samples,
    check_data_dir,
    clients_data,
    load_dataset,
    read_split_file,
    split_clients,
)
from fedquilt.data.holdings import Holdings
from fedquilt.data.identity import salted_digest, shared_sample
from fedquilt.learning import (
    Engine,
    FlatModel,
    MakeMetric,
    Objective,
    Task,
    auto_loss,
    choose_engine,
    evaluate,
    fit,
    freeze_others,
    make_metrics,
    measure,
    public_inputs,
)
from fedquilt.learning.local import SequentialEngine
from fedquilt.learning.metrics import OwnMetric
from fedquilt.learning.objective import OwnLoss
from fedquilt.learning.optimizers import Factory
from fedquilt.learning.streams import wake
from fedquilt.method import Method, MethodParts, RemoteEngine, WholeModel
from fedquilt.models import FeatureModel, make_model
from fedquilt.models.features import precompute
from fedquilt.population import Availability, CohortSelector, ParticipationTracker, propensities
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.ledger import check_ids, roster_name
from fedquilt.privacy.mechanism import Mechanism
from fedquilt.privacy.run_account import RunAccount
from fedquilt.round import Federation
from fedquilt.slices.method import LargestOnly, Slices, Smallest
from fedquilt.slices.slicing import smallest_model
from fedquilt.slices.static_norm import make_static, make_tracking

_LOG = logging.getLogger("fedquilt")

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
        return Roster(ids, f"{dataset}-writers", False, _digest(ids, parts))
    ids = tuple(f"{dataset}:{_part_digest(dataset, part)}" for part in parts)
    return Roster(ids, roster_name(dataset, ids), False, _digest(ids, parts))


def roster_of_own(parts: Parts, client_ids: Iterable[str] | None) -> Roster:
    """Return the roster of a user's own index lists."""
    ids = None if client_ids is None else check_ids(client_ids)
    if ids is not None and len(ids) != len(parts):
        raise InvalidValueError(
            f"client_ids must hold one id for each of {len(parts)} clients; it holds {len(ids)}"
        )
    return Roster(ids, None, ids is not None, _digest(ids, parts))


def named_clients(
    clients: Sequence[Any] | Mapping[str, Any], client_ids: Iterable[str] | None
) -> tuple[Sequence[Any], Iterable[str] | None]:
    """Return index lists and ids, where `clients` may be a mapping from one to the other."""
    if not isinstance(clients, Mapping):
        return clients, client_ids
    if client_ids is not None:
        raise InvalidValueError(
            "client_ids must be left out when clients is a mapping: it has them"
        )
    return list(clients.values()), list(clients)


def _part_digest(dataset: str, part: NDArray[np.int64]) -> str:
    numbers = np.sort(part).astype("<i8").tobytes()
    return hashlib.sha256(dataset.encode() + b"\0" + numbers).hexdigest()[:16]


def _digest(ids: tuple[str, ...] | None, parts: Parts) -> str:
    digest = hashlib.sha256()
    for value in ids or ():
        digest.update(len(value.encode()).to_bytes(8, "big") + value.encode())
    held = parts if isinstance(parts, Holdings) else Holdings(parts)
    for content in held.as_bytes():
        digest.update(content)
    return digest.hexdigest()


BuildMethod = Callable[[MethodParts], Method]
"""Makes a method from the parts of a run; a user may bring one."""

BuildEngine = Callable[[MethodParts], Engine]
"""Makes an engine from the parts of a run; a user may bring one."""


@dataclass(frozen=True, eq=False)
class Own:
    """Parts that a user brings instead of naming them in the configuration."""

    method: BuildMethod | None = None
    mechanism: Build | type[Certified] | None = None
    engine: Engine | BuildEngine | None = None
    loss: OwnLoss | None = None
    optimizer: Factory | None = None
    metrics: Sequence[str | OwnMetric] | Mapping[str, str | OwnMetric] | OwnMetric | None = None
    remote: RemoteEngine | None = None


@dataclass(frozen=True, eq=False)
class Problem:
    """Data on the device, the samples of each client, and the initial model.

    `model_width` is the width of this model as a share of the one that was asked for:
    below 1 when a run trains the smallest slice only.  `lends_memory`: it is used for one run,
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
    own: Own = Own()
    lends_memory: bool = False
    metrics: Mapping[str, MakeMetric] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    client_tests: Parts | None = None
    data: Mapping[str, Samples] = field(default_factory=dict, repr=False)
    engine_choice: str = ""

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
        }


def build_problem(config: RunConfig, progress: bool = False) -> tuple[RunConfig, Problem]:
    """Load the data set a configuration names, deal it out, and build the model.

    Returns the configuration with what was left open (number of clients,
    target accuracy) filled in.
    """
    check_data_dir(config.data_dir)
    wake(config.device)
    train, test = load_dataset(
        config.dataset, config.data_dir, download=not config.no_download, progress=progress
    )
    held_out, pool = _hold_out(config, len(train))
    groups = train.groups[pool] if train.groups is not None else None
    num_clients = config.num_clients
    if num_clients is None and config.partition != "writer":
        num_clients = 100
    if isinstance(config, CondenseConfig) and config.split_file is not None:
        parts = read_split_file(config.split_file, len(train))
    else:
        parts = split_clients(
            config.partition,
            train.targets.numpy()[pool],
            num_clients,
            generator(config.seed, "partition"),
            dirichlet_alpha=config.dirichlet_alpha,
            classes_per_client=config.classes_per_client,
            groups=groups,
        )
    clients = Holdings(pool[part] for part in parts)
    del parts
    people = None
    if config.partition == "writer" and train.groups is not None:
        people = [train.person(int(train.groups[part[0]])) for part in clients]
    roster = roster_of_split(config.dataset, clients, people)
    model = make_model(
        config.model,
        train.images.shape[1:],
        train.num_classes,
        torch_seed(config.seed, "model"),
    )
    config = _with_data_defaults(config, len(clients))
    data = (as_samples(train, "train"), as_samples(test, "test"))
    return config, _assemble(config, model, *data, clients, roster, held_out, Own())


def problem_from(
    config: RunConfig,
    model: nn.Module,
    train: object,
    test: object,
    clients: Sequence[Sequence[int] | NDArray[Any]] | None,
    client_ids: Iterable[str] | None = None,
    own: Own | None = None,
    client_tests: Sequence[Any] | None = None,
    validation: object = None,
) -> tuple[RunConfig, Problem]:
    """Build the problem from a user's own model, data and split."""
    # In a private mode bad samples make their client's update zero, and nobody is told.
    finite = not MODE_TABLE[config.mode].noised
    if clients is None:
        train_set, clients = clients_data(_each_client(train), finite=finite)
        client_ids = list(train) if isinstance(train, Mapping) else client_ids
    else:
        train_set = as_samples(train, "train", finite=finite)
    test_set = None if test is None else as_samples(test, "test")
    parts = _checked_clients(clients, len(train_set))
    if config.num_clients not in (None, len(parts)):
        raise InvalidValueError(
            f"num_clients={config.num_clients} must be {len(parts)}, the number of index lists"
        )
    if config.early_stopping and validation is None:
        raise InvalidValueError(
            "early_stopping=True needs validation=, data that no client holds: with your own "
            "clients none can be cut from theirs"
        )
    checked = None if validation is None else as_samples(validation, "validation")
    config = _with_data_defaults(config, len(parts))
    none = np.zeros(0, dtype=np.int64)
    roster = roster_of_own(parts, client_ids)
    if not config.allow_overlap:
        _refuse_overlap(parts, roster.ids)
    tests: Parts | None = None
    if client_tests is not None:
        tests = _checked_clients(client_tests, len(train_set), "client_tests")
        tests = check_client_tests(parts, tests, allow_overlap=config.allow_overlap)
        roster = dataclasses.replace(roster, digest=_digest(roster.ids, Holdings([*parts, *tests])))
    own = own or Own()
    problem = _assemble(
        config, model, train_set, test_set, parts, roster, none, own, tests, checked
    )
    return config, problem


def _each_client(train: object) -> Sequence[Any] | Mapping[str, Any]:
    """Return one data set a client, or raise: without `clients` nothing else says whose is what."""
    if isinstance(train, Mapping) and not any(isinstance(v, torch.Tensor) for v in train.values()):
        return train
    if isinstance(train, list) and train:
        return train
    raise InvalidValueError(
        "clients must say which samples of train each client holds; it may be left out where train "
        "is a list of data sets, one a client, or a mapping from client ids to data sets"
    )


def build_selector(config: RunConfig, num_clients: int) -> CohortSelector:
    """Build step 1: availability and selection."""
    draws = propensities(num_clients, generator(config.seed, "propensity"))
    return CohortSelector(
        Availability.make(config.availability, num_clients, draws),
        draws,
        rule=config.selection,
        limit=config.cohort_limit(num_clients),
        seed=config.seed,
        secret=config.mode == "certified" and config.amplification,
    )


def build_method(config: RunConfig, problem: Problem) -> Method:
    """Build what clients do and what the server makes of it."""
    own, task = problem.own, problem.task
    if own.remote is not None:
        # The same method as of a run on one machine; only step 3 is elsewhere.
        here = dataclasses.replace(problem, own=dataclasses.replace(own, remote=None, engine=None))
        method = build_method(config.replace(engine="sequential"), here)
        method.move_to(own.remote)
        return method
    parts = MethodParts(
        config,
        problem.flat,
        task,
        problem.num_classes,
        problem.selector.secret,
        lends_memory=problem.lends_memory,
        optimizer=own.optimizer,
        score=problem.score,
        server_inputs=None if problem.validation is None else problem.validation[0],
    )
    if own.engine is not None:
        engine = own.engine(parts) if callable(own.engine) else own.engine
        parts = dataclasses.replace(parts, engine=engine)
    if own.method is not None:
        return own.method(parts)
    if isinstance(config, CondenseConfig):
        return make_condensation(config, problem.flat.module, task, problem.num_classes)
    if config.method == "full":
        return WholeModel(parts)
    if config.method == "smallest":
        return Smallest(parts, problem.model_width)
    if config.method == "largest_only":
        return LargestOnly(parts)
    return Slices(parts)


def settle_engine(config: RunConfig, problem: Problem) -> tuple[RunConfig, Problem]:
    """Return the configuration with the engine that `auto` is for this run, and its reason.

    Its folder then says which one, and whoever resumes it trains with the same.
    """
    if not _is_open(config, problem):
        return config, problem
    own = problem.own
    cohort = config.cohort_limit(len(problem.task.clients))
    settings = MethodParts(
        config,
        problem.flat,
        problem.task,
        problem.num_classes,
        problem.selector.secret,
        optimizer=own.optimizer,
    ).local_settings
    choice = choose_engine(problem.flat, problem.task, settings, config.num_rounds, cohort)
    said = f"engine=auto is {choice.engine}: {choice.reason}"
    _LOG.info("%s", said)
    problem = dataclasses.replace(problem, engine_choice=said)
    return config.replace(engine=choice.engine), problem


def engine_of_before(config: RunConfig, problem: Problem) -> RunConfig:
    """Return the configuration of a resumed run with the engine that it began with.

    A folder that says `auto` was made before `auto` was settled at the start: on a CPU it was
    `sequential` then, whose rounding a run with seeded noise must meet again.
    """
    was_sequential = _is_open(config, problem) and problem.task.device.type == "cpu"
    return config.replace(engine="sequential") if was_sequential else config


def _is_open(config: RunConfig, problem: Problem) -> bool:
    """Whether it is still to be decided which engine trains the clients of a run."""
    own = problem.own
    brought = own.method or own.engine or own.remote
    trains = config.method in WHOLE_METHODS and not isinstance(config, CondenseConfig)
    settled = config.engine != "auto" or config.devices is not None
    return not (settled or brought or not trains or problem.task.elsewhere)


def _refuse_unknown(config: RunConfig, own: Own) -> None:
    """Refuse `custom` where nobody brought anything: a run of somebody's own parts, resumed."""
    for name in ("method", "engine", "loss", "optimizer", "metrics"):
        brought = getattr(own, name)
        if name == "engine" and brought is None:
            brought = own.remote
        if getattr(config, name) == "custom" and brought is None:
            raise InvalidValueError(
                f"{name}='custom' must be passed as an object: fedquilt.run(..., {name}=yours)"
            )


def build_federation(
    config: RunConfig,
    problem: Problem,
    account: RunAccount | None = None,
    method: Method | None = None,
) -> Federation:
    """Build the federation of the configured mode, as it is before round 0."""
    method = build_method(config, problem) if method is None else method
    parts = MechanismParts(config, problem.flat, method, problem.selector, account)
    mechanism = make_mechanism(parts, problem.own.mechanism)
    _lend_updates(problem, method, mechanism)
    return Federation(
        select=problem.selector.select,
        tracker=ParticipationTracker(len(problem.task.clients), config.participation_ema),
        method=method,
        mechanism=mechanism,
        learning_rate_at=config.learning_rate_at,
        weights=problem.flat.read().clone(),
        account=account,
    )


def _lend_updates(problem: Problem, method: Method, mechanism: Mechanism) -> None:
    """Let updates lie in the working model's memory where the round is sure to keep none.

    A mechanism or a method of somebody's own may keep them.
    """
    known = problem.own.mechanism is None and type(method) is WholeModel
    if not (problem.lends_memory and known) or mechanism.needs_whole_cohort:
        return
    if type(method.engine) is SequentialEngine:
        method.engine.lends_updates = True


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


def _with_data_defaults(config: RunConfig, num_clients: int) -> RunConfig:
    """Fill in what the data decide, and check the cohort against it."""
    target = config.target_accuracy
    if target is None:
        target = TARGET_ACCURACY.get(config.dataset)
    if config.early_stopping and target is None:
        raise InvalidValueError(
            f"early_stopping=True needs target_accuracy: {config.dataset!r} has none of its own"
        )
    settled = config.replace(num_clients=num_clients, target_accuracy=target)
    settled.cohort_limit(num_clients)
    return settled


def _hold_out(config: RunConfig, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (validation samples, samples for clients); the first is empty by default."""
    if not config.early_stopping and config.norm_statistics != "server":
        return np.zeros(0, dtype=np.int64), np.arange(size)
    order = generator(config.seed, "validation").permutation(size)
    count = max(1, round(config.validation_fraction * size))
    if size - count < (config.num_clients or 1):
        raise InvalidValueError(
            f"validation_fraction={config.validation_fraction} must leave at least one of {size} "
            f"samples to each of num_clients={config.num_clients or 1}"
        )
    return np.sort(order[:count]), np.sort(order[count:])


def _assemble(
    config: RunConfig,
    model: nn.Module,
    train: Samples,
    test: Samples | None,
    clients: Parts,
    roster: Roster,
    held_out: NDArray[np.int64],
    own: Own,
    client_tests: Parts | None = None,
    validation: Samples | None = None,
) -> Problem:
    """Put data and model on the device, and find out whether they fit."""
    _refuse_unknown(config, own)
    device = pick_device(config.device)
    inputs, targets = (_on_device(part, device) for part in (train.inputs, train.targets))
    tests: tuple[Any, Any] | None = None
    if test is not None:
        tests = _on_device(test.inputs, device), _on_device(test.targets, device)
    index = torch.from_numpy(held_out)
    checked: tuple[Any, Any] | None = None
    if validation is not None:
        checked = _on_device(validation.inputs, device), _on_device(validation.targets, device)
    clients, client_tests = _held_back(config, clients, client_tests)
    input_shape = tuple(trees.leaves(inputs)[0].shape[1:])
    model, front = copy.deepcopy(model), None
    if isinstance(model, FeatureModel) and not isinstance(config, CondenseConfig):
        # A frozen front says the same of a sample in every round: ask it once.
        front = model.front.to(device)
        inputs = precompute(front, inputs)
        tests = None if tests is None else (precompute(front, tests[0]), tests[1])
        checked = None if checked is None else (precompute(front, checked[0]), checked[1])
        model = model.on_features()
    freeze_others(model, config.patterns("trainable"))
    sample = public_inputs(inputs, 2)  # what is tried on the model is decided for all clients
    model_width = "1"
    if config.method == "smallest":
        model, width = smallest_model(config, model, sample, len(clients))
        model_width = str(width)
    if config.method in NARROW_METHODS:
        make_static(model)
    flat = FlatModel(model, sample, adopt=True)
    check_mode(config, flat)
    task = Task(inputs, targets, clients)
    task, outputs, notes = _with_objective(config, task, flat.module, own)
    scores = _check_fit(config, task, tests, flat.module, outputs, train)
    ranges = fit.accepted(flat.module, task, outputs)
    if tests is not None:
        fit.refuse_outside(*tests, ranges, task.objective, "test")
    if checked is not None:
        _check_validation(task, flat.module, checked)
        fit.refuse_outside(*checked, ranges, task.objective, "validation")
    if MODE_TABLE[config.mode].noised:
        task = fit.without_spoilt(task, ranges)
    else:
        fit.refuse_outside(inputs, targets, ranges, task.objective, "training")
    wanted = config.metrics if own.metrics is None else own.metrics
    for note in train.notes:
        _LOG.warning("%s", note)
    return Problem(
        task=task,
        test=tests,
        client_tests=client_tests,
        validation=(inputs[index], targets[index]) if len(held_out) else checked,
        flat=flat,
        # What classes there are is public knowledge: the model's, not the largest label's.
        num_classes=train.num_classes or scores,
        model_width=model_width,
        selector=build_selector(config, len(clients)),
        roster=roster,
        input_shape=input_shape,
        front=front,
        own=own,
        metrics=make_metrics(wanted, task.objective, outputs, task.public().targets),
        notes=(*train.notes, *notes),
        data={
            name: data
            for name, data in (("training", train), ("test", test), ("validation", validation))
            if data is not None
        },
    )


def _check_validation(task: Task, module: nn.Module, data: tuple[Any, Any]) -> None:
    """Refuse validation data on which no accuracy can be measured."""
    if not task.objective.has_classes:
        raise InvalidValueError(
            f"validation must be left out with loss={task.objective.name!r}: early stopping looks "
            "at an accuracy, and there are no classes"
        )
    fit.trial_outputs(module, task.objective, trees.take(data[0], slice(0, 1)), "validation")
    if trees.structure(data[1]) != trees.structure(task.targets):
        raise InvalidValueError(
            f"validation targets of shape {trees.described(data[1])} must have the form of the "
            f"training targets, {trees.described(task.targets)}"
        )


def _on_device(samples: Any, device: torch.device) -> Any:
    return trees.mapped(samples, lambda tensor: tensor.to(device))


def _with_objective(
    config: RunConfig, task: Task, module: nn.Module, own: Own
) -> tuple[Task, torch.Tensor | None, tuple[str, ...]]:
    """Return the task with what clients minimise, the model's public outputs, and notes."""
    loss = config.loss if own.loss is None else own.loss
    given = None if loss == "auto" else Objective(loss, config.ignore_index)
    inputs = task.public().inputs
    outputs = fit.trial_outputs(module, given, inputs, "training")
    if given is None:
        name = auto_loss(outputs, task.public().targets)
        given = Objective(name, config.ignore_index)
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
    if test is not None and trees.structure(test[1]) != trees.structure(task.targets):
        raise InvalidValueError(
            f"test targets of shape {trees.described(test[1])} must have the form of the training "
            f"targets, {trees.described(task.targets)}"
        )
    return scores


def _refuse_overlap(parts: Parts, ids: tuple[str, ...] | None) -> None:
    """Refuse clients that hold the same sample: each one's bound says less about it."""
    found = shared_sample(parts)
    if found is None:
        return
    sample, *holders = found
    first, second = (f"clients[{k}]" if ids is None else repr(ids[k]) for k in holders)
    raise InvalidValueError(
        f"{first} and {second} must not both hold sample {sample}: a bound is about one "
        "client, and what several hold is protected less. If they do share samples, say "
        "allow_overlap=True (--allow-overlap)"
    )


def tests_of(
    client_tests: Sequence[Any] | Mapping[str, Any] | None,
    clients: Sequence[Any] | Mapping[str, Any] | None,
) -> Sequence[Any] | None:
    """Return what each client evaluates on, in the order of the clients."""
    if not isinstance(client_tests, Mapping):
        return client_tests
    names = list(clients) if isinstance(clients, Mapping) else []
    stranger = next((name for name in client_tests if name not in names), None)
    if stranger is not None:
        raise InvalidValueError(
            f"client_tests[{stranger!r}] must belong to one of the clients, a mapping too: "
            f"{', '.join(map(repr, names[:5])) or 'clients is a list'}"
        )
    return [client_tests.get(name, []) for name in names]


def _held_back(
    config: RunConfig, clients: Parts, given: Parts | None
) -> tuple[Parts, Parts | None]:
    """Return what clients train on and what they evaluate on, None where they do not."""
    fraction = config.client_test_fraction
    if (fraction or given is not None) and isinstance(config, CondenseConfig):
        raise InvalidValueError(
            f"client_test_fraction={fraction:g} must be 0 and client_tests be left out where "
            "clients send statistics: they do not evaluate a model"
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


def _checked_clients(
    clients: Sequence[Sequence[int] | NDArray[Any]], size: int, what: str = "clients"
) -> Holdings:
    """Return who holds which samples; samples that are not in the data are an error."""
    if len(clients) == 0:
        raise InvalidValueError(f"{what}=[] must hold at least one list of sample numbers")
    return Holdings(clients, size, what)
