"""OpenAI's own client: which of its classes our errors become, and what each tells. docs/errors.md has all reasons.

    pip install openai
    python examples/openai_errors.py

OPENAI_BASE_URL: by default http://127.0.0.1:8000/v1.
"""

import os

import openai

client = openai.OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "-"),
    max_retries=0,  # by default the client tries 429 and 503 again by itself, when `retry-after` says
)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Hello"}]


def show(**options: object) -> None:
    try:
        client.chat.completions.create(**{"model": model, "messages": messages, "max_tokens": 4, **options})
    except openai.APIStatusError as error:
        print(f"{type(error).__name__} {error.status_code} {error.code} {error.param}: {error.message}")
        print(f"  request {error.request_id}")  # x-request-id: name it when you ask the operator


show(temperature=3)
show(model="no-such-model")
show(messages=[{"role": "user", "content": "again " * 20000}])
show(extra_body={"wibble": 1})
show(
    messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
)
