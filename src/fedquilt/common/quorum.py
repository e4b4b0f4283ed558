"""How many clients must answer before their sum may be opened."""

from __future__ import annotations

import math


def fewest(count: int, share: float, colluding: int = 0) -> int:
    """Return T, the fewest of `count` clients whose sum may be opened.

    At least the share of them, and 2T > count + colluding.  An honest client signs one list of
    survivors, one that colludes as many as it likes, so two lists with T signatures each would
    need 2T <= (count - colluding) + 2 colluding: a server has one at most, and opens of every
    client one secret at most (Bonawitz et al. 2017, section 6.2).

    >>> fewest(20, 0.7), fewest(20, 0.5), fewest(20, 0.5, 4)
    (14, 11, 13)
    """
    # A share such as 0.7 of 20 must not become 15 by its last binary digit.
    return max(math.ceil(share * count - 1e-9), (count + colluding) // 2 + 1)


_KEYS, _TAGS, _LETTER, _SIGNATURE, _SHARE = 3 * 32, 2 * 16, 2 * 33 + 16, 64, 33


def protocol_bytes(count: int) -> dict[str, int]:
    """Return what a client sends and receives of a sum of `count`, beside its vector, in bytes.

    Two public keys and what commits to a seed, signed; of each share of two secrets a tag, and a
    sealed letter with them to each peer; a signature under the list of survivors; one share of
    each peer.  A signature has 64 bytes (Ed25519).

    >>> protocol_bytes(20)
    {'keys': 160, 'letters': 2198, 'shares': 724, 'received': 6038}
    """
    keys, letters = _KEYS + _SIGNATURE, (count - 1) * _LETTER
    received = count * (keys + _SIGNATURE) + letters
    return {"keys": keys, "letters": letters + count * _TAGS, "shares": _SIGNATURE + count * _SHARE,
            "received": received}  # fmt: skip
