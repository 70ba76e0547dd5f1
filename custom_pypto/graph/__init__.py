"""The ops as GE operators.

``<op>.h`` is the prototype of an op, in the form that CANN compiles; ``<op>_<overload>.h`` is that
of another overload. ``python -m custom_pypto.graph`` writes them from the ops' schemas and
descriptions, which :mod:`.prototypes` reads; its ``node`` adds a node of an operator to a graph.
"""
