"""Loads: arrival times, lengths, prompts, traces; all from a seed."""

import itertools
import random
import statistics
from pathlib import Path

import pytest

from common.errors import InvalidArgument
from services.bench.arrivals import Arrivals
from services.bench.target import picture
from services.bench.trace_files import TraceEntry, read_trace
from services.bench.workload import Lengths, Shape, fit, mean_rate, replay, synthetic

TRACES = Path(__file__).parents[3] / "examples" / "traces"


def gaps(arrivals: Arrivals, count: int = 4000) -> list[float]:
    times = list(itertools.islice(arrivals.times(random.Random(1)), count))
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize(
    ("kind", "shape", "variation"), [("constant", 1, 0.0), ("poisson", 1, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4, 0.5)]
)
def test_gaps_have_their_mean_and_their_spread(kind, shape: float, variation: float) -> None:
    """Of a gamma distribution the standard deviation is mean / √shape."""
    found = gaps(Arrivals(rate=5.0, kind=kind, shape=shape))
    assert statistics.mean(found) == pytest.approx(0.2, rel=0.1)
    assert statistics.pstdev(found) / statistics.mean(found) == pytest.approx(variation, rel=0.1, abs=1e-6)


def test_the_same_draws_stand_behind_every_rate() -> None:
    slow, fast = gaps(Arrivals(rate=1.0)), gaps(Arrivals(rate=8.0))
    assert [gap / 8 for gap in slow] == pytest.approx(fast)


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"rate": -1}, {"rate": float("inf")}, {"rate": 1, "shape": 0}])
def test_impossible_rates_are_refused(wrong: dict) -> None:
    with pytest.raises(InvalidArgument):
        Arrivals(**wrong)


@pytest.mark.parametrize(("text", "lengths"), [("128", (128, 128)), ("64-256", (64, 256))])
def test_lengths(text: str, lengths: tuple[int, int]) -> None:
    assert Lengths.parse(text, "prompt_tokens") == Lengths(*lengths)


@pytest.mark.parametrize("text", ["", "0", "9-3", "x", "1-2-3", "-5"])
def test_wrong_lengths_name_their_field(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Lengths.parse(text, "prompt_tokens")
    assert refused.value.field == "prompt_tokens"


SHAPE = Shape(prompt=Lengths(20, 60), output=Lengths(1, 9), prefix_tokens=16, image_share=0.5)


def test_a_seed_fixes_the_load() -> None:
    one, again = (synthetic(SHAPE, 50, Arrivals(rate=2.0), seed=7) for _ in range(2))
    assert one == again
    assert [ask.words() for ask in one] == [ask.words() for ask in again]
    other = synthetic(SHAPE, 50, Arrivals(rate=2.0), seed=8)
    assert [ask.at for ask in other] != [ask.at for ask in one]
    lengths = [len(ask.words()) for ask in one]
    assert lengths == [ask.prompt_tokens for ask in one]
    assert min(lengths) >= 20
    assert max(lengths) <= 60
    assert len(set(lengths)) > 10
    assert 10 < sum(ask.image for ask in one) < 40
    assert picture(one[0]) == picture(again[0]) != picture(one[1])


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    words = [ask.words() for ask in synthetic(SHAPE, 10, None, seed=1)]
    assert len({tuple(each[:16]) for each in words}) == 1
    assert len({each[16] for each in words}) == 10


def test_a_sweeps_loads_have_other_words_and_the_same_lengths() -> None:
    one, two = (synthetic(SHAPE, 10, None, seed=1, load=load) for load in (0, 1))
    assert [ask.prompt_tokens for ask in one] == [ask.prompt_tokens for ask in two]
    assert not {ask.words()[0] for ask in one} & {ask.words()[0] for ask in two}
    assert not {ask.words()[-1] for ask in one} & {ask.words()[-1] for ask in two}


def test_equal_blocks_of_a_trace_have_equal_words() -> None:
    entries = [
        TraceEntry(at=5.0, prompt_tokens=1000, output_tokens=30, hash_ids=(0, 1), block_tokens=512),
        TraceEntry(at=9.0, prompt_tokens=1500, output_tokens=3, hash_ids=(0, 2, 3), block_tokens=512),
    ]
    first, second = replay(entries, speedup=2.0, length_scale=0.125, seed=3)
    assert (first.at, second.at) == (0.0, 2.0)
    assert (first.prompt_tokens, second.prompt_tokens) == (125, 188)
    assert (first.output_tokens, second.output_tokens) == (4, 1)
    assert first.words()[:64] == second.words()[:64]
    assert first.words()[64] != second.words()[64]


def test_what_is_too_long_is_cut() -> None:
    asks = synthetic(Shape(prompt=Lengths(90, 90), output=Lengths(20, 20)), 2, None, seed=1)
    fitted, cut = fit(asks, 100)
    assert cut == 2
    assert [(ask.prompt_tokens, ask.output_tokens) for ask in fitted] == [(80, 20)] * 2
    assert fitted[0].words() == asks[0].words()[:80]
    assert fit(asks, 110) == (asks, 0)
    assert fit(asks, 0) == (asks, 0)
    (long,), cut = fit(synthetic(Shape(prompt=Lengths(5, 5), output=Lengths(99, 99)), 1, None, seed=1), 40)
    assert (long.prompt_tokens, long.output_tokens, cut) == (5, 20, 1)


def test_the_traces_that_are_brought_along() -> None:
    azure = read_trace(TRACES / "azure-conversation.csv")
    assert len(azure) == 200
    assert (azure[0].prompt_tokens, azure[0].output_tokens) == (374, 44)
    assert azure[1].at - azure[0].at == pytest.approx(4.314579, abs=1e-6)
    mooncake = read_trace(TRACES / "mooncake-conversation.jsonl", limit=30)
    assert len(mooncake) == 30
    assert all(len(entry.hash_ids) == -(-entry.prompt_tokens // 512) for entry in mooncake)
    assert mean_rate(replay(mooncake, speedup=4)) == pytest.approx(4 * mean_rate(replay(mooncake)))


def test_splitwises_form(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "request_id,request_type,arrival_timestamp,batch_size,prompt_size,token_size\n0,2,3,1,2048,8\n1,2,1,1,9,2\n"
    )
    assert [(entry.at, entry.prompt_tokens, entry.output_tokens) for entry in read_trace(file)] == [
        (1, 9, 2),
        (3, 2048, 8),
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "columns"),
        ("a,b\n1,2\n", "columns"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,0,2\n", "line 2"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp"', "line 2"),
        ('{"timestamp": 0}\n', "line 1"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=told):
        read_trace(file)
