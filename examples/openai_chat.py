"""OpenAI's own client, unmodified: streaming with usage, several choices, log probabilities, token-id prompts.

    pip install openai
    python examples/openai_chat.py

OPENAI_BASE_URL: by default http://127.0.0.1:8000/v1. OPENAI_API_KEY: a key, where one is needed.
"""

import math
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "-"),
)
model = os.environ.get("MODEL") or client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the capital of France?"}]

# A stream. The last chunk has the usage and no choices.
for chunk in client.chat.completions.create(
    model=model, messages=messages, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        details = chunk.usage.prompt_tokens_details
        print(
            f"\n{chunk.usage.completion_tokens} tokens; {details.cached_tokens} of {chunk.usage.prompt_tokens} cached"
        )

# Several choices of one prompt, which is computed once. The seed makes them the same each time.
answer = client.chat.completions.create(
    model=model, messages=messages, temperature=0.8, seed=1, n=2, max_completion_tokens=8
)
for choice in answer.choices:
    print(f"[{choice.index}] {choice.finish_reason}: {choice.message.content!r}")

# How sure was it, and of what else had it thought?
answer = client.chat.completions.create(
    model=model, messages=messages, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
)
for token in answer.choices[0].logprobs.content:
    others = ", ".join(f"{each.token!r} {math.exp(each.logprob):.0%}" for each in token.top_logprobs)
    print(f"{token.token!r} {math.exp(token.logprob):.0%} of {others}")

# Completions take text, token ids, and lists of either.
answer = client.completions.create(
    model=model, prompt=["The capital of France is", "The capital of Italy is"], temperature=0, max_tokens=4
)
for choice in answer.choices:
    print(f"[{choice.index}]{choice.text!r}")

# The responses API, with OpenAI's events.
question = "What is the capital of France?"
with client.responses.stream(model=model, input=question, temperature=0, max_output_tokens=24) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
    print(f"\n{stream.get_final_response().usage.output_tokens} tokens")
