"""Certificates for TLS, keys for nodes, secrets for executors."""

from __future__ import annotations

import datetime
import ipaddress
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedquilt.common.errors import DataError, InvalidValueError
from fedquilt.common.storage import write_file
from fedquilt.common.untrusted import NOTE_BYTES, read_bytes, read_named

CONNECTION = "fedquilt"
"""What the connection to a SuperLink is called in Flower's own configuration."""

LOOPBACK = ("localhost", "127.0.0.1")
_YEARS = 2


def make_authority(folder: Path, name: str = "fedquilt local authority") -> None:
    """Write `ca.crt` and `ca.key`, unless they are there."""
    if (folder / "ca.crt").exists():
        return
    key = ec.generate_private_key(ec.SECP384R1())
    subject = _name(name)
    built = _builder(subject, subject, key.public_key())
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    built = built.add_extension(usage, critical=True)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = built.add_extension(identifier, critical=False).sign(key, hashes.SHA384())
    _write_private(folder / "ca.key", key)
    write_file(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))


def make_certificate(folder: Path, stem: str, hosts: Sequence[str]) -> None:
    """Write `STEM.pem` and `STEM.key` for these host names and addresses, signed by the CA."""
    if (folder / f"{stem}.pem").exists():
        return
    names = x509.SubjectAlternativeName([_host(host) for host in hosts])
    try:
        authority = x509.load_pem_x509_certificate(read_named(folder / "ca.crt", NOTE_BYTES))
        signer = serialization.load_pem_private_key(read_named(folder / "ca.key", NOTE_BYTES), None)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{str(folder)!r} must hold an authority, ca.crt and ca.key, and one of them cannot be "
            f"read: {str(error)[:200]}"
        ) from error
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise DataError(f"{str(folder / 'ca.key')!r} must be an elliptic-curve key")
    key = ec.generate_private_key(ec.SECP384R1())
    # Hosts are the alternative names; a common name has room for 64 characters only.
    built = _builder(_name("fedquilt server"), authority.subject, key.public_key())
    built = built.add_extension(names, critical=False)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = built.add_extension(issuer, critical=False).sign(signer, hashes.SHA384())
    _write_private(folder / f"{stem}.key", key)
    write_file(folder / f"{stem}.pem", certificate.public_bytes(serialization.Encoding.PEM))


def make_node_key(path: Path) -> bytes:
    """Write a node's private key and `PATH.pub`, unless they are there; return the public one."""
    public = path.with_name(path.name + ".pub")
    if not path.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
        write_file(path, private, 0o600)
        line = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        write_file(public, line + b"\n")
    return read_bytes(public, NOTE_BYTES)


def make_secret(path: Path) -> None:
    """Write what an executor proves itself with, unless it is there."""
    if not path.exists():
        write_file(path, (secrets.token_urlsafe(48) + "\n").encode(), 0o600)


def make_server_files(folder: Path, hosts: Sequence[str], port: int = 8000) -> None:
    """Write what a server needs, and keep what is there: certificates, a secret, a connection.

    `hosts` are the names and addresses by which nodes reach it.  The connection, in
    `flwr/config.toml`, is the operator's own: to the SuperLink on loopback.
    """
    folder = folder.resolve()
    for host in hosts:
        _host(host)  # before anything is written
    (folder / "flwr").mkdir(parents=True, exist_ok=True, mode=0o700)
    make_authority(folder)
    make_certificate(folder, "server", [*hosts, *LOOPBACK])
    make_secret(folder / "superlink.secret")
    connection = (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "127.0.0.1:{port}"\nroot-certificates = "{folder / "ca.crt"}"\n'
    )
    write_file(folder / "flwr" / "config.toml", connection.encode(), 0o600)


def make_node_files(folder: Path) -> bytes:
    """Write what a node needs beside `ca.crt`: its key and a secret; return the public key."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    make_secret(folder / "node.secret")
    return make_node_key(folder / "node")


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


_LABELS = re.compile(r"(\*\.)?[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?", re.IGNORECASE)


def _host(host: str) -> x509.GeneralName:
    """Return a host as certificates name it: an address, or a name in its ASCII form (IDNA)."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    import idna

    try:
        name = host if host.isascii() else idna.encode(host, uts46=True).decode()
    except idna.IDNAError:
        name = ""
    if len(name) > 253 or not _LABELS.fullmatch(name):
        raise InvalidValueError(
            f"host={host[:80]!r} must be an address or a name: parts of at most 63 letters, digits "
            "and '-' with dots between, 253 characters in all"
        )
    return x509.DNSName(name)


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_file(path, encoded, 0o600)
