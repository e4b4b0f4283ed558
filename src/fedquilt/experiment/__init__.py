"""One run: what is called (`api`), how it starts (`start`), the loop over its rounds (`loop`)."""

from fedquilt.experiment.api import resume_run, run, run_config, run_in_memory

__all__ = ["resume_run", "run", "run_config", "run_in_memory"]
