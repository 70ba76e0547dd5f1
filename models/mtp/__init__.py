"""Speculative decoding with the model's own layer for multi-token prediction (MTP): ``layer`` (its
parts and rows), ``decoding`` (the loop of ``generate()``), ``gain`` (what was accepted, and whether
it pays)."""
