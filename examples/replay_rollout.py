"""One step of GRPO on the ops, with what the rollout chose replayed in training.

A policy gradient weighs each token by the ratio of its probability in training to that in the
rollout, 1 before the first update. The ratio also depends on the keys that indexers select and on
the experts that routers choose, which other weights, kernels or batches change. This example
samples several answers to each of some questions with a lookup checkpoint (examples/checkpoints),
and prints how far log-ratios are from 0:

- ``replay``: training attends to the recorded keys;
- ``other indexer, replay``: the same after noise on the indexers, which stands for whatever makes
  training select otherwise; the same bits, as no indexer chooses;
- ``other indexer``: without replay, the indexers with noise select;
- ``other router, replay``, of models with routed experts, as lookup_v4: after noise on the routers
  alone. Tokens pass through the recorded experts, whose weights the router gives;
- ``other router, keys``: the same with the keys replayed alone. The routers choose.

Here the ops give a token the same bits in a decode step and in training. So the ratio with replay
is 1 to the bit where the matrix products of torch do so, too: on an AMD EPYC (Zen 3, torch
2.13) for 4 sequences or more. The products of a decode step have a row per sequence, and those of 1
to 3 rows sum in another order: log-ratios up to 3e-6. A model that is patched with
``batch_invariant=True`` has ratios of 1 anywhere (docs/reliability.md).

Then it takes one step with advantages normalised by group; the reward is 1 if the first new token
is the right value. No ratio is clipped, as all are 1. The indexers keep their weights: no gradient
passes a selection.

    python examples/replay_rollout.py
    python examples/replay_rollout.py --model examples/checkpoints/lookup_v4 --prompt-tokens 256
"""

from options import Help, at_least, one_line_errors  # first; options.py says why

# isort: split
import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import train_lookup
import train_lookup_v4
from transformers import set_seed

from custom_pypto import models


def rollout(model, prompts, args):
    """The samples with their prompts, the logits of the new tokens, and what the model chose."""
    with models.record_indices(model, experts=True) as record:
        done = model.eval().generate(
            prompts,
            do_sample=True,
            temperature=args.temperature,
            top_k=0,
            max_new_tokens=args.new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return done.sequences, torch.stack(done.logits, 1), record


def logits_in_training(model, ids, args, record=None, experts=None):
    """The logits of the new tokens; the last token is not fed, as in the rollout."""
    replay = models.replay_indices
    with nullcontext() if record is None else replay(model, record, experts=experts):
        return model.train()(ids[:, :-1]).logits[:, -args.new_tokens :]


def log_probabilities(logits, tokens, args):
    """Of ``tokens`` ``[B, N]`` in ``logits`` ``[B, N, V]``."""
    return (logits / args.temperature).log_softmax(-1).gather(2, tokens[..., None]).squeeze(2)


@torch.no_grad()
def disturb(model, part, noise):
    """Adds noise to the weights of modules of this name, ``"indexer"`` or ``"gate"``."""
    for name, weight in model.named_parameters():
        if f".{part}." in name and weight.numel() > 1:
            weight += noise * weight.std() * torch.randn_like(weight)


def advantages_of(rewards):
    """Rewards ``[prompts, samples]``, normalised in the group of each prompt."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + 1e-6)


def print_distance(title, log_ratio):
    distances = log_ratio.abs()
    mean = f", mean {distances.mean():.1e}" if distances.any() else ", equal to the bit"
    print(f"{title:<22} largest |log-ratio| {distances.max():.1e}{mean}")


def parser_of(description, temperature, of_model):
    parser = argparse.ArgumentParser(description=description, formatter_class=Help)
    add = parser.add_argument
    here = Path(__file__).resolve().parent
    add("--model", type=Path, default=here / "checkpoints/lookup", help=of_model)
    add("--prompts", type=at_least(1), default=4)
    add("--samples", type=at_least(2), default=8, help="per prompt, at least 2")
    add("--prompt-tokens", type=at_least(33), default=96, help="at least 33")
    add("--new-tokens", type=at_least(1), default=8)
    add("--temperature", type=float, default=temperature)
    help = "on indexers and routers, of their standard deviation"
    add("--noise", type=float, default=0.5, help=help)
    add("--seed", type=int, default=0)
    return parser


def prepared(args):
    """The model, patched to train on the ops, prompts, and the right answer of each sample."""
    set_seed(args.seed)
    with one_line_errors():
        model = models.load(args.model, dtype=torch.float32)
    models.use_custom_pypto(model, training="ops")
    task = train_lookup_v4 if model.config.model_type == "deepseek_v4" else train_lookup
    with one_line_errors():
        texts, _ = task.lookup_batch(
            args.prompts, args.prompt_tokens + 2, questions=1, seed=args.seed
        )
    return model, texts[:, :-2], texts[:, -2:-1].repeat_interleave(args.samples, 0)


def main():
    parser = parser_of(__doc__, 3.0, "made by train_lookup.py or train_lookup_v4.py")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--threads", type=at_least(1), default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, prompts, answers = prepared(args)
    model.generation_config.eos_token_id = None  # all samples get the same length
    prompts = prompts.repeat_interleave(args.samples, 0)
    ids, logits, record = rollout(model, prompts, args)
    new_tokens = ids[:, -args.new_tokens :]
    old = log_probabilities(logits, new_tokens, args)

    def training_log_probabilities(record=None, experts=None):
        logits = logits_in_training(model, ids, args, record, experts)
        return log_probabilities(logits, new_tokens, args)

    @torch.no_grad()
    def right_answers():
        first = logits_in_training(model, ids, args, record)[:, :1]
        return log_probabilities(first, answers, args).exp().mean()

    weights = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        print_distance("replay", training_log_probabilities(record) - old)
        disturb(model, "indexer", args.noise)
        print_distance("other indexer, replay", training_log_probabilities(record) - old)
        print_distance("other indexer", training_log_probabilities() - old)
        model.load_state_dict(weights)
        if record.experts:
            disturb(model, "gate", args.noise)
            print_distance("other router, replay", training_log_probabilities(record) - old)
            print_distance("other router, keys", training_log_probabilities(record, False) - old)
    model.load_state_dict(weights)

    rewards = (new_tokens[:, :1] == answers).float().view(args.prompts, args.samples)
    advantages = advantages_of(rewards).view(-1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    before = right_answers()
    ratio = (training_log_probabilities(record) - old).exp()
    (-ratio * advantages).mean().backward()
    optimizer.step()
    print(f"rewards of the groups  {' '.join(f'{x:.2f}' for x in rewards.mean(1).tolist())}")
    print(f"right answers          probability {before:.4f}, after the step {right_answers():.4f}")


if __name__ == "__main__":
    main()
