"""The server of the FedNum document, a thin object over the round that everything uses.

What it joins (the round, the server step, the run's folder) stands above this package
and is imported where it is used: `import fedquilt.condense` loads none of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt import validate
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.client import FedNumClient, ImageInfo, checked_device, table_of
from fedquilt.condense.feature_models import FeatureModels
from fedquilt.condense.losses import LOGIT_LOSSES
from fedquilt.condense.matching import MatchingSettings
from fedquilt.condense.synthetic import SyntheticSet
from fedquilt.condense.table import StatisticsTable
from fedquilt.condense.training import TrainingSettings
from fedquilt.config import CondenseConfig, write_config_file
from fedquilt.errors import InvalidValueError, RunFolderError
from fedquilt.randomness import generator

if TYPE_CHECKING:
    from fedquilt.condensing import Lens
    from fedquilt.learning import ClientUpdate
    from fedquilt.population import Cohort
    from fedquilt.privacy.statement import Statement
    from fedquilt.round import Federation
    from fedquilt.run_folder import RunFolder


class Client(Protocol):
    """What the server asks of a client; `FedNumClient` is one, and so may yours be."""

    cid: int | str
    classes: list[int]

    def receive_model(self, model: nn.Module) -> None:
        """Take the model of the round."""

    def train(self) -> dict[str, Any]:
        """Return "classes", "avg_features", "avg_logits" and, if groups differ, "counts"."""


class FedNumServer:
    """FedNum with the document's interface.

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
    dataset_info
        See `fedquilt.condense.client.ImageInfo`.
    test_loader
        Gives batches (images, labels), as often as it is asked; None: no evaluation.
    init_method
        "random", or "real_sample", which takes images out of the clients.
    output_dir
        The folder of this run.  A server made with the same arguments goes on after the
        last round that is finished there.

    `history` has one dictionary a round: round (from 0), time in seconds,
    epoch_avg_loss and evaluate_acc (None where there is none), clients, groups,
    matching_loss.  `synthetic` is the synthetic set, `statement` what may be claimed.
    """

    def __init__(
        self,
        global_model: nn.Module,
        clients: Sequence[Client],
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
        dataset_info: Mapping[str, Any],
        test_loader: Iterable[Any] | None,
        eval_gap: int,
        init_method: str,
        logit_loss_type: str,
        loss_computation: str,
        device: torch.device | str,
        *,
        seed: int = 0,
        feature_model: str = "global",
        model_n: int | None = None,
        augmentation: str = "none",
        embed_layer: str | None = None,
        image_momentum: float = 0.5,
        model_lr: float = 0.01,
        output_dir: str | Path | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self.global_model = global_model
        self.clients = _checked_clients(clients)
        self.info = ImageInfo.read(dataset_info)
        self.device = checked_device(device)
        self.all_classes = _all_classes(self.clients, self.info.num_classes)
        self.test_loader = _checked_loader(test_loader, self.info)
        self.logger = logger if logger is not None else logging.getLogger("fedquilt")
        self.config = CondenseConfig(
            dataset=self.info.name,
            model="custom",
            num_clients=len(self.clients),
            num_rounds=validate.integer("communication_rounds", communication_rounds, at_least=1),
            clients_per_round=validate.number("join_ratio", join_ratio, above=0, at_most=1),
            eval_every=validate.integer("eval_gap", eval_gap, at_least=1),
            batch_size=batch_size,
            model_epochs=model_epochs,
            model_lr=model_lr,
            ipc=ipc,
            rho=rho,
            avg_num=avg_num,
            min_group=min(getattr(client, "min_group", 1) for client in self.clients),
            max_samples=0,
            batch_num=batch_num,
            dc_iterations=dc_iterations,
            image_lr=image_lr,
            image_momentum=image_momentum,
            init_method=init_method,
            logit_loss_type=validate.choice("logit_loss_type", logit_loss_type, LOGIT_LOSSES),
            loss_computation=loss_computation,
            feature_model=feature_model,
            model_n=model_n,
            augmentation=Augmentation(augmentation).strategy,
            embed_layer=embed_layer,
            seed=seed,
        )
        self._lines: list[dict[str, Any]] = []
        self._folder_path = None if output_dir is None else Path(output_dir)
        self._federation = self._build()
        self._fingerprint = self._digest()

    def _build(self) -> Federation:
        """Put the parts of the round together."""
        from fedquilt.aggregation import EndToEnd
        from fedquilt.condensing import CondensingServer, Lens
        from fedquilt.condensing.build import groups_per_step
        from fedquilt.condensing.training import Trainer
        from fedquilt.learning import FlatModel
        from fedquilt.population import ParticipationTracker
        from fedquilt.privacy.mechanism import NoPrivacy
        from fedquilt.round import Federation

        config, augmentation = self.config, Augmentation(self.config.augmentation)
        sample = torch.zeros(2, *self.info.shape, device=self.device)
        self._flat = FlatModel(self.global_model, sample)
        _check_outputs(self._flat.module, sample, self.info)
        lens = Lens(
            self.global_model,
            sample,
            FeatureModels(config.feature_model, config.feature_models, config.rho, config.seed),
            augmentation,
            self.all_classes,
            embed_layer=config.embed_layer,
            with_logits=config.logit_loss != "none",
            seed=config.seed,
        )
        engine = _ClientEngine(self.clients, lens, augmentation, self.device)
        self.synthetic = self._first_images()
        training = TrainingSettings(config.model_epochs, config.batch_size, config.model_lr)
        server = CondensingServer(
            Trainer(self.global_model, sample, training, augmentation, config.seed),
            self.synthetic,
            lens,
            MatchingSettings(
                config.dc_iterations,
                config.image_step(math.prod(self.info.shape), lens.num_features),
                config.image_momentum,
                config.logit_loss,
                config.loss_computation,
            ),
            groups_per_step=groups_per_step(config.batch_num, config.avg_num),
            traffic=lambda: (engine.bytes_up, engine.bytes_down),
            # Where nobody sent anything the round passes and the model stays as it is.
            trains_in=lambda round_index: server.report()["groups"] > 0,
            restarts=config.feature_model == "random_pool",
            seed=config.seed,
        )
        names = ("class statistics", *self._flat.names)
        return Federation(
            select=self._cohort,
            tracker=ParticipationTracker(len(self.clients)),
            engine=engine,
            mechanism=NoPrivacy(names, config.delta, _notes(self.clients, config.init_method)),
            server=server,
            learning_rate_at=lambda round_index: config.model_lr,
            weights=self._flat.read().clone(),
            gather=lambda: EndToEnd(self.device),
        )

    def _first_images(self) -> SyntheticSet:
        """Return the images to begin with; a class that nobody holds begins with noise."""
        source = generator(self.config.seed, "first images")
        ipc = self.config.ipc
        first = SyntheticSet.random(self.all_classes, ipc, self.info.shape, source, self.device)
        if self.config.init_method != "real_sample":
            return first
        for label, images in zip(first.classes, first.by_class(), strict=True):
            held = torch.cat([_images_of(client, label).to(self.device) for client in self.clients])
            if len(held):
                chosen = np.resize(source.permutation(len(held)), ipc)
                images.copy_(held[torch.from_numpy(chosen).to(self.device)])
        return first

    @property
    def history(self) -> list[dict[str, Any]]:
        """What happened in each round so far."""
        return [
            {
                "round": line["round"],
                "time": line["seconds"],
                "epoch_avg_loss": line.get("epoch_avg_loss"),
                "evaluate_acc": line.get("test_accuracy"),
                "clients": [self.clients[place].cid for place in line["cohort"]],
                "groups": line.get("groups", 0),
                "matching_loss": line.get("matching_loss"),
            }
            for line in self._lines
        ]

    @property
    def statement(self) -> Statement:
        """What may be claimed about the clients after the rounds so far."""
        counts = self._federation.tracker.participation_count
        return self._federation.mechanism.statement(counts, None)

    def select_clients(self) -> list[Client]:
        """Return the clients of the next round: everybody, or as many as join_ratio says."""
        count = len(self.clients)
        limit = self.config.cohort_limit(count)
        source = generator(self.config.seed, "select", len(self._lines))
        return [self.clients[i] for i in np.sort(source.choice(count, limit, replace=False))]

    def _cohort(self, round_index: int, allowed: NDArray[np.bool_] | None) -> Cohort:
        """Ask `select_clients`, which a subclass may override."""
        from fedquilt.population import Cohort

        place_of = {id(client): place for place, client in enumerate(self.clients)}
        chosen = [place_of.get(id(client), -1) for client in self.select_clients()]
        if -1 in chosen or len(set(chosen)) < len(chosen):
            raise InvalidValueError("select_clients() must return clients of the server, each once")
        places = np.array(chosen, dtype=np.int64)
        return Cohort(places, places)

    def fit(self) -> nn.Module:
        """Run the rounds that are left and return the trained global model.

        An exception within a round leaves everything as it was before that round.
        """
        with contextlib.ExitStack() as stack:
            folder = None
            if self._folder_path is not None:
                folder = _open_folder(self._folder_path, self.config)
                stack.callback(folder.close)
                self._pick_up(folder)
            while len(self._lines) < self.config.num_rounds:
                line = self._one_round()
                self._lines.append(line)
                self._log(line)
                if folder is not None:
                    folder.append_round(line)
                    self._save(folder)
            if folder is not None and folder.read_result() is None:
                folder.write_result(self._result())
        return self.global_model

    def evaluate(self) -> tuple[float, float]:
        """Return (accuracy, loss) of the global model on the test batches."""
        from fedquilt.learning import evaluate

        if self.test_loader is None:
            raise InvalidValueError("test_loader=None must be a loader to evaluate with")
        self._flat.write(self._federation.weights)
        sums, size = np.zeros(2), 0
        for images, labels in self.test_loader:
            batch = images.to(self.device, torch.float32), labels.to(self.device)
            sums += len(labels) * np.array(evaluate(self._flat.module, *batch))
            size += len(labels)
        return float(sums[0] / size), float(sums[1] / size)

    def _one_round(self) -> dict[str, Any]:
        """Run the next round and evaluate where it is due; return its line."""
        from fedquilt.history import as_line
        from fedquilt.round import run_round

        federation, index = self._federation, len(self._lines)
        weights = federation.weights.clone()
        state = {key: np.array(value) for key, value in federation.state().items()}
        began = time.perf_counter()
        try:
            record = run_round(federation, index)
            line = as_line(record, time.perf_counter() - began)
            last = index + 1 == self.config.num_rounds
            due = (index + 1) % self.config.eval_every == 0 or last
            if due and self.test_loader is not None:
                line["test_accuracy"], line["test_loss"] = self.evaluate()
                line["participation_stats"] = federation.tracker.get_statistics()
        except BaseException:
            federation.weights = weights
            federation.load_state(state)
            raise
        self._store_weights()
        return line

    def _store_weights(self) -> None:
        self._flat.write(self._federation.weights)
        self.global_model.load_state_dict(self._flat.module.state_dict())

    def _log(self, line: dict[str, Any]) -> None:
        done = self.history[-1]
        accuracy = done["evaluate_acc"]
        self.logger.info(
            "round %d of %d: clients %s, %d groups%s",
            done["round"] + 1,
            self.config.num_rounds,
            done["clients"],
            done["groups"],
            "" if accuracy is None else f", accuracy {accuracy:.4f}",
        )
        for place in line["non_finite"]:
            self.logger.warning(
                "client %r sent NaN or infinity and was left out", self.clients[place].cid
            )

    def _digest(self) -> NDArray[np.uint8]:
        """Return what tells this run from another with the same settings."""
        held = [(client.cid, list(client.classes), _size(client)) for client in self.clients]
        digest = hashlib.sha256(repr(held).encode())
        digest.update(self._federation.weights.cpu().numpy().tobytes())
        return np.frombuffer(digest.digest(), dtype=np.uint8)

    def _save(self, folder: RunFolder) -> None:
        state = self._federation.state() | {"fingerprint": self._fingerprint}
        state["weights"] = self._federation.weights.cpu().numpy()
        folder.save_checkpoint(len(self._lines), self._flat.module.state_dict(), state)

    def _pick_up(self, folder: RunFolder) -> None:
        """Go to the last round that is finished in the folder."""
        saved = folder.load_checkpoint()
        if saved is None and self._lines:
            raise RunFolderError(f"output_dir={str(folder.path)!r} has lost its checkpoint")
        if saved is not None:
            state = saved.state
            if not np.array_equal(state.get("fingerprint", []), self._fingerprint):
                raise RunFolderError(
                    f"output_dir={str(folder.path)!r} must be another folder: the run in it began "
                    "with other weights of the global model, or with other clients"
                )
            self._federation.weights = torch.from_numpy(state["weights"]).to(self.device)
            self._federation.load_state(state)
        self._lines = folder.read_rounds(0 if saved is None else saved.rounds)
        self._store_weights()

    def _result(self) -> dict[str, Any]:
        """Return the content of result.json, as of any other run."""
        from fedquilt.results import build_result

        counts = self._federation.tracker.participation_count
        result = build_result(self.config, self._lines, self.statement, counts)
        result["stopped"] = None
        result["metadata"] |= {
            "input_shape": list(self.info.shape),
            "num_classes": self.info.num_classes,
        }
        return result


class _ClientEngine:
    """Step 3: hand the models of the round to the client objects, take what they return."""

    def __init__(
        self,
        clients: Sequence[Client],
        lens: Lens,
        augmentation: Augmentation,
        device: torch.device,
    ) -> None:
        self._clients = clients
        self._lens = lens
        self._augmented = augmentation.families != ("none",)
        self._device = device
        self.bytes_up = 0
        self.bytes_down = 0
        if self._augmented:
            for client in clients:
                if not hasattr(client, "receive_augmentation"):
                    raise InvalidValueError(
                        f"augmentation={augmentation.strategy!r} must be 'none': "
                        f"client {client.cid!r} has no receive_augmentation()"
                    )

    def train(
        self,
        start: torch.Tensor,
        cohort: Sequence[int] | NDArray[np.int64],
        round_index: int,
        learning_rate: float,
    ) -> Iterator[ClientUpdate]:
        """Yield the table of each client of the cohort as a vector, in its order."""
        from fedquilt.condensing.engine import joined
        from fedquilt.learning import ClientUpdate

        self._lens.open(start, round_index)
        self.bytes_up, self.bytes_down = 0, len(cohort) * self._lens.bytes_down()
        models = range(len(self._lens.models))
        for place in cohort:
            client = self._clients[int(place)]
            table = joined([self._ask(client, round_index, number) for number in models])
            self.bytes_up += table.num_bytes
            size = int(table.counts.sum())
            yield ClientUpdate(int(place), table.pack().to(self._device), size, math.nan)

    def _ask(self, client: Client, round_index: int, number: int) -> StatisticsTable:
        lens = self._lens
        if isinstance(client, FedNumClient):
            # Not how often it was asked, but the round decides: a resumed run goes on alike.
            client.open_round(round_index * len(lens.models) + number)
        client.receive_model(lens.models[number])
        if self._augmented:
            client.receive_augmentation(  # type: ignore[attr-defined]
                lens.transforms[number], lens.classes
            )
        message = client.train()
        sizes = (lens.num_features, lens.num_logits)
        return table_of(message, client.cid, number, lens.classes, *sizes)

    def close(self) -> None:
        """Hold nothing, give nothing back."""


def _checked_clients(clients: Sequence[Client]) -> list[Client]:
    found = list(clients)
    if not found:
        raise InvalidValueError("clients=[] must hold at least one client")
    for client in found:
        for name in ("cid", "classes", "receive_model", "train"):
            if not hasattr(client, name):
                raise InvalidValueError(
                    f"clients: {type(client).__name__} must have cid, classes, receive_model() "
                    f"and train(); it has no {name}"
                )
    taken: set[int | str] = set()
    for client in found:
        if client.cid in taken:
            raise InvalidValueError(f"clients: cid={client.cid!r} must name one client only")
        taken.add(client.cid)
    return found


def _all_classes(clients: Sequence[Client], num_classes: int) -> tuple[int, ...]:
    labels = {
        validate.integer(f"class of client {client.cid!r}", c, at_least=0, at_most=num_classes - 1)
        for client in clients
        for c in client.classes
    }
    if not labels:
        raise InvalidValueError("clients must list at least one class; their classes are empty")
    return tuple(sorted(labels))


def _checked_loader(loader: Iterable[Any] | None, info: ImageInfo) -> Iterable[Any] | None:
    """Look at the first batch, so that a misfit is an error here and not after a round."""
    if loader is None:
        return None
    if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
        raise InvalidValueError(
            f"test_loader of type {type(loader).__name__} must be iterable again and again"
        )
    batch = next(iter(loader), None)
    parts = list(batch) if isinstance(batch, tuple | list) else []
    if len(parts) != 2 or not all(isinstance(p, torch.Tensor) and len(p) for p in parts):
        raise InvalidValueError(
            "test_loader must give batches (images, labels) of tensors, at least one"
        )
    images, labels = parts
    if images.shape[1:] != info.shape or int(labels.max()) >= info.num_classes:
        raise InvalidValueError(
            f"test_loader with images of shape {tuple(images.shape[1:])} and labels up to "
            f"{int(labels.max())} must have shape {info.shape} and labels below {info.num_classes}"
        )
    return loader


@torch.no_grad()
def _check_outputs(model: nn.Module, sample: torch.Tensor, info: ImageInfo) -> None:
    model.eval()
    try:
        outputs = model(sample)
    except (RuntimeError, ValueError, IndexError) as error:
        raise InvalidValueError(
            f"global_model must take images of shape {info.shape}; it does not: {error}"
        ) from error
    if outputs.shape != (len(sample), info.num_classes):
        raise InvalidValueError(
            f"global_model must return {info.num_classes} scores an image, the num_classes of "
            f"dataset_info; it returns a tensor of shape {tuple(outputs.shape)}"
        )


def _images_of(client: Client, label: int) -> torch.Tensor:
    get = getattr(client, "get_images", None)
    if get is None:
        raise InvalidValueError(
            "init_method='real_sample' must be 'random': "
            f"client {client.cid!r} has no get_images(label)"
        )
    images: torch.Tensor = get(label)
    return images


def _size(client: object) -> int | None:
    return len(client) if isinstance(client, Sized) else None


def _notes(clients: Sequence[Client], init_method: str) -> list[str]:
    """Say what leaves the clients."""
    ours = [c for c in clients if isinstance(c, FedNumClient)]
    known = [c for c in ours if type(c).train is FedNumClient.train]
    notes = []
    if known:
        least = min(min(client.min_group, client.avg_num) for client in known)
        notes.append(
            f"clients send means over groups of at least {least} samples: no sample leaves as it "
            "is, but a mean is no guarantee"
            if least > 1
            else "groups of one sample leave the clients: their embeddings are sent as they are"
        )
    if len(known) < len(clients):
        notes.append("clients with a train() of their own send what it returns, unchecked")
    if init_method == "real_sample":
        notes.append(
            "init_method=real_sample: images of clients leave them and are the first synthetic "
            "images; for comparison only"
        )
    return notes


def _open_folder(path: Path, config: CondenseConfig) -> RunFolder:
    """Make the folder, or open the run that is in it, and lock it."""
    from fedquilt.run_folder import RunFolder, storage_errors

    if not (path / "config.toml").exists():
        text = io.StringIO()
        write_config_file(config, text)
        with storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / ".config.toml.tmp").write_text(text.getvalue(), encoding="utf-8")
            os.replace(path / ".config.toml.tmp", path / "config.toml")
    folder = RunFolder.open(path)
    there, here = folder.read_config().as_dict(), config.as_dict()
    for key in here:
        if there.get(key) != here[key]:
            raise RunFolderError(
                f"output_dir={str(path)!r} must be another folder: the run in it has "
                f"{key}={there.get(key)!r}, not {here[key]!r}"
            )
    folder.acquire()
    return folder
