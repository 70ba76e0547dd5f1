"""The ops as GE operators.

``<op>.h`` is the prototype of an op, in the form that CANN compiles; ``<op>_<overload>.h`` is that
of another overload. :mod:`.ops` builds a node of each operator. ``python -m custom_pypto.graph``
writes both from the ops' schemas and descriptions, which :mod:`.prototypes` reads.
"""
