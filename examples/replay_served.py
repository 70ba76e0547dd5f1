"""Replays what a server of vLLM selected: a rollout served, a policy gradient computed on it.

The server answers questions of the lookup checkpoint, several samples for each, and says which
positions each token attended to. Training attends to the same ones. Prints

- how many of the served selections are those that the model makes itself of the same tokens;
- the largest distance of a log-ratio, training over server, from 0, with replay;
- the same after noise on the indexers: equal to the bit with replay, as no indexer chooses, and far
  off without;
- the norm of the gradient of a step of GRPO on them.

In one terminal the server, in float32 so that rounding chooses nothing, in another this program:

    bash run.sh serve examples/checkpoints/lookup --dtype float32 --enable-return-indexer-topk
    python examples/replay_served.py
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
    """Token ids, log-probabilities of the new ones, and selections of all samples."""
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
    arrays = [np.load(io.BytesIO(base64.b64decode(c["indexer_topk"]))) for c in choices]
    return ids, logprobs, torch.from_numpy(np.stack(arrays))


def log_probabilities(model, ids, args):
    """Of the new tokens, as the server reports them: before the temperature."""
    logits = model(ids[:, :-1]).logits[:, -args.new_tokens :]
    return logits.log_softmax(-1).gather(2, ids[:, -args.new_tokens :, None]).squeeze(2)


def main():
    parser = parser_of(__doc__, 2.0, "what the server serves")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    args = parser.parse_args()
    model, prompts, answers = prepared(args)
    ids, old, selections = served(args, prompts)

    with torch.no_grad(), models.record_indices(model) as own:
        model.eval()(ids[:, :-1], use_cache=True)
    own = own.indices
    record = models.Record(dict(zip(own, selections.unbind(2), strict=True)))
    same = [own[i].sort(-1).values == x.sort(-1).values for i, x in record.indices.items()]
    equal = torch.stack(same).all(-1)
    print(f"selections             {equal.sum()} of {equal.numel()} are the model's own")

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
