"""Which 4 of a sequence's cached tokens matter to its newest one, and attention over those alone.

    python examples/call_ops.py

Queries and keys are random numbers: the program shows shapes, and how the two ops fit together.
"""

from options import Help  # first; options.py says why

# isort: split
import argparse

import torch

import custom_pypto

argparse.ArgumentParser(description=__doc__, formatter_class=Help).parse_args()

torch.manual_seed(0)
B, S1, N1, L, R = 2, 1, 16, 512, 64  # sequences, new tokens of each, heads, latent, RoPE dims
index_heads, D, blocks, block_size = 64, 128, 8, 16

# a paged cache: blocks in any order, one table row per sequence, lengths in tokens
latent = torch.randn(blocks, block_size, 1, L)
key_rope = torch.randn(blocks, block_size, 1, R)
index_key = torch.randn(blocks, block_size, 1, D)
block_table = torch.tensor([[5, 0, 3], [2, 7, 1]], dtype=torch.int32)
lengths = torch.tensor([40, 3], dtype=torch.int32)

# score[j] = sum over heads of weight * relu(query . key j); the best positions come first
indices = custom_pypto.npu_lightning_indexer_pto(
    torch.randn(B, S1, index_heads, D),
    index_key,
    torch.randn(B, S1, index_heads),
    actual_seq_lengths_key=lengths,
    block_table=block_table,
    sparse_count=4,
)
print("positions of the 4 best keys, of the newest token of each sequence:")
print(indices.tolist())  # the second sequence has 3 tokens only: -1 ends its row

# softmax(scale * [query | query_rope] . [latent | key_rope]) over those rows, times their latents
out = custom_pypto.npu_sparse_flash_attention_pto(
    torch.randn(B, S1, N1, L),
    latent,
    None,
    indices,
    192**-0.5,
    query_rope=torch.randn(B, S1, N1, R),
    key_rope=key_rope,
    actual_seq_lengths_kv=lengths,
    block_table=block_table,
)
print("attention over them, [sequences, new tokens, heads, latent]:")
print(tuple(out.shape), out.dtype)
