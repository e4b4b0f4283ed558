"""MLflow: a run's rounds in a local file store, in the folder `mlflow` of the run.

Look at it with `MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri RUN/mlflow`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedquilt.common import optional
from fedquilt.common.storage import write_file
from fedquilt.observe.tracking import scalars_of, step_of, withholds_time

MLFLOW_FOLDER = "mlflow"
ID_FILE = "run-id.txt"
_LONGEST = 6000  # characters of a parameter that MLflow takes
_MOST_AT_ONCE = 100
# MLflow reports its use to its makers unless told otherwise, and calls files old-fashioned.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}


class MlflowTracker:
    """Logs to a run of its own in a file store inside the run's folder.

    A round that withholds its seconds is stamped with the time of opening.  A resumed run
    goes on in the same MLflow run; a round that comes out as before is not logged twice.
    """

    def __init__(
        self, folder: Path, *, project: str, run_name: str, config: Mapping[str, Any]
    ) -> None:
        place = folder / MLFLOW_FOLDER
        place.mkdir(parents=True, exist_ok=True)
        self._opened = int(1000 * time.time())
        with _local():
            load_mlflow()
            import mlflow.entities as entities
            from mlflow.tracking import MlflowClient

            self._entities = entities
            self._client = MlflowClient(tracking_uri=place.resolve().as_uri())
            self._run_id = self._begin(place / ID_FILE, project, run_name, config)
            self._known = self._logged()

    def _begin(self, file: Path, project: str, run_name: str, config: Mapping[str, Any]) -> str:
        """Return the run of this folder, made where there is none."""
        written = file.read_text(encoding="utf-8").strip() if file.exists() else ""
        if re.fullmatch(r"[0-9a-f]{32}", written):
            self._client.update_run(written, status="RUNNING")
            return written
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        made = self._client.create_run(
            experiment, start_time=self._opened, run_name=run_name, tags={"mlflow.user": "fedquilt"}
        )
        run_id = str(made.info.run_id)
        given = [self._entities.Param(key, str(value)[:_LONGEST]) for key, value in config.items()]
        for start in range(0, len(given), _MOST_AT_ONCE):
            self._client.log_batch(run_id, params=given[start : start + _MOST_AT_ONCE])
        write_file(file, f"{run_id}\n".encode())
        return run_id

    def _logged(self) -> set[tuple[str, int, float]]:
        """Return what an earlier process has logged."""
        names = self._client.get_run(self._run_id).data.metrics
        return {
            (name, metric.step, metric.value)
            for name in names
            for metric in self._client.get_metric_history(self._run_id, name)
        }

    def log(self, line: Mapping[str, Any]) -> None:
        """Write one round."""
        step, stamp = step_of(line), self._stamp(line)
        metrics = [
            self._entities.Metric(name, float(value), stamp, step)
            for name, value in scalars_of(line).items()
            if (name, step, float(value)) not in self._known
        ]
        with _local():
            self._client.log_batch(self._run_id, metrics=metrics)

    def _stamp(self, line: Mapping[str, Any]) -> int:
        return self._opened if withholds_time(line) else int(1000 * time.time())

    def close(self, *, failed: bool = False) -> None:
        """Say how the run ended; its end is stamped like its start where time is withheld."""
        status = "FAILED" if failed else "FINISHED"
        with _local():
            self._client.set_terminated(self._run_id, status=status, end_time=self._opened)


def load_mlflow() -> Any:
    """Return the package, told to keep to itself."""
    with _local():
        return optional.load("mlflow", "trackers='mlflow'")


@contextmanager
def _local() -> Iterator[None]:
    """Keep MLflow to this machine and to files; what the user has set stays."""
    added = [name for name in _ENVIRONMENT if name not in os.environ]
    os.environ.update({name: _ENVIRONMENT[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
