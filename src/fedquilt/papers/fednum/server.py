"""FedNumServer: the FedNum document's interface to a condensation.

A thin object over the training loop that everything uses (`fedquilt.experiment.loop`).
Step 3 has FedNumClient objects in the place of data (`FedNumEngine`).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.common.randomness import generator
from fedquilt.common.storage import storage_errors
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.engine import RoundModels, TableSource, joined
from fedquilt.condense.method import (
    Condensation,
    assemble_condensation,
    begin_images,
    init_notes,
    make_round_models,
    statistics_notes,
    training_of,
)
from fedquilt.condense.server import CondensingServer
from fedquilt.condense.statistics import StatisticsTable
from fedquilt.condense.training import Learner
from fedquilt.config import CondenseConfig, RunConfig
from fedquilt.experiment.loop import Experiment
from fedquilt.federation import Federation
from fedquilt.method import Progress
from fedquilt.observe.trackers import Tracker, check_trackers, open_trackers, tracker_names
from fedquilt.papers.fednum import arguments
from fedquilt.papers.fednum.client import FedNumClient, table_of
from fedquilt.papers.fednum.pictures import draw_pictures
from fedquilt.population import Cohort, ParticipationTracker
from fedquilt.privacy.mechanism import NoPrivacy
from fedquilt.privacy.statement import Statement
from fedquilt.record.folder import RunFolder
from fedquilt.round import RoundRecord
from fedquilt.training import ClientIds, ClientUpdate, FlatModel, evaluate


class ClientEngine(TableSource):
    """Send the models of the round to the client objects, collect what they return.

    Parameters
    ----------
    clients
        Everybody; a cohort names their places here.
    round_models
        The feature models that they receive.
    augmentation
        That of the round models; a client that takes none can only do without.
    device
        Where the server wants what they send.
    """

    def __init__(
        self,
        clients: Sequence[arguments.Client],
        round_models: RoundModels,
        augmentation: Augmentation,
        device: torch.device,
    ) -> None:
        self._clients = clients
        self.round_models = round_models
        self._augmented = augmentation.families != ("none",)
        self._device = device
        self.bytes_up = 0
        self.bytes_down = 0
        self.progress: Progress | None = None
        if self._augmented:
            _check_augmentable(clients, augmentation)

    def train(
        self, start: torch.Tensor, cohort: ClientIds, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        """Yield the table of each client of the cohort as a vector, in its order."""
        self.round_models.open(start, round_index)
        self.bytes_up, self.bytes_down = 0, len(cohort) * self.round_models.bytes_down()
        models = range(len(self.round_models.models))
        for place in map(int, cohort):
            client = self._clients[place]
            table = joined([self._ask(client, round_index, number) for number in models])
            bits = self.round_models.row_bits
            self.bytes_up += table.num_bytes(bits)
            size = int(table.counts.sum())
            yield ClientUpdate(place, table.pack(bits).to(self._device), size, math.nan)

    def _ask(self, client: arguments.Client, round_index: int, number: int) -> StatisticsTable:
        round_models = self.round_models
        if isinstance(client, FedNumClient):
            # Not how often it was asked, but the round decides: a resumed run goes on alike.
            client.open_round(round_index * len(round_models.models) + number)
        client.receive_model(round_models.models[number])
        if self._augmented:
            client.receive_augmentation(  # type: ignore[attr-defined]
                round_models.transforms[number], round_models.classes
            )
        message = client.train()
        sizes = (round_models.num_features, round_models.num_logits)
        return table_of(message, client.cid, number, round_models.classes, *sizes)


def _check_augmentable(clients: Iterable[arguments.Client], augmentation: Augmentation) -> None:
    for client in clients:
        if not hasattr(client, "receive_augmentation"):
            raise InvalidValueError(
                f"augmentation={augmentation.strategy!r} must be 'none': "
                f"client {client.cid!r} has no receive_augmentation()"
            )


def cohort_of(chosen: Iterable[arguments.Client], clients: Iterable[arguments.Client]) -> Cohort:
    """Return the places of the chosen clients among all of them."""
    place_of = {id(client): place for place, client in enumerate(clients)}
    found = [place_of.get(id(client), -1) for client in chosen]
    if -1 in found or len(set(found)) < len(found):
        raise InvalidValueError("select_clients() must return clients of the server, each once")
    places = np.array(found, dtype=np.int64)
    return Cohort(places, places)


def check_contributes(clients: Sequence[arguments.Client]) -> None:
    """Raise, before anything is computed, where it is known that nobody will send anything.

    What clients with a `train` of their own send is known only when they have.
    """
    known = [c for c in clients if isinstance(c, FedNumClient) and _groups_as_ours(c)]
    if len(known) == len(clients) and not any(client.sent_classes() for client in known):
        least = min(client.min_group for client in known)
        raise InvalidValueError(
            f"min_group={least} must be smaller: no client holds so many samples of a class, "
            "and nobody would send anything"
        )


def _groups_as_ours(client: FedNumClient) -> bool:
    return type(client).train is FedNumClient.train


def make_fednum(
    config: CondenseConfig,
    model: nn.Module,
    sample: torch.Tensor,
    clients: Sequence[arguments.Client],
    classes: tuple[int, ...],
    num_classes: int,
) -> Condensation:
    """Build the method; `sample` has the shape and the device of the images."""
    check_contributes(clients)
    augmentation = Augmentation(config.augmentation)
    round_models = make_round_models(config, model, sample, augmentation, classes)
    engine = ClientEngine(clients, round_models, augmentation, sample.device)

    def images_of(holders: Sequence[arguments.Client], label: int) -> torch.Tensor:
        held = [_images_of(client, label, config).to(sample.device) for client in holders]
        return torch.cat(held)

    held_by = ({c: images_of([client], c) for c in client.classes} for client in clients)
    first = begin_images(config, classes, sample, model, held_by, partial(images_of, clients))
    return assemble_condensation(
        config,
        Learner(model, sample, training_of(config), augmentation, config.seed),
        engine,
        first,
        notes=notes_on(clients, config.init_method),
        num_classes=num_classes,
        trains_late=False,
    )


def _images_of(client: arguments.Client, label: int, config: CondenseConfig) -> torch.Tensor:
    get = getattr(client, "get_images", None)
    if get is None:
        raise InvalidValueError(
            f"init_method={config.init_method!r} must be 'random': "
            f"client {client.cid!r} has no get_images(label)"
        )
    images: torch.Tensor = get(label)
    return images


def notes_on(clients: Sequence[arguments.Client], init_method: str) -> list[str]:
    """Say what leaves the clients."""
    ours = [c for c in clients if isinstance(c, FedNumClient)]
    known = [c for c in ours if _groups_as_ours(c)]
    notes: list[str] = []
    if known:
        least = min(min(client.min_group, client.avg_num) for client in known)
        notes += statistics_notes(least, "random")
    if len(known) < len(clients):
        notes.append("clients with a train() of their own send what it returns, unchecked")
    return notes + init_notes(init_method)


def entry_of(line: Mapping[str, Any], clients: Sequence[arguments.Client]) -> dict[str, Any]:
    """Return the entry of `history` for a round's line."""
    return {
        "round": line["round"],
        "time": line["seconds"],
        "epoch_avg_loss": line.get("epoch_avg_loss"),
        "evaluate_acc": line.get("test_accuracy"),
        "clients": [clients[place].cid for place in line["cohort"]],
        "groups": line.get("groups", 0),
        "matching_loss": line.get("matching_loss"),
    }


def round_in_words(done: Mapping[str, Any], num_rounds: int) -> str:
    """Return what the document prints of a round: who was in it, accuracy, loss and time."""
    words = [f"clients {done['clients']}", f"{done['groups']} groups"]
    for key, name in (("evaluate_acc", "accuracy"), ("epoch_avg_loss", "loss")):
        words += [] if done[key] is None else [f"{name} {done[key]:.4f}"]
    return f"round {done['round'] + 1} of {num_rounds}: {', '.join(words)}, {done['time']:.2f} s"


def warn_of_round(
    logger: logging.Logger, line: Mapping[str, Any], clients: Sequence[arguments.Client]
) -> None:
    """Warn of a round without statistics, and of the clients that were left out."""
    done = entry_of(line, clients)
    if not done["groups"]:
        logger.warning(
            "round %d: no client of it holds min_group samples of a class, and nothing was sent",
            done["round"] + 1,
        )
    for place in line["non_finite"]:
        logger.warning("client %r sent NaN or infinity and was left out", clients[place].cid)


def checked_tracker(tracker: object, output_dir: str | Path | None) -> str | Tracker | None:
    """Return a tracker or names of some; raise where it is neither, or has nowhere to write."""
    if tracker is None or tracker == "none":
        return None
    if isinstance(tracker, str):
        check_trackers(tracker)
        if output_dir is None:
            raise InvalidValueError(
                f"tracker={tracker!r} needs an output_dir: it writes into the run's folder"
            )
        return tracker
    if not all(callable(getattr(tracker, name, None)) for name in ("log", "close")):
        raise InvalidValueError(
            f"tracker of type {type(tracker).__name__} must be names of trackers, or have "
            "log(line) and close(failed=...)"
        )
    return cast(Tracker, tracker)


class _Subject:
    """The server's model, evaluated on its test batches."""

    def __init__(self, server: FedNumServer, flat: FlatModel) -> None:
        self.flat = flat
        self._server = server

    def whole_model(self) -> nn.Module:
        """Return a copy of the model, on the CPU."""
        return copy.deepcopy(self.flat.module).cpu()

    def evaluate(self) -> dict[str, float]:
        """Return accuracy and loss; nothing without test batches."""
        if self._server.test_loader is None:
            return {}
        accuracy, loss = self._server.evaluate()
        return {"test_accuracy": accuracy, "test_loss": loss}

    def metadata(self) -> dict[str, Any]:
        """Return what the images are."""
        info = self._server.info
        return {"input_shape": list(info.shape), "num_classes": info.num_classes}


class _Rounds(Experiment):
    """The training loop, in which a round that fails leaves everything as it was."""

    def run_round(self, round_index: int) -> RoundRecord:
        """Run one round, or go back to before it."""
        federation = self.federation
        weights = federation.weights.clone()
        state = {key: np.array(value) for key, value in federation.state().items()}
        try:
            return super().run_round(round_index)
        except BaseException:
            federation.weights = weights
            federation.load_state(state)
            raise

    def _check_kept(self, state: Mapping[str, NDArray[Any]]) -> None:
        assert self.folder is not None
        arguments.check_fingerprint(self.folder.path, state, self._kept_state["fingerprint"])


class FedNumServer:
    """FedNum with the interface of the FedNum document (section 2).

    Parameters
    ----------
    global_model
        A classifier with `embed(x)`, or with `embed_layer` any; `fit` trains it.
    clients
        `FedNumClient`s, or others with `cid`, `classes`, `receive_model` and `train`.
    communication_rounds, join_ratio, eval_gap
        Rounds, share of the clients in each, and after how many the model is evaluated;
        after the last it always is.
    batch_size, model_epochs
        Of training on the synthetic images.
    ipc, dc_iterations, image_lr, logit_loss_type, loss_computation
        Images of a class, matching steps a round, their rate and loss.
    avg_num, batch_num
        A matching step sees batch_num // avg_num groups of a class, at least one; all
        of them where `batch_num` is None.
    rho
        Distance of models with `feature_model="perturbed"`.
    init_method
        "random"; "real_sample" takes images out of the clients; with "dm" clients condense
        images of their own first (FedDM), which begin as theirs and are sent.
    test_set, model_identification
        Of the published code, kept as attributes; the test batches come from
        `test_loader`, and results go to `output_dir`.
    test_loader
        Gives batches (images, labels), as often as it is asked; None: no evaluation.
    dataset_info
        See `fedquilt.papers.fednum.client.ImageInfo`.
    feature_model, model_n, augmentation, tiles, moments
        As the options of `fedquilt condense`; the defaults are the FedNum document's.
    output_dir
        The folder of this run, with the images and pictures of them.  A server made with
        the same arguments goes on after the last round that is finished there.
    tracker
        Where rounds are logged: an object with `log(line)` and `close(failed=)`, or names of
        trackers ("wandb", "tensorboard", "mlflow", joined by commas), which write into
        `output_dir`.
    model_schedule
        How the rate of that training goes: "constant", as in the document's code, "step" (a tenth
        from half way on) or "cosine".
    logger, verbose
        After every round the ids of its clients, the accuracy where it was measured, loss and
        time go to the logger, or without one that is heard to the error stream; False: nowhere.

    `history` has one dictionary a round: round (from 0), time in seconds,
    epoch_avg_loss and evaluate_acc (None where there is none), clients, groups,
    matching_loss.  `synthetic` is the synthetic set, `statement` what may be claimed.
    """

    def __init__(
        self,
        global_model: nn.Module,
        clients: Sequence[arguments.Client],
        communication_rounds: int,
        join_ratio: float,
        batch_size: int,
        model_epochs: int,
        ipc: int,
        rho: float,
        avg_num: int,
        batch_num: int | None,
        dc_iterations: int,
        image_lr: float | None,
        init_method: str = "random",
        eval_gap: int = 1,
        test_set: object = None,
        test_loader: Iterable[Any] | None = None,
        device: torch.device | str = "cpu",
        model_identification: str = "",
        dataset_info: Mapping[str, Any] | None = None,
        logit_loss_type: str = "wasserstein",
        loss_computation: str = "avg-loss",
        *,
        seed: int = 0,
        feature_model: str = "global",
        model_n: int | None = None,
        augmentation: str = "none",
        embed_layer: str | None = None,
        image_momentum: float = 0.5,
        model_lr: float = 0.01,
        tiles: int = 1,
        moments: int = 1,
        output_dir: str | Path | None = None,
        tracker: str | Tracker | None = None,
        logger: logging.Logger | None = None,
        model_schedule: str = "constant",
        verbose: bool = True,
    ) -> None:
        self.global_model = global_model
        self.clients = arguments.checked_clients(clients)
        self.info = arguments.ImageInfo.read(dataset_info)
        self.device = arguments.checked_device(device)
        self.test_set = test_set
        self.model_identification = model_identification
        self.all_classes = arguments.all_classes(self.clients, self.info.num_classes)
        self.test_loader = arguments.checked_loader(test_loader, self.info)
        self.logger = logger if logger is not None else logging.getLogger("fedquilt")
        self._own_logger = logger is not None
        self.verbose = checks.flag("verbose", verbose)
        self.config = arguments.make_config(
            self.clients,
            self.info,
            communication_rounds=communication_rounds,
            join_ratio=join_ratio,
            eval_gap=eval_gap,
            logit_loss_type=logit_loss_type,
            augmentation=augmentation,
            batch_size=batch_size,
            model_epochs=model_epochs,
            model_lr=model_lr,
            model_schedule=model_schedule,
            ipc=ipc,
            rho=rho,
            avg_num=avg_num,
            batch_num=batch_num,
            dc_iterations=dc_iterations,
            image_lr=image_lr,
            image_momentum=image_momentum,
            init_method=init_method,
            loss_computation=loss_computation,
            feature_model=feature_model,
            model_n=model_n,
            embed_layer=embed_layer,
            tiles=tiles,
            moments=moments,
            seed=seed,
        )
        self._folder_path = None if output_dir is None else Path(output_dir)
        self._tracking = checked_tracker(tracker, output_dir)
        self._tracker: Tracker | None = None
        self._flat = self._checked_model()
        self._experiment = self._build()

    def _checked_model(self) -> FlatModel:
        sample = torch.zeros(2, *self.info.shape, device=self.device)
        flat = FlatModel(self.global_model, sample)
        arguments.check_outputs(flat.module, sample, self.info)
        return flat

    def _build(self) -> _Rounds:
        """Build the federation from the server's parts."""
        config, clients = self.config, self.clients
        sample = torch.zeros(2, *self.info.shape, device=self.device)
        method = make_fednum(
            config, self.global_model, sample, clients, self.all_classes, self.info.num_classes
        )
        self._images = method.images
        self.synthetic = method.images.synthetic
        federation = Federation(
            select=self._cohort,
            tracker=ParticipationTracker(len(clients)),
            method=method,
            mechanism=NoPrivacy(method.released, config.delta, method.notes),
            learning_rate_at=lambda round_index: config.model_lr,
            weights=self._flat.read().clone(),
        )
        return _Rounds(
            config,
            _Subject(self, self._flat),
            federation,
            observer=self._observe,
            kept_state={"fingerprint": arguments.fingerprint(clients, federation.weights)},
        )

    def _observe(self, config: RunConfig, line: dict[str, Any]) -> None:
        """Say how a round went, and copy its weights into the caller's model."""
        if self.verbose:
            said = round_in_words(entry_of(line, self.clients), config.num_rounds)
            heard = self.logger.isEnabledFor(logging.INFO) and self.logger.hasHandlers()
            if heard or self._own_logger:
                self.logger.info("%s", said)
            else:
                print(said, file=sys.stderr)
        warn_of_round(self.logger, line, self.clients)
        if self._tracker is not None:
            self._tracker.log(line)
        self._store_weights()

    @property
    def history(self) -> list[dict[str, Any]]:
        """What happened in each round so far."""
        return [entry_of(line, self.clients) for line in self._experiment.lines]

    @property
    def statement(self) -> Statement:
        """What may be claimed about the clients after the rounds so far."""
        federation = self._experiment.federation
        return federation.mechanism.statement(federation.tracker.participation_count, None)

    def select_clients(self) -> list[arguments.Client]:
        """Return the clients of the next round: everybody, or as many as join_ratio says."""
        count = len(self.clients)
        limit = self.config.cohort_limit(count)
        source = generator(self.config.seed, "select", len(self._experiment.lines))
        return [self.clients[i] for i in np.sort(source.choice(count, limit, replace=False))]

    def _cohort(self, round_index: int, allowed: NDArray[np.bool_] | None) -> Cohort:
        """Return the cohort of `select_clients`, which a subclass may override."""
        return cohort_of(self.select_clients(), self.clients)

    def fit(self) -> nn.Module:
        """Run the rounds that are left and return the trained global model.

        An exception within a round leaves everything as it was before that round.
        """
        experiment = self._experiment
        with contextlib.ExitStack() as stack:
            stack.enter_context(experiment.method.running())
            if self._folder_path is not None:
                experiment.folder = self._open_folder(self._folder_path, stack)
                experiment.saves_every_round = True
                self._restore(experiment.folder)
            self._tracker = self._open_tracker(stack)
            try:
                experiment.run()
                self._check_contributed()
                if experiment.folder is not None and experiment.folder.read_result() is None:
                    experiment.finish()
                    draw_pictures(experiment.folder.path)
            finally:
                experiment.folder = None
                self._store_weights()
        return self.global_model

    def _check_contributed(self) -> None:
        """Raise where no round brought anything: the images would be noise."""
        assert isinstance(self._images, CondensingServer)
        self._images.check_contributed()

    def _open_tracker(self, stack: contextlib.ExitStack) -> Tracker | None:
        """Open what rounds are logged to; it is closed with the stack, also after an error."""
        tracker = self._tracking
        if isinstance(tracker, str):
            assert self._folder_path is not None
            project, name = tracker_names(self.config)
            tracker = open_trackers(
                tracker,
                self._folder_path,
                project=project,
                run_name=self.model_identification or name,
                config=self.config.as_dict(),
            )
        if tracker is not None:
            close = tracker.close
            stack.push(lambda kind, *error: close(failed=kind is not None))
        return tracker

    def evaluate(self) -> tuple[float, float]:
        """Return (accuracy, loss) of the global model on the test batches."""
        if self.test_loader is None:
            raise InvalidValueError("test_loader=None must be a loader to evaluate with")
        self._flat.write(self._experiment.federation.weights)
        sums, size = np.zeros(2), 0
        for images, labels in self.test_loader:
            batch = images.to(self.device, torch.float32), labels.to(self.device)
            sums += len(labels) * np.array(evaluate(self._flat.module, *batch))
            size += len(labels)
        return float(sums[0] / size), float(sums[1] / size)

    def _store_weights(self) -> None:
        self._flat.write(self._experiment.federation.weights)
        self.global_model.load_state_dict(self._flat.module.state_dict())

    def _open_folder(self, path: Path, stack: contextlib.ExitStack) -> RunFolder:
        """Make the run's folder, or open the one that is there; lock it for the stack."""
        if not (path / "config.toml").exists():
            with storage_errors(path):
                arguments.write_settings(path, self.config)
        folder = RunFolder.open(path)
        arguments.check_settings(path, folder.read_config(), self.config)
        folder.acquire()
        stack.callback(folder.close)
        return folder

    def _restore(self, folder: RunFolder) -> None:
        """Go to the last round that is finished in the folder."""
        experiment = self._experiment
        if experiment.lines and folder.load_checkpoint() is None:
            raise RunFolderError(f"output_dir={str(folder.path)!r} has lost its checkpoint")
        experiment.restore()
        self._store_weights()
