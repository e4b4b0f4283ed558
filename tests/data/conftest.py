"""Small made-up data sets, a local mirror, and the real data where it is found."""

from __future__ import annotations

import gzip
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedquilt.data import DATASETS, DatasetSpec, FileSpec, ImageDataset, load_dataset
from fedquilt.data import files as locate_module
from fedquilt.data import load as load_module
from fedquilt.errors import DataNotFoundError

TRAIN, TEST = 12, 6


@pytest.fixture
def real_dataset() -> Callable[[str], tuple[ImageDataset, ImageDataset]]:
    """Load a real data set from FEDQUILT_DATA, or skip the test."""

    def load(name: str) -> tuple[ImageDataset, ImageDataset]:
        folders = os.environ.get("FEDQUILT_DATA")
        if not folders:
            pytest.skip(f"needs the files of {name}: FEDQUILT_DATA is not set")
        try:
            return load_dataset(name, folders, download=False)
        except DataNotFoundError as error:
            pytest.skip(f"needs the files of {name}: {error}")

    return load


@dataclass
class TinySet:
    """A data set of 12 + 6 images of 4x4 pixels: its specification and files."""

    spec: DatasetSpec
    packed: dict[str, bytes]
    images: list[np.ndarray]
    labels: list[np.ndarray]

    def write(self, root: Path, *, skip: tuple[str, ...] = ()) -> Path:
        folder = root / self.spec.folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.packed.items():
            if name not in skip:
                (folder / name).write_bytes(data)
        return folder


def idx_bytes(array: np.ndarray) -> bytes:
    """Write IDX by hand, for uint8 arrays."""
    dims = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + dims + array.astype(np.uint8).tobytes()


def packed_spec(name: str, content: bytes, packed: bytes, shape: tuple[int, ...]) -> FileSpec:
    return FileSpec(
        name,
        shape,
        "uint8",
        len(content),
        hashlib.sha256(content).hexdigest(),
        len(packed),
        hashlib.md5(packed).hexdigest(),
    )


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> TinySet:
    """Register the data set 'tiny', unknown to every mirror of the world."""
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (n, 4, 4)).astype(np.uint8) for n in (TRAIN, TEST)]
    labels = [np.arange(n, dtype=np.uint8) % 3 for n in (TRAIN, TEST)]
    packed: dict[str, bytes] = {}
    files = []
    for part, x, y in zip(("train", "t10k"), images, labels, strict=True):
        for name, array in ((f"{part}-images-x.gz", x), (f"{part}-labels-x.gz", y)):
            content = idx_bytes(array)
            packed[name] = gzip.compress(content, mtime=0)
            files.append(packed_spec(name, content, packed[name], array.shape))
    spec = DatasetSpec(
        name="tiny",
        title="made up",
        kind="idx",
        image_shape=(1, 4, 4),
        mean=(0.25,),
        std=(0.5,),
        num_classes=3,
        folder="tiny-files",
        files=tuple(files),
        mirrors=("http://127.0.0.1:9/",),
    )
    register(monkeypatch, spec)
    return TinySet(spec, packed, images, labels)


def register(monkeypatch: pytest.MonkeyPatch, spec: DatasetSpec) -> None:
    known = {**DATASETS, spec.name: spec}
    for module in (load_module, locate_module):
        monkeypatch.setattr(module, "DATASETS", known)


@pytest.fixture
def register_spec(monkeypatch: pytest.MonkeyPatch) -> Callable[[DatasetSpec], None]:
    return lambda spec: register(monkeypatch, spec)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No test but those of the real data sees the folders or mirrors of the user."""
    if "real_dataset" not in request.fixturenames:
        monkeypatch.delenv("FEDQUILT_DATA", raising=False)
    monkeypatch.delenv("FEDQUILT_MIRRORS", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@dataclass
class Mirror:
    """What a local server serves; a path in `torn` breaks off halfway."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    """A web server on 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.requests.append(self.path)
            body = served.files.get(self.path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if self.path in served.torn else body)

        def log_message(self, *arguments: object) -> None:
            """Keep the test output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Mirror(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    server.shutdown()
    thread.join()
    server.server_close()
