"""What a load asks for: each request's time, lengths and prompt, all of it following from a seed."""

import math
import random
from collections.abc import Iterator, Sequence

import msgspec

from common.errors import InvalidArgument
from services.bench.arrivals import Arrivals
from services.bench.trace_files import TraceEntry

SHARED = "shared"  # the words that all synthetic prompts begin with
Segments = tuple[tuple[str, int], ...]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request. A prompt is made of segments (key, tokens): equal keys have equal words, cut to their length.

    A long trace has some hundred million tokens; they are drawn when their request is about to be sent.
    """

    number: int
    at: float  # seconds after the load's beginning; an open loop's
    segments: Segments
    output_tokens: int
    image: bool = False
    seed: int = 0
    load: int = 0  # words of one load are not those of another

    @property
    def prompt_tokens(self) -> int:
        return sum(count for _, count in self.segments)

    def words(self) -> list[int]:
        """Numbers below 2**30, one a token. Whoever sends them makes token ids or words of them."""
        return [word for key, count in self.segments for word in _words(f"{self.seed} {self.load} {key}", count)]


class Lengths(msgspec.Struct, frozen=True):
    """Uniform from `least` to `most` tokens, both included."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str, field: str) -> "Lengths":
        """ "128" or "64-256"."""
        least, _, most = text.partition("-")
        try:
            found = cls(int(least), int(most or least))
        except ValueError:
            raise InvalidArgument(f"{field} is a number or a range such as 64-256, not {text!r}", field=field) from None
        if not 1 <= found.least <= found.most:
            raise InvalidArgument(f"{field} is at least 1, and a range rises; not {text!r}", field=field)
        return found

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths in tokens. prefix_tokens: how many of a prompt's first words are the same in all."""

    prompt: Lengths = Lengths(128, 128)
    output: Lengths = Lengths(32, 32)
    prefix_tokens: int = 0
    image_share: float = 0.0


def synthetic(shape: Shape, count: int, arrivals: Arrivals | None, seed: int, load: int = 0) -> list[Ask]:
    """`count` requests of this shape. arrivals: None for a closed loop, where a request begins when one has ended.

    Loads of one seed have the same lengths and the same draws behind their times, but other words: what one has left in
    a cache is no help for the next.
    """
    times: Iterator[float] = arrivals.times(random.Random(f"times {seed}")) if arrivals else iter([0.0] * count)
    rng = random.Random(f"lengths {seed}")
    asks = []
    for number in range(count):
        length, output = shape.prompt.draw(rng), shape.output.draw(rng)
        image = rng.random() < shape.image_share
        segments = _cut(((SHARED, shape.prefix_tokens), (f"request {number}", length)), length)
        asks.append(
            Ask(
                number=number,
                at=next(times),
                segments=segments,
                output_tokens=output,
                image=image,
                seed=seed,
                load=load,
            )
        )
    return asks


def replay(
    entries: Sequence[TraceEntry],
    *,
    speedup: float = 1.0,
    length_scale: float = 1.0,
    image_share: float = 0.0,
    seed: int = 0,
    load: int = 0,
) -> list[Ask]:
    """A trace as requests: at its times divided by `speedup`, at its lengths times `length_scale`.

    Blocks with the same hash id get the same words. Scaling shrinks the blocks, too, so that the share of a prompt that
    others have stays what it was.
    """
    rng = random.Random(f"images {seed}")
    asks = []
    begin = entries[0].at if entries else 0.0
    for number, entry in enumerate(entries):
        length = max(1, round(entry.prompt_tokens * length_scale))
        block = max(1, round(entry.block_tokens * length_scale))
        blocks = tuple((f"block {key}", block) for key in entry.hash_ids)
        segments = _cut((*blocks, (f"request {number}", length)), length)  # rounding may leave blocks short of it
        asks.append(
            Ask(
                number=number,
                at=(entry.at - begin) / speedup,
                segments=segments,
                output_tokens=max(1, round(entry.output_tokens * length_scale)),
                image=rng.random() < image_share,
                seed=seed,
                load=load,
            )
        )
    return asks


def mean_rate(asks: Sequence[Ask]) -> float:
    """Requests a second of an open loop, from the first to the last one; inf when all come at once."""
    span = asks[-1].at - asks[0].at if asks else 0.0
    return (len(asks) - 1) / span if span > 0 else math.inf


def fit(asks: Sequence[Ask], context: int) -> tuple[list[Ask], int]:
    """The requests, cut to a context of that many tokens (0: unknown), and how many had to be cut.

    Of what does not fit the output gets half of the context at most, and the prompt loses its end.
    """
    if not context:
        return list(asks), 0
    fitted = []
    for ask in asks:
        if ask.prompt_tokens + ask.output_tokens > context:
            output = min(ask.output_tokens, max(1, context // 2))
            segments = _cut(ask.segments, max(1, context - output))
            ask = msgspec.structs.replace(ask, output_tokens=output, segments=segments)
        fitted.append(ask)
    return fitted, sum(before is not after for before, after in zip(asks, fitted, strict=True))


def _cut(segments: Segments, length: int) -> Segments:
    """The first `length` tokens."""
    found = []
    for key, count in segments:
        taken = min(count, length)
        if taken > 0:
            found.append((key, taken))
        length -= taken
    return tuple(found)


def _words(key: str, count: int) -> list[int]:
    rng = random.Random(f"words {key}")
    return [rng.getrandbits(30) for _ in range(count)]
