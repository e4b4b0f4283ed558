"""Configurations as text."""

from __future__ import annotations

import io

from fedquilt.config import RunConfig, write_config_file


def written(config: RunConfig) -> str:
    """Return a configuration as the text of its file."""
    stream = io.StringIO()
    write_config_file(config, stream)
    return stream.getvalue()
