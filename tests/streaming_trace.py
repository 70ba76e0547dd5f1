"""Which experts a small trained model asks for, token by token.

    python tests/streaming_trace.py     # trains anew, a minute on one core, and writes the file

A DeepSeek-V3.2 of four layers with 64 experts, of which a token takes 6, is trained on the bytes of
this repository's pages, and reads the last of them. Routers of random weights ask for experts at
random: then the share of hits is the share of experts in memory, whatever makes room.
"""

from pathlib import Path

import torch
from repository import REPOSITORY
from safetensors.torch import save_file
from tiny import tiny_config
from transformers import DeepseekV32ForCausalLM

FILE = Path(__file__).with_suffix(".safetensors")
LAYERS, EXPERTS, CHOSEN = 4, 64, 6
STEPS, BATCH, LENGTH = 400, 8, 128
TOKENS = 1024  # that are recorded


def text() -> torch.Tensor:
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    return torch.tensor(list("\n".join(page.read_text() for page in pages).encode()))


def model() -> DeepseekV32ForCausalLM:
    torch.manual_seed(0)
    config = tiny_config(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=0,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        n_group=1,
        index_topk=LENGTH,  # dense
        max_position_embeddings=LENGTH,
        initializer_range=0.02,
    )
    return DeepseekV32ForCausalLM(config)


def train(net: DeepseekV32ForCausalLM, bytes_: torch.Tensor) -> float:
    """Returns the last loss in nats a byte, with experts balanced by their biases as in the report
    of DeepSeek-V3."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    routers = [layer.mlp.gate for layer in net.model.layers]
    loads: list[torch.Tensor] = []
    for router in routers:
        router.register_forward_hook(lambda _, inputs, output: loads.append(output[2]))
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        starts = torch.randint(len(bytes_) - LENGTH, (BATCH,), generator=generator)
        ids = torch.stack([bytes_[start : start + LENGTH] for start in starts])
        loads.clear()
        loss = net(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for router, chosen in zip(routers, loads, strict=True):
            counts = chosen.flatten().bincount(minlength=EXPERTS).float()
            router.e_score_correction_bias += 1e-3 * (counts.mean() - counts).sign()
        if step % 50 == 0:
            print(step, f"{loss.item():.2f}", flush=True)
    return loss.item()


@torch.no_grad()
def recorded(net: DeepseekV32ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """``[tokens, layers, k]`` uint8."""
    found: list[torch.Tensor] = []
    for layer in net.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, inputs, output: found.append(output[2]))
    for part in ids.split(LENGTH):
        net(part[None], use_cache=False)
    parts = [torch.stack(found[i : i + LAYERS], 1) for i in range(0, len(found), LAYERS)]
    return torch.cat(parts).to(torch.uint8)


if __name__ == "__main__":
    torch.set_num_threads(1)
    whole, net = text(), model()
    net.train()
    loss = train(net, whole[:-TOKENS])
    net.eval()
    for layer in net.model.layers:
        layer.mlp.gate._forward_hooks.clear()
    about = {"loss": f"{loss:.2f} nats a byte", "steps": str(STEPS)}
    save_file({"experts": recorded(net, whole[-TOKENS:])}, FILE, about)
