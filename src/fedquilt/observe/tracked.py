"""A run that is tracked: an observer that opens trackers with the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedquilt.common.observer import Observer, Observers, as_observer
from fedquilt.observe.tracking import Trackers


class Tracked(Observer):
    """Hands every round to the trackers that were named; a context manager that closes them.

    It is given public lines only (`Observer`), so trackers log what anybody may see.
    """

    def __init__(self, names: str) -> None:
        from fedquilt.observe.trackers import check_trackers

        check_trackers(names)
        self._names = names
        self._trackers: Trackers | None = None

    def opened(self, config: Any, folder: Path) -> None:
        """Open the trackers in the run's folder."""
        from fedquilt.observe.trackers import open_trackers

        project, name = tracker_names(config)
        self._trackers = open_trackers(
            self._names, folder, project=project, run_name=name, config=config.as_dict()
        )

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Log a round."""
        if self._trackers is not None:
            self._trackers.log(line)

    def __enter__(self) -> Tracked:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._trackers is not None:
            self._trackers.close(failed=kind is not None)


@contextmanager
def tracked(
    names: str, observer: Callable[[Any, dict[str, Any]], None] | None
) -> Iterator[Callable[[Any, dict[str, Any]], None] | None]:
    """Yield an observer that also logs to the named trackers; the observer itself for "none"."""
    if names == "none":
        yield observer
        return
    with Tracked(names) as logging:
        yield Observers(as_observer(observer), logging)


def tracker_names(config: Any) -> tuple[str, str]:
    """Return project and run name, as the FedNum reference writes them for a condensation."""
    if config.method != "condense":
        return f"fedquilt_{config.dataset}", f"{config.mode}_seed{config.seed}"
    people = f"client{config.num_clients}_{config.dirichlet_alpha:g}_{config.partition}"
    rounds = f"cr{config.num_rounds}_join_ratio{config.clients_per_round:g}"
    return f"{config.mode}_{config.dataset}_{people}", f"{config.model}_{rounds}"
