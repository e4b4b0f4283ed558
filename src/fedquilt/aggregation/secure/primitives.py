"""Keys, masks and shares of secrets: what both sides of secure aggregation compute.

Everything rests on `cryptography`: X25519 (RFC 7748) for pairs, Ed25519 (RFC 8032), or the key of
a Flower node (ECDSA), for signatures, HKDF-SHA256 (RFC 5869) for keys, ChaCha20 (RFC 8439) for
masks and ChaCha20-Poly1305 for letters.  Shares are those of Shamir 1979 over the integers modulo
the smallest prime above 2^256, in which every secret of 32 bytes has its place.

A key is derived from a pair's secret *and* from the story that its owner was told (`salt`): who
takes part, under which keys, in which round of which run.  Two clients that were told different
stories derive keys that have nothing to do with one another, and their masks stay in the sum.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key
from numpy.typing import NDArray

from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import secret_bytes

PRIME = 2**256 + 297
"""The smallest prime above 2^256."""
SHARE_BYTES = 33
SECRET_BYTES = 32
TAG_BYTES = 16
SEALED_BYTES = 2 * SHARE_BYTES + 16  # with the tag of Poly1305

_NONCE = bytes(12)  # every key encrypts one letter, or makes one mask
_COUNTER = bytes(16)


Secret = bytes | bytearray
"""What its owner can overwrite is a `bytearray`; what somebody else has opened is not."""


class ProtocolError(InvalidValueError):
    """Somebody did not keep to the protocol: this client's part in the round has ended."""


def digest(*parts: bytes | int | str) -> bytes:
    """Return the SHA-256 of parts, each with its kind and length: no two lists look alike."""
    hashed = hashlib.sha256()
    for part in parts:
        kind = type(part).__name__[0].encode()
        data = part if isinstance(part, bytes) else str(part).encode()
        hashed.update(kind + len(data).to_bytes(8, "big") + data)
    return hashed.digest()


def public_of(private: Secret) -> bytes:
    """Return the public X25519 key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def is_point(public: bytes) -> bool:
    """Tell whether a public key gives a secret with every private one: no point of small order."""
    try:
        pair_key(bytes(SECRET_BYTES), public, b"", "")
    except ProtocolError:
        return False
    return True


def pair_key(private: Secret, public: bytes, salt: bytes, purpose: str) -> bytes:
    """Return the 256-bit key that two clients share for a purpose, under one story."""
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:  # a point of small order gives no secret
        raise ProtocolError("a public key must not be a point of small order") from error
    return HKDF(SHA256(), SECRET_BYTES, salt, purpose.encode()).derive(secret)


def own_key(seed: Secret, salt: bytes) -> bytes:
    """Return the key of the mask that a client alone knows."""
    return HKDF(SHA256(), SECRET_BYTES, salt, b"own mask").derive(seed)


def key_stream(key: bytes, size: int, bits: int) -> NDArray[np.uint32]:
    """Return `size` numbers below 2^bits, uniform to whoever does not know the key."""
    stream = Cipher(algorithms.ChaCha20(key, _COUNTER), mode=None).encryptor()
    words = np.frombuffer(stream.update(bytes(4 * size)), dtype="<u4").astype(np.uint32)
    return words & np.uint32(2**bits - 1)


def seal(key: bytes, letter: bytes, about: bytes) -> bytes:
    """Encrypt a letter so that only the same key and the same `about` open it."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, letter, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """Return the letter, or refuse it."""
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, about)
    except InvalidTag:
        raise ProtocolError("a letter must be sealed by its sender for this story") from None


SigningKey = Ed25519PrivateKey | EllipticCurvePrivateKey
"""Of a client for many rounds: Ed25519, or the elliptic-curve key of a Flower node."""


def new_signing_key() -> Ed25519PrivateKey:
    """Return a new key of a client."""
    return Ed25519PrivateKey.from_private_bytes(secret_bytes(32))


def verifying_key(key: SigningKey) -> bytes:
    """Return the public key that everybody knows a client by, in its DER form."""
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def sign(key: SigningKey, message: bytes) -> bytes:
    """Return a client's signature."""
    if isinstance(key, Ed25519PrivateKey):
        return key.sign(message)
    return key.sign(message, ECDSA(SHA384()))


def is_signed(public: bytes, signature: bytes, message: bytes) -> bool:
    """Tell whether a message has the signature of a public key (`verifying_key`)."""
    try:
        key = load_der_public_key(public)
        if isinstance(key, Ed25519PublicKey):
            key.verify(signature, message)
        elif isinstance(key, EllipticCurvePublicKey):
            key.verify(signature, message, ECDSA(SHA384()))
        else:
            return False
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


def share(secret: Secret, places: Sequence[int], needed: int) -> list[bytes]:
    """Split a secret of 32 bytes so that any `needed` shares give it, and fewer nothing.

    Share of place x: f(x) for a random polynomial f of degree needed - 1 with f(0) the secret.
    """
    # 64 bytes modulo a prime of 257 bits: no number is likelier than another by 2^-255.
    drawn = secret_bytes(64 * (needed - 1))
    terms = [int.from_bytes(drawn[k : k + 64], "big") for k in range(0, len(drawn), 64)]
    shares = []
    for x in places:
        value = 0
        for term in terms:
            value = (value + term) * x % PRIME
        value = (value + int.from_bytes(secret, "big")) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def tag_of(share: bytes, dealer: int, kind: str) -> bytes:
    """Return what tells a share from every other one, and nothing of it to who does not know it.

    A share is uniform among 2^256 values to whoever has fewer than are needed, so its hash
    is hiding by its entropy, and another share with the same 128 bits is not found.
    """
    return digest("share", dealer, kind, share)[:TAG_BYTES]


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """Return the secret of shares by place; None where they are of no 32 bytes."""
    weights = _weights(tuple(shares))
    values = (int.from_bytes(value, "big") for value in shares.values())
    total = sum(w * v for w, v in zip(weights, values, strict=True)) % PRIME
    return total.to_bytes(SECRET_BYTES, "big") if total < 2**256 else None


@functools.lru_cache(maxsize=8)
def _weights(places: tuple[int, ...]) -> list[int]:
    """Return Lagrange's weights at 0: prod over others y of y / (y - x)."""
    weights = []
    for x in places:
        over = under = 1
        for y in places:
            if y != x:
                over, under = over * y % PRIME, under * (y - x) % PRIME
        weights.append(over * pow(under, -1, PRIME) % PRIME)
    return weights


def pack(numbers: NDArray[np.uint32], bits: int) -> bytes:
    """Return numbers below 2^bits one after the other, `bits` bits each, lowest first."""
    rows = numbers.astype("<u4").view(np.uint8).reshape(-1, 4)
    spread = np.unpackbits(rows, axis=1, count=bits, bitorder="little")
    return np.packbits(spread.ravel(), bitorder="little").tobytes()


def unpack(packed: bytes, size: int, bits: int) -> NDArray[np.uint32]:
    """Return what `pack` was given, or refuse what is not as long."""
    if len(packed) != packed_size(size, bits):
        raise ProtocolError(
            f"a masked vector of {len(packed)} bytes must have {packed_size(size, bits)}"
        )
    spread = np.unpackbits(
        np.frombuffer(packed, dtype=np.uint8), count=size * bits, bitorder="little"
    )
    rows = np.zeros((size, 32), dtype=np.uint8)
    rows[:, :bits] = spread.reshape(size, bits)
    return np.packbits(rows, axis=1, bitorder="little").view("<u4").ravel().astype(np.uint32)


def packed_size(size: int, bits: int) -> int:
    """Return how many bytes so many numbers of so many bits take."""
    return -(-size * bits // 8)


def listed(clients: Iterable[int]) -> str:
    """Return clients in one order, whatever order they came in."""
    return ",".join(map(str, sorted(clients)))
