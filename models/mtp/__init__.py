"""Speculative decoding with the model's own layer for multi-token prediction (MTP): ``layer`` (its
rows), ``parts`` (what is around its decoder layer), ``plain`` (its residuals where others have
streams), ``decoding`` (the loop of ``generate()``), ``leads`` (how far sequences of a batch are
ahead of each other), ``gain`` (what was accepted, and whether it pays), ``loss`` (in training)."""
