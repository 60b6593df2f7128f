"""The token ids of a request's prompt, each image with as many placeholders as its embedding has rows."""

import functools
from collections.abc import Sequence
from typing import Any

from common.models.tokenizer import Tokenizer
from common.models.vision.spec import Size, VisionSpec
from epd.v1 import generation_pb2
from services.gateway.tools.prompt import fields, with_tools
from services.gateway.tools.schema import offer


def prompt_ids(
    request: generation_pb2.GenerateRequest, tokenizer: Tokenizer, spec: VisionSpec | None, sizes: Sequence[Size]
) -> list[int]:
    """spec: None for a text model. sizes: of the request's images, in order.

    Raises InvalidArgument for text that is not valid Unicode, a chat that the template refuses, and unless the prompt
    has as many image markers as there are images.
    """
    match request.WhichOneof("prompt"):
        case "text":
            special = not request.HasField("add_special_tokens") or request.add_special_tokens
            text = request.text if spec is None else spec.expand_text(request.text, sizes, field="prompt")
            return tokenizer.encode(text, add_special_tokens=special)
        case "token_ids":
            ids = list(request.token_ids.ids)
            encode = functools.partial(tokenizer.encode, add_special_tokens=False)
            return ids if spec is None else spec.expand_ids(ids, sizes, encode, field="prompt")
        case _:
            chat = request.chat
            messages, tools = with_tools(chat_messages(chat, tokenizer, spec), offer(chat).told, tokenizer)
            text = tokenizer.render_chat(
                messages,
                tools=tools,
                add_generation_prompt=chat.add_generation_prompt or not chat.HasField("add_generation_prompt"),
                continue_final_message=chat.continue_final_message,
            )
            if spec is not None:
                text = spec.expand_text(text, sizes, field="messages")
            return tokenizer.encode(text, add_special_tokens=False)


def chat_messages(chat: generation_pb2.Chat, tokenizer: Tokenizer, spec: VisionSpec | None) -> list[dict[str, Any]]:
    """As the chat template takes them. Of a text model content is a string; of a vision-language model it is a list of
    parts, unless the template takes strings only: then the model's marker stands for each image."""
    if spec is not None and tokenizer.takes_parts:
        return [
            {
                "role": message.role,
                "content": [_part(part) for part in message.content] or [{"type": "text", "text": ""}],
                **fields(message),
            }
            for message in chat.messages
        ]
    marker = "" if spec is None else spec.marker
    return [
        {
            "role": message.role,
            "content": "".join(part.text if part.HasField("text") else marker for part in message.content),
            **fields(message),
        }
        for message in chat.messages
    ]


def _part(part: generation_pb2.ContentPart) -> dict[str, str]:
    return {"type": "text", "text": part.text} if part.HasField("text") else {"type": "image"}
