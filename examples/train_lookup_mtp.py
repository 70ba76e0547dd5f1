"""Trains a layer for multi-token prediction (MTP) for a lookup checkpoint, which stays as it is.

    python examples/train_lookup_mtp.py    # about two minutes; writes lookup_mtp/
    python examples/train_lookup_mtp.py --checkpoint lookup_v4    # four; writes lookup_v4_mtp/
    python examples/train_lookup_mtp.py --measure examples/checkpoints/lookup    # only measures

The layer drafts the value behind a question and the ``.`` behind the value: the first with the
model's states, the second with its own, as generate() does. What it must find for that differs:

- ``lookup``: a fact far back in the text, for which the layer needs its own indexer, trained as in
  train_lookup.py.
- ``lookup_v4``: its layer sees the last 128 tokens alone, so it drafts what can be known from them:
  the answers to questions that were asked before. With each token it gets the streams of the one
  before it, and so with a colour the animal. When an animal is asked again, one look back finds its
  colour: not without these streams, nor with those of another token.
"""

from options import parser_of, train_or_measure  # first; options.py says why

# isort: split
import argparse
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import train_lookup_v4
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from train_lookup import KEYS, dense_attention, index_loss, labels_of, lookup_batch, train
from train_lookup_v4 import SENTENCE, TOKEN_ID, WINDOW
from transformers import AutoModelForCausalLM, set_seed

from custom_pypto import models
from custom_pypto.models.mtp.layer import add_mtp, joined, output_of
from custom_pypto.models.mtp.parts import parts_of

CHECKPOINTS = Path(__file__).parent / "checkpoints"
FIRST, SECOND = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))


def passed(task, model, layer, input_ids, before, start):
    """The layer's states of tokens from position ``start`` on, with the states before them."""
    tokens = input_ids.size(1)
    embedded = joined(layer, model.model.embed_tokens(input_ids), before)
    positions = torch.arange(start, start + tokens)[None]
    window = getattr(layer.self_attn, "sliding_window", tokens)
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(1 - window)
    mask = torch.zeros(tokens, tokens).masked_fill(~seen, torch.finfo(embedded.dtype).min)
    output = layer(
        embedded,
        attention_mask=mask[None, None],
        position_embeddings=task.rotations(model.model.rotary_emb, embedded, positions),
        position_ids=positions,
    )
    return output_of(layer, output)


def draft_loss(task, model, layer, input_ids, labels, states):
    """Of answers, from the model's states; of ``.`` after a value, from the layer's, too."""
    losses = []
    for start in (1, 2):
        before = states[:, :-1].detach()
        states = passed(task, model, layer, input_ids[:, start:], before, start)
        wanted = labels[:, start + 1 :]
        kept = wanted >= 0 if start == 1 else wanted == model.config.eos_token_id
        hidden = parts_of(layer).hidden(layer, states[:, :-1])
        losses.append(F.cross_entropy(model.lm_head(hidden[kept]), wanted[kept]))
    return sum(losses)


class Facts:
    """Of ``lookup``: the questions are about facts anywhere in the text."""

    questions = 32
    defaults = dict(seed=0, tokens=1024, layer_steps=200, indexer_steps=100)
    texts = staticmethod(partial(lookup_batch, questions=questions))

    @staticmethod
    def rotations(rotary, embedded, positions):
        return rotary(embedded, position_ids=positions)

    @staticmethod
    @torch.no_grad()
    def states(model, input_ids):
        return model.model(input_ids, use_cache=False).last_hidden_state

    @staticmethod
    @torch.no_grad()
    def begin(model, layer):
        # the first layer looks facts up, and takes embeddings
        layer.load_state_dict(model.model.layers[0].state_dict(), strict=False)
        layer.shared_head.norm.load_state_dict(model.model.norm.state_dict())
        hidden = model.config.hidden_size
        scale = model.model.embed_tokens.weight.std().item()
        layer.eh_proj.weight.mul_(0.05)  # about half as much of hidden states as of embeddings
        layer.eh_proj.weight[:, :hidden] += scale * torch.eye(hidden)

    @classmethod
    def train_layer(cls, model, layer, data, args):
        cls.begin(model, layer)
        named = [*layer.named_parameters()]
        of_indexer = [p for name, p in named if ".indexer." in name]
        of_layer = [p for name, p in named if ".indexer." not in name]
        lengths = [128, 256, 512, 1024]

        def batch_of(step):
            length = lengths[step % len(lengths)]
            input_ids, labels = cls.texts(max(1, args.tokens // length), length, generator=data)
            return input_ids, labels, cls.states(model, input_ids)

        def layer_loss(step):
            return draft_loss(cls, model, layer, *batch_of(step))

        def indexer_loss(step):
            input_ids, _, states = batch_of(step)
            length, recorded = input_ids.size(1), []
            questions = torch.arange(length - 3 * len(KEYS), length, 3)
            rows = torch.cat([questions, torch.randint(length, (len(KEYS),), generator=data)])
            hook = layer.self_attn.register_forward_hook(lambda *call: recorded.append(call[-1][1]))
            with torch.no_grad():
                passed(cls, model, layer, input_ids[:, 1:], states[:, :-1], 1)
            hook.remove()
            return index_loss(layer.self_attn.indexer, recorded[0], rows.clamp(min=1) - 1)

        with dense_attention(model):
            model.set_attn_implementation("eager")
            layer.self_attn.config._attn_implementation = "eager"
            train(of_layer, layer_loss, steps=args.layer_steps, title="layer")
            train(of_indexer, indexer_loss, steps=args.indexer_steps, title="indexer")


class AskedTwice:
    """Of ``lookup_v4``: the questions of a text are asked again in another order."""

    questions = 16  # twice, with their answers, 96 tokens: within the window
    defaults = dict(seed=1, tokens=1536, batches=40, layer_steps=220)

    @classmethod
    def texts(cls, batch, length, *, seed=None, generator=None, gap=WINDOW):
        """A batch of the task, whose questions are asked again.

        Returns:
            ``input_ids`` ``[batch, length]``, and labels: the ids of colours and ``.`` of the
            second time, -100 elsewhere.
        """
        if generator is None:
            generator = torch.Generator().manual_seed(seed)
        asked, options = 3 * cls.questions, {"gap": gap, "generator": generator}
        first, _ = train_lookup_v4.lookup_batch(
            batch, length - asked, questions=cls.questions, **options
        )
        answers = first[:, -asked:].unflatten(1, (cls.questions, 3))
        order = [torch.randperm(cls.questions, generator=generator) for _ in answers]
        again = torch.stack([one[of] for one, of in zip(answers, order, strict=True)]).flatten(1)
        input_ids = torch.cat([first, again], 1)
        return input_ids, labels_of(input_ids, length - asked)

    @staticmethod
    def rotations(rotary, embedded, positions):
        return {"main": rotary(embedded, position_ids=positions, layer_type="main")}

    @staticmethod
    @torch.no_grad()
    def states(model, input_ids):
        """What the model hands to the head that joins its streams, ``[B, S, M, hidden]``."""
        streams, head = [], model.model.hc_head
        hook = head.register_forward_pre_hook(lambda _, args: streams.append(args[0]))
        model.model(input_ids, use_cache=False)
        hook.remove()
        return streams[0]

    @staticmethod
    @torch.no_grad()
    def begin(model, layer, batches):
        """Lets the layer begin with a look back: one half of what it takes is of the token, the
        other of the animal before it, as least squares find it in the streams; queries are of the
        first half, keys of the second, and values of the first."""
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

    @classmethod
    def train_layer(cls, model, layer, data, args):
        length, batches = (SENTENCE + 6) * cls.questions, []
        for _ in range(args.batches):  # the model's part of the time, once
            ids, labels = cls.texts(args.tokens // length, length, gap=0, generator=data)
            batches.append((ids, labels, cls.states(model, ids)))
        cls.begin(model, layer, batches)

        def layer_loss(step):
            return draft_loss(cls, model, layer, *batches[step % len(batches)])

        steps = {"steps": args.layer_steps, "learning_rate": 3e-3}
        train(layer.parameters(), layer_loss, title="layer", **steps)


def orthonormal(rows, columns):
    return torch.linalg.qr(torch.randn(rows, columns))[0]


TASKS = {"lookup": Facts, "lookup_v4": AskedTwice}


@torch.no_grad()
def answers(task, model, length, *, drafts=2, **options):
    """transformers' output, with the answers to the last questions of a text.

    Each question is the only token allowed after the text, or after the ``.`` of an answer. A step
    drafts its value and ``.``.

    Args:
        drafts: of a step; 0: none.
        options: more of ``generate()``.
    """
    input_ids, _ = task.texts(1, length, seed=1_000_000)
    text = length - 3 * task.questions
    everything = list(range(model.config.vocab_size))

    def allowed(_, ids):
        is_asked = (len(ids) - text) % 3 == 0
        return [input_ids[0, len(ids)].item()] if is_asked else everything

    if drafts:
        options |= {"use_mtp": True, "num_assistant_tokens": drafts}
    return model.generate(
        input_ids[:, :text],
        prefix_allowed_tokens_fn=allowed,
        max_new_tokens=3 * task.questions,
        eos_token_id=None,
        return_dict_in_generate=True,
        **options,
    )


def measure(task, checkpoint):
    """Prints what is accepted of the drafts made, by their place in a step."""
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    saved = [models.load(checkpoint, dtype=dtype, mtp=True) for dtype in dtypes.values()]
    print(f"| tokens | {' | '.join(dtypes)} |")
    for length in (512, 1024, 2048, 4096):
        row = [str(length)]
        for model in saved:
            counts = answers(task, model, length).drafts
            places = zip(counts.accepted, counts.drafted, strict=True)
            row.append(", ".join(f"{accepted} of {drafted}" for accepted, drafted in places))
        print(f"| {' | '.join(row)} |")


def add_layer(output, checkpoint, model):
    """Writes the checkpoint with the MTP layer of ``model``, in bfloat16, as its second shard."""
    if output.resolve() != checkpoint.resolve():
        but = shutil.ignore_patterns("README.md")
        shutil.copytree(checkpoint, output, dirs_exist_ok=True, ignore=but)
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        weights = load_file(Path(folder, "model.safetensors"))
    if (whole := output / "model.safetensors").is_file():
        whole.rename(output / FIRST)
    with safe_open(output / FIRST, "pt") as file:
        names = set(file.keys())
    layer = {name: tensor for name, tensor in weights.items() if name not in names}
    save_file(layer, output / SECOND, {"format": "pt"})
    shutil.copymode(output / FIRST, output / SECOND)  # which its user alone may read
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())},
        "weight_map": {name: SECOND if name in layer else FIRST for name in sorted(weights)},
    }
    (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    # transformers warns of the layer of a V3.2 unless it is told the file of the model
    config = {"num_nextn_predict_layers": 1, "transformers_weights": FIRST}
    config = json.loads((output / "config.json").read_text()) | config
    (output / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def train_mtp(task, args):
    set_seed(args.seed)
    torch.set_num_threads(args.threads)
    data = torch.Generator().manual_seed(args.seed)
    checkpoint = CHECKPOINTS / args.checkpoint
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, trust_remote_code=False
    )
    model.requires_grad_(False)
    layer = add_mtp(model).requires_grad_(True)
    task.train_layer(model, layer, data, args)
    add_layer(args.output, checkpoint, model)
    measure(task, args.output)


def main():
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument(
        "--checkpoint", choices=TASKS, default="lookup", help="whose layer; others' defaults differ"
    )
    name = first.parse_known_args()[0].checkpoint
    task = TASKS[name]
    parser = parser_of(__doc__, parents=[first], output=f"{name}_mtp", **task.defaults)
    train_or_measure(parser, partial(train_mtp, task), partial(measure, task))


if __name__ == "__main__":
    main()
