"""Secure aggregation: a server learns the sum of its clients' vectors, and none of them.

The protocol of Bonawitz et al. 2017 ("Practical Secure Aggregation for Privacy-Preserving
Machine Learning", CCS, section 7, against a server that deviates), on the full graph:

| step | a client sends | the server sends back |
|---|---|---|
| 0 | two public keys of this round and the hash of its own mask's seed, signed | those of all |
| 1 | to each peer, sealed: shares of that seed and of its masking key; tags | the letters |
| 2 | its integers modulo 2^b under its own mask and one for each peer | who survived |
| 3 | its signature under that list | the signatures |
| 4 | of survivors the share of the seed, of others the share of the key | |

Pairwise masks cancel in the sum; the seeds of survivors remove their own masks, the keys of those
who were lost in step 2 remove the masks they left behind.  `primitives` has the cryptography,
`client` and `server` the two sides as state machines without a transport, `client` also what a
round is about and what a client insists on.  `MaskedSum` runs all of them in this process.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt.aggregation import Accumulator, Place
from fedquilt.aggregation.secure.client import MaskingClient, Member, SumOrder
from fedquilt.aggregation.secure.primitives import new_signing_key, verifying_key
from fedquilt.aggregation.secure.server import Server
from fedquilt.common.errors import InvalidValueError


class MaskedSum:
    """A sum of integers that the protocol makes, with all its clients in this process.

    Of the clients of whom no vector came, every third has been lost with its letters sent, so that
    others take its masks away, every third with its keys alone, and every third before.

    Parameters
    ----------
    plain : Accumulator
        The empty sum in whose place it stands; it says how long, and where.
    round_index, count : int
        The round, and how many clients its roster has.
    least, colluding, bits : int
        As of an `SumOrder`.
    """

    keeps_vectors = True
    held = None

    def __init__(
        self, plain: Accumulator, *, round_index: int, count: int, least: int, colluding: int,
        bits: int,
    ) -> None:  # fmt: skip
        self._plain, self._vectors = plain, list[NDArray[np.int64]]()
        self._round, self._count, self._least = round_index, count, least
        self._colluding, self._bits = colluding, bits

    @property
    def weight(self) -> float:
        """How many clients have sent a vector."""
        return float(len(self._vectors))

    def add(self, vector: torch.Tensor, weight: float = 1.0, place: Place | None = None) -> None:
        """Take one client's integers; all weights are 1, and everybody holds everything."""
        if weight != 1.0 or place is not None:
            raise InvalidValueError(f"weight={weight:g} must be 1, and vectors whole, under masks")
        self._vectors.append(vector.to("cpu").numpy().astype(np.int64))

    @property
    def total(self) -> torch.Tensor:
        """Run the protocol; return the sum modulo 2^bits, nearest to zero."""
        like = self._plain.total
        keys = [new_signing_key() for _ in range(self._count)]
        known = {c: verifying_key(key) for c, key in enumerate(keys)}
        order = SumOrder(
            run="in this process",
            round_index=self._round,
            task=b"",
            roster=known,
            least=self._least,
            colluding=self._colluding,
            size=like.numel(),
            bits=self._bits,
        )
        clients = [MaskingClient(Member(c, known, key), order) for c, key in enumerate(keys)]
        summed = torch.from_numpy(run_protocol(order, clients, self._vectors))
        return summed.to(like.device, torch.float64)


def run_protocol(
    order: SumOrder, clients: list[MaskingClient], vectors: list[NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Let clients go through the five steps with a server; the first of them have vectors."""
    server, here = Server(order), clients[: len(vectors)]
    written, advertised = ([*here, *clients[len(vectors) + k :: 3]] for k in (0, 1))
    made = {client.client: client.advertise() for client in {*written, *advertised}}
    adverts = server.take_adverts(made)
    server.take_letters({client.client: client.share(adverts) for client in written})
    for client, vector in zip(here, vectors, strict=True):
        server.add(client.client, client.mask(server.letters_to(client.client), vector))
    survivors = server.survivors()
    signed = {client.client: client.agree(survivors) for client in here}
    signatures = server.take_signatures(signed)
    return server.open({client.client: client.unmask(signatures) for client in here})
