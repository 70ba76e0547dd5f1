"""Replays what a server of vLLM chose: a rollout served, a policy gradient computed on it.

The server answers questions of a lookup checkpoint, several samples for each, and says which
positions each token attended to and, of a model with routed experts, which of them it passed
through. Training repeats both. Prints

- how many of the served choices are those that the model makes itself of the same tokens;
- the largest distance of a log-ratio, training over server, from 0, with replay;
- the same after noise on the indexers: equal to the bit with replay, as no indexer chooses, and far
  off without;
- the norm of the gradient of a step of GRPO on them.

In one terminal the server, in float32 so that rounding chooses nothing, in another this program:

    bash run.sh serve examples/checkpoints/lookup --dtype float32 --enable-return-indexer-topk
    python examples/replay_served.py

With routed experts, which replies have by a flag more:

    bash run.sh serve examples/checkpoints/lookup_v4 --dtype float32 \
        --enable-return-indexer-topk --enable-return-routed-experts
    python examples/replay_served.py --model examples/checkpoints/lookup_v4 --prompt-tokens 256
"""

import options  # noqa: F401  # first; options.py says why

# isort: split
import base64
import io
import json
import urllib.error
import urllib.request

import numpy as np
import torch
from replay_rollout import advantages_of, disturb, parser_of, prepared, print_distance

from custom_pypto import models


def served(args, prompts: torch.Tensor):
    """Token ids, log-probabilities of the new ones, and what was chosen, of all samples: selections
    ``[B, T, layers, K]``, and experts ``[B, T, layers, k]`` or None."""
    request = dict(
        model=args.model.resolve().name,
        prompt=prompts.tolist(),
        n=args.samples,
        max_tokens=args.new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        logprobs=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    url = f"{args.url}/v1/completions"
    body, kind = json.dumps(request).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, kind)) as reply:
            choices = json.load(reply)["choices"]
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}: {error} {error.read().decode()}") from error
    except urllib.error.URLError as error:
        raise SystemExit(f"--url {args.url}: {error.reason}; start bash run.sh serve") from error
    if not choices[0].get("indexer_topk"):
        raise SystemExit(f"{url} returns no selections; serve with --enable-return-indexer-topk")
    ids = torch.tensor([choice["prompt_token_ids"] + choice["token_ids"] for choice in choices])
    logprobs = torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices])
    names = ["indexer_topk", "routed_experts"]
    selections, experts = ([array_of(c.get(name)) for c in choices] for name in names)
    experts = None if experts[0] is None else torch.stack(experts)
    return ids, logprobs, torch.stack(selections), experts


def array_of(text: str | None) -> torch.Tensor | None:
    if text is None:
        return None
    return torch.from_numpy(np.load(io.BytesIO(base64.b64decode(text))).astype(np.int32))


def log_probabilities(model, ids, args):
    """Of the new tokens, as the server reports them: before the temperature."""
    logits = model(ids[:, :-1]).logits[:, -args.new_tokens :]
    return logits.log_softmax(-1).gather(2, ids[:, -args.new_tokens :, None]).squeeze(2)


def main():
    parser = parser_of(__doc__, 2.0, "what the server serves")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    args = parser.parse_args()
    model, prompts, answers = prepared(args)
    ids, old, selections, experts = served(args, prompts)

    with torch.no_grad(), models.record_indices(model, experts=experts is not None) as own:
        model.eval()(ids[:, :-1], use_cache=True)
    record = models.Record(dict(zip(own.indices, selections.unbind(2), strict=True)))
    if experts is not None:
        record.experts = {i: experts[:, :, i] for i in own.experts}
    for title, ours, theirs in [
        ("selections", own.indices, record.indices),
        ("experts", own.experts, record.experts),
    ]:
        same = [(ours[i].sort(-1).values == x.sort(-1).values).all(-1) for i, x in theirs.items()]
        equal, total = sum(x.sum() for x in same), sum(x.numel() for x in same)
        if total:
            print(f"{title:<22} {equal} of {total} are the model's own")

    model.train()
    with torch.no_grad(), models.replay_indices(model, record):
        replayed = log_probabilities(model, ids, args)
    print_distance("replay", replayed - old)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    disturb(model, "indexer", args.noise)
    with torch.no_grad():
        with models.replay_indices(model, record):
            again = log_probabilities(model, ids, args)
        print_distance("replay, other indexer", again - replayed)
        print_distance("other indexer", log_probabilities(model, ids, args) - replayed)
    model.load_state_dict(weights)

    rewards = (ids[:, -args.new_tokens, None] == answers).float().view(args.prompts, args.samples)
    with models.replay_indices(model, record):
        ratio = (log_probabilities(model, ids, args) - old).exp()
        (-ratio * advantages_of(rewards).view(-1, 1)).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    print(f"gradient of a step     norm {norm:.2e}")


if __name__ == "__main__":
    main()
