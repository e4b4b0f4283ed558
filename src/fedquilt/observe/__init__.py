"""What watches a run: experiment trackers, the resource monitor, the log.

The public names, those of HeFlwr, are `fedquilt.monitor` and `fedquilt.log`.
"""
