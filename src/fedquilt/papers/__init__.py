"""The interfaces of the published documents, over the same round as everything else."""
