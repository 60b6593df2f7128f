"""Prompts with images on the timed executor: identity, limits, and when their embeddings may be given back."""

import pytest

import common.engine.messages as msg
from common.engine.settings import TimedModel
from common.sampling import ChoiceTokens
from tests.unit.engine.harness import Harness, disaggregated
from tests.unit.engine.media import IMAGES, MediaHarness, image

PROMPT = list(range(20, 100))
RED, BLUE = image("red", 10), image("blue", 10)


@pytest.fixture
def engine():
    engine = MediaHarness(token_budget=32)
    yield engine
    engine.clean()


def submit(engine: MediaHarness, seq: str = "s", media=(RED,), prompt=PROMPT, **options) -> None:
    engine.submit(seq, prompt, media=engine.place(seq, media), **options)


def tokens(engine: MediaHarness, media, **options) -> list[int]:
    seq = f"t{len(engine.done)}"
    submit(engine, seq, media, **options)
    engine.run()
    assert seq not in engine.failed, engine.failed[seq]
    return engine.tokens[seq][0]


# --- identity ---------------------------------------------------------------------------------------------------------


def test_case_d1_another_image_is_another_prompt(engine):
    red, blue = tokens(engine, [RED]), tokens(engine, [BLUE])
    assert red != blue
    assert [event.cached_tokens for event in engine.of(msg.Started)] == [0, 0]
    assert tokens(engine, []) not in (red, blue)


def test_case_d2_the_same_image_and_prompt_hit_the_cache(engine):
    assert tokens(engine, [RED]) == tokens(engine, [RED])
    assert [event.cached_tokens for event in engine.of(msg.Started)] == [0, 64]


def test_images_swapped_and_moved(engine):
    second = {name: image(name, 50) for name in ("red", "blue")}
    results = [
        tokens(engine, [RED, second["blue"]]),
        tokens(engine, [BLUE, second["red"]]),
        tokens(engine, [RED, second["red"]]),
        tokens(engine, [image("red", 11), second["blue"]]),
    ]
    assert len(set(map(tuple, results))) == 4
    # What follows the first image's blocks differs from the 48th token on; an image moved by one token from the first.
    assert [event.cached_tokens for event in engine.of(msg.Started)] == [0, 0, 48, 0]


def test_tokens_before_the_image_are_shared(engine):
    first, second = image("red", 40), image("blue", 40)
    tokens(engine, [first])
    tokens(engine, [second])
    assert engine.of(msg.Started)[-1].cached_tokens == 32


def test_keys_of_decoded_blocks_go_on(engine):
    """A prompt that contains an earlier answer hits its blocks, too."""
    answer = tokens(engine, [RED], max_tokens=20)
    tokens(engine, [RED], prompt=[*PROMPT, *answer, 7])
    assert engine.of(msg.Started)[-1].cached_tokens == 96


def test_every_form_gives_the_same_tokens():
    whole = tokens(MediaHarness(), [RED], max_tokens=20)
    assert tokens(MediaHarness(token_budget=7), [RED], max_tokens=20) == whole
    assert tokens(MediaHarness(), [RED], output=whole[:9], max_tokens=20) == whole[9:]
    prefill, decode = MediaHarness(), Harness(timed=TimedModel(**IMAGES), embedding_rows=0)
    for seq in ("cold", "warm"):
        assert disaggregated(prefill, decode, seq, PROMPT, media=prefill.place(seq, [RED]), max_tokens=20) == {0: whole}
    assert decode.of(msg.Reserved)[-1].hit_blocks == 4
    assert decode.of(msg.EmbeddingsFreed) == []
    prefill.clean()
    decode.clean()


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "media",
    [
        [image("a", 0, 10), image("b", 9, 10)],
        [image("b", 20, 10), image("a", 0, 10)],
        [image("a", 71, 10)],
        [image("a", -1, 10)],
        [image("a", 5, 0)],
        [msg.Media(key=b"a", start=0, length=10, rows=11)],
    ],
    ids=["overlap", "order", "beyond", "before", "empty", "more rows than tokens"],
)
def test_inconsistent_images_are_refused(engine, media):
    submit(engine, "s", media)
    assert (engine.failed["s"].reason, engine.failed["s"].field) == ("INVALID_ARGUMENT", "media")
    assert engine.freed == ["s"]


@pytest.mark.parametrize("blocks", [(), (3,), (3, 64), (-1, 3)], ids=["none", "few", "beyond", "negative"])
def test_blocks_that_are_not_there_are_refused(engine, blocks):
    item = msg.Media(key=b"a", start=0, length=20, rows=20, blocks=blocks)
    engine.submit("s", PROMPT, media=[item])
    assert (engine.failed["s"].reason, engine.failed["s"].field) == ("INVALID_ARGUMENT", "media")
    engine.reserve("d", PROMPT, media=[item])  # nothing is read
    engine.run()
    assert engine.of(msg.Reserved, "d")
    engine.send(msg.Cancel(seq="d"))
    assert engine.freed == ["s"]


def test_workers_without_images_refuse_them():
    text, decode = Harness(), Harness(timed=TimedModel(**IMAGES), embedding_rows=0)
    for engine in (text, decode):
        engine.submit("s", PROMPT, media=[RED])
        assert (engine.failed["s"].reason, engine.failed["s"].field) == ("INVALID_ARGUMENT", "media")
    assert text.embeddings is decode.embeddings is None
    text.reserve("d", PROMPT, media=[RED])
    assert "d" in text.failed
    assert [each.seq for each in text.of(msg.EmbeddingsFreed)] == ["s"]


# --- when the embeddings are free -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"decode": False}, {"decode": False, "publish": True}, {"choices": [0, 1, 2]}])
def test_freed_with_the_first_token(engine, options):
    submit(engine, **options)
    for _ in range(2):
        engine.step()
        assert engine.freed == []
    engine.step()
    assert engine.freed == ["s"]
    engine.send(msg.Release(seq="s"))
    engine.run()
    assert engine.freed == ["s"]
    assert all(len(each) == (8 if options.get("decode", True) else 1) for each in engine.tokens["s"].values())


@pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding", "published"])
def test_freed_by_cancel(engine, stage):
    if stage == "waiting":
        engine.submit("blocker", range(20, 420), max_tokens=1)
        engine.step()
    submit(engine, publish=stage == "published", decode=stage != "published")
    for _ in range({"waiting": 1, "prefilling": 2, "decoding": 5, "published": 5}[stage]):
        engine.step()
    before = engine.freed.copy()
    assert before == ([] if stage in ("waiting", "prefilling") else ["s"])
    engine.send(msg.Cancel(seq="s"))
    engine.send(msg.Cancel(seq="s"))
    engine.run()
    assert engine.freed == ["s"]


def test_freed_when_every_choice_is_finished_before_the_first_token(engine):
    submit(engine, choices=[0, 1])
    engine.step()
    engine.send(msg.Finish(seq="s", choices=[0]))
    engine.step()
    assert engine.freed == []
    engine.send(msg.Finish(seq="s", choices=[1]))
    assert engine.freed == ["s"]
    engine.run()
    assert "s" in engine.done


def test_released_while_computing_reads_on(engine):
    submit(engine, publish=True, decode=False)
    engine.step()
    engine.send(msg.Release(seq="s"))
    assert engine.freed == []
    engine.run()
    assert engine.freed == ["s"]
    assert len(engine.tokens["s"][0]) == 1


def test_freed_when_refused_for_load():
    engine = MediaHarness(max_waiting=1, token_budget=32)
    submit(engine, "a")
    submit(engine, "b")
    assert (engine.failed["b"].reason, engine.freed) == ("OVERLOADED", ["b"])
    engine.send(msg.Drain())
    submit(engine, "c")
    assert (engine.failed["c"].reason, engine.freed) == ("DRAINING", ["b", "c"])
    engine.run()
    assert engine.freed == ["b", "c", "a"]
    engine.clean()


def test_a_name_in_use_frees_nothing(engine):
    submit(engine)
    engine.step()
    engine.submit("s", PROMPT, media=[RED])
    assert engine.failed["s"].reason == "DUPLICATE_REQUEST"
    assert engine.freed == []
    engine.run()
    assert engine.freed == ["s"]


def test_freed_when_the_output_is_not_finite(engine):
    submit(engine)
    engine.step()
    execute = engine.executor.execute
    engine.executor.execute = lambda *args: [[None] * len(each) for each in execute(*args)]
    engine.run()
    assert "s" in engine.failed
    assert engine.freed == ["s"]
    engine.executor.execute = execute


def test_freed_when_the_engine_breaks():
    engine = MediaHarness(token_budget=32)
    submit(engine, "a")
    submit(engine, "b")
    engine.step()
    engine.core.fail_all()
    assert sorted(engine.freed) == ["a", "b"]
    for each in ("a", "b"):
        assert engine.failed[each].reason == "ENGINE_FAILED"


# --- preemption -------------------------------------------------------------------------------------------------------


def test_preempted_while_decoding_fails_at_once():
    """Its embeddings are gone, so the gateway resumes it; the text request is recomputed here."""
    engine = MediaHarness(num_blocks=12)
    engine.submit("text", range(20, 100), max_tokens=90)
    submit(engine, max_tokens=90)
    engine.run()
    assert engine.failed.keys() == {"s"}
    assert engine.failed["s"].reason == "PREEMPTED"
    rows = [row for batch in engine.batches for row in batch.rows if row.choice.sequence.seq == "s"]
    assert {row.choice.preemptions for row in rows} == {1}
    assert 1 < len(engine.tokens["s"][0]) < 90
    assert len(engine.tokens["text"][0]) == 90
    assert engine.freed == ["s"]
    engine.clean()


def test_preempted_before_the_first_token_is_recomputed():
    engine = MediaHarness(num_blocks=13, token_budget=4)
    engine.submit("text", range(20, 36), max_tokens=150)
    while len(engine.tokens["text"][0]) < 74:
        engine.step()
    submit(engine)
    engine.run()
    rows = [row for batch in engine.batches for row in batch.rows if row.choice.sequence.seq == "s"]
    assert 1 in {row.choice.preemptions for row in rows}
    assert engine.tokens["s"][0] == tokens(MediaHarness(), [RED])
    assert engine.freed == ["s"]
    engine.clean()


def test_committed_and_preempted_fails_at_once():
    """A decode worker never had the embeddings."""
    engine = Harness(timed=TimedModel(**IMAGES), embedding_rows=0, num_blocks=12)
    engine.submit("text", range(20, 100), max_tokens=90)
    engine.reserve("s", PROMPT, media=[RED], max_tokens=90)
    while not engine.of(msg.Reserved):
        engine.step()
    engine.send(msg.Commit(seq="s", first=[ChoiceTokens(choice=0, token_ids=[30])]))
    engine.run()
    assert engine.failed["s"].reason == "PREEMPTED"
    assert len(engine.tokens["text"][0]) == 90
    assert engine.of(msg.EmbeddingsFreed) == []
    engine.clean()
