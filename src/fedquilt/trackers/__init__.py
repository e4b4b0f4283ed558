"""Experiment trackers: a run's rounds in Weights & Biases and in TensorBoard.

Trackers only watch.  What they cannot write is lost to them and to nobody else: the
record of a run is its own folder.  By default nothing leaves the machine.

    from fedquilt.trackers import open_trackers

    with open_trackers(
        "wandb,tensorboard", folder, project="digits", run_name="seed 0", config={"seed": 0}
    ) as trackers:
        trackers.log({"round": 0, "train_loss": 2.3, "seconds": 0.8})
"""

from fedquilt.trackers.fan_out import Trackers
from fedquilt.trackers.opening import check_trackers, open_trackers
from fedquilt.trackers.tracker import Tracker

__all__ = ["Tracker", "Trackers", "check_trackers", "open_trackers"]
