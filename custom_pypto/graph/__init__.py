"""The ops as GE operators.

``<op>.h`` is the prototype of an op, in the form that CANN compiles. ``python -m
custom_pypto.graph`` writes them from the ops' schemas and descriptions, which :mod:`.prototypes`
reads; its ``node`` adds a node of an operator to a graph.
"""
