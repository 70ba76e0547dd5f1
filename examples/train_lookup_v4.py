"""Trains a tiny DeepSeek-V4 to look facts up in a long text, as train_lookup.py trains a V3.2.

The text is sentences of 8 words: a subject and the colours of its hat, coat, trousers and shoes.
A question is the animal's own token, so that one match of queries and keys is learnt for all
animals; its answer is the colour of the coat:

    the quiet old otter red blue green white  that tired young baker orange ...  otter blue .

DeepSeek-V4 attends to the last 128 tokens and, in a layer with an indexer (compressed sparse
attention), to ``index_topk`` of the compressed rows, each made of two windows of 4 tokens. No
animal is in the 128 tokens before the questions, and 128 tokens, the window of heavily compressed
attention, hold the colours of 16 subjects. So an answer is right only if

- the indexer selects the row of the animal's sentence,
- this row joins the subject, last token of its first window, to the second token of its second
  window: a compressor off by a token reads hat or trousers, off by a window another subject's coat.

Otherwise it is right by chance (1 of 8).

Two stages as in train_lookup.py: the model with every compressed row selected, on growing texts;
then the indexer alone, on the KL divergence between the attention to the compressed rows and the
softmax of its scores.

    python examples/train_lookup_v4.py    # about 15 minutes on one free core; writes lookup_v4/
    python examples/train_lookup_v4.py --measure examples/checkpoints/lookup_v4    # only measures
"""

from options import parser_of, train_or_measure  # first; options.py says why

# isort: split
import copy
from functools import partial

import torch
import train_lookup
from train_lookup import (
    CLAUSE,
    END,
    KEYS,
    PAD,
    UNK,
    VALUES,
    answer_loss,
    divergence,
    forward_replaced,
    labels_of,
    lookup_tokenizer,
    train,
)
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, set_seed

DETERMINERS, ADJECTIVES, PEOPLE = CLAUSE[:3]
VOCABULARY = [PAD, UNK, END, *KEYS, *VALUES, *PEOPLE, *DETERMINERS, *ADJECTIVES]
TOKEN_ID = {word: i for i, word in enumerate(VOCABULARY)}
SENTENCE, SUBJECT, COAT = 8, 3, 5  # words of a sentence; places in it
WINDOW = 128  # tokens a query reads uncompressed, its own included
RATIO = 4  # tokens per compressed row
# Lengths of texts up to a share of the steps: the first answers are found among 4 and 8 animals.
CURRICULUM = [(0.3, [44]), (0.55, [44, 88]), (0.75, [88, 176]), (1.0, [320, 512, 1024, 2048])]


def lookup_batch(batch, length, *, questions=8, seed=None, generator=None, gap=WINDOW):
    """A batch of the task: sentences, up to 32 of them about animals, then questions with answers.

    Returns:
        ``input_ids`` ``[batch, length]`` int64, the last ``3 * questions`` tokens of each row are
        animal, colour, ``.``, and the ``gap`` tokens before them are without animals; ``labels``
        of the same shape in transformers' convention (not shifted): the id at colours and their
        ``.``, -100 elsewhere.
    """
    text = length - 3 * questions
    places = (text - gap) // SENTENCE
    facts = min(len(KEYS), places)
    if not 1 <= questions <= facts:
        raise ValueError(
            f"lookup_batch: length must be at least {gap} + {SENTENCE + 3} * questions with 1 to "
            f"{len(KEYS)} questions, got length={length}, questions={questions}"
        )
    if generator is None:
        generator = torch.Generator().manual_seed(seed)
    input_ids = torch.empty(batch, length, dtype=torch.int64)
    for row in input_ids:
        sentences = _sentences(-(-text // SENTENCE), generator)
        key = TOKEN_ID[KEYS[0]] + torch.randperm(len(KEYS), generator=generator)[:facts]
        place = torch.randperm(places, generator=generator)[:facts]
        sentences[place, SUBJECT] = key
        row[:text] = sentences.flatten()[:text]
        asked = torch.randperm(facts, generator=generator)[:questions]
        answer = sentences[place[asked], COAT]
        end = torch.full_like(asked, TOKEN_ID[END])
        row[text:] = torch.stack([key[asked], answer, end], dim=1).flatten()
    return input_ids, labels_of(input_ids, text)


def _sentences(count, generator):
    """Sentences about people ``[count, 8]``."""
    groups = [DETERMINERS, ADJECTIVES, ADJECTIVES, PEOPLE, *[VALUES] * 4]
    return torch.stack(
        [
            TOKEN_ID[words[0]] + torch.randint(len(words), (count,), generator=generator)
            for words in groups
        ],
        dim=1,
    )


lookup_prompt = partial(train_lookup.lookup_prompt, make=lookup_batch, vocabulary=VOCABULARY)
lookup_accuracy = partial(train_lookup.lookup_accuracy, make=lookup_batch, batch=16, questions=8)


def lookup_model(index_topk):
    """Attention and indexer at their published dimensions but for 2 heads; the rest is tiny."""
    config = DeepseekV4Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        num_hidden_layers=3,
        layer_types=[
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
        num_attention_heads=2,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=32,
        index_topk=index_topk,
        mlp_layer_types=["moe"] * 3,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        initializer_range=0.05,
        pad_token_id=TOKEN_ID[PAD],
        bos_token_id=None,
        eos_token_id=TOKEN_ID[END],
    )
    return DeepseekV4ForCausalLM(config)


def attentions(model):
    return [layer.self_attn for layer in model.model.layers]


def compressors(model):
    """The compressors with an indexer."""
    return [a.compressor for a in attentions(model) if hasattr(a.compressor, "indexer")]


def dense_attention(model):
    """Inside, the indexers select every complete row and record their inputs."""

    def select_all(indexer, hidden_states, q_residual, position_ids, *_):
        indexer.called_with = hidden_states, q_residual, position_ids
        complete = (position_ids[..., None] + 1) // RATIO
        row = torch.arange(complete.max())
        return row.where(row < complete, -1).expand(len(hidden_states), -1, -1)

    return forward_replaced([compressor.indexer for compressor in compressors(model)], select_all)


def index_scores(indexer, rows):
    """Scores ``[B, R, S / 4]`` of the recorded tokens ``rows`` ``[R]``, with a gradient."""
    scorer, scores = indexer.scorer, []

    def forward(q, keys, hidden_states):
        scores.append(type(scorer).forward(scorer, q[:, rows], keys, hidden_states[:, rows]))
        return q.new_zeros(*q.shape[:2], keys.shape[1])  # for a selection that nobody reads

    scorer.forward = forward
    type(indexer).forward(indexer, *indexer.called_with, None, None)
    del scorer.forward
    future = torch.arange(scores[0].shape[-1]) >= (rows[:, None] + 1) // RATIO
    return scores[0].masked_fill(future, torch.finfo(scores[0].dtype).min)


def index_loss(indexer, attention, rows):
    """KL(attention to compressed rows, summed over heads, normalised || softmax of the scores)."""
    return divergence(attention[:, :, rows, attention.shape[2] :], index_scores(indexer, rows))


def negate_index_weights(compressor):
    compressor.indexer.scorer.weights_proj.weight.neg_()


def shift_by_a_token(compressor):
    """Every token of a window gets the bias of the token before it."""
    compressor.position_bias.copy_(compressor.position_bias.roll(1, 0))


def shift_by_a_window(compressor):
    """The two halves, for the row of the next window and of the token's own, change places."""
    for weight in compressor.kv_proj.weight, compressor.gate_proj.weight:
        weight.copy_(weight.roll(compressor.head_dim, 0))
    compressor.position_bias.copy_(compressor.position_bias.roll(compressor.head_dim, 1))


DEFECTS = [negate_index_weights, shift_by_a_token, shift_by_a_window]


@torch.no_grad()
def broken(model, defect):
    """A copy of ``model`` with ``defect`` in every compressor that has an indexer."""
    twin = copy.deepcopy(model)
    for compressor in compressors(twin):
        defect(compressor)
    return twin


def measure(output, lengths=(256, 512, 1024, 2048)):
    """Prints the accuracy of the checkpoint, and of its broken twins."""
    model = DeepseekV4ForCausalLM.from_pretrained(output, dtype=torch.float32)
    reduced = DeepseekV4ForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
    columns = {"bfloat16": reduced, "float32": model}
    columns |= {defect.__name__: broken(model, defect) for defect in DEFECTS}
    print("| tokens | every row | " + " | ".join(columns) + " |")
    for length in lengths:
        with dense_attention(model):
            accuracies = [lookup_accuracy(model, length)]
        accuracies += [lookup_accuracy(column, length) for column in columns.values()]
        print(f"| {length} | " + " | ".join(f"{accuracy:.3f}" for accuracy in accuracies) + " |")


def train_lookup_v4(args):
    set_seed(args.seed)
    torch.set_num_threads(args.threads)
    data = torch.Generator().manual_seed(args.seed)
    model = lookup_model(args.index_topk)
    of_indexer = [p for name, p in model.named_parameters() if ".indexer." in name]
    of_model = [p for name, p in model.named_parameters() if ".indexer." not in name]

    def batch_of(length):
        gap = WINDOW if length > 2 * WINDOW else 0  # none in the first, short texts
        questions = min(len(KEYS), (length - gap) // (SENTENCE + 3))
        rows = max(1, args.tokens // length)
        return lookup_batch(rows, length, questions=questions, gap=gap, generator=data)

    def model_loss(step):
        lengths = next(lengths for end, lengths in CURRICULUM if step < end * args.model_steps)
        return answer_loss(model, *batch_of(lengths[step % len(lengths)]))

    def indexer_loss(step):
        length = [320, 512, 1024, 2048][step % 4]
        input_ids, labels = batch_of(length)
        questions = (labels[0] > TOKEN_ID[END]).nonzero().flatten() - 1
        others = torch.randint(RATIO, length, (len(questions),), generator=data)
        with torch.no_grad():
            outputs = model(input_ids, use_cache=False, output_attentions=True)
        return sum(
            index_loss(layer.compressor.indexer, weights, torch.cat([questions, others]))
            for layer, weights in zip(attentions(model), outputs.attentions, strict=True)
            if hasattr(layer.compressor, "indexer")
        )

    with dense_attention(model):
        train(of_model, model_loss, steps=args.model_steps, title="model", learning_rate=3e-3)
        train(of_indexer, indexer_loss, steps=args.indexer_steps, title="indexer")
    lookup_tokenizer(TOKEN_ID).save_pretrained(args.output)
    model.to(torch.bfloat16).save_pretrained(args.output)
    measure(args.output)


if __name__ == "__main__":
    parser = parser_of(
        __doc__,
        output="lookup_v4",
        index_topk=16,
        tokens=1056,
        model_steps=700,
        indexer_steps=200,
    )
    train_or_measure(parser, train_lookup_v4, measure)
