"""Quantized weights of linear layers and experts, computed on the CPU as they are stored:
:func:`custom_pypto.weight_only_linear`."""
