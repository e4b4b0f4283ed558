"""The API document's settings on MNIST: FedAvg, and the seed's modes beside it.

    python benchmarks/document_settings.py [--modes fedavg,quap_fl] [--num-rounds 100] [--seeds 0]

100 clients, Dirichlet 0.5, Beta(2, 5) availability, up to 30 clients a round, 5
local epochs, batch 32, learning rate 0.01, the document's MNIST network.
Needs torch and numpy only; meant for a GPU (about half a second a round there).
Nothing is tuned; the accuracy is of the test set, which steers nothing.
"""

from __future__ import annotations

import argparse
import platform
import time
import tomllib

import torch

from fedquilt.config import RunConfig, build_config
from fedquilt.experiment.api import run_in_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", default="fedavg,quap_fl,quap_fl_client")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--num-rounds", type=int, default=100)
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--preset", default=None)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    print(f"torch {torch.__version__} on {device}", flush=True)
    for mode in arguments.modes.split(","):
        for seed in arguments.seeds.split(","):
            config = build_config(
                {
                    "dataset": "mnist",
                    "mode": mode,
                    "seed": int(seed),
                    "num_rounds": arguments.num_rounds,
                    "data_dir": arguments.data_dir,
                    "no_download": True,
                    **dict(parse_setting(text) for text in arguments.set),
                },
                preset=arguments.preset,
            )
            report(config)


def parse_setting(text: str) -> tuple[str, object]:
    """Read `lr_decay=1.0` as TOML does."""
    return next(iter(tomllib.loads(text).items()))


def report(config: RunConfig) -> None:
    began = time.perf_counter()
    finished = run_in_memory(config)
    history = finished.result["history"]
    curve = "  ".join(
        f"{index}:{accuracy:.4f}"
        for index, accuracy in zip(
            history["evaluation_rounds"], history["test_accuracy"], strict=True
        )
    )
    epsilon = finished.result["statement"]["epsilon_max"]
    seconds = time.perf_counter() - began
    print(f"{config.mode:15} seed {config.seed}  epsilon {epsilon}  {seconds:6.1f} s", flush=True)
    print(f"    {curve}", flush=True)


if __name__ == "__main__":
    main()
