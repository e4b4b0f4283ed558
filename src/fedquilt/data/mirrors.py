"""Which mirrors to download from: the public ones, or those the user names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from fedquilt import validate
from fedquilt.data.specs import DATASETS
from fedquilt.errors import InvalidValueError

MIRRORS_VARIABLE = "FEDQUILT_MIRRORS"
"""Environment variable `name=URL,URL;name=URL`: mirrors that replace the public ones."""


def named_mirrors(override: Mapping[str, Sequence[str]] | None = None) -> dict[str, Sequence[str]]:
    """Return the mirrors the user names, by data set: those of `override` go first.

    A data set that neither `override` nor FEDQUILT_MIRRORS names keeps its public mirrors.
    """
    environment = _from_environment()
    for source, named in ((MIRRORS_VARIABLE, environment), ("mirrors", override or {})):
        for name, urls in named.items():
            _check(source, name, urls)
    return {**environment, **(override or {})}


def address(mirror: str, name: str) -> str:
    """Return the address of file `name` in the folder `mirror`."""
    return f"{mirror.rstrip('/')}/{name}"


def _from_environment() -> dict[str, Sequence[str]]:
    result: dict[str, Sequence[str]] = {}
    for entry in os.environ.get(MIRRORS_VARIABLE, "").split(";"):
        if not entry.strip():
            continue
        name, equals, urls = entry.partition("=")
        if not equals:
            raise InvalidValueError(
                f"{MIRRORS_VARIABLE}: {entry.strip()!r} must have the form name=URL,URL"
            )
        result[name.strip()] = [url.strip() for url in urls.split(",") if url.strip()]
    return result


def _check(source: str, name: str, urls: Sequence[str]) -> None:
    validate.choice(source, name, [known for known, spec in DATASETS.items() if spec.mirrors])
    if isinstance(urls, str) or not urls:
        raise InvalidValueError(f"{source}: {name!r} must list at least one URL, got {urls!r}")
    for url in urls:
        if not str(url).startswith(("http://", "https://")):
            raise InvalidValueError(
                f"{source}: {url!r} for {name!r} must begin with http:// or https://"
            )
