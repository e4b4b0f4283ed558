"""What watches a run: experiment trackers, the resource monitor, the log.

The documents' names are `fedquilt.monitor` and `fedquilt.log`.
"""
