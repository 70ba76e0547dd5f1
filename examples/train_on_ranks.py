"""Trains a tiny DeepSeek-V3.2 whose experts ranks share, and clips the norm of its gradients.

    torchrun --nproc-per-node 2 examples/train_on_ranks.py
    torchrun --nproc-per-node 1 examples/train_on_ranks.py    # the same losses and norms

A rank has a part of some gradients, as DTensors, and the others whole. torch's clip_grad_norm_
rejects a mixture, and DTensors of several meshes, so the norm is formed here: a part counts with
those of the other ranks, and what every rank has counts once.
"""

from options import Help, at_least, check_folder  # first; options.py says why

# isort: split
import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from train_lookup import lookup_batch, lookup_model

from custom_pypto import models

EXPERTS = dict(first_k_dense_replace=1, n_routed_experts=8, moe_intermediate_size=64)
EXPERTS |= dict(num_experts_per_tok=2, n_group=1, topk_group=1)


def clip_gradients(parameters, most: float) -> float:
    """Scales all gradients so that their norm is at most ``most``; the norm before."""
    gradients = [x.grad for x in parameters if x.grad is not None]
    norms = [torch.linalg.vector_norm(x) for x in gradients]
    # of a part: those of all ranks, added up
    norms = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
    norm = torch.stack(norms).norm().item()
    for gradient in gradients:
        gradient.mul_(min(1.0, most / (norm + 1e-6)))
    return norm


def train(args, folder: str) -> None:
    torch.manual_seed(0)  # the same on all ranks, for whatever is drawn
    if dist.get_rank() == 0:
        lookup_model(args.index_topk, **EXPERTS).save_pretrained(folder)
    dist.barrier()
    model = models.load(folder, expert_parallel=True)
    models.use_custom_pypto(model, training="ops").train()
    parameters = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=False)  # foreach takes one kind
    for step in range(args.steps):
        ids, labels = lookup_batch(2, args.length, seed=step)  # all ranks have the whole batch
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        norm = clip_gradients(parameters, args.clip)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, norm of the gradients {norm:.4f}")
    if args.save:
        model.save_pretrained(args.save)  # by all ranks; the first one writes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--steps", type=at_least(1), default=10)
    add("--index-topk", type=at_least(1), default=16)
    add("--length", type=at_least(128), default=256, help="tokens of a text")
    add("--clip", type=float, default=1.0, help="the largest norm of the gradients")
    add("--save", type=Path, help="folder for the trained model")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(f"ranks need torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
    if args.save:
        check_folder(parser, "--save", args.save)
    dist.init_process_group()
    try:
        with tempfile.TemporaryDirectory() as own:
            folders = [own]
            dist.broadcast_object_list(folders)  # the first rank's; all are on this machine
            train(args, *folders)
            dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
