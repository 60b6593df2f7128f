"""OpenAI's own client with a picture, as a data: URI.

    pip install openai
    python examples/openai_image.py picture.png "What colour is the background?"

OPENAI_BASE_URL: by default http://127.0.0.1:8000/v1.
"""

import base64
import mimetypes
import os
import sys
from pathlib import Path

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "-"),
)
path = Path(sys.argv[1])
question = sys.argv[2] if sys.argv[2:] else "What colour is the background?"
kind = mimetypes.guess_type(path.name)[0] or "image/png"
url = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"

# /v1/models tells which take images.
model = next(model.id for model in client.models.list() if getattr(model, "images", False))
parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=16
)
print(answer.choices[0].message.content)
print(f"{answer.usage.prompt_tokens} prompt tokens", file=sys.stderr)
