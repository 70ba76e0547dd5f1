"""Random hostile calls of the ops on the CPU, each refused by name or equal to the reference.

``python tests/fuzz --minutes 10 --seed 7`` runs them; a case is a seed and a number.
"""
