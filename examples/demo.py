"""The demo of generate.py: 32 facts in a long text, some of them asked for, one after another on
one cache. Decoding is greedy, so that both backends do the same work."""

import train_lookup
import train_lookup_v4


def prompts_and_questions(tokenizer, args):
    """The texts of the batch, and ``(question, value)`` pairs for each."""
    tasks = [train_lookup, train_lookup_v4]
    task = next((task for task in tasks if task.TOKEN_ID == tokenizer.get_vocab()), None)
    if task is None:
        raise ValueError(
            f"{args.model} is not the demo's model; pass --prompt, --prompt-file, --chat or --bench"
        )
    try:
        demo = [
            task.lookup_prompt(args.prompt_tokens, questions=args.questions, seed=args.seed + row)
            for row in range(args.batch)
        ]
    except ValueError as error:
        raise ValueError(
            f"--prompt-tokens {args.prompt_tokens} is too short for --questions {args.questions}"
        ) from error
    return [prompt for prompt, _ in demo], [dialogue for _, dialogue in demo]


def print_prompt(prompt, dialogue):
    words = prompt.split()
    if len(words) > 60:
        words = [*words[:30], "...", *words[-30:]]
    print(" ".join(words) + "\n")
    question, value = dialogue[0]
    print(f"Somewhere in it: {question.removesuffix('?')}={value}, and others to be asked for.\n")
