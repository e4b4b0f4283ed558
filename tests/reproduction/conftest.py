"""`python -m reproduction` called in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from command_line import Said
from reproduction.__main__ import main

Again = Callable[..., Said]


@pytest.fixture
def again(here: object, capsys: pytest.CaptureFixture[str]) -> Again:
    """Call `python -m reproduction` with arguments, in an empty folder."""

    def call(*arguments: object) -> Said:
        capsys.readouterr()
        code: object = 0
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stopped:  # of argparse
            code = stopped.code
        assert isinstance(code, int)
        return Said(code, *capsys.readouterr())

    return call
