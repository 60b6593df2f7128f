"""A multiple-choice evaluation as lm-evaluation-harness does it: log probabilities of each answer, from `echo`.

    pip install openai
    python examples/evaluate.py

The requests are those of its `local-completions`: prompts as token ids, echo, logprobs 1, max_tokens 1. The harness
itself runs against the gateway, too: docs/clients.md. OPENAI_BASE_URL: by default http://127.0.0.1:8000/v1.
"""

import os

from openai import OpenAI

TASK = [
    ("The capital of France is", [" Paris", " Rome", " Berlin", " Madrid"], 0),
    ("The opposite of hot is", [" blue", " cold", " seven", " fast"], 1),
    ("Two plus two equals", [" nine", " a dog", " four", " Paris"], 2),
    ("The sun rises in the", [" kitchen", " table", " shoe", " east"], 3),
]
client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "-"),
)
model = os.environ.get("MODEL") or client.models.list().data[0].id
root = str(client.base_url).removesuffix("/v1/")


def tokens(text: str) -> list[int]:
    asked = {"model": model, "prompt": text, "add_special_tokens": False}
    return client.post(f"{root}/tokenize", body=asked, cast_to=dict)["tokens"]


def loglikelihoods(context: str, endings: list[str]) -> list[tuple[float, bool]]:
    """Of each ending after the context: its log probability, and whether greedy decoding would have said it."""
    start = len(tokens(context))
    answer = client.completions.create(
        model=model,
        prompt=[tokens(context + ending) for ending in endings],
        temperature=0,
        max_tokens=1,
        logprobs=1,
        echo=True,
        seed=1234,
    )
    found = []
    for choice in sorted(answer.choices, key=lambda choice: choice.index):
        scored = choice.logprobs
        said = slice(start, -1)  # without the context, and without the token that max_tokens=1 generates
        greedy = all(
            token == max(top, key=top.get)
            for token, top in zip(scored.tokens[said], scored.top_logprobs[said], strict=True)
        )
        found.append((sum(scored.token_logprobs[said]), greedy))
    return found


right = 0
for context, endings, expected in TASK:
    scores = [score for score, _ in loglikelihoods(context, endings)]
    chosen = scores.index(max(scores))
    right += chosen == expected
    print(f"{context}{endings[chosen]}  {scores[chosen]:.2f}")
print(f"accuracy {right}/{len(TASK)}")
