"""Where clients train: in this process, in worker processes, on several devices."""
