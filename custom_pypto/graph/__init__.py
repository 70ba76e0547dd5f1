"""What the ops are as GE operators.

``<op>.h`` is the prototype of an op, in the form that CANN compiles. :mod:`.prototypes` reads it
here, without CANN; :mod:`.ops` builds a node of each operator and is generated from what was read,
by ``python -m custom_pypto.graph``.
"""
