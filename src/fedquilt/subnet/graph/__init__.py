"""From a model's graph to the dimensions that are cut together.

`walk` reads the graph; `layers`, `operations` and `combine` say how each node
carries the cut dimension on; `axis_table` ties dimensions; `records` is the result.
"""
