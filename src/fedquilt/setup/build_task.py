"""From a named data set, or from your own data and clients, to a `FederatedTask`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import generator, torch_seed
from fedquilt.config import TARGET_ACCURACY, CondenseConfig, RunConfig
from fedquilt.config.modes import MODE_TABLE
from fedquilt.data import (
    ImageDataset,
    as_samples,
    check_data_dir,
    clients_data,
    load_dataset,
    read_split_file,
    split_clients,
)
from fedquilt.data.holdings import Holdings, shared_sample
from fedquilt.data.load import SHARED_PEOPLE, with_people_noted
from fedquilt.data.samples import Samples
from fedquilt.models import make_model
from fedquilt.setup import task
from fedquilt.training.draws import seeded_layers
from fedquilt.training.hardware import warm_up_gpu


def build_task(
    config: RunConfig, progress: bool = False, working: task.Working | None = None
) -> tuple[RunConfig, task.FederatedTask]:
    """Load the data set a configuration names, deal it out, and build the model.

    Returns the configuration with what was left open (number of clients,
    target accuracy) filled in.  `working` is told how far a long step is.
    """
    check_data_dir(config.data_dir)
    warm_up_gpu(config.device)
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
    roster = task.roster_of_split(config.dataset, clients, people)
    model = make_model(
        config.model, train.images.shape[1:], train.num_classes, torch_seed(config.seed, "model")
    )
    config = _with_data_defaults(config, len(clients))
    data = (as_samples(train, "train"), as_samples(test, "test"))
    given = task.GivenData(*data, clients, roster, held_out)
    return config, task.make_task(config, model, given, task.UserComponents(), working)


def task_from(
    config: RunConfig,
    model: nn.Module,
    train: object,
    test: object,
    clients: Sequence[Sequence[int] | NDArray[Any]] | None,
    client_ids: Iterable[str] | None = None,
    own: task.UserComponents | None = None,
    client_tests: Sequence[Any] | None = None,
    validation: object = None,
) -> tuple[RunConfig, task.FederatedTask]:
    """Build the problem from a user's own model, data and split."""
    # In a private mode bad samples make their client's update zero, and nobody is told.
    finite = not MODE_TABLE[config.mode].noised
    if isinstance(train, ImageDataset) and isinstance(test, ImageDataset):
        train = with_people_noted(train, test)
    given_apart = clients is None
    if clients is None:
        each = _each_client(train)
        train_set, clients = clients_data(each, finite=finite, around=_own_draws(config.seed))
        client_ids = list(train) if isinstance(train, Mapping) else client_ids
    else:
        train_set = as_samples(train, "train", finite=finite)
    test_set = None if test is None else as_samples(test, "test")
    if not finite:
        train_set = _said_as_of_test(train_set, test_set, whole=not given_apart)
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
    roster = task.roster_of_own(parts, client_ids)
    if not config.allow_overlap:
        _refuse_overlap(parts, roster.ids)
    tests: task.Parts | None = None
    if client_tests is not None:
        tests = _checked_clients(client_tests, len(train_set), "client_tests")
        tests = task.check_client_tests(parts, tests, allow_overlap=config.allow_overlap)
        roster = dataclasses.replace(
            roster, digest=task.roster_digest(roster.ids, Holdings([*parts, *tests]))
        )
    given = task.GivenData(
        train_set, test_set, parts, roster, client_tests=tests, validation=checked
    )
    return config, task.make_task(config, model, given, own or task.UserComponents())


def _own_draws(seed: int) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """Return generators of its own for each client's data set.

    How much one client's transformations draw does not move what the next one's do.
    """
    return lambda client: seeded_layers(torch.device("cpu"), torch_seed(seed, "data", client))


def _said_as_of_test(train: Samples, test: Samples | None, *, whole: bool) -> Samples:
    """Return the samples of clients with what the test data say of their form.

    In which type one client holds them, and how many classes it knows of, is its own.  Of a
    `whole` data set the type is everybody's; its classes may be the largest label of somebody.
    """
    people = tuple(note for note in train.notes if whole or note == SHARED_PEOPLE)
    notes, classes = ((), None) if test is None else (test.notes, test.num_classes)
    notes = () if whole else notes
    return dataclasses.replace(train, notes=(*notes, *people), num_classes=classes)


def named_clients(
    clients: Sequence[Any] | Mapping[str, Any], client_ids: Iterable[str] | None
) -> tuple[Sequence[Any], Iterable[str] | None]:
    """Return index lists and ids, where `clients` may be a mapping from one to the other."""
    if not isinstance(clients, Mapping):
        if not hasattr(clients, "__len__") or not hasattr(clients, "__getitem__"):
            raise InvalidValueError(
                f"clients={clients!r:.60} must be a list of index lists, one a client, or a "
                "mapping from names to them; fedquilt.data.split_clients deals samples to clients"
            )
        return clients, client_ids
    if client_ids is not None:
        raise InvalidValueError(
            "client_ids must be left out when clients is a mapping: it has them"
        )
    return list(clients.values()), list(clients)


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


def _checked_clients(
    clients: Sequence[Sequence[int] | NDArray[Any]], size: int, what: str = "clients"
) -> Holdings:
    """Return who holds which samples; samples that are not in the data are an error."""
    if len(clients) == 0:
        raise InvalidValueError(f"{what}=[] must hold at least one list of sample numbers")
    return Holdings(clients, size, what)


def _refuse_overlap(parts: task.Parts, ids: tuple[str, ...] | None) -> None:
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
    _refuse_people_held_out(config)
    order = generator(config.seed, "validation").permutation(size)
    count = max(1, round(config.validation_fraction * size))
    if size - count < (config.num_clients or 1):
        raise InvalidValueError(
            f"validation_fraction={config.validation_fraction} must leave at least one of {size} "
            f"samples to each of num_clients={config.num_clients or 1}"
        )
    return np.sort(order[:count]), np.sort(order[count:])


def _refuse_people_held_out(config: RunConfig) -> None:
    """Refuse to hold out samples of people who are clients where a claim would be about them."""
    covered = config.patterns("noise_layers") == ("all",)
    if config.partition == "writer" and config.is_bounded(covered=covered):
        asked = "early_stopping=True" if config.early_stopping else "norm_statistics='server'"
        raise InvalidValueError(
            f"{asked} must be left out with partition='writer' in mode={config.mode!r}: samples "
            "that are held out were made by people who are clients, and no claim covers them"
        )
