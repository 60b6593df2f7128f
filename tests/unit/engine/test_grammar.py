"""Output by a grammar: in one engine, over a hand-off, resumed and preempted."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

import common.engine.messages as msg
from common.grammar.grammar import JSON_OBJECT, Grammar, choice, json_schema
from common.models.tokenizer import Tokenizer
from tests.checkpoints import tiny_checkpoint
from tests.schemas import random_schema
from tests.tokenizer import save_tokenizer
from tests.unit.engine.harness import Harness, disaggregated

EOS = 2
SEEDED = {"temperature": 1.0, "max_tokens": 1500}
SIZES = {"num_blocks": 512, "max_running": 32, "token_budget": 256}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tiny_checkpoint("llama", tmp_path_factory.mktemp("grammar"), max_context=2048))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.fixture
def engine(model_dir: Path) -> Harness:
    return Harness.modules(model_dir, **SIZES)


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 500, 6 + seed % 7).tolist()


def test_json_schemas_always_parse_and_validate(engine: Harness, tokenizer: Tokenizer) -> None:
    """200 random schemas, a seed each, many at once: what ends by itself is valid, and nothing else was cut off."""
    for seed in range(200):
        engine.submit(str(seed), prompt(seed), seed=seed, grammar=json_schema(random_schema(seed)), **SEEDED)
    engine.run()
    assert not engine.failed
    texts = set()
    for seed in range(200):
        tokens = engine.tokens[str(seed)][0]
        assert engine.reasons[str(seed)] == {0: "stop"}
        assert EOS not in tokens[:-1]
        text = tokenizer.decode(tokens)
        jsonschema_rs.validate(random_schema(seed), json.loads(text))
        texts.add(text)
    assert len(texts) > 150
    engine.clean()


def test_seeds_and_choices_draw_apart_and_again(engine: Harness, tokenizer: Tokenizer) -> None:
    """n choices have a state each; a seed gives the same once more."""
    schema = {"type": "string", "minLength": 4, "maxLength": 30}
    for name in ("one", "two"):
        engine.submit(name, prompt(1), choices=[0, 1, 2], seed=9, grammar=json_schema(schema), **SEEDED)
        engine.run()
    texts = [tokenizer.decode(engine.tokens["one"][index]) for index in range(3)]
    for text in texts:
        jsonschema_rs.validate(schema, json.loads(text))
    assert len(set(texts)) == 3
    assert engine.tokens["one"] == engine.tokens["two"]


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", r"[0-9]{3}-(a|bc)+x"), r"[0-9]{3}-(a|bc)+x"),
        (choice(["yes", "no", 'may"be\n', "세계"]), 'yes|no|may"be\n|세계'),
        (Grammar("lark", 'start: "<" /[a-z]{1,9}/ ">" start?'), r"(<[a-z]{1,9}>)+"),
        (Grammar("regex", "x?"), "x?"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_kinds(grammar: Grammar, pattern: str, temperature: float, engine: Harness, tokenizer: Tokenizer) -> None:
    for seed in range(6):
        tokens = engine.one(prompt(seed), grammar=grammar, temperature=temperature, seed=seed, max_tokens=200)
        if len(tokens) < 200:
            assert re.fullmatch(pattern, tokenizer.decode(tokens))


def test_with_filters_penalties_logprobs_and_bias(engine: Harness, tokenizer: Tokenizer) -> None:
    """The mask comes before the filters, so these have something left; log probabilities are the model's own."""
    grammar = choice(["red", "green", "blue"])
    free = engine.one(prompt(3), max_tokens=1, top_logprobs=3, temperature=0.0)
    options: dict[str, Any] = {"top_k": 1, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 1.5, "seed": 4}
    options |= {"logit_bias": {free[0]: 100.0, EOS: 100.0}, "temperature": 1.0, "max_tokens": 20}
    engine.submit("all", prompt(3), grammar=grammar, top_logprobs=3, **options)
    engine.run()
    assert tokenizer.decode(engine.tokens["all"][0]) in ("red", "green", "blue")
    first = engine.logprobs["all"][0]
    assert first.top[0].token_id == free[0]  # raw: neither bias nor mask
    assert first.logprob < first.top[0].logprob


def test_min_tokens_end_and_ignore_eos(engine: Harness, tokenizer: Tokenizer) -> None:
    """min_tokens holds where the grammar can go on; where it cannot, its end counts."""
    grammar = Grammar("regex", "[ab]{1,40}")
    tokens = engine.one(prompt(4), grammar=grammar, min_tokens=15, logit_bias={EOS: 100.0}, max_tokens=100)
    assert len(tokens) == 16  # and EOS as soon as it may
    assert re.fullmatch("[ab]+", tokenizer.decode(tokens))
    assert tokenizer.decode(engine.one(prompt(4), grammar=choice(["a"]), min_tokens=15, max_tokens=100)) == "a"
    whole = engine.one(prompt(4), grammar=grammar, ignore_eos=True, logit_bias={EOS: 100.0}, max_tokens=100)
    assert len(tokenizer.decode(whole)) == 40


def test_a_cut_by_max_tokens_says_so(engine: Harness) -> None:
    engine.submit("cut", prompt(5), grammar=Grammar("regex", "[ab]{50}"), max_tokens=7)
    engine.run()
    assert engine.reasons["cut"] == {0: "length"}


def test_a_hand_off_gives_the_same(model_dir: Path, tokenizer: Tokenizer) -> None:
    """Prefill's first token is masked, decode goes on from it: token by token what one engine gives."""
    prefill, decode, both = (Harness.modules(model_dir, **SIZES) for _ in range(3))
    for seed in range(8):
        schema = random_schema(1000 + seed)
        options: dict[str, Any] = {"seed": seed, "grammar": json_schema(schema), "choices": [0, 1], **SEEDED}
        moved = disaggregated(prefill, decode, f"moved{seed}", prompt(seed), **options)
        both.submit(f"whole{seed}", prompt(seed), **options)
        both.run()
        assert moved == both.tokens[f"whole{seed}"]
        for tokens in moved.values():
            jsonschema_rs.validate(schema, json.loads(tokenizer.decode(tokens)))
    prefill.clean()
    decode.clean()


def test_a_resume_at_every_token_gives_the_same(model_dir: Path) -> None:
    """As after a worker's death: another engine gets the tokens so far and goes on in mid-object."""
    parts = {"a": {"type": "string", "maxLength": 8}}
    schema = {"type": "object", "properties": parts, "required": ["a"], "additionalProperties": False}
    options: dict[str, Any] = {"seed": 3, "grammar": json_schema(schema), **SEEDED}
    whole = Harness.modules(model_dir, **SIZES).one(prompt(2), **options)
    assert 5 < len(whole) < 150
    other = Harness.modules(model_dir, **SIZES)
    for cut in range(1, len(whole)):
        assert whole[:cut] + other.one(prompt(2), output=whole[:cut], **options) == whole
    moved = disaggregated(
        *(Harness.modules(model_dir, **SIZES) for _ in "pd"), "x", prompt(2), output=whole[:4], **options
    )
    assert whole[:4] + moved[0] == whole


def test_a_preemption_gives_the_same(model_dir: Path, tokenizer: Tokenizer) -> None:
    grammar = Grammar("regex", "([a-d]{3},){20}")
    roomy = Harness.modules(model_dir, **SIZES)
    tight = Harness.modules(model_dir, num_blocks=9, max_running=32, token_budget=256)
    for harness in (roomy, tight):
        for seed in range(2):
            harness.submit(str(seed), prompt(seed), seed=seed, grammar=grammar, temperature=1.0, max_tokens=120)
        harness.run()
    assert not tight.failed
    assert any(choice.preemptions for batch in tight.batches for row in batch.rows for choice in (row.choice,))
    assert tight.tokens == roomy.tokens
    assert re.fullmatch("([a-d]{3},){20}", tokenizer.decode(tight.tokens["0"][0]))


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar("regex", "(secret"), "unclosed"),
        (Grammar("regex", "[a&&b]"), "cannot be used"),
        (json_schema({"not": {"type": "string"}}), '"not"'),
        (json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}), "unsatisfiable"),
        (json_schema({"$ref": "#"}), "nothing matches"),
        (json_schema({"type": "secret"}), "a `type` is none of JSON's"),
        (json_schema({"type": "string", "format": "secret"}), "`format`"),
        (json_schema({"properties": 5}), "`properties` must be an object"),
        (json_schema({"type": "array", "items": "secret"}), "must be an object or a boolean"),
        (json_schema({"type": "object", "required": "secret"}), "`required` must be of type array"),
        (json_schema({"type": "integer", "minimum": "secret"}), "`minimum` must be of type number"),
        (json_schema({"$ref": "#/$defs/secret"}), "leads nowhere"),
        (json_schema({"$ref": "http://secret.example/x"}), "cannot be used"),
        (Grammar("regex", "a(?=secret)"), "look-around"),
        (Grammar("lark", 'start: "a" b\nb: secret'), "(line 2, column 4): it uses a rule that it does not define"),
        (Grammar("lark", 'begin: "secret"'), "no rule `start`"),
        (json_schema("{"), "JSON object"),
        (json_schema({"type": "integer", "multipleOf": 1000003}), "multipleOf"),
        (json_schema('{"type": "number", "multiple\\u004ff": 100.07}'), "multipleOf"),
        (Grammar("json_schema", '{"anyOf":[' + ",".join(['{"$ref":"#/x"}'] * 257) + "]}"), "256 references"),
        (Grammar("lark", 'start: "a" secret'), "cannot be used"),
        (Grammar("lark", "start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
        (Grammar("lark", "\n" * 1000), "1000 lines"),
        (Grammar("regex", "a" * 200_000), "131072"),
        (Grammar("choice", "[]"), "at least one"),
        (choice(["a", ""]), "none that is empty"),
        (choice(["a"] * 1025), "1024"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_its_field(grammar: Grammar, word: str, engine: Harness) -> None:
    engine.submit("bad", prompt(1), grammar=grammar)
    engine.run()
    failed = engine.failed["bad"]
    assert (failed.reason, failed.field) == ("INVALID_ARGUMENT", "grammar")
    assert word in failed.message
    assert "secret" not in failed.message
    engine.clean()


def test_without_a_tokenizer_there_is_no_grammar(tmp_path: Path) -> None:
    for engine in (Harness(), Harness.modules(tiny_checkpoint("llama", tmp_path))):
        engine.submit("x", [5, 6], grammar=JSON_OBJECT)
        assert engine.failed["x"].field == "grammar"
        engine.clean()


def test_an_output_against_the_grammar_is_refused(engine: Harness, tokenizer: Tokenizer) -> None:
    engine.submit("x", [5, 6], output=tokenizer.encode("[1"), grammar=JSON_OBJECT, max_tokens=50)
    engine.submit("y", [5, 6], output=[*tokenizer.encode("{}"), EOS], grammar=JSON_OBJECT, max_tokens=50)
    engine.run()
    assert {seq: failed.field for seq, failed in engine.failed.items()} == {"x": "output", "y": "output"}
    engine.clean()


def test_waiting_for_a_grammar_can_be_cancelled_and_has_an_end(model_dir: Path) -> None:
    engine = Harness.modules(model_dir, **SIZES)
    grammars = engine.core.grammars
    assert grammars is not None
    now = [0.0]
    grammars._clock = lambda: now[0]
    released = threading.Event()
    gate = grammars._cache._thread.submit(released.wait, 30)
    try:
        for seq in ("cancelled", "late"):
            engine.submit(seq, prompt(1), grammar=choice([seq]), publish=True, decode=False)
        engine.submit("free", prompt(2))
        engine.send(msg.Cancel(seq="cancelled"))
        assert engine.step()  # others do not wait
        now[0] = 31.0
        engine.step()
        assert "30 seconds" in engine.failed["late"].message
    finally:
        released.set()
        gate.result(30)
    engine.run()
    assert engine.tokens.keys() == {"free"}
    engine.clean()


def test_compiled_grammars_are_kept_and_bounded(model_dir: Path) -> None:
    engine = Harness.modules(model_dir, **SIZES)
    cache = engine.core.grammars._cache  # type: ignore[union-attr]
    for number in range(80):
        engine.one(prompt(1), grammar=choice([f"{number}"]))
    assert len(cache) == 64
    known = cache.compile(choice(["79"]))
    assert known.done()
    assert cache.compile(choice(["79"])) is known
    assert not engine.failed
