"""From a model's graph to the dimensions that are cut together.

`walk` reads the graph; `layers` and `operations` say how each node carries the cut
dimension on; `cuts` ties dimensions and is the result.
"""
