"""Trains a layer for multi-token prediction (MTP) for the lookup_v4 checkpoint, which stays as it
is.

The layer sees the last 128 tokens alone, so it drafts what can be known from them: the answers to
questions that were asked before. With each token it gets the streams of the one before it, and so
with a colour the animal. When an animal is asked again, one look back finds its colour: not without
these streams, nor with those of another token.

    python examples/train_lookup_v4_mtp.py    # about four minutes; writes lookup_v4_mtp/

``drafted_answers`` measures what is accepted.
"""

from options import Help, at_least, check_folder  # first; options.py says why

# isort: split
import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from train_lookup import KEYS, labels_of, train
from train_lookup_mtp import drafted, report
from train_lookup_v4 import END, SENTENCE, TOKEN_ID, WINDOW, lookup_batch
from transformers import AutoModelForCausalLM, set_seed

from custom_pypto.models.mtp.layer import add_mtp, joined
from custom_pypto.models.mtp.parts import StreamParts

CHECKPOINT = Path(__file__).parent / "checkpoints/lookup_v4"
QUESTIONS = 16  # twice, with their answers, 96 tokens: within the window


def asked_twice(batch, length, *, questions=QUESTIONS, seed=None, generator=None, gap=WINDOW):
    """A batch of the task with its questions asked again in another order.

    Returns:
        ``input_ids`` ``[batch, length]``, and labels: the ids of colours and ``.`` of the second
        time, -100 elsewhere.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(seed)
    asked, options = 3 * questions, {"questions": questions, "gap": gap, "generator": generator}
    first, _ = lookup_batch(batch, length - asked, **options)
    answers = first[:, -asked:].unflatten(1, (questions, 3))
    order = [torch.randperm(questions, generator=generator) for _ in answers]
    again = torch.stack([one[of_row] for one, of_row in zip(answers, order, strict=True)]).flatten(
        1
    )
    input_ids = torch.cat([first, again], 1)
    return input_ids, labels_of(input_ids, length - asked)


@torch.no_grad()
def streams_of(model, input_ids):
    """What the model hands to the head that joins its streams, ``[B, S, M, hidden]``."""
    streams = []
    hook = model.model.hc_head.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
    model.model(input_ids, use_cache=False)
    hook.remove()
    return streams[0]


def states(model, layer, input_ids, streams):
    """The layer's states of all tokens but the first, with the streams of the model; and of all but
    the first two, with its own before them."""
    first = passed(model, layer, input_ids[:, 1:], streams[:, :-1], 1)
    return first, passed(model, layer, input_ids[:, 2:], first[:, :-1].detach(), 2)


def passed(model, layer, input_ids, before, start):
    tokens = input_ids.size(1)
    embedded = joined(layer, model.model.embed_tokens(input_ids), before)
    positions = torch.arange(start, start + tokens)[None]
    angles = model.model.rotary_emb(embedded, position_ids=positions, layer_type="main")
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - WINDOW)
    mask = torch.zeros(tokens, tokens).masked_fill(~seen, torch.finfo(embedded.dtype).min)
    return layer(
        embedded,
        attention_mask=mask[None, None],
        position_embeddings={"main": angles},
        position_ids=positions,
    )


def draft_loss(model, layer, input_ids, labels, streams):
    """Of answers, from the model's streams; of ``.`` after a colour, from the layer's, too."""
    losses = []
    for start, of_tokens in enumerate(states(model, layer, input_ids, streams), 1):
        wanted = labels[:, start + 1 :]
        kept = wanted >= 0 if start == 1 else wanted == TOKEN_ID[END]
        hidden = StreamParts.hidden(layer, of_tokens[:, :-1])
        losses.append(F.cross_entropy(model.lm_head(hidden[kept]), wanted[kept]))
    return sum(losses)


def drafted_answers(model, length, *, batch=1, seed=1_000_000):
    """transformers' output, with the answers to all questions of a text that were asked before."""
    input_ids, _ = asked_twice(batch, length, seed=seed)
    return drafted(model, input_ids, QUESTIONS)


@torch.no_grad()
def begin(model, layer, batches):
    """Lets the layer begin with a look back: one half of what it takes is of the token, the other
    of the animal before it, as least squares find it in the streams; queries are of the first half,
    keys of the second, and values of the first."""
    text, attention = model.model, layer.self_attn
    layer.hc_head.load_state_dict(text.hc_head.state_dict())
    layer.kv_norm.load_state_dict(text.norm.state_dict())
    tokens = torch.cat([ids.flatten() for ids, _, _ in batches])
    animals = (tokens >= TOKEN_ID[KEYS[0]]) & (tokens <= TOKEN_ID[KEYS[-1]])
    streams = layer.hnorm(torch.cat([streams.flatten(0, 1) for *_, streams in batches]))
    wanted = layer.enorm(text.embed_tokens(tokens)) * animals[:, None]
    wanted = wanted[:, None].expand_as(streams).flatten(0, 1)
    found = torch.linalg.lstsq(streams.flatten(0, 1), wanted).solution.T
    half = model.config.hidden_size // 2
    rotated = model.config.qk_rope_head_dim  # the last of a row's dims
    onto = orthonormal(2 * half, half).T
    match, value = (orthonormal(model.config.head_dim - rotated, half) for _ in range(2))
    for weight in (layer.e_proj, layer.h_proj, attention.q_a_proj, attention.q_b_proj):
        weight.weight.mul_(0.1)
    layer.e_proj.weight[:half] += onto
    layer.h_proj.weight[half:] += onto @ found
    attention.q_a_proj.weight[:, :half] += torch.eye(half)
    for head in attention.q_b_proj.weight.chunk(model.config.num_attention_heads):
        head[:-rotated] += match
    attention.kv_proj.weight.mul_(0.3)
    attention.kv_proj.weight[:-rotated] += torch.cat([value, match], 1)


def orthonormal(rows, columns):
    return torch.linalg.qr(torch.randn(rows, columns))[0]


def train_mtp(args):
    set_seed(args.seed)
    torch.set_num_threads(args.threads)
    data = torch.Generator().manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, dtype=torch.float32, trust_remote_code=False
    )
    model.requires_grad_(False)
    layer = add_mtp(model).requires_grad_(True)
    length, batches = (SENTENCE + 6) * QUESTIONS, []
    for _ in range(args.batches):  # the model's part of the time, once
        ids, labels = asked_twice(args.tokens // length, length, gap=0, generator=data)
        batches.append((ids, labels, streams_of(model, ids)))
    begin(model, layer, batches)

    def layer_loss(step):
        return draft_loss(model, layer, *batches[step % len(batches)])

    steps = {"steps": args.layer_steps, "learning_rate": 3e-3}
    train(layer.parameters(), layer_loss, title="layer", **steps)
    add_layer(args.output, CHECKPOINT, model)
    report(args.output, drafted_answers, (512, 1024, 2048, 4096))


def add_layer(output, checkpoint, model):
    """Writes the checkpoint with the MTP layer of ``model``, in bfloat16, as its second shard."""
    if output.resolve() != checkpoint.resolve():
        but = shutil.ignore_patterns("README.md")
        shutil.copytree(checkpoint, output, dirs_exist_ok=True, ignore=but)
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        weights = load_file(Path(folder, "model.safetensors"))
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    if (whole := output / "model.safetensors").is_file():
        whole.rename(output / first)
    with safe_open(output / first, "pt") as file:
        names = set(file.keys())
    layer = {name: tensor for name, tensor in weights.items() if name not in names}
    save_file(layer, output / second, {"format": "pt"})
    shutil.copymode(output / first, output / second)  # which its user alone may read
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())},
        "weight_map": {name: second if name in layer else first for name in sorted(weights)},
    }
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = json.loads((output / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (output / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--output", type=Path, default=Path("lookup_v4_mtp"), help="folder of the checkpoint")
    add("--seed", type=int, default=1)
    add("--threads", type=at_least(1), default=1, help="changes rounding, hence the weights")
    add("--tokens", type=int, default=1536, help="tokens per step")
    add("--batches", type=at_least(1), default=40, help="of texts, which come again and again")
    add("--layer-steps", type=int, default=220)
    args = parser.parse_args()
    check_folder(parser, "--output", args.output)
    train_mtp(args)


if __name__ == "__main__":
    main()
