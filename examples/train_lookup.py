"""Trains a tiny DeepSeek-V3.2, indexer included, to look facts up in a long text.

The text is filler with one fact per animal hidden in it; behind it come questions and answers:

    the quiet sailor otter=red slowly crossed a wide harbour , ... otter? red . whale? blue .

A fact and a question are one token each, so one attention step from the question to the right
fact answers it - and only if the indexer has put that fact among the ``index_topk`` keys that
sparse attention reads. With a wrong indexer or attention, answers are right by chance (1 of 8).

Two stages, as DeepSeek-V3.2 (arXiv:2512.02556, section 2.1) trains its own indexer:

1. the model with dense attention, on growing contexts;
2. the indexer alone, on the KL divergence between the attention distribution (summed over heads,
   normalised) and the softmax of its scores.

    python examples/train_lookup.py            # about 10 minutes on two cores; writes lookup/

The checkpoint of this repository is in examples/checkpoints/lookup.
"""

from options import Help, at_least, check_folder  # first; options.py says why

# isort: split
import argparse
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from tqdm import tqdm
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DynamicCache,
    PreTrainedTokenizerFast,
    set_seed,
)
from transformers.models.deepseek_v32.modeling_deepseek_v32 import apply_rotary_pos_emb

KEYS = (
    "otter whale heron badger lynx falcon beaver walrus gecko moose panda tiger raven stork bison "
    "koala camel zebra hyena lemur sloth tapir viper egret finch goose hippo llama mole newt ox yak"
).split()
VALUES = "red blue green yellow white black orange purple".split()
# One clause of filler is one word of each group in turn.
CLAUSE = [
    group.split()
    for group in (
        "the a this that",
        "old quiet young tired careful distant weary gentle",
        "sailor farmer teacher painter traveller baker doctor keeper",
        "slowly often rarely calmly",
        "watched crossed left found followed passed remembered described",
        "the a every another",
        "narrow empty wide silent broken frozen hidden sunlit",
        "harbour valley garden bridge meadow station village orchard",
        "near behind beyond beside",
        "winter dawn rain summer noon harvest twilight spring",
        ",",
    )
]
PAD, UNK, END = "<pad>", "<unk>", "."
PAIRS = [f"{key}={value}" for key in KEYS for value in VALUES]
QUESTIONS = [f"{key}?" for key in KEYS]
VOCABULARY = list(
    dict.fromkeys([PAD, UNK, END, *PAIRS, *QUESTIONS, *VALUES, *(w for g in CLAUSE for w in g)])
)
TOKEN_ID = {word: i for i, word in enumerate(VOCABULARY)}
# Pairs, questions and values are contiguous in the vocabulary.
FIRST_PAIR, FIRST_QUESTION, FIRST_VALUE = (
    TOKEN_ID[words[0]] for words in (PAIRS, QUESTIONS, VALUES)
)


def lookup_batch(batch, length, *, questions=32, seed=None, generator=None):
    """A batch of the task: a text with every animal's fact in it, then questions with answers.

    Returns:
        ``input_ids`` ``[batch, length]`` int64, the last ``3 * questions`` tokens of each row are
        question, value, ``.``; ``labels`` of the same shape in transformers' convention (not
        shifted): the id at values and their ``.``, -100 elsewhere.
    """
    text = length - 3 * questions
    if not 1 <= questions <= len(KEYS) or text < len(KEYS):
        raise ValueError(
            f"lookup_batch: length must be at least {len(KEYS)} + 3 * questions with 1 to "
            f"{len(KEYS)} questions, got length={length}, questions={questions}"
        )
    if generator is None:
        generator = torch.Generator().manual_seed(seed)
    input_ids = torch.empty(batch, length, dtype=torch.int64)
    filler = text - len(KEYS)
    for row in input_ids:
        key = torch.randperm(len(KEYS), generator=generator)
        value = torch.randint(len(VALUES), (len(KEYS),), generator=generator)
        is_fact = torch.zeros(text, dtype=torch.bool)
        is_fact[torch.randperm(text, generator=generator)[: len(KEYS)]] = True
        row[:text][is_fact] = FIRST_PAIR + key * len(VALUES) + value
        row[:text][~is_fact] = filler_of(filler, generator)
        asked = torch.randperm(len(KEYS), generator=generator)[:questions]
        row[text:] = torch.stack(
            [
                FIRST_QUESTION + key[asked],
                FIRST_VALUE + value[asked],
                torch.full_like(asked, TOKEN_ID[END]),
            ],
            dim=1,
        ).flatten()
    return input_ids, labels_of(input_ids, text)


def labels_of(input_ids, text):
    """Labels for the answers and the ``.`` behind the first ``text`` tokens."""
    labels = torch.full_like(input_ids, -100)
    for place in (1, 2):
        labels[:, text + place :: 3] = input_ids[:, text + place :: 3]
    return labels


def filler_of(count, generator, token_id=TOKEN_ID):
    """``count`` ids of clauses without facts."""
    random = torch.randint(2**31, (count,), generator=generator)
    groups = [torch.tensor([token_id[word] for word in group]) for group in CLAUSE]
    filler = torch.empty(count, dtype=torch.int64)
    for i, group in enumerate(groups):
        filler[i :: len(groups)] = group[random[i :: len(groups)] % len(group)]
    return filler


def lookup_prompt(length, *, questions=16, seed=0, make=lookup_batch, vocabulary=VOCABULARY):
    """The text of one prompt of ``length`` tokens (without the questions), and its questions.

    Returns:
        the text, and a list of ``(question, value)`` words.
    """
    input_ids, _ = make(1, length + 3 * questions, questions=questions, seed=seed)
    words = [vocabulary[i] for i in input_ids[0].tolist()]
    return " ".join(words[:length]), list(
        zip(words[length::3], words[length + 1 :: 3], strict=True)
    )


@torch.no_grad()
def lookup_accuracy(
    model, length, *, batch=4, questions=32, seed=1_000_000, new_cache=None, make=lookup_batch
):
    """Share of the questions of a batch whose value the model ranks first.

    Every question follows the right answers to the earlier ones. The text goes through a cache in
    chunks, so that transformers' index scores, ``[64, chunk, length]`` float32, stay small;
    ``new_cache()`` makes the cache, transformers' ``DynamicCache`` by default.
    """
    # not above: vLLM's environment, whose tests take prompts from here, has an older transformers
    from custom_pypto.models import CACHE

    input_ids, labels = make(batch, length, questions=questions, seed=seed)
    right = asked = 0
    for ids, label in zip(input_ids.split(1), labels.split(1), strict=True):
        cache = new_cache() if new_cache else DynamicCache(config=model.config)
        guess = torch.cat(
            [model(chunk, **{CACHE: cache}).logits.argmax(-1) for chunk in ids.split(512, 1)],
            dim=1,
        )
        is_value = label[:, 1:] > TOKEN_ID[END]
        right += (guess[:, :-1] == label[:, 1:])[is_value].sum().item()
        asked += is_value.sum().item()
    return right / asked


def lookup_model(index_topk, **sizes):
    """The ops at their published dimensions (latent 512, RoPE 64, indexer 64 x 128), else tiny.

    Args:
        sizes: other settings of the config.
    """
    settings = dict(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        index_topk=index_topk,
        index_n_heads=64,
        index_head_dim=128,
        max_position_embeddings=163840,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.05,
        pad_token_id=TOKEN_ID[PAD],
        bos_token_id=None,
        eos_token_id=TOKEN_ID[END],
    )
    return DeepseekV32ForCausalLM(DeepseekV32Config(**settings | sizes))


def lookup_tokenizer(token_id=TOKEN_ID):
    tokenizer = Tokenizer(models.WordLevel(token_id, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        padding_side="left",
        model_max_length=163840,
        clean_up_tokenization_spaces=False,
    )


@contextmanager
def forward_replaced(indexers, forward):
    """Inside, ``forward(indexer, ..)`` is the forward of each indexer."""
    for indexer in indexers:
        indexer.forward = partial(forward, indexer)
    try:
        yield indexers
    finally:
        for indexer in indexers:
            del indexer.forward


def dense_attention(model):
    """Inside, the indexers select every key and record their inputs."""

    def select_all(indexer, hidden, q_resid, position_embeddings, attention_mask, *_, **__):
        indexer.called_with = hidden, q_resid, position_embeddings
        every_key = torch.arange(attention_mask.shape[-1], dtype=torch.int32)
        return every_key.expand(*hidden.shape[:2], -1)

    return forward_replaced([layer.self_attn.indexer for layer in model.model.layers], select_all)


def index_scores(indexer, rows, hidden_states, q_resid, position_embeddings):
    """Scores ``[B, R, T]`` of the tokens ``rows`` ``[R]``; transformers' own has no gradient."""
    rope = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid[:, rows]).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    cos, sin = position_embeddings
    q_rope, _ = apply_rotary_pos_emb(
        q[..., :rope], q[..., :rope], cos[:, rows], sin[:, rows], unsqueeze_dim=2
    )
    k_rope, _ = apply_rotary_pos_emb(k[..., :rope], k[..., :rope], cos, sin, unsqueeze_dim=2)
    q = torch.cat([q_rope, q[..., rope:]], dim=-1)
    k = torch.cat([k_rope, k[..., rope:]], dim=-1).squeeze(2)
    weights = indexer.weights_proj(hidden_states[:, rows]) * indexer.n_heads**-0.5
    per_head = torch.einsum("brhd,btd->brht", q, k) * indexer.softmax_scale
    scores = torch.einsum("brh,brht->brt", weights, F.relu(per_head))
    keys = torch.arange(k.shape[1])
    return scores.masked_fill(keys > rows[:, None], torch.finfo(scores.dtype).min)


def index_loss(indexer, attention, rows):
    """KL(attention summed over heads, normalised || softmax of the index scores) at ``rows``."""
    return divergence(attention[:, :, rows], index_scores(indexer, rows, *indexer.called_with))


def divergence(attention, scores):
    """Of ``scores`` ``[B, R, T]`` from ``attention`` ``[B, H, R, T]``."""
    target = attention.sum(1)
    target = target / target.sum(-1, keepdim=True)
    return F.kl_div(scores.log_softmax(-1), target, reduction="none").sum(-1).mean()


def answer_loss(model, input_ids, labels):
    hidden, labels = model.model(input_ids, use_cache=False).last_hidden_state, labels[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[:, :-1][labels >= 0]), labels[labels >= 0])


def train(parameters, loss_of_step, *, steps, title, learning_rate=2e-3):
    """AdamW, linear warm-up, cosine decay to a twentieth."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    warm_up = LinearLR(optimizer, 0.02, total_iters=50)
    decay = CosineAnnealingLR(optimizer, steps - 50, learning_rate / 20)
    schedule = SequentialLR(optimizer, [warm_up, decay], [50])
    begin = time.perf_counter()
    with tqdm(range(steps), desc=title, disable=None) as progress:  # None: only on a terminal
        for step in progress:
            loss = loss_of_step(step)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            if step % 50 == 0:
                progress.set_postfix(loss=f"{loss.item():.3f}")
    print(f"{title}: {steps} steps in {time.perf_counter() - begin:.0f} s, loss {loss.item():.4f}")


def train_lookup(args):
    set_seed(args.seed)
    torch.set_num_threads(args.threads)
    data = torch.Generator().manual_seed(args.seed)
    model = lookup_model(args.index_topk)
    of_indexer = [p for name, p in model.named_parameters() if ".indexer." in name]
    of_model = [p for name, p in model.named_parameters() if ".indexer." not in name]

    def batch_of(length):
        return lookup_batch(max(1, args.tokens // length), length, generator=data)

    def model_loss(step):
        lengths = [160] if step < args.short_steps else [128, 256, 512, 1024, 2048]
        return answer_loss(model, *batch_of(lengths[step % len(lengths)]))

    def indexer_loss(step):
        length = [256, 512, 1024, 2048][step % 4]
        input_ids, _ = batch_of(length)
        questions = torch.arange(length - 3 * len(KEYS), length, 3)
        others = torch.randint(length, (len(KEYS),), generator=data)
        rows = torch.cat([questions, others])
        with torch.no_grad():
            attentions = model(input_ids, use_cache=False, output_attentions=True).attentions
        return sum(
            index_loss(layer.self_attn.indexer, attention, rows)
            for layer, attention in zip(model.model.layers, attentions, strict=True)
        )

    lengths = [256, 512, 1024, 2048, 4096]
    with dense_attention(model):
        model.set_attn_implementation("sdpa")
        train(of_model, model_loss, steps=args.model_steps, title="model")
        dense = [lookup_accuracy(model, length) for length in lengths]
        model.set_attn_implementation("eager")  # sdpa does not give the attention distribution
        train(of_indexer, indexer_loss, steps=args.indexer_steps, title="indexer")

    lookup_tokenizer().save_pretrained(args.output)
    model.to(torch.bfloat16).save_pretrained(args.output)
    for dtype in (torch.float32, torch.bfloat16):
        saved = DeepseekV32ForCausalLM.from_pretrained(args.output, dtype=dtype)
        for length, dense_accuracy in zip(lengths, dense, strict=True):
            print(
                f"{length} tokens: accuracy {lookup_accuracy(saved, length):.3f} with index_topk "
                f"{args.index_topk} in {dtype}, {dense_accuracy:.3f} with dense attention"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--output", type=Path, default=Path("lookup"), help="folder of the checkpoint")
    add("--seed", type=int, default=0)
    add("--threads", type=at_least(1), default=2, help="changes rounding, hence the weights")
    add("--index-topk", type=at_least(1), default=16)
    add("--tokens", type=int, default=2048, help="tokens per step")
    add("--model-steps", type=int, default=1700)
    add("--short-steps", type=int, default=1000, help="first model steps on short texts")
    add("--indexer-steps", type=int, default=400)
    args = parser.parse_args()
    check_folder(parser, "--output", args.output)
    train_lookup(args)


if __name__ == "__main__":
    main()
