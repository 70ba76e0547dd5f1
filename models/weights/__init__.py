"""Weights of linear layers and experts in fewer bits, computed on the CPU as they are stored:
:func:`custom_pypto.weight_only_linear`."""
