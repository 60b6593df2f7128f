"""Synthetic pictures: what the generator promises, and that held-out combinations are never trained on."""

import io
from collections import Counter

import pytest
from PIL import Image

from common.models import pictures
from common.models.pictures import COLOURS, COUNTS, KINDS, PLACES, SHAPES, SIZE, blank, draw, heldout, is_heldout

TRIPLES = [(s, c, b) for s in SHAPES for c in COLOURS for b in COLOURS if c != b]
SOME = [draw(seed) for seed in range(300)]
HELDOUT = heldout(300)


def test_a_seed_is_a_picture() -> None:
    assert draw(7) == draw(7)
    assert draw(7).png() == draw(7).png()
    assert len({picture.png() for picture in SOME}) == len(SOME)


def test_this_seed_is_this_picture() -> None:
    """Figures of the model card hold for these pictures: the generator must not drift."""
    assert draw(3).questions()[0].answer == "yellow"
    assert [(thing.colour, thing.shape, thing.place) for thing in draw(3).things] == [
        ("blue", "circle", "bottom left"),
        ("green", "triangle", "bottom right"),
    ]
    assert [thing.colour for thing in heldout(1)[0].things] == ["blue", "orange"]


def test_png_is_the_image() -> None:
    with Image.open(io.BytesIO(SOME[0].png()), formats=["PNG"]) as image:
        assert (image.mode, image.size) == ("RGB", (SIZE, SIZE))
        assert image.tobytes() == SOME[0].image.tobytes()


def test_heldout_triples_are_never_trained_on() -> None:
    seen = {triple for picture in SOME for triple in picture.triples()}
    unseen = {triple for picture in HELDOUT for triple in picture.triples()}
    assert not any(is_heldout(*triple) for triple in seen)
    assert all(is_heldout(*triple) for triple in unseen)
    assert unseen == {triple for triple in TRIPLES if is_heldout(*triple)}


def test_training_shows_every_pair_of_facts() -> None:
    trained = [triple for triple in TRIPLES if not is_heldout(*triple)]
    assert 0.15 < 1 - len(trained) / len(TRIPLES) < 0.25
    assert {(s, c) for s, c, _ in trained} == {(s, c) for s in SHAPES for c in COLOURS}
    assert {(s, b) for s, _, b in trained} == {(s, b) for s in SHAPES for b in COLOURS}


def test_heldout_sets_of_other_seeds_are_other_pictures() -> None:
    assert {picture.seed for picture in heldout(50, 1)}.isdisjoint(picture.seed for picture in heldout(50, 2))
    assert heldout(50, 1) == heldout(50, 1)


@pytest.mark.parametrize("picture", [*SOME[:40], *HELDOUT[:40]], ids=lambda picture: str(picture.seed))
def test_the_image_shows_the_facts(picture: pictures.Picture) -> None:
    assert len(picture.things) <= 3
    colours = [thing.colour for thing in picture.things]
    assert len({*colours, picture.background}) == len(colours) + 1
    assert picture.image.getpixel((SIZE // 2, SIZE // 2)) == picture.background_rgb
    places = [PLACES.index(thing.place) for thing in picture.things]
    assert places == sorted(set(places))
    for thing in picture.things:
        x, y = thing.centre
        assert picture.image.getpixel((int(x), int(y))) == thing.rgb
        assert thing.place == PLACES[2 * (y > SIZE / 2) + (x > SIZE / 2)]
        row, column = divmod(PLACES.index(thing.place), 2)
        half = SIZE / 2
        assert column * half <= x - thing.radius
        assert x + thing.radius <= (column + 1) * half
        assert row * half <= y - thing.radius
        assert y + thing.radius <= (row + 1) * half


def test_shades_of_a_colour_stay_nearest_to_it() -> None:
    for picture in SOME:
        for colour, rgb in [(picture.background, picture.background_rgb)] + [(t.colour, t.rgb) for t in picture.things]:
            distances = {name: sum((a - b) ** 2 for a, b in zip(rgb, COLOURS[name], strict=True)) for name in COLOURS}
            assert min(distances, key=distances.__getitem__) == colour


def test_questions_have_one_answer_from_the_facts() -> None:
    for picture in SOME + HELDOUT:
        questions = picture.questions()
        assert len({question.text for question in questions}) == len(questions)
        answers = {question.text: question.answer for question in questions}
        assert answers["What colour is the background?"] == picture.background
        assert answers["How many objects are there?"] == COUNTS[len(picture.things)]
        for thing in picture.things:
            assert (
                answers[f"What shape is the {thing.colour} object?"] == f"The {thing.colour} object is a {thing.shape}."
            )
            assert answers[f"Where is the {thing.colour} object?"] == thing.place
        alone = [shape for shape, times in Counter(thing.shape for thing in picture.things).items() if times == 1]
        assert sorted(question.text for question in questions if question.kind == "colour") == sorted(
            f"What colour is the {shape}?" for shape in alone
        )
        assert {question.kind for question in questions} <= set(KINDS)


def test_a_question_as_a_chat_has_the_picture_in_front() -> None:
    (message,) = SOME[0].questions()[0].messages()
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["image", "text"]


def test_answers_cannot_be_guessed_from_the_question() -> None:
    for kind, most in {"background": 0.25, "count": 0.45, "colour": 0.25, "shape": 0.5, "place": 0.4}.items():
        found = Counter(q.answer for picture in HELDOUT for q in picture.questions() if q.kind == kind)
        assert max(found.values()) / sum(found.values()) < most


def test_blank_says_nothing() -> None:
    assert blank(SOME[0]).tobytes() == blank(SOME[1]).tobytes()
    assert len(blank(SOME[0]).getcolors()) == 1
