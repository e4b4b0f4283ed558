"""What a certified condensation reaches, by epsilon and number of releases.

    python benchmarks/private_condensation.py [--seeds 0,1,2] [--epsilons 6] [--dataset mnist]

100 clients, Dirichlet 0.5, everybody joins every round; noise is secret, so figures
differ from run to run.  Columns: the accuracy of a linear head on the public front,
trained on the synthetic images alone (what `fedquilt condense --mode certified` reports),
and that of a ConvNet of width 32 trained from scratch
on the images alone.  Means and standard deviations over seeds.  The test set is looked at
by these accuracies only; settings are the package's defaults, which were chosen on training
images of MNIST and CIFAR-10.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from fedquilt.common.randomness import generator
from fedquilt.condense.augment import Augmentation
from fedquilt.condense.training import TrainingSettings, train_on
from fedquilt.config import build_config
from fedquilt.data import load_dataset
from fedquilt.experiment.api import run_in_memory
from fedquilt.models import make_model
from fedquilt.training import evaluate

NETWORK = TrainingSettings(epochs=500)
WIDTHS = (8, 10, 18, 20, 8)
FAMILIES = "crop_cutout_scale_rotate"


def condense(dataset: str, epsilon: float, rounds: int, seed: int) -> dict[str, Any]:
    """Run one condensation; return its accuracies and the statement's epsilon."""
    settings = {"dataset": dataset, "num_clients": 100, "dirichlet_alpha": 0.5}
    bounded = {"method": "condense", "mode": "certified", "epsilon": epsilon}
    config = build_config(
        {**settings, **bounded, "num_rounds": rounds, "eval_every": rounds, "seed": seed}
    )
    done = run_in_memory(config)
    assert done.synthetic is not None
    _, test = load_dataset(dataset)
    shape, classes = test.images.shape[1:], test.num_classes
    network = make_model("convnet-32", shape, classes, seed)
    train_on(
        network,
        done.synthetic.images,
        done.synthetic.targets,
        NETWORK,
        Augmentation(FAMILIES),
        generator(seed, "benchmark"),
    )
    return {
        "images": done.final_accuracy,
        "convnet": evaluate(network, test.images, test.targets)[0],
        "epsilon": done.statement.epsilon_max,
    }


def spread(values: list[float]) -> str:
    """Return mean and standard deviation in percent."""
    wide = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):6.2f} ± {100 * wide:.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epsilons", default="6")
    parser.add_argument("--rounds", default="1,40")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'epsilon':>8}{'releases':>10}{'head on images':>18}{'ConvNet on images':>20}{'worst':>8}"
    )
    for epsilon in map(float, options.epsilons.split(",")):
        for rounds in map(int, options.rounds.split(",")):
            rows = [
                condense(options.dataset, epsilon, rounds, int(seed))
                for seed in options.seeds.split(",")
            ]
            worst = max(row["epsilon"] for row in rows)
            columns = [spread([row[name] for row in rows]) for name in ("images", "convnet")]
            print(
                f"{epsilon:8g}{rounds:10d}{columns[0]:>18}{columns[1]:>20}{worst:8.3f}", flush=True
            )


if __name__ == "__main__":
    main()
