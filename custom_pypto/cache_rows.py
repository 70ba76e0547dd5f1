"""Bytes of a row in an int8 cache; ``csrc`` has the same in the header of its row reader."""

SCALE_GROUP = 128  # values that share a scale


def int8_row_bytes(latent: int, rope: int) -> int:
    """``latent`` values of one byte, ``rope`` values of two, a float32 scale per group."""
    return latent + 2 * rope + 4 * latent // SCALE_GROUP


def int8_index_row_bytes(dim: int) -> int:
    """Of the indexer: ``dim`` values of one byte, a float16 scale."""
    return dim + 2
