"""The rounds of a `FedNumServer`, as the document names what is said of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fedquilt.condense.fednum_arguments import Client


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
