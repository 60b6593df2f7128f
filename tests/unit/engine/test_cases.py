"""The numbered cases at the engine's level, on the timed executor where tokens do not matter, on a model where they
do."""

import pytest

import common.engine.messages as msg
from common.sampling import ChoiceTokens
from tests.unit.engine.harness import Harness, disaggregated


def prompt(length: int, start: int = 20) -> list[int]:
    return [start + number % 400 for number in range(length)]


@pytest.fixture
def engine():
    engine = Harness()
    yield engine
    engine.clean()


def test_a6_first_token_ends_it(llama):
    """On the prefill side, in one engine, and for a decode side that had reserved already."""
    text = llama.prompt(37)
    first = llama.tokens(text)[0]
    prefill, decode = (Harness.modules(llama.model_dir) for _ in range(2))
    assert disaggregated(prefill, decode, "s", text, stop_token_ids=(first,)) == {0: [first]}
    assert prefill.reasons["s"] == {0: "stop"}
    assert prefill.of(msg.Prefilled)[0].first[0].stop_token_id == first
    assert decode.core.steps == 0
    assert decode.done["s"]
    prefill.clean()
    decode.clean()
    assert prefill.one(text, stop_token_ids=(first,)) == [first]
    prefill.clean()


def test_a6_one_of_three_choices_ends(engine):
    """The others go on from the shared prompt, whichever ended."""
    tokens = Harness()
    tokens.submit("s", prompt(40), choices=[0, 1, 2], max_tokens=1)
    firsts = tokens.run().tokens["s"]
    for ended in range(3):
        seq = f"s{ended}"
        engine.submit(seq, prompt(40), choices=[0, 1, 2], max_tokens=20, stop_token_ids=(firsts[ended][0],))
        engine.run()
        assert engine.reasons[seq] == {**dict.fromkeys(range(3), "length"), ended: "stop"}
        assert [len(engine.tokens[seq][index]) for index in range(3)] == [
            1 if index == ended else 20 for index in range(3)
        ]
        engine.clean()


def test_a7_max_tokens_one(engine):
    engine.submit("s", prompt(40), max_tokens=1)
    engine.run()
    assert len(engine.tokens["s"][0]) == 1
    assert engine.reasons["s"] == {0: "length"}
    assert engine.core.steps == 1


def test_a8_min_tokens_over_a_hand_off(llama):
    text = llama.prompt(37)
    greedy = llama.tokens(text, max_tokens=20)
    stops = tuple(set(greedy[:3]))
    prefill, decode = (Harness.modules(llama.model_dir) for _ in range(2))
    tokens = disaggregated(prefill, decode, "s", text, min_tokens=5, max_tokens=20, stop_token_ids=stops)[0]
    assert prefill.core.steps == 1
    assert not set(tokens[:5]) & set(stops)
    assert tokens == Harness.modules(llama.model_dir).one(text, min_tokens=5, max_tokens=20, stop_token_ids=stops)


@pytest.mark.parametrize("length", [1, 2, 15])
def test_a9_shorter_than_a_block(engine, length):
    engine.submit("s", prompt(length))
    engine.run()
    assert len(engine.tokens["s"][0]) == 8
    assert engine.done["s"].cached_tokens == 0


def test_a10_exactly_k_blocks_twice(llama):
    engine = Harness.modules(llama.model_dir)
    text = llama.prompt(48)
    assert engine.one(text) == engine.one(text) == llama.tokens(text)
    assert [each.cached_tokens for each in engine.of(msg.Started)] == [0, 32]


def test_a13_second_preemption_is_told():
    """Given up after one local recomputation; everything it held is free, the other is undisturbed."""
    engine = Harness(num_blocks=14)
    engine.submit("short", prompt(64), max_tokens=40)  # makes room for the first recomputation
    engine.submit("long", prompt(16, 90), max_tokens=180)  # takes it again
    engine.submit("s", prompt(40, 60), max_tokens=120)
    engine.run()
    assert engine.failed.keys() == {"s"}
    assert engine.failed["s"].reason == "PREEMPTED"
    rows = [row for batch in engine.batches for row in batch.rows if row.choice.sequence.seq == "s"]
    assert {row.choice.preemptions for row in rows} == {2}
    assert sum(row.end - row.start > 1 for row in rows) == 2  # the prompt, and one recomputation
    assert len(engine.tokens["long"][0]) == 180
    engine.clean()


@pytest.mark.parametrize(
    "stage", ["waiting", "prefilling", "decoding", "published", "reserving", "reserved", "committed"]
)
def test_a14_cancel_at_every_stage(stage):
    engine = Harness(num_blocks=16, token_budget=16)
    blocker = {"waiting": 200, "reserving": 200}.get(stage)
    if blocker:
        engine.submit("blocker", prompt(blocker), max_tokens=30)
        engine.step()
    if stage in ("reserving", "reserved", "committed"):
        engine.reserve("s", prompt(60), choices=[0, 1])
    else:
        engine.submit("s", prompt(60), choices=[0, 1], publish=stage == "published", decode=stage != "published")
    steps = {
        "waiting": 1,
        "prefilling": 2,
        "decoding": 6,
        "published": 6,
        "reserving": 1,
        "reserved": 1,
        "committed": 1,
    }
    for _ in range(steps[stage]):
        engine.step()
    if stage == "committed":
        engine.send(msg.Commit(seq="s", first=[ChoiceTokens(choice=each, token_ids=[30]) for each in (0, 1)]))
        engine.step()
    state = engine.core.sequences["s"].state.value
    assert state == {"prefilling": "running", "decoding": "running", "committed": "running"}.get(stage, stage)
    before = len(engine.batches)
    engine.send(msg.Cancel(seq="s"))
    engine.send(msg.Cancel(seq="s"))
    engine.run()
    assert not any(row.choice.sequence.seq == "s" for batch in engine.batches[before:] for row in batch.rows)
    assert "s" not in engine.done
    assert "s" not in engine.failed
    engine.send(msg.Release(seq="s"))
    engine.clean()


def test_a16_a_long_prompt_is_left_at_once_and_the_next_is_not_held_up():
    engine = Harness(num_blocks=64, token_budget=16)
    engine.submit("long", prompt(500))
    engine.step()
    engine.send(msg.Cancel(seq="long"))
    engine.submit("next", prompt(10))
    engine.step()
    assert [row.choice.sequence.seq for row in engine.batches[-1].rows] == ["next"]
    engine.run().clean()


def test_b7_repeated_tokens(engine):
    """Block identity includes the prefix: equal blocks of one prompt are different blocks."""
    for _ in range(2):
        engine.submit("s", [30] * 70)
        engine.run().done.clear()
        started = engine.of(msg.Started)[-1]
        assert len(set(started.blocks)) == 5
    assert started.cached_tokens == 64


def test_c4_context_limits(engine):
    context = 512
    for seq, length, options, reason in [
        ("over", context + 1, {}, "CONTEXT_TOO_LONG"),
        ("full", context, {}, "CONTEXT_TOO_LONG"),
        ("output", context - 10, {"max_tokens": 11}, "CONTEXT_TOO_LONG"),
    ]:
        engine.submit(seq, prompt(length), **options)
        assert engine.failed[seq].reason == reason
        assert str(context) in engine.failed[seq].message
        assert str(length) in engine.failed[seq].message
    engine.submit("fits", prompt(context - 10), max_tokens=10)
    engine.submit("omitted", prompt(context - 10, 60), max_tokens=None)
    engine.run()
    for seq in ("fits", "omitted"):
        assert len(engine.tokens[seq][0]) == 10
        assert engine.reasons[seq] == {0: "length"}


def test_c5_empty_prompt_and_no_tokens(engine):
    engine.submit("empty", [])
    engine.submit("none", prompt(5), max_tokens=0)
    assert (engine.failed["empty"].field, engine.failed["none"].field) == ("prompt", "max_tokens")
    engine.submit("s", prompt(5))
    assert engine.run().done["s"]


@pytest.mark.parametrize(
    ("length", "options"),
    [(65, {}), (40, {"choices": [0, 1, 2, 3]}), (40, {"max_tokens": 100, "ignore_eos": True})],
)
def test_c6_never_fits(length, options):
    engine = Harness(num_blocks=5 if "choices" in options else 4)
    engine.submit("s", prompt(length), **options)
    engine.reserve("r", prompt(length), **options)
    for seq in ("s", "r"):
        assert engine.failed[seq].reason == "NEVER_FITS"
        numbers = [int(word) for word in engine.failed[seq].message.replace(";", " ").split() if word.isdigit()]
        assert numbers[0] > numbers[1] == engine.settings.num_blocks
    engine.clean()


def test_a_full_pool_ends_what_has_no_limit():
    """max_tokens omitted, pool smaller than the context: the pool is the limit, not a preemption for ever."""
    engine = Harness(num_blocks=4)
    engine.submit("s", prompt(30), max_tokens=None)
    engine.run()
    assert engine.reasons["s"] == {0: "length"}
    assert len(engine.tokens["s"][0]) == 4 * 16 + 1 - 30
    engine.clean()


def test_c10_cold_then_warm_four_times(llama):
    engine = Harness.modules(llama.model_dir)
    text = llama.prompt(50)
    assert [engine.one(text) for _ in range(5)] == [llama.tokens(text)] * 5


def test_c12_stop_before_min_tokens(llama):
    """The stop token is not sampled before min_tokens, then ends the request."""
    text = llama.prompt(37)
    greedy = llama.tokens(text, max_tokens=30)
    engine = Harness.modules(llama.model_dir)
    stop = greedy[4]
    assert engine.one(text, stop_token_ids=(stop,), max_tokens=30) == greedy[: greedy.index(stop) + 1]
    late = engine.one(text, stop_token_ids=(stop,), min_tokens=12, max_tokens=30)
    assert stop not in late[:12]
    assert len(late) > 12


def test_eos_ends_unless_ignored(references, tmp_path):
    from tests.checkpoints import tiny_checkpoint
    from tests.unit.engine.harness import Reference

    plain = references("llama")
    text = plain.prompt(37)
    greedy = plain.tokens(text, max_tokens=12)
    model = Reference(tiny_checkpoint("llama", tmp_path, eos_token_id=greedy[5]))
    engine = Harness.modules(model.model_dir)
    expected = greedy[: greedy.index(greedy[5]) + 1]
    assert model.tokens(text, max_tokens=12) == expected
    assert engine.one(text, max_tokens=12) == expected
    assert engine.one(text, max_tokens=12, ignore_eos=True) == greedy
    assert greedy[5] not in engine.one(text, max_tokens=12, min_tokens=12)


def test_c13_cached_tokens_cold_and_warm(engine):
    for length in (5, 16, 17, 100):
        for _ in range(2):
            engine.submit(f"s{length}", prompt(length, length))
            engine.run()
            cached = engine.done.pop(f"s{length}").cached_tokens
            engine.done.clear()
        assert cached == (length - 1) // 16 * 16 < length
    assert [each.cached_tokens for each in engine.of(msg.Started)][::2] == [0] * 4


def test_e1_tenants_do_not_share(engine):
    for salt in (b"a", b"b", b"a"):
        engine.submit("s", prompt(40), salt=salt)
        engine.run()
        engine.done.clear()
    assert [each.cached_tokens for each in engine.of(msg.Started)] == [0, 0, 32]


def test_without_a_prefix_cache():
    engine = Harness(prefix_cache=False)
    for _ in range(2):
        engine.submit("s", prompt(40), choices=[0, 1])
        engine.run()
        engine.done.clear()
    assert [each.cached_tokens for each in engine.of(msg.Started)] == [0, 0]
    assert engine.of(msg.Blocks) == []
    engine.clean()
    assert engine.core.load().cached_blocks == 0


# --- queues and publications ------------------------------------------------------------------------------------------


def test_bounded_queue_refuses_with_a_hint():
    engine = Harness(max_waiting=3)
    for number in range(3):
        engine.submit(f"s{number}", prompt(20))
    engine.submit("late", prompt(20))
    engine.reserve("reserve", prompt(20))
    for seq in ("late", "reserve"):
        assert engine.failed[seq].reason == "OVERLOADED"
        assert engine.failed[seq].retry_after_seconds > 0
    engine.run()
    engine.submit("late", prompt(20))
    engine.run()
    assert engine.done["late"]
    engine.clean()


def test_published_blocks_are_capped_at_half_of_the_pool():
    engine = Harness(num_blocks=16)
    for number in range(4):
        engine.submit(f"p{number}", prompt(60, 20 + 60 * number), publish=True, decode=False)
        engine.submit(f"d{number}", prompt(20, 21 + 60 * number))
    engine.run()
    assert [seq for seq in engine.tokens if seq.startswith("p")] == ["p0", "p1"]
    assert {f"d{number}" for number in range(4)} <= engine.done.keys()  # what does not publish goes on
    assert engine.core.load().held_blocks == 8
    engine.submit("long", prompt(200, 100), publish=True, decode=False)
    engine.run()
    assert "long" not in engine.tokens
    engine.send(msg.Release(seq="p0"))
    engine.run()
    assert [seq for seq in engine.tokens if seq.startswith("p")] == ["p0", "p1", "p2"]
    for number in range(1, 4):
        engine.send(msg.Release(seq=f"p{number}"))
        engine.run()
    assert engine.tokens["long"]  # more than half of the pool: once it is the only one
    engine.send(msg.Release(seq="long"))
    assert len(engine.of(msg.Prefilled)) == 5
    assert {f"p{number}" for number in range(4)} <= engine.done.keys()
    engine.clean()


def test_released_before_it_was_ready(engine):
    """The first token still comes; nothing is kept."""
    engine.submit("s", prompt(40), publish=True, decode=False)
    engine.send(msg.Release(seq="s"))
    engine.run()
    assert len(engine.tokens["s"][0]) == 1
    assert engine.done["s"]
    assert engine.of(msg.Chunk) == []


def test_a_held_block_is_not_reused_before_the_release():
    engine = Harness(num_blocks=8)
    engine.submit("p", prompt(50), publish=True, decode=False)
    engine.run()
    started = engine.of(msg.Started, "p")[0]
    content = engine.memory.data[:, started.blocks].copy()
    for number in range(6):
        engine.submit(f"s{number}", prompt(40, 100 + number))
    engine.run()
    assert len(engine.done) == 6
    assert (engine.memory.data[:, started.blocks] == content).all()
    assert [engine.core.pool.generation(block) for block in started.blocks] == started.generations
    engine.send(msg.Release(seq="p"))
    for number in range(6):
        engine.submit(f"t{number}", prompt(40, 200 + number))
    engine.run()
    assert [engine.core.pool.generation(block) for block in started.blocks] != started.generations
    engine.clean()


def test_reservations_wait_for_blocks_in_order():
    engine = Harness(num_blocks=8)
    engine.submit("p", prompt(60), publish=True, decode=False)
    engine.run()
    engine.reserve("big", prompt(90, 300))
    engine.reserve("small", prompt(10, 100))
    engine.submit("s", prompt(10, 200))
    engine.run()
    assert engine.of(msg.Reserved) == []  # the small one does not overtake, nor does a submission
    assert engine.of(msg.Started, "s") == []
    engine.send(msg.Release(seq="p"))
    engine.run()
    assert [each.seq for each in engine.of(msg.Reserved)] == ["big"]
    engine.send(msg.Cancel(seq="big"))
    engine.run()
    assert [each.seq for each in engine.of(msg.Reserved)] == ["big", "small"]
    assert engine.done["s"]
    engine.send(msg.Cancel(seq="small"))
    engine.run().clean()


def test_priority_goes_first():
    engine = Harness(max_running=1)
    for number, priority in enumerate((0, 0, 5, -1)):
        engine.submit(f"s{number}", prompt(10), priority=priority, max_tokens=2)
    engine.run()
    assert list(engine.done) == ["s2", "s0", "s1", "s3"]


def test_chunks_and_progress_of_a_publication():
    engine = Harness(token_budget=16)
    engine.submit("s", prompt(40), publish=True, decode=False)
    engine.run()
    chunks = engine.of(msg.Chunk)
    assert [(each.step, each.start, each.end, each.last) for each in chunks] == [
        (1, 0, 16, False),
        (2, 16, 32, False),
        (3, 32, 40, True),
    ]
    assert engine.events.index(chunks[2]) < engine.events.index(engine.of(msg.Prefilled)[0])
    assert engine.rings == 3 + engine.executor.num_layers  # each step's end, and the last chunk's layers
    assert engine.memory.progress() == (3, engine.executor.num_layers)
    engine.send(msg.Release(seq="s"))
    engine.clean()


def test_finish_ends_single_choices():
    engine = Harness()
    engine.submit("s", prompt(40), choices=[0, 1, 2], max_tokens=30)
    engine.send(msg.Finish(seq="s", choices=[0]))  # before the fork: the first choice computes for the others
    for _ in range(3):
        engine.step()
    engine.send(msg.Finish(seq="s", choices=[2]))
    for _ in range(3):
        engine.step()
    assert [len(engine.tokens["s"][index]) for index in range(3)] == [0, 6, 3]
    engine.send(msg.Finish(seq="s", choices=[1, 2]))
    assert engine.done["s"]
    engine.clean()


def test_a_commit_with_other_choices_is_refused(engine):
    engine.reserve("s", prompt(40), choices=[0, 1])
    engine.run()
    engine.send(msg.Commit(seq="s", first=[ChoiceTokens(choice=0, token_ids=[30])]))
    assert engine.failed["s"].reason == "TRANSFER_FAILED"


def test_draining_admits_nothing_new():
    engine = Harness()
    engine.submit("s", prompt(40))
    engine.send(msg.Drain())
    engine.submit("late", prompt(40))
    engine.run()
    assert engine.done["s"]
    assert engine.failed["late"].reason == "DRAINING"


def test_block_events_mirror_the_index():
    engine = Harness(num_blocks=12)
    known: set[bytes] = set()
    for number in range(12):
        engine.submit(f"s{number}", prompt(50, 20 + 7 * number))
        engine.run()
    for event in engine.of(msg.Blocks):
        assert not set(event.stored) & known
        assert set(event.removed) <= known
        known = (known | set(event.stored)) - set(event.removed)
    assert known == {key[:16] for key in engine.core.pool.indexed_keys()}
    assert known


def test_not_a_number_fails_one_request_alone(references, tmp_path):
    """Its blocks are neither shared nor dangerous to whoever gets them next."""
    import torch
    from safetensors.torch import load_file, save_file

    from tests.checkpoints import tiny_checkpoint

    reference = references("llama")
    directory = tiny_checkpoint("llama", tmp_path)
    weights = load_file(directory / "model.safetensors")
    poison = 7
    weights["model.embed_tokens.weight"][poison] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    engine = Harness.modules(directory, num_blocks=12)
    good = [token for token in reference.prompt(20) if token != poison]
    engine.submit("bad", [poison, *reference.prompt(40)], choices=[0, 1])
    engine.submit("good", good, max_tokens=20)
    engine.run()
    assert engine.failed["bad"].reason == "INTERNAL"
    assert engine.tokens["good"][0] == reference.tokens(good, max_tokens=20)
    engine.clean()
    for seed in range(4):  # every block is used again
        text = [token for token in reference.prompt(60, seed) if token != poison]
        assert engine.one(text, max_tokens=20) == reference.tokens(text, max_tokens=20)
    engine.submit("again", [poison, *reference.prompt(40)])
    engine.run()
    assert engine.of(msg.Started, "again")[0].cached_tokens == 0
    assert engine.failed["again"]
    engine.clean()
