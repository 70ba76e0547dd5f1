"""Trains a tiny DeepSeek-V3.2 of four layers to look up a fact that only another one leads to.

The text is filler, in which one fact per owner and one per animal are hidden. A question names the
owner, and its answer is the colour of the animal:

    the quiet anna>otter sailor otter=red slowly crossed a wide harbour , ... anna? red . boris? ..

Facts and questions are one token each. An attention step from the question to ``anna>otter`` gives
the animal, and a second step, in a later layer, its colour. Before the first step nothing of the
question says otter: the indexer of a layer before it cannot select ``otter=red``, and a layer
behind it that attends to the selection of one before it answers by luck. So the model shows where
layers may share a selection, and where not (docs/shared_selections.md).

Layers 0 and 1 learn the first step, 2 and 3 the second. The two of a pair start with equal weights,
and most training steps leave out the attention of one of them, so that each can do the step. Behind
layer 1 the model is asked for the animal, too: without that it finds no answer in these few steps.

Three stages, of which the first two are those of train_lookup.py: the model with dense attention,
on growing texts; the indexers alone, on the KL divergence between the attention distribution and
the softmax of their scores; the model with sparse attention. Without the third the stop behind an
answer is often missed, as 4 keys are not the many that it saw in the first.

    python examples/train_lookup_hops.py    # about 5 minutes on one free core; writes lookup_hops/
    python examples/train_lookup_hops.py --measure examples/checkpoints/lookup_hops
"""

from options import parser_of, train_or_measure  # first; options.py says why

# isort: split
import contextlib
from functools import partial

import torch
import torch.nn.functional as F
import train_lookup
from train_lookup import (
    CLAUSE,
    END,
    PAD,
    UNK,
    VALUES,
    dense_attention,
    filler_of,
    index_loss,
    labels_of,
    lookup_tokenizer,
    train,
)
from transformers import DeepseekV32ForCausalLM, set_seed

OWNERS = (
    "anna boris clara david emma felix greta henri irene jonas karla luis maria nils olga pavel"
)
OWNERS, ANIMALS = OWNERS.split(), train_lookup.KEYS[:16]
HOLDS = [f"{owner}>{animal}" for owner in OWNERS for animal in ANIMALS]
FACTS = [f"{animal}={value}" for animal in ANIMALS for value in VALUES]
QUESTIONS = [f"{owner}?" for owner in OWNERS]
WORDS = [word for group in CLAUSE for word in group]
VOCABULARY = list(
    dict.fromkeys([PAD, UNK, END, *HOLDS, *FACTS, *QUESTIONS, *VALUES, *ANIMALS, *WORDS])
)
TOKEN_ID = {word: i for i, word in enumerate(VOCABULARY)}
FIRST_HOLD, FIRST_FACT, FIRST_QUESTION, FIRST_VALUE, FIRST_ANIMAL = (
    TOKEN_ID[words[0]] for words in (HOLDS, FACTS, QUESTIONS, VALUES, ANIMALS)
)
COUNT = len(OWNERS)
PATTERNS = ["FFFF", "FSFS", "FFSF", "FFSS", "FSSS"]
#: owners in a text, and its tokens with the questions, up to a share of the steps
CURRICULUM = [
    (0.3, [(4, 24)]),
    (0.45, [(4, 24), (8, 48)]),
    (0.6, [(8, 48), (16, 96)]),
    (1.0, [(16, 96), (16, 128), (16, 256), (16, 512)]),
]


def lookup_batch(batch, length, *, questions=COUNT, seed=None, generator=None, owners=COUNT):
    """A batch of the task: a text with two facts for each of ``owners``, then questions.

    Returns:
        ``input_ids`` and ``labels`` as those of train_lookup.py.
    """
    text = length - 3 * questions
    if not 1 <= questions <= owners <= COUNT or text < 2 * owners:
        raise ValueError(
            f"lookup_batch: length must be at least {2 * owners} + 3 * questions with 1 to "
            f"{min(owners, COUNT)} questions, got length={length}, questions={questions}"
        )
    if generator is None:
        generator = torch.Generator().manual_seed(seed)
    random = partial(torch.randperm, generator=generator)
    input_ids = torch.empty(batch, length, dtype=torch.int64)
    for row in input_ids:
        owner, animal = random(COUNT)[:owners], random(COUNT)[:owners]
        value = torch.randint(len(VALUES), (owners,), generator=generator)
        holds = FIRST_HOLD + owner * len(ANIMALS) + animal
        facts = torch.cat([holds, FIRST_FACT + animal * len(VALUES) + value])
        is_fact = torch.zeros(text, dtype=torch.bool)
        is_fact[random(text)[: len(facts)]] = True
        row[:text][is_fact] = facts[random(len(facts))]
        row[:text][~is_fact] = filler_of(text - len(facts), generator, TOKEN_ID)
        asked = random(owners)[:questions]
        answers = [FIRST_QUESTION + owner[asked], FIRST_VALUE + value[asked]]
        end = torch.full_like(asked, TOKEN_ID[END])
        row[text:] = torch.stack([*answers, end], dim=1).flatten()
    return input_ids, labels_of(input_ids, text)


def animals_of(input_ids):
    """At each question the id of its animal, elsewhere -100."""
    found = torch.full_like(input_ids, -100)
    for row, target in zip(input_ids, found, strict=True):
        holds = row[(row >= FIRST_HOLD) & (row < FIRST_FACT)] - FIRST_HOLD
        animal = torch.zeros(COUNT, dtype=torch.int64)
        animal[holds // len(ANIMALS)] = holds % len(ANIMALS)
        asks = (row >= FIRST_QUESTION) & (row < FIRST_VALUE)
        target[asks] = FIRST_ANIMAL + animal[row[asks] - FIRST_QUESTION]
    return found


lookup_prompt = partial(train_lookup.lookup_prompt, make=lookup_batch, vocabulary=VOCABULARY)
lookup_accuracy = partial(train_lookup.lookup_accuracy, make=lookup_batch, batch=8, questions=COUNT)


def lookup_model(index_topk):
    """Tiny in all dimensions, so that it trains in minutes."""
    model = train_lookup.lookup_model(
        index_topk,
        vocab_size=len(VOCABULARY),
        num_hidden_layers=4,
        first_k_dense_replace=4,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        index_n_heads=8,
        index_head_dim=64,
        pad_token_id=TOKEN_ID[PAD],
        eos_token_id=TOKEN_ID[END],
    )
    layers = model.model.layers
    for first, second in ((0, 1), (2, 3)):
        layers[second].load_state_dict(layers[first].state_dict())
    with (
        torch.no_grad()
    ):  # of a fact of two words the sum, so that a match of one is learnt for all
        owner, animal, value = (
            torch.randn(len(words), model.config.hidden_size) * model.config.initializer_range
            for words in (OWNERS, ANIMALS, VALUES)
        )
        for first, rows in (
            (FIRST_HOLD, (owner[:, None] + animal).flatten(0, 1)),
            (FIRST_FACT, (animal[:, None] + value).flatten(0, 1)),
            (FIRST_QUESTION, owner),
        ):
            model.model.embed_tokens.weight[first : first + len(rows)] = rows
    return model


@contextlib.contextmanager
def without_attention(model, layers):
    """Inside, the attention of these layers adds nothing."""
    hooks = [
        model.model.layers[layer].self_attn.register_forward_hook(
            lambda module, args, output: (torch.zeros_like(output[0]), *output[1:])
        )
        for layer in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def measure(output, lengths=(128, 256, 512)):
    """Prints the accuracy of the checkpoint by pattern of layers that share a selection."""
    from custom_pypto import models

    model = models.load(output, dtype=torch.float32)
    print("| tokens | " + " | ".join(PATTERNS) + " |")
    for length in lengths:
        accuracies = []
        for pattern in PATTERNS:
            models.use_custom_pypto(model, index_topk_pattern=pattern)
            cache = partial(models.PagedCache, model, 1, length)
            accuracies.append(lookup_accuracy(model, length, new_cache=cache))
        print(f"| {length} | " + " | ".join(f"{accuracy:.3f}" for accuracy in accuracies) + " |")


def train_lookup_hops(args):
    set_seed(args.seed)
    torch.set_num_threads(args.threads)
    data = torch.Generator().manual_seed(args.seed)
    model = lookup_model(args.index_topk)
    of_indexer = [p for name, p in model.named_parameters() if ".indexer." in name]
    of_model = [p for name, p in model.named_parameters() if ".indexer." not in name]

    def model_loss(step):
        sizes = next(sizes for end, sizes in CURRICULUM if step < end * args.model_steps)
        owners, length = sizes[step % len(sizes)]
        batch = args.tokens // length
        input_ids, labels = lookup_batch(
            batch, length, questions=owners, owners=owners, generator=data
        )
        # of each pair one layer, in one step of five none
        left_out = torch.randint(5, (2,), generator=data).tolist()
        left_out = [2 * pair + x % 2 for pair, x in enumerate(left_out) if x < 4]
        with without_attention(model, left_out):
            outputs = model.model(input_ids, use_cache=False, output_hidden_states=True)
        losses = []
        for hidden, targets in (
            (outputs.last_hidden_state[:, :-1], labels[:, 1:]),
            (model.model.norm(outputs.hidden_states[2]), animals_of(input_ids)),
        ):
            asked = targets >= 0
            losses.append(F.cross_entropy(model.lm_head(hidden[asked]), targets[asked]))
        return sum(losses)

    def indexer_loss(step):
        length = [96, 128, 256, 512][step % 4]
        input_ids, _ = lookup_batch(args.tokens // length, length, generator=data)
        answers = torch.arange(length - 3 * COUNT, length)  # with questions and stops
        others = torch.randint(length, (COUNT,), generator=data)
        with torch.no_grad():
            attentions = model(input_ids, use_cache=False, output_attentions=True).attentions
        return sum(
            index_loss(layer.self_attn.indexer, attention, torch.cat([answers, others]))
            for layer, attention in zip(model.model.layers, attentions, strict=True)
        )

    with dense_attention(model):
        model.set_attn_implementation("sdpa")
        train(of_model, model_loss, steps=args.model_steps, title="model")
        model.set_attn_implementation("eager")  # sdpa does not give the attention distribution
        train(of_indexer, indexer_loss, steps=args.indexer_steps, title="indexer")
    model.set_attn_implementation("sdpa")
    train(
        of_model,
        lambda step: model_loss(args.model_steps - 1 - step % 4),  # the last, long texts
        steps=args.sparse_steps,
        title="sparse",
        learning_rate=1e-3,
    )
    lookup_tokenizer(TOKEN_ID).save_pretrained(args.output)
    model.to(torch.bfloat16).save_pretrained(args.output)
    for length in (128, 256, 512):
        saved = DeepseekV32ForCausalLM.from_pretrained(args.output, dtype=torch.float32)
        accuracy = lookup_accuracy(saved, length)
        with dense_attention(saved):
            dense = lookup_accuracy(saved, length)
        print(f"{length} tokens: accuracy {accuracy:.3f}, {dense:.3f} with dense attention")
    measure(args.output)


if __name__ == "__main__":
    parser = parser_of(
        __doc__,
        output="lookup_hops",
        index_topk=4,
        tokens=2048,
        model_steps=700,
        indexer_steps=300,
        sparse_steps=150,
    )
    train_or_measure(parser, train_lookup_hops, measure)
