"""FedNumServer: the documents' interface to a condensation.

The server of the FedNum document, a thin object over the round that everything uses.

What it joins (the round, the server step, the run's folder) stands above this package
and is imported where it is used: `import fedquilt.condense` loads none of it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.common.randomness import generator
from fedquilt.condense.fednum_arguments import (
    Client,
    ImageInfo,
    all_classes,
    check_fingerprint,
    check_outputs,
    check_settings,
    checked_clients,
    checked_device,
    checked_loader,
    fingerprint,
    make_config,
    write_settings,
)

if TYPE_CHECKING:
    from fedquilt.population import Cohort
    from fedquilt.privacy.statement import Statement
    from fedquilt.round import Federation
    from fedquilt.run_folder import RunFolder

__all__ = ["Client", "FedNumServer"]


def entry_of(line: Mapping[str, Any], clients: Sequence[Client]) -> dict[str, Any]:
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


def log_round(
    logger: logging.Logger, line: Mapping[str, Any], clients: Sequence[Client], num_rounds: int
) -> None:
    """Tell the log of a round, and of clients that were left out."""
    done = entry_of(line, clients)
    accuracy = done["evaluate_acc"]
    logger.info(
        "round %d of %d: clients %s, %d groups%s",
        done["round"] + 1,
        num_rounds,
        done["clients"],
        done["groups"],
        "" if accuracy is None else f", accuracy {accuracy:.4f}",
    )
    for place in line["non_finite"]:
        logger.warning("client %r sent NaN or infinity and was left out", clients[place].cid)


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
        See `fedquilt.condense.fednum_client.ImageInfo`.
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
        self.clients = checked_clients(clients)
        self.info = ImageInfo.read(dataset_info)
        self.device = checked_device(device)
        self.all_classes = all_classes(self.clients, self.info.num_classes)
        self.test_loader = checked_loader(test_loader, self.info)
        self.logger = logger if logger is not None else logging.getLogger("fedquilt")
        self.config = make_config(
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
            seed=seed,
        )
        self._lines: list[dict[str, Any]] = []
        self._folder_path = None if output_dir is None else Path(output_dir)
        self._federation = self._build()
        self._fingerprint = fingerprint(self.clients, self._federation.weights)

    def _build(self) -> Federation:
        """Put the parts of the round together."""
        from fedquilt.aggregation import Concatenation
        from fedquilt.condense.fednum_engine import make_parts, notes_on
        from fedquilt.condense.method import RELEASED
        from fedquilt.learning import FlatModel
        from fedquilt.population import ParticipationTracker
        from fedquilt.privacy.mechanism import NoPrivacy
        from fedquilt.round import Federation

        config, clients, model = self.config, self.clients, self.global_model
        sample = torch.zeros(2, *self.info.shape, device=self.device)
        self._flat = FlatModel(model, sample)
        check_outputs(self._flat.module, sample, self.info)
        engine, server = make_parts(config, model, sample, clients, self.all_classes)
        self.synthetic = server.synthetic
        return Federation(
            select=self._cohort,
            tracker=ParticipationTracker(len(clients)),
            engine=engine,
            mechanism=NoPrivacy(RELEASED, config.delta, notes_on(clients, config.init_method)),
            server=server,
            learning_rate_at=lambda round_index: config.model_lr,
            weights=self._flat.read().clone(),
            gather=lambda: Concatenation(self.device),
        )

    @property
    def history(self) -> list[dict[str, Any]]:
        """What happened in each round so far."""
        return [entry_of(line, self.clients) for line in self._lines]

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
        from fedquilt.condense.fednum_engine import cohort_of

        return cohort_of(self.select_clients(), self.clients)

    def fit(self) -> nn.Module:
        """Run the rounds that are left and return the trained global model.

        An exception within a round leaves everything as it was before that round.
        """
        with contextlib.ExitStack() as stack:
            path = self._folder_path
            folder = None if path is None else self._open_folder(path, stack)
            while len(self._lines) < self.config.num_rounds:
                line = self._one_round()
                self._lines.append(line)
                log_round(self.logger, line, self.clients, self.config.num_rounds)
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
        from fedquilt.record import as_line
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

    def _open_folder(self, path: Path, stack: contextlib.ExitStack) -> RunFolder:
        """Make the run's folder, or go to where the run in it stopped; lock it for the stack."""
        from fedquilt.run_folder import RunFolder, storage_errors

        if not (path / "config.toml").exists():
            with storage_errors(path):
                write_settings(path, self.config)
        folder = RunFolder.open(path)
        check_settings(path, folder.read_config(), self.config)
        folder.acquire()
        stack.callback(folder.close)
        self._pick_up(folder)
        return folder

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
            check_fingerprint(folder.path, state, self._fingerprint)
            self._federation.weights = torch.from_numpy(state["weights"]).to(self.device)
            self._federation.load_state(state)
        self._lines = folder.read_rounds(0 if saved is None else saved.rounds)
        self._store_weights()

    def _result(self) -> dict[str, Any]:
        """Return the content of result.json, as of any other run."""
        from fedquilt.record import build_result

        counts = self._federation.tracker.participation_count
        result = build_result(self.config, self._lines, self.statement, counts)
        result["stopped"] = None
        result["metadata"] |= {
            "input_shape": list(self.info.shape),
            "num_classes": self.info.num_classes,
        }
        return result
