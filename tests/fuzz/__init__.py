"""Fuzzing of the ops on the CPU: every call is rejected or equals the reference.

``python tests/fuzz --minutes 10 --seed 7`` runs them; a case is a seed and a number.
"""
