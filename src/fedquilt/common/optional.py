"""Optional packages, imported where they are first used.

Training needs torch and numpy; a missing package raises an error when it is needed, with
what to install.
"""

from __future__ import annotations

import importlib
from typing import Any

from fedquilt.common.errors import MissingPackageError

# Module: the package that brings it, and what to install with pip.
_PACKAGES = {
    "PIL": ("pillow", "pillow"),
    "cryptography": ("cryptography", "fedquilt[secure]"),
    "dp_accounting": ("dp-accounting", "dp-accounting>=0.6,<0.7"),
    "flwr": ("flwr", "fedquilt[flower]"),
    "matplotlib": ("matplotlib", "matplotlib"),
    "mlflow": ("mlflow-skinny", "fedquilt[trackers]"),
    "pooch": ("pooch", "pooch"),
    "prometheus_client": ("prometheus-client", "fedquilt[monitor]"),
    "psutil": ("psutil", "fedquilt[monitor]"),
    "ray": ("ray", "fedquilt[flower-sim]"),
    "pynvml": ("nvidia-ml-py", "nvidia-ml-py"),
    "requests": ("requests", "requests"),
    "tensorboard": ("tensorboard", "fedquilt[trackers]"),
    "wandb": ("wandb", "fedquilt[trackers]"),
}


def require(module: str, purpose: str) -> Any:
    """Return a module of an optional package.

    Parameters
    ----------
    module
        Its dotted name, for instance "prometheus_client.core".
    purpose
        What needs it, as the user knows it; the message begins with it.

    Raises
    ------
    MissingPackageError
        The package is not installed.
    """
    top = module.partition(".")[0]
    package, install = _PACKAGES[top]
    try:
        whole = importlib.import_module(top)
        # A folder of that name in the working directory imports as a package without a file.
        if hasattr(whole, "__path__") and getattr(whole, "__file__", None) is None:
            raise ImportError(f"{top} is a folder in {list(whole.__path__)}")
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs the package {package}, which is not installed: "
            f"pip install '{install}'"
        ) from error
