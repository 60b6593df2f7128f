"""Greedy float32 tokens with images equal the whole model's generate, in every form the engine computes them."""

import numpy as np
import pytest

import common.engine.messages as msg
from tests.unit.engine.harness import Harness, disaggregated
from tests.unit.engine.pictures import TEXTS, Gallery, Prompt

A, B, C, END = TEXTS


def one(gallery: Gallery) -> Prompt:
    return gallery.clear(lambda seed: gallery.prompt(A, gallery.picture(seed), END))


def three(gallery: Gallery) -> Prompt:
    def make(seed: int) -> Prompt:
        first, second, third = (gallery.picture(seed + number) for number in range(3))
        return gallery.prompt(A, first, B, second, C, third, END)

    return gallery.clear(make)


def adjacent(gallery: Gallery) -> Prompt:
    return gallery.clear(lambda seed: gallery.prompt(A, gallery.picture(seed), gallery.picture(seed + 1), END))


def same_twice(gallery: Gallery) -> Prompt:
    return gallery.clear(lambda seed: gallery.prompt(A, gallery.picture(seed), B, gallery.picture(seed), END))


def image_first(gallery: Gallery) -> Prompt:
    return gallery.clear(lambda seed: gallery.prompt(gallery.picture(seed), END))


FORMS = (one, three, adjacent, same_twice, image_first)


@pytest.mark.parametrize("chunk", [7, 256])
def test_alone_cold_and_cached(gallery, chunk):
    """Case D10, adjacent images, among them; the second time KV blocks are hit (case D2)."""
    engine = gallery.engine(token_budget=chunk)
    for form in FORMS:
        prompt = form(gallery)
        expected = gallery.tokens(prompt)
        for turn in range(2):
            assert gallery.run(engine, prompt) == expected, (form.__name__, turn)
        cold, warm = engine.of(msg.Started)[-2:]
        assert cold.cached_tokens < warm.cached_tokens == (len(prompt.ids) - 1) // 16 * 16
    engine.clean()


@pytest.mark.parametrize("chunk", [7, 256])
def test_case_d1_swapped_images(gallery, chunk):
    """The same tokens and the same images in another order: another answer and other blocks."""

    def make(seed: int) -> tuple[Prompt, Prompt]:
        first, second = gallery.picture(seed), gallery.picture(seed + len(TEXTS))  # of one size
        return gallery.prompt(A, first, B, second, END), gallery.prompt(A, second, B, first, END)

    there, back = gallery.clear(make)
    assert there.ids == back.ids
    assert gallery.tokens(there) != gallery.tokens(back)
    engine = gallery.engine(token_budget=chunk)
    for prompt in (there, back, there):
        assert gallery.run(engine, prompt) == gallery.tokens(prompt)
    before, after = (event.cached_tokens for event in engine.of(msg.Started)[1:])
    assert before == there.media[0].start // 16 * 16
    assert after == (len(there.ids) - 1) // 16 * 16
    engine.clean()


@pytest.mark.parametrize("budget", [7 + 8, 256])
def test_among_others(gallery, budget):
    """Text, decodes and several prompts with images in one step; arrivals are spread over the steps."""
    engine = gallery.engine(token_budget=budget)
    words = gallery.clear(lambda seed: (gallery.prompt(A + "x" * seed + END), gallery.prompt("y" * (40 + seed))), 24)
    prompts = [*words, *(form(gallery) for form in FORMS)]
    for number, prompt in enumerate(prompts):
        gallery.submit(engine, f"s{number}", prompt, max_tokens=24 if prompt in words else 12)
        engine.step()
    engine.run()
    assert any(batch.decodes and len(batch.rows) > batch.decodes for batch in engine.batches)
    for number, prompt in enumerate(prompts):
        assert engine.tokens[f"s{number}"][0] == gallery.tokens(prompt, 24 if prompt in words else 12), number
    engine.clean()


def test_several_image_prompts_in_one_step(gallery):
    engine = gallery.engine(token_budget=2048)
    prompts = [form(gallery) for form in FORMS]
    for number, prompt in enumerate(prompts):
        gallery.submit(engine, f"s{number}", prompt)
    engine.run()
    assert len(engine.batches[0].rows) == len(prompts)
    for number, prompt in enumerate(prompts):
        assert engine.tokens[f"s{number}"][0] == gallery.tokens(prompt), number
    engine.clean()


def test_three_choices(gallery):
    prompt = three(gallery)
    engine = gallery.engine(token_budget=7)
    gallery.submit(engine, "n", prompt, choices=[0, 1, 2])
    engine.run()
    assert dict(engine.tokens["n"]) == dict.fromkeys(range(3), gallery.tokens(prompt))
    assert engine.freed == ["n"]
    engine.clean()


@pytest.mark.parametrize("mirror", [False, True])
def test_disaggregated(gallery, mirror):
    """The decode worker has neither embeddings nor vision weights; its positions come from the grids."""
    prefill = gallery.engine(token_budget=7, mirror=mirror)
    decode = Harness.modules(gallery.checkpoint, embedding_rows=0, mirror=mirror)
    assert decode.embeddings is None
    for form in (three, adjacent):
        prompt = form(gallery)
        expected = gallery.tokens(prompt)
        for turn in ("cold", "warm"):
            seq = f"{form.__name__}-{turn}"
            media = prefill.place(seq, prompt.media, [gallery.embedding(image) for image in prompt.images])
            options = {"media": media, "choices": [0, 1], "max_tokens": 12, "ignore_eos": True}
            assert disaggregated(prefill, decode, seq, prompt.ids, **options) == {0: expected, 1: expected}, seq
        assert decode.of(msg.Reserved)[-1].hit_blocks == (len(prompt.ids) - 1) // 16
    prefill.clean()
    decode.clean()


def test_resume_with_output(gallery):
    prompt = three(gallery)
    expected = gallery.tokens(prompt)
    for given in (1, 11):
        assert gallery.run(gallery.engine(token_budget=7), prompt, output=expected[:given]) == expected[given:]


@pytest.mark.parametrize("chunk", [7, 256])
def test_cached_prefix_that_ends_inside_an_image(gallery, chunk):
    """Two prompts part right after an image, so that the second starts from blocks that end within it."""

    def make(seed: int) -> tuple[Prompt, Prompt]:
        image = gallery.picture(seed + 1)
        for length in range(1, 17):
            first, second = (gallery.prompt("x" * length, image, tail) for tail in "?!")
            if _parts(second, len(second.ids) - 1):
                return first, second
        raise AssertionError("no block ends inside the image")

    first, second = gallery.clear(make)
    engine = gallery.engine(token_budget=chunk)
    assert gallery.run(engine, first) == gallery.tokens(first)
    assert gallery.run(engine, second) == gallery.tokens(second)
    assert _parts(second, len(second.ids) - 1) == engine.of(msg.Started)[-1].cached_tokens
    engine.clean()


def _parts(prompt: Prompt, tokens: int) -> int:
    """The end of the last whole block of the first `tokens`, where that is inside an image; else 0."""
    end = tokens // 16 * 16
    return end if any(each.start < end < each.start + each.length for each in prompt.media) else 0


def test_another_image_of_the_same_size_hits_nothing_of_the_first(gallery):
    def make(seed: int) -> tuple[Prompt, Prompt]:
        return tuple(gallery.prompt(A, gallery.picture(seed + 4 * number), END) for number in range(2))

    red, blue = gallery.clear(make)
    engine = gallery.engine()
    assert red.ids == blue.ids
    assert gallery.run(engine, red) == gallery.tokens(red)
    assert gallery.run(engine, blue) == gallery.tokens(blue) != gallery.tokens(red)
    assert engine.of(msg.Started)[-1].cached_tokens == red.media[0].start // 16 * 16
    engine.clean()


def test_chunks_end_within_images_where_the_model_allows_it(gallery):
    engine = gallery.engine(token_budget=7)
    prompt = three(gallery)
    gallery.run(engine, prompt)
    chunks = [row for batch in engine.batches for row in batch.rows[batch.decodes :]]
    parted = [row.end for row in chunks if _within_run(gallery, prompt, row.end)]
    if gallery.spec.splittable:
        assert parted
        assert max(row.end - row.start for row in chunks) == 7
    else:
        assert not parted
        assert max(row.end - row.start for row in chunks) > 7
        assert all(row.end - row.start < 7 + max(each.rows for each in prompt.media) for row in chunks)


def _within_run(gallery: Gallery, prompt: Prompt, end: int) -> bool:
    around = prompt.ids[end - 1 : end + 1]
    return around == [gallery.spec.image_token_id] * 2


def test_text_alone(gallery):
    prompt = gallery.clear(lambda seed: gallery.prompt(A + "x" * seed + END), 24)
    engine = gallery.engine(token_budget=7)
    assert gallery.run(engine, prompt, max_tokens=24) == gallery.tokens(prompt, 24)
    assert engine.of(msg.EmbeddingsFreed) == []
    engine.clean()


def test_prompt_and_images_must_agree(gallery):
    prompt = three(gallery)
    token = gallery.spec.image_token_id
    first, *others = prompt.media
    fewer = [msg.Media(key=first.key, start=first.start, length=first.length, rows=first.rows - 1, grid=first.grid)]
    longer = [*prompt.media[:-1], msg.Media(**{**_fields(prompt.media[-1]), "length": 10**6})]
    wrong = {
        "none": (prompt.ids, []),
        "one less": (prompt.ids, others),
        "rows": (prompt.ids, [*fewer, *others]),
        "beyond": (prompt.ids, longer),
        "a token more": ([*prompt.ids, token], prompt.media),
        "no tokens": ([5] * len(prompt.ids), prompt.media),
    }
    engine = gallery.engine()
    for name, (ids, media) in wrong.items():
        engine.submit(name, ids, media=engine.place(name, media))
        engine.reserve(f"reserve {name}", ids, media=media)
        for seq in (name, f"reserve {name}"):
            assert (engine.failed[seq].reason, engine.failed[seq].field) == ("INVALID_ARGUMENT", "media"), seq
    assert engine.freed == [name for name in wrong if name != "none"]
    engine.clean()


def _fields(item: msg.Media) -> dict:
    return {name: getattr(item, name) for name in item.__struct_fields__}


def test_embeddings_that_are_not_finite_fail_their_request_only(gallery):
    prompt, other = one(gallery), image_first(gallery)
    engine = gallery.engine()
    gallery.submit(engine, "good", other)
    media = engine.place("bad", prompt.media, [np.full_like(gallery.embedding(prompt.images[0]), 0xFF)])
    engine.submit("bad", prompt.ids, media=media)
    engine.run()
    assert engine.failed.keys() == {"bad"}
    assert sorted(engine.freed) == ["bad", "good"]
    assert engine.tokens["good"][0] == gallery.tokens(other)
    assert gallery.run(engine, prompt) == gallery.tokens(prompt)  # nothing of it was shared
    assert engine.of(msg.Started)[-1].cached_tokens == 0
    engine.clean()


def test_weights_are_the_text_models_only(gallery):
    engine = gallery.engine()
    text = {name for name, _ in engine.executor._model.named_parameters()}
    assert engine.executor.weight_bytes > 0
    assert not any("vision" in name or "visual" in name or "projector" in name for name in text)
