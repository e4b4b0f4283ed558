"""One run: what is called and how it starts (`api`), the loop over its rounds (`loop`)."""

from fedquilt.experiment.api import resume_run, run, run_config, run_in_memory

__all__ = ["resume_run", "run", "run_config", "run_in_memory"]
