"""Make the environments of the frameworks for `python -m benchmarks.bench --peers FOLDER`.

    python benchmarks/peers/install.py FOLDER [--torch 2.13.0] [--only pfl,flower]

Each gets a virtual environment of its own, because their requirements do not go together; one
that cannot be installed is reported and left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = {
    "pfl": ["pfl"],
    "flower": ["flwr[simulation]"],
    "fluke": ["fluke-fl"],
    "fedlab": ["fedlab"],
}


def install(folder: Path, name: str, torch: str) -> bool:
    """Make one environment; return whether it could be."""
    place = folder / name
    if not place.exists():
        venv.create(place, with_pip=True)
    python = place / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    command = [str(python), "-m", "pip", "install", "--quiet", f"torch=={torch}", *PACKAGES[name]]
    return subprocess.run(command, check=False).returncode == 0


def main() -> None:
    """Install what was asked for, and say what could not be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="2.13.0", help="version of torch in all of them")
    parser.add_argument("--only", default=",".join(PACKAGES))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.only.split(","):
        done = install(options.folder, name, options.torch)
        print(f"{name}: {'installed' if done else 'could not be installed'}", flush=True)


if __name__ == "__main__":
    main()
