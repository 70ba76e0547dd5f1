"""Trains a layer for multi-token prediction (MTP) for the lookup checkpoint, which stays as it is.

The layer drafts the value behind a question and the ``.`` behind the value: the first with the
model's hidden states, the second with its own, as generate() does. The value follows from a fact
far back in the text, so the layer needs its own indexer, which is trained as in train_lookup.py.

    python examples/train_lookup_mtp.py           # about two minutes; writes lookup_mtp/

``drafted_answers`` measures what is accepted.
"""

from options import Help, at_least, check_folder  # first; options.py says why

# isort: split
import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from train_lookup import (
    END,
    KEYS,
    TOKEN_ID,
    dense_attention,
    index_loss,
    lookup_batch,
    lookup_tokenizer,
    train,
)
from transformers import AutoModelForCausalLM, set_seed

from custom_pypto import models
from custom_pypto.models.mtp.layer import add_mtp, joined, output_of

CHECKPOINT = Path(__file__).parent / "checkpoints/lookup"


def drafts(model, layer, input_ids):
    """The layer's outputs for all tokens but the first, ``[B, S - 1, hidden]``: with the hidden
    states of the model; and for all but the first two, with the layer's own before them."""
    with torch.no_grad():
        before = model.model(input_ids, use_cache=False).last_hidden_state[:, :-1]
    first = passed(model, layer, input_ids[:, 1:], before, 1)
    return first, passed(model, layer, input_ids[:, 2:], first[:, :-1].detach(), 2)


def passed(model, layer, input_ids, before, start):
    embedded = joined(layer, model.model.embed_tokens(input_ids), before)
    tokens = input_ids.size(1)
    positions = torch.arange(start, start + tokens)[None]
    mask = torch.full((tokens, tokens), torch.finfo(embedded.dtype).min).triu(1)[None, None]
    angles = model.model.rotary_emb(embedded, position_ids=positions)
    output = layer(
        embedded, attention_mask=mask, position_embeddings=angles, position_ids=positions
    )
    return output_of(layer, output)


def draft_loss(model, layer, input_ids, labels):
    """Of answers, from the model's hidden states; of ``.`` after a value, from the layer's, too."""
    losses = []
    for start, outputs in enumerate(drafts(model, layer, input_ids), 1):
        wanted = labels[:, start + 1 :]
        kept = wanted >= 0 if start == 1 else wanted == TOKEN_ID[END]
        losses.append(F.cross_entropy(model.lm_head(outputs[:, :-1][kept]), wanted[kept]))
    return sum(losses)


def drafted_answers(model, length, *, batch=1, questions=32, seed=1_000_000):
    """transformers' output, with the answers to all questions of a text."""
    input_ids, _ = lookup_batch(batch, length, questions=questions, seed=seed)
    return drafted(model, input_ids, questions)


@torch.no_grad()
def drafted(model, input_ids, questions):
    """transformers' output, with the answers to the last ``questions`` of a batch.

    Each question is the only token allowed after the text, or after the ``.`` of an answer. A step
    drafts its value and ``.``.
    """
    text = input_ids.size(1) - 3 * questions

    def allowed(row, ids):
        is_asked = (len(ids) - text) % 3 == 0
        return [input_ids[row, len(ids)].item()] if is_asked else everything

    everything = list(range(model.config.vocab_size))
    return model.generate(
        input_ids[:, :text],
        use_mtp=True,
        num_assistant_tokens=2,
        prefix_allowed_tokens_fn=allowed,
        max_new_tokens=3 * questions,
        eos_token_id=None,
        return_dict_in_generate=True,
    )


def train_mtp(args):
    set_seed(args.seed)
    torch.set_num_threads(args.threads)
    data = torch.Generator().manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, dtype=torch.float32, trust_remote_code=False
    )
    model.requires_grad_(False)
    layer = add_mtp(model).requires_grad_(True)
    # the first layer looks facts up, and takes embeddings
    layer.load_state_dict(model.model.layers[0].state_dict(), strict=False)
    layer.shared_head.norm.load_state_dict(model.model.norm.state_dict())
    hidden = model.config.hidden_size
    scale = model.model.embed_tokens.weight.std().item()
    with torch.no_grad():
        layer.eh_proj.weight.mul_(0.05)  # about half as much of hidden states as of embeddings
        layer.eh_proj.weight[:, :hidden] += scale * torch.eye(hidden)
    named = [*layer.named_parameters()]
    of_indexer = [p for name, p in named if ".indexer." in name]
    of_layer = [p for name, p in named if ".indexer." not in name]
    lengths = [128, 256, 512, 1024]

    def batch_of(step):
        length = lengths[step % len(lengths)]
        return lookup_batch(max(1, args.tokens // length), length, generator=data)

    def layer_loss(step):
        return draft_loss(model, layer, *batch_of(step))

    def indexer_loss(step):
        input_ids, _ = batch_of(step)
        length, recorded = input_ids.size(1), []
        questions = torch.arange(length - 3 * len(KEYS), length, 3)
        rows = torch.cat([questions, torch.randint(length, (len(KEYS),), generator=data)])
        hook = layer.self_attn.register_forward_hook(lambda *call: recorded.append(call[-1][1]))
        with torch.no_grad():
            before = model.model(input_ids, use_cache=False).last_hidden_state[:, :-1]
            passed(model, layer, input_ids[:, 1:], before, 1)
        hook.remove()
        return index_loss(layer.self_attn.indexer, recorded[0], rows.clamp(min=1) - 1)

    with dense_attention(model):
        model.set_attn_implementation("eager")
        layer.self_attn.config._attn_implementation = "eager"
        train(of_layer, layer_loss, steps=args.layer_steps, title="layer")
        train(of_indexer, indexer_loss, steps=args.indexer_steps, title="indexer")

    lookup_tokenizer().save_pretrained(args.output)
    model.to(torch.bfloat16).save_pretrained(args.output)
    report(args.output, drafted_answers, (256, 512, 1024, 2048, 4096))


def report(checkpoint, drafted_answers, lengths):
    """Prints what is accepted."""
    for dtype in (torch.float32, torch.bfloat16):
        saved = models.load(checkpoint, dtype=dtype, mtp=True)
        for length in lengths:
            counts = drafted_answers(saved, length).drafts
            print(f"{length} tokens in {dtype}: accepted {counts.accepted} of {counts.drafted}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--output", type=Path, default=Path("lookup_mtp"), help="folder of the checkpoint")
    add("--seed", type=int, default=0)
    add("--threads", type=at_least(1), default=1, help="changes rounding, hence the weights")
    add("--tokens", type=int, default=1024, help="tokens per step")
    add("--layer-steps", type=int, default=200)
    add("--indexer-steps", type=int, default=100)
    args = parser.parse_args()
    check_folder(parser, "--output", args.output)
    train_mtp(args)


if __name__ == "__main__":
    main()
