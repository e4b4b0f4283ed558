"""From a configuration to a federation: data, clients, model, method, mechanism.

Clients get ids here, so that a ledger recognises them in every run (`Roster`):

| where clients come from | a client's id | the population's own name |
|---|---|---|
| a split by people (`writer`) | `writer:` and the writer's number | one for all the people |
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.condense.method import make_condensation
from fedquilt.config import TARGET_ACCURACY, CondenseConfig, RunConfig
from fedquilt.config.modes import MODE_TABLE
from fedquilt.data import ImageDataset, as_dataset, check_data_dir, load_dataset, split_clients
from fedquilt.learning import Engine, FlatModel, Task, evaluate, freeze_others, public_inputs
from fedquilt.method import Method, MethodParts, RemoteEngine, WholeModel
from fedquilt.models import FeatureModel, make_model
from fedquilt.models.features import precompute
from fedquilt.population import Availability, CohortSelector, ParticipationTracker, propensities
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.ledger import check_ids, roster_name
from fedquilt.privacy.run_account import RunAccount
from fedquilt.round import Federation
from fedquilt.slices.method import Slices, Smallest
from fedquilt.slices.slicing import smallest_model

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


def roster_of_split(dataset: str, parts: Parts, people: Sequence[int] | None = None) -> Roster:
    """Return the roster of a split of a named data set; `people`: whose samples each part is."""
    if people is not None:
        ids = tuple(f"writer:{person}" for person in people)
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
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part.astype("<i8").tobytes())
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
    remote: RemoteEngine | None = None


@dataclass(frozen=True, eq=False)
class Problem:
    """Data on the device, the samples of each client, and the initial model.

    `model_width` is the width of this model as a share of the one that was asked for:
    below 1 when a run trains the smallest slice only.
    """

    task: Task
    test: tuple[torch.Tensor, torch.Tensor]
    validation: tuple[torch.Tensor, torch.Tensor] | None
    flat: FlatModel
    num_classes: int
    selector: CohortSelector
    roster: Roster
    input_shape: tuple[int, ...]
    front: nn.Module | None = None
    model_width: str = "1"
    own: Own = Own()

    def whole_model(self) -> nn.Module:
        """Return a copy of the model as it stands, on the CPU, its front included."""
        module = copy.deepcopy(self.flat.module).cpu()
        if self.front is not None:
            module.front = copy.deepcopy(self.front).cpu()
        return module

    def evaluate(self) -> dict[str, float]:
        """Step 9: evaluate the model as it stands; test data are used nowhere else."""
        accuracy, loss = evaluate(self.flat.module, *self.test)
        measured = {"test_accuracy": accuracy, "test_loss": loss}
        if self.validation is not None:
            measured["validation_accuracy"], _ = evaluate(self.flat.module, *self.validation)
        return measured

    def metadata(self) -> dict[str, Any]:
        """Return what is needed to build the model again."""
        return {
            "input_shape": list(self.input_shape),
            "num_classes": self.num_classes,
            "model_width": self.model_width,
        }


def build_problem(config: RunConfig, progress: bool = False) -> tuple[RunConfig, Problem]:
    """Load the data set a configuration names, deal it out, and build the model.

    Returns the configuration with what was left open (number of clients,
    target accuracy) filled in.
    """
    check_data_dir(config.data_dir)
    train, test = load_dataset(
        config.dataset, config.data_dir, download=not config.no_download, progress=progress
    )
    held_out, pool = _hold_out(config, len(train))
    groups = train.groups[pool] if train.groups is not None else None
    num_clients = config.num_clients
    if num_clients is None and config.partition != "writer":
        num_clients = 100
    parts = split_clients(
        config.partition,
        train.targets.numpy()[pool],
        num_clients,
        generator(config.seed, "partition"),
        dirichlet_alpha=config.dirichlet_alpha,
        classes_per_client=config.classes_per_client,
        groups=groups,
    )
    clients = [pool[part] for part in parts]
    people = None
    if config.partition == "writer" and train.groups is not None:
        people = [int(train.groups[part[0]]) for part in clients]
    roster = roster_of_split(config.dataset, clients, people)
    model = make_model(
        config.model,
        train.images.shape[1:],
        train.num_classes,
        torch_seed(config.seed, "model"),
    )
    config = _with_data_defaults(config, len(clients))
    known = train.num_classes
    return config, _assemble(config, model, train, test, clients, roster, held_out, known)


def problem_from(
    config: RunConfig,
    model: nn.Module,
    train: object,
    test: object,
    clients: Sequence[Sequence[int] | NDArray[Any]],
    client_ids: Iterable[str] | None = None,
    own: Own | None = None,
) -> tuple[RunConfig, Problem]:
    """Build the problem from a user's own model, data and split."""
    # In a private mode bad samples make their client's update zero, and nobody is told.
    train_set = as_dataset(train, finite=not MODE_TABLE[config.mode].noised)
    test_set = as_dataset(test)
    parts = _checked_clients(clients, len(train_set))
    if config.num_clients not in (None, len(parts)):
        raise InvalidValueError(
            f"num_clients={config.num_clients} must be {len(parts)}, the number of index lists"
        )
    if config.early_stopping:
        raise InvalidValueError(
            "early_stopping=True must be left off with your own clients: "
            "a validation split that no client holds cannot be cut from their data"
        )
    config = _with_data_defaults(config, len(parts))
    none = np.zeros(0, dtype=np.int64)
    roster = roster_of_own(parts, client_ids)
    # What classes there are is public knowledge: the model's, not the largest label's.
    known = train_set.num_classes if isinstance(train, ImageDataset) else None
    problem = _assemble(config, model, train_set, test_set, parts, roster, none, known)
    return config, dataclasses.replace(problem, own=own or Own())


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
    parts = MethodParts(config, problem.flat, task, problem.num_classes, problem.selector.secret)
    if own.engine is not None:
        engine = own.engine(parts) if callable(own.engine) else own.engine
        parts = dataclasses.replace(parts, engine=engine)
    _refuse_unknown(config, own)
    if own.method is not None:
        return own.method(parts)
    if isinstance(config, CondenseConfig):
        return make_condensation(config, problem.flat.module, task, problem.num_classes)
    if config.method == "full":
        return WholeModel(parts)
    if config.method == "smallest":
        return Smallest(parts, problem.model_width)
    return Slices(parts)


def _refuse_unknown(config: RunConfig, own: Own) -> None:
    """Refuse `custom` where nobody brought anything: a run of somebody's own parts, resumed."""
    for name in ("method", "engine"):
        if getattr(config, name) == "custom" and getattr(own, name) is None:
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
    return Federation(
        select=problem.selector.select,
        tracker=ParticipationTracker(len(problem.task.clients), config.participation_ema),
        method=method,
        mechanism=make_mechanism(parts, problem.own.mechanism),
        learning_rate_at=config.learning_rate_at,
        weights=problem.flat.read().clone(),
        account=account,
    )


def pick_device(name: str) -> torch.device:
    """Return the device of a name; `auto` is the GPU when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidValueError("device='cuda' must be 'cpu' or 'auto': torch finds no GPU here")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


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
    if not config.early_stopping:
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
    train: ImageDataset,
    test: ImageDataset,
    clients: list[NDArray[np.int64]],
    roster: Roster,
    held_out: NDArray[np.int64],
    num_classes: int | None,
) -> Problem:
    """Put data and model on the device; None for the classes: as many as the model has."""
    device = pick_device(config.device)
    inputs, targets = train.images.to(device), train.targets.to(device)
    index = torch.from_numpy(held_out)
    tests = test.images.to(device)
    input_shape = tuple(inputs.shape[1:])
    model, front = copy.deepcopy(model), None
    if isinstance(model, FeatureModel) and not isinstance(config, CondenseConfig):
        # A frozen front says the same of a sample in every round: ask it once.
        front = model.front.to(device)
        inputs, tests = precompute(front, inputs), precompute(front, tests)
        model = model.on_features()
    freeze_others(model, config.patterns("trainable"))
    sample = public_inputs(inputs, 2)  # what is tried on the model is decided for all clients
    model_width = "1"
    if config.method == "smallest":
        model, width = smallest_model(config, model, sample, len(clients))
        model_width = str(width)
    problem = Problem(
        task=Task(inputs, targets, clients),
        test=(tests, test.targets.to(device)),
        validation=(inputs[index], targets[index]) if len(held_out) else None,
        flat=FlatModel(model, sample),
        num_classes=num_classes or 0,
        model_width=model_width,
        selector=build_selector(config, len(clients)),
        roster=roster,
        input_shape=input_shape,
        front=front,
    )
    check_mode(config, problem.flat)
    outputs = _check_outputs(problem)
    return dataclasses.replace(problem, num_classes=num_classes or outputs)


@torch.no_grad()
def _check_outputs(problem: Problem) -> int:
    """Try one input of each kind, so that a misfit is an error here and not in round 0.

    Returns how many scores the model gives.
    """
    module = problem.flat.module.eval()
    scores = 0
    for name, inputs, targets in (
        ("training", problem.task.public().inputs, problem.task.targets),
        ("test", *problem.test),
    ):
        if len(targets) == 0:
            raise InvalidValueError(f"the {name} data must hold at least one sample")
        shape = tuple(inputs.shape[1:])
        try:
            outputs = module(inputs[:1])
        except (RuntimeError, ValueError, IndexError) as error:
            raise InvalidValueError(
                f"the model must take {name} inputs of shape {shape}; it does not: {error}"
            ) from error
        if outputs.ndim != 2 or int(targets.max()) >= outputs.shape[1]:
            raise InvalidValueError(
                f"the model must return one score for each of {int(targets.max()) + 1} classes of "
                f"the {name} data; it returns a tensor of shape {tuple(outputs.shape)}"
            )
        scores = int(outputs.shape[1])
    return scores


def _checked_clients(
    clients: Sequence[Sequence[int] | NDArray[Any]], size: int
) -> list[NDArray[np.int64]]:
    """Return the index lists as arrays; samples that are not in the data are an error."""
    if len(clients) == 0:
        raise InvalidValueError("clients=[] must hold at least one list of sample numbers")
    parts = []
    for client, indices in enumerate(clients):
        part = np.asarray(indices)
        if part.ndim != 1 or (part.size and part.dtype.kind not in "iu"):
            raise InvalidValueError(f"clients[{client}] must be a list of sample numbers")
        if part.size == 0:  # a client without data is a client: it joins and sends zero
            parts.append(np.zeros(0, dtype=np.int64))
            continue
        if part.min() < 0 or part.max() >= size:
            raise InvalidValueError(
                f"clients[{client}] must hold numbers >= 0 and < {size}, the size of the data; "
                f"it holds {int(part.min())} to {int(part.max())}"
            )
        parts.append(part.astype(np.int64))
    return parts
