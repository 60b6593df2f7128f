"""Whether the time to the first token tells a tenant what another has asked (the side channel of CVE-2025-46570).

A victim asks something. Then, in random order, the attacker asks the same and something that nobody has asked, and so
does the victim itself; each question is used once. AUC: how often the asked one was the faster of two. 0.5 is a coin,
1 tells for sure. Timed workers, two of a role, so that the choice of the worker takes part.

    python -m bench timing [--probes 1000]
"""

import argparse
import asyncio
import io
import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from PIL import Image

from bench.mesh import BenchMesh
from bench.report import median, save, show
from common.models.catalog import DEFAULT_MODEL, DEFAULT_VISION_MODEL
from common.models.fetch import find_model
from common.models.pictures import draw
from epd.v1 import generation_pb2

PROMPT_TOKENS = 256
PROMPT_SECONDS = 0.02  # of prefill, for all of them
IMAGE_SECONDS = 0.02  # of one image on an encoder
TIMEOUT_SECONDS = 60.0
NEWS_SECONDS = 0.05  # in which a gateway hears what a worker has cached
KINDS = ("prompt", "image")
TENANTS = {"another tenant": "attacker", "same tenant": "victim"}

Ask = Callable[[str, int], Awaitable[float]]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--probes", type=int, default=1000, help="of each class")


def auc(faster: Sequence[float], slower: Sequence[float]) -> float:
    """P(a of `faster` < b of `slower`), ties counted half (Mann and Whitney's U over all pairs)."""
    ordered = sorted(slower)
    wins = 0.0
    for value in faster:
        below, upto = bisect_left(ordered, value), bisect_right(ordered, value)
        wins += len(ordered) - upto + (upto - below) / 2
    return wins / (len(faster) * len(slower))


class Questions:
    """Questions by number: equal numbers ask the same of the cache under test, and nothing else is ever the same."""

    def __init__(self, mesh: BenchMesh, kind: str) -> None:
        self._mesh, self._kind = mesh, kind
        self._asked = 0
        self.cached: dict[str, int] = {}  # tenant: tokens or images that were found cached

    async def ask(self, tenant: str, number: int) -> float:
        """Seconds to the first token, by the client's clock."""
        self._asked += 1
        request = generation_pb2.GenerateRequest()
        if self._kind == "prompt":
            rng = random.Random(number)
            request.token_ids.ids.extend(rng.randrange(100, 40_000) for _ in range(PROMPT_TOKENS))
        else:
            message = request.chat.messages.add(role="user")
            message.content.add(text=f"{self._asked:08}. Look at this.")  # no prompt begins as another
            message.content.add(image=generation_pb2.Image(data=_picture(number)))
        request.sampling.max_tokens = 1
        begin, first = time.perf_counter(), 0.0
        async for answer in self._mesh.stub.Generate(
            request, timeout=TIMEOUT_SECONDS, metadata=(("x-epd-tenant", tenant),)
        ):
            if not first and any(choice.token_ids for choice in answer.choices):
                first = time.perf_counter() - begin
            if answer.HasField("accounting"):
                image = self._kind == "image"
                found = answer.accounting.cached_images if image else answer.usage.cached_tokens
                self.cached[tenant] = self.cached.get(tenant, 0) + found
        return first


def _picture(number: int) -> bytes:
    """A drawn one, with its number in its first pixels: many are drawn alike."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(draw(number).png())) as drawn:
        image = drawn.convert("RGB")
    for place, value in enumerate(number.to_bytes(6, "little")):
        image.putpixel((place, 0), (value, value, value))
    image.save(buffer, "PNG")
    return buffer.getvalue()


async def probe(questions: Questions, probes: int) -> dict[str, dict[str, list[float]]]:
    rng = random.Random(1)
    numbers = iter(range(1 << 20, 1 << 30))
    seconds: dict[str, dict[str, list[float]]] = {name: {"asked": [], "new": []} for name in TENANTS}
    for _ in range(probes):
        asked = next(numbers)
        await questions.ask("victim", asked)
        await asyncio.sleep(NEWS_SECONDS)
        plan = [(name, "asked", asked) for name in TENANTS] + [(name, "new", next(numbers)) for name in TENANTS]
        rng.shuffle(plan)
        for name, which, number in plan:
            seconds[name][which].append(await questions.ask(TENANTS[name], number))
    return seconds


async def measure(kind: str, probes: int) -> dict[str, Any]:
    worker: dict[str, Any] = {
        "engine.executor": "timed",
        "engine.num_blocks": 4096,
        "engine.timed.seconds_per_prefill_token": PROMPT_SECONDS / PROMPT_TOKENS if kind == "prompt" else 0.0,
    }
    roles, model = ("prefill", "prefill", "decode"), DEFAULT_MODEL
    if kind == "image":
        roles, model = ("encode", "encode", "prefill,decode"), DEFAULT_VISION_MODEL
        worker |= {
            "engine.timed.image_hidden_size": 64,
            "encoder.timed.base_seconds": IMAGE_SECONDS,
            "encoder.timed.seconds_per_row": 0.0,
        }
    async with BenchMesh(str(find_model(model)), roles, worker=worker) as mesh:
        questions = Questions(mesh, kind)
        for number in range(8):
            await questions.ask("warm up", number)
        seconds = await probe(questions, probes)
        return {
            name: {
                "auc": auc(of["asked"], of["new"]),
                "asked_seconds": median(of["asked"]),
                "new_seconds": median(of["new"]),
                "cached": questions.cached.get(TENANTS[name], 0),
            }
            for name, of in seconds.items()
        }


def run(options: argparse.Namespace) -> None:
    result = {kind: asyncio.run(measure(kind, options.probes)) for kind in KINDS}
    show(
        f"What time tells of what a tenant has asked ({options.probes} probes a class)",
        ["asked", "by", "TTFT ms, asked before", "never asked", "AUC", "found cached"],
        [
            [
                kind,
                name,
                f"{1e3 * of['asked_seconds']:.1f}",
                f"{1e3 * of['new_seconds']:.1f}",
                f"{of['auc']:.3f}",
                f"{of['cached']} {'tokens' if kind == 'prompt' else 'images'}",
            ]
            for kind, tenants in result.items()
            for name, of in tenants.items()
        ],
        "aim: another tenant 0.5 ± 0.05 and nothing cached, the same tenant at least 0.95",
    )
    print(f"saved {save('timing', {'probes': options.probes, 'kinds': result})}")
