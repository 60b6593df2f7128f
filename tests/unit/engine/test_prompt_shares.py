"""A long prompt and an endless stream of short ones on a whole engine: both come forward, each within its bound."""

import math

import common.engine.messages as msg
from common.engine.settings import TimedModel
from tests.unit.engine.harness import Harness

INSTANT = TimedModel(
    base_seconds=0, seconds_per_prefill_token=0, seconds_per_decode=0, vocab_size=4096, max_context=4096
)
BUDGET, LONG, SHORT = 64, 2048, 24


class Stream:
    """Prompts for prefill alone; with every step as many short ones come as a step can compute."""

    def __init__(self, **settings: float) -> None:
        self.engine = Harness(timed=INSTANT, num_blocks=1024, token_budget=BUDGET, max_waiting=100_000, **settings)
        self.count = 0
        self.waits: list[int] = []  # in steps, of short prompts that have been computed
        self._came: dict[str, int] = {}

    def submit(self, seq: str, tokens: int) -> None:
        prompt = [10 + self.count // 1000, 10 + self.count % 1000, *range(10, 8 + tokens)]
        self.count += 1
        self.engine.submit(seq, prompt, decode=False)

    def step(self, short: int) -> None:
        for _ in range(short):
            seq = f"short-{self.count}"
            self._came[seq] = self.engine.core.steps
            self.submit(seq, SHORT)
        self.engine.step()
        for event in self.engine.of(msg.Prefilled):
            if event.seq in self._came:
                self.waits.append(self.engine.core.steps - self._came.pop(event.seq))

    def done(self, seq: str) -> bool:
        return bool(self.engine.of(msg.Prefilled, seq))


def test_an_endless_stream_of_short_prompts_holds_up_a_long_one_no_longer_than_its_bound() -> None:
    stream = Stream()
    stream.submit("long", LONG)
    bound = math.ceil(LONG / (BUDGET / 2))
    for _ in range(bound):
        stream.step(short=3)  # more than a step can compute
    assert stream.done("long")
    assert len(stream.waits) >= (bound - 2) * (BUDGET // 2) // SHORT  # they had the other half


def beside_a_long_one(share: float) -> list[int]:
    """Waits of the short prompts that were computed beside it, at half of what there is."""
    stream = Stream(oldest_share=share)
    stream.submit("long", LONG)
    for _ in range(20):
        stream.step(short=1)
    assert not stream.done("long")
    return stream.waits


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    waits = beside_a_long_one(0.5)
    assert len(waits) >= 18
    assert max(waits) <= 2


def test_in_the_order_of_arrival_they_do() -> None:
    assert beside_a_long_one(1.0) == []
