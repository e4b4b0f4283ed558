"""What each data set consists of: files, checksums, mirrors, normalisation.

A file is known by its content.  The copy a mirror serves has a known MD5; a copy
that somebody unpacked, or packed again, is accepted when its content has the known
SHA-256.  Of CIFAR-100 and Tiny ImageNet the archive itself is read, by its published MD5.  For
what LEAF's scripts write (FEMNIST, Shakespeare) there is no checksum: they draw at random, and
only the form is checked.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from fedquilt.common import checks
from fedquilt.common.errors import InvalidValueError

Kind = Literal[
    "digits",
    "idx",
    "cifar",
    "writers",
    "cifar100",
    "tiny-imagenet",
    "leaf-images",
    "leaf-text",
    "own",
]


@dataclass(frozen=True)
class FileSpec:
    """One file of a data set.

    `shape`, `dtype`, `size` and `sha256` describe the content, unpacked.  `packed_size`
    and `packed_md5` describe the original gzip file, and are None for a file that is
    distributed unpacked.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["uint8", "int32"]
    size: int
    sha256: str
    packed_size: int | None = None
    packed_md5: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The file names under which the content is sought, the distributed one first."""
        return (self.name, self.name.removesuffix(".gz")) if self.packed_md5 else (self.name,)

    @property
    def expected(self) -> str:
        """What the file should be, for error messages."""
        content = f"content of {self.size} bytes with sha256 {self.sha256}"
        if self.packed_md5 is None:
            return content
        return f"gzip of {self.packed_size} bytes with md5 {self.packed_md5}, or {content}"


@dataclass(frozen=True)
class ArchiveSpec:
    """A tar file that mirrors serve in place of the files; members are `prefix/name`."""

    name: str
    size: int
    md5: str
    prefix: str


@dataclass(frozen=True)
class DatasetSpec:
    """One data set: where its files lie, what they must hold, how images are normalised.

    A pixel x in [0, 1] of channel c becomes (x - mean[c]) / std[c].  `base` names the
    data set whose images this one shares; its own files then add to them.  A mirror is
    the address of a folder: file and archive names are appended to it.

    Kinds without `files` read `archive` itself, or the JSON files below `folder`, or what
    `load` returns (`fedquilt.register_dataset`).
    """

    name: str
    title: str
    kind: Kind
    image_shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int = 10
    folder: str = ""
    files: tuple[FileSpec, ...] = ()
    mirrors: tuple[str, ...] = ()
    archive: ArchiveSpec | None = None
    base: str | None = None
    load: Callable[[], tuple[Any, Any]] | None = None


def _idx_files(packed_sizes: Sequence[int], digests: str) -> tuple[FileSpec, ...]:
    """Return MNIST's four files, with a line `packed md5, content sha256` for each."""
    parts = (
        ("train-images-idx3-ubyte.gz", (60_000, 28, 28), 47_040_016),
        ("train-labels-idx1-ubyte.gz", (60_000,), 60_008),
        ("t10k-images-idx3-ubyte.gz", (10_000, 28, 28), 7_840_016),
        ("t10k-labels-idx1-ubyte.gz", (10_000,), 10_008),
    )
    files = []
    for part, packed, line in zip(parts, packed_sizes, digests.splitlines(), strict=True):
        (name, shape, size), (md5, sha256) = part, line.split()
        files.append(FileSpec(name, shape, "uint8", size, sha256, packed, md5))
    return tuple(files)


_DIGITS = DatasetSpec(
    name="digits",
    title="scikit-learn's handwritten digits",
    kind="digits",
    image_shape=(1, 8, 8),
    # Of the training part (see `fedquilt.data.load`), its 0..16 grey levels over 16.
    mean=(0.3051,),
    std=(0.3762,),
)

_MNIST = DatasetSpec(
    name="mnist",
    title="MNIST handwritten digits",
    kind="idx",
    image_shape=(1, 28, 28),
    mean=(0.1307,),
    std=(0.3081,),
    folder="mnist",
    files=_idx_files(
        (9_912_422, 28_881, 1_648_877, 4_542),
        """\
f68b3c2dcbeaaa9fbdd348bbdeb94873 ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db
d53e105ee54ea40749a09fcbcd1e9432 65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5
9fb629c4189551a2d022fa330f9573f3 0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7
ec29112dd5afa0611ce80d1b7f02629c ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2
""",
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)

_FASHION_MNIST = DatasetSpec(
    name="fashion-mnist",
    title="Fashion-MNIST articles of clothing",
    kind="idx",
    image_shape=(1, 28, 28),
    mean=(0.2860,),
    std=(0.3530,),
    folder="fashion-mnist",
    files=_idx_files(
        (26_421_880, 29_515, 4_422_102, 5_148),
        """\
8d4fb7e6c68d591d4c3dfef9ec88bf0d c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888
25c81989df183df01b3e8a0aad5dffbe bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9
bef4ecab320f06d8554ea6380940ec79 5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b
bb300cfdad3c16e7a12a480ee83cd310 0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34
""",
    ),
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
)

_CIFAR10 = DatasetSpec(
    name="cifar10",
    title="CIFAR-10 small colour photographs (binary version)",
    kind="cifar",
    image_shape=(3, 32, 32),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
    folder="cifar-10-batches-bin",
    files=tuple(
        FileSpec(f"{batch}.bin", (10_000, 3_073), "uint8", 30_730_000, sha256)
        for batch, sha256 in (
            ("data_batch_1", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            ("data_batch_2", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            ("data_batch_3", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            ("data_batch_4", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            ("data_batch_5", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
            ("test_batch", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
        )
    ),
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
    archive=ArchiveSpec(
        name="cifar-10-binary.tar.gz",
        size=170_052_171,
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        prefix="cifar-10-batches-bin",
    ),
)

_MNIST_WRITERS = DatasetSpec(
    name="mnist-writers",
    title="MNIST with the writer of every digit (labels of QMNIST)",
    kind="writers",
    image_shape=_MNIST.image_shape,
    mean=_MNIST.mean,
    std=_MNIST.std,
    folder="qmnist-writers",
    files=(
        FileSpec(
            "qmnist-train-labels-idx2-int.gz",
            (60_000, 8),
            "int32",
            1_920_012,
            "bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5",
            463_024,
            "0058f8dd561b90ffdd0f734c6a30e5e4",
        ),
        FileSpec(
            "qmnist-test-labels-idx2-int.gz",
            (60_000, 8),
            "int32",
            1_920_012,
            "92d0ccb8c25f9c6534270fb4be7e1d24a1c6d315edfc8a638bfbd31c70f362dd",
            526_800,
            "5b5b05890a5e13444e108efe57b788aa",
        ),
    ),
    mirrors=("https://raw.githubusercontent.com/facebookresearch/qmnist/master/",),
    base="mnist",
)

_CIFAR100 = DatasetSpec(
    name="cifar100",
    title="CIFAR-100 small colour photographs (binary version)",
    kind="cifar100",
    image_shape=(3, 32, 32),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    num_classes=100,
    folder="cifar-100",
    mirrors=_CIFAR10.mirrors,
    archive=ArchiveSpec(
        name="cifar-100-binary.tar.gz",
        size=168_513_733,
        md5="03b5dce01913d631647c71ecec9e9cb8",
        prefix="cifar-100-binary",
    ),
)

_TINY_IMAGENET = DatasetSpec(
    name="tiny-imagenet",
    title="Tiny ImageNet, 200 classes of 64x64 photographs",
    kind="tiny-imagenet",
    image_shape=(3, 64, 64),
    mean=(0.4802, 0.4481, 0.3975),
    std=(0.2770, 0.2691, 0.2821),
    num_classes=200,
    folder="tiny-imagenet",
    mirrors=("http://cs231n.stanford.edu/",),
    archive=ArchiveSpec(
        name="tiny-imagenet-200.zip",
        size=248_100_043,
        md5="90528d7ca1a48142e341f4ef8d21d0de",
        prefix="tiny-imagenet-200",
    ),
)

_FEMNIST = DatasetSpec(
    name="femnist",
    title="FEMNIST: digits and letters by writer (JSON of LEAF)",
    kind="leaf-images",
    image_shape=(1, 28, 28),
    mean=(0.9637,),
    std=(0.1597,),
    num_classes=62,
    folder="femnist",
)

_SHAKESPEARE = DatasetSpec(
    name="shakespeare",
    title="Shakespeare: the next letter, by speaker (JSON of LEAF)",
    kind="leaf-text",
    image_shape=(80,),
    mean=(),
    std=(),
    num_classes=80,
    folder="shakespeare",
)

_KNOWN: dict[str, DatasetSpec] = {
    spec.name: spec
    for spec in (
        *(_DIGITS, _MNIST, _FASHION_MNIST, _CIFAR10, _MNIST_WRITERS),
        *(_CIFAR100, _TINY_IMAGENET, _FEMNIST, _SHAKESPEARE),
    )
}

DATASETS: Final[Mapping[str, DatasetSpec]] = MappingProxyType(_KNOWN)
"""Every known data set by name."""

WITH_PEOPLE = ("mnist-writers", "femnist", "shakespeare")
"""Data sets that say who made each sample."""


def add_spec(spec: DatasetSpec) -> None:
    """Make a data set known in this process, under a name that no other has."""
    if not re.fullmatch(r"[\w][\w.+-]*", spec.name):
        raise InvalidValueError(
            f"name={spec.name!r} must be letters, digits, '.', '_', '+' and '-': it names a folder"
        )
    if spec.name in _KNOWN:
        raise InvalidValueError(
            f"name={spec.name!r} must be new: a data set has it already ({_KNOWN[spec.name].title})"
        )
    _KNOWN[spec.name] = spec


def register_dataset(
    name: str,
    source: Callable[[], tuple[Any, Any]] | DatasetSpec,
    *,
    num_classes: int | None = None,
    title: str = "",
) -> None:
    """Make a data set known by name in this process, wherever one is named.

    Parameters
    ----------
    name : str
        Letters, digits, '.', '_', '+' and '-'; no other data set may have it.  A ledger knows
        clients by this name and their sample numbers: the same name must always mean the same
        data.
    source : callable or DatasetSpec
        A function that returns (train, test), each an `ImageDataset` or a pair
        `(inputs, labels)`, or the description of files in a form that is known.
    num_classes : int, optional
        Of what a function returns; the largest label of its test part and one more by default,
        as what clients hold decides nothing that is public.
    title : str
        What the list of data sets says of it.

    Examples
    --------
    >>> import torch
    >>> x, y = torch.zeros(8, 3), torch.arange(8) % 2
    >>> register_dataset("eight-zeros", lambda: ((x, y), (x, y)))
    >>> from fedquilt.data import load_dataset
    >>> load_dataset("eight-zeros")[0]
    ImageDataset('eight-zeros', 8 samples 3, 2 classes)
    """
    checks.text("name", name)
    if isinstance(source, DatasetSpec):
        if num_classes is not None:
            raise InvalidValueError("num_classes must be left out beside a DatasetSpec: it has one")
        add_spec(dataclasses.replace(source, name=name, title=title or source.title))
        return
    if not callable(source):
        raise InvalidValueError(
            f"source={source!r:.60} must be a function that returns (train, test), or a DatasetSpec"
        )
    classes = 0 if num_classes is None else checks.integer("num_classes", num_classes, at_least=1)
    add_spec(
        DatasetSpec(
            name=name,
            title=title or "registered at run time",
            kind="own",
            image_shape=(),
            mean=(),
            std=(),
            num_classes=classes,
            load=source,
        )
    )
