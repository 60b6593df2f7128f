"""LoRA adapters in the engine: tokens as of merged weights, in mixed batches, with blocks of their own."""

import contextlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import common.engine.messages as msg
from common.models.lora import TARGETS
from tests import oracle
from tests.adapters import ALL, make_adapter, merged
from tests.checkpoints import ARCHITECTURES, VLM_ARCHITECTURES, tiny_checkpoint, vlm_checkpoint
from tests.unit.engine.harness import Harness

MAX_TOKENS = 10


def load(engine: Harness, path: Path, *, max_rank: int = 16, max_adapters: int = 2) -> msg.AdapterLoaded:
    engine.send(msg.LoadAdapter(number=1, path=str(path), max_rank=max_rank, max_adapters=max_adapters))
    found = engine.events[-1]
    assert isinstance(found, msg.AdapterLoaded)
    return found


def prompt_of(rng: random.Random, checkpoints: list[Path], length: int = 37) -> tuple[list[int], list[list[int]]]:
    """A prompt without near ties on any of the checkpoints, and each one's tokens."""
    for _ in range(60):
        prompt = [rng.randrange(10, 500) for _ in range(length)]
        try:
            return prompt, [oracle.generate(each, prompt, MAX_TOKENS) for each in checkpoints]
        except oracle.NearTie:
            continue
    raise AssertionError("no prompt without near ties")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tiny_checkpoint(architecture, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    return make


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_mixed_batch_gives_each_row_its_own_adapter(
    architecture: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny(architecture)
    one = make_adapter(base, tmp_path / "one", seed=1)
    two = make_adapter(
        base, tmp_path / "two", seed=2, r=3, modules=("q_proj", "v_proj", "down_proj"), layers=(0, 2), use_rslora=True
    )
    weights = [base, merged(base, one, tmp_path / "m1"), merged(base, two, tmp_path / "m2")]
    engine = Harness.modules(base, token_budget=48)
    adapters = ["", load(engine, one).adapter, load(engine, two).adapter]
    assert len(set(adapters)) == 3
    prompt, expected = prompt_of(random.Random(architecture), weights)
    assert len({tuple(tokens) for tokens in expected}) == 3  # else this shows nothing
    for number in range(6):  # prefill chunks and decodes of all three in one batch
        engine.submit(
            str(number), prompt, adapter=adapters[number % 3], max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
        )
    engine.run()
    assert not engine.failed
    for number in range(6):
        assert engine.tokens[str(number)][0] == expected[number % 3], (architecture, number)
    assert any(
        len({row.choice.sequence.adapter for row in batch.rows[: batch.decodes]}) == 3 for batch in engine.batches
    )


@pytest.mark.parametrize("architecture", VLM_ARCHITECTURES)
def test_a_vision_language_models_text_part_takes_adapters_too(architecture: str, tmp_path: Path) -> None:
    base = vlm_checkpoint(architecture, tmp_path / "base")
    path = make_adapter(base, tmp_path / "one", seed=1)
    whole = merged(base, path, tmp_path / "m")
    engine = Harness.modules(base)
    loaded = load(engine, path)
    assert not loaded.reason, loaded.message
    rng = random.Random(architecture)
    expected: list[int] = []
    while not expected:
        prompt = [rng.randrange(30, 120) for _ in range(20)]
        with contextlib.suppress(oracle.NearTie):
            expected = oracle.generate_with_images(whole, prompt, [], 6)
    engine.submit("x", prompt, adapter=loaded.adapter, max_tokens=6, temperature=0.0, ignore_eos=True)
    engine.submit("base", prompt, max_tokens=6, temperature=0.0, ignore_eos=True)
    engine.run()
    assert engine.tokens["x"][0] == expected != engine.tokens["base"][0]


def test_blocks_are_shared_within_an_adapter_and_never_beyond(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny("llama")
    engine = Harness.modules(base)
    one = load(engine, make_adapter(base, tmp_path / "one", seed=1)).adapter
    two = load(engine, make_adapter(base, tmp_path / "two", seed=2)).adapter
    cached: dict[str, int] = {}
    for name, adapter in (("base", ""), ("one", one), ("two", two), ("one again", one), ("base again", "")):
        engine.submit(name, range(10, 60), adapter=adapter, max_tokens=2, temperature=0.0)
        engine.run()
        cached[name] = engine.done[name].cached_tokens
    assert cached == {"base": 0, "one": 0, "two": 0, "one again": 48, "base again": 48}


def test_an_adapter_that_is_let_go_stays_until_its_place_is_needed(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny("llama")
    engine = Harness.modules(base)
    paths = [make_adapter(base, tmp_path / str(i), seed=i) for i in range(4)]
    first, second = (load(engine, path).adapter for path in paths[:2])
    refused = load(engine, paths[2])
    assert (refused.reason, refused.field) == ("INVALID_ARGUMENT", "lora_name")
    assert "max_adapters" in refused.message

    engine.submit("runs", range(10, 40), adapter=first, max_tokens=40, temperature=0.0, ignore_eos=True)
    engine.step()
    engine.send(msg.LetAdapterGo(adapter=first))
    assert load(engine, paths[2]).reason == "OVERLOADED"  # its sequence still runs
    engine.submit("resumes", range(10, 40), adapter=first, max_tokens=2, temperature=0.0)
    engine.run()
    assert set(engine.done) == {"runs", "resumes"}
    assert load(engine, paths[2]).dropped == [first]
    engine.submit("late", range(10, 40), adapter=first, max_tokens=2, temperature=0.0)
    assert engine.failed["late"].reason == "NOT_READY"
    engine.submit("kept", range(10, 40), adapter=second, max_tokens=2, temperature=0.0)
    engine.run()
    assert "kept" in engine.done
    assert engine.core.check_integrity() == []


def test_without_adapters_no_layer_is_touched(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny("llama")
    engine = Harness.modules(base)

    def hooks() -> int:
        model: Any = engine.executor._model  # type: ignore[attr-defined]
        return sum(len(module._forward_hooks) for module in model.modules())

    assert hooks() == 0
    adapter = load(engine, make_adapter(base, tmp_path / "one", seed=1, modules=("q_proj",), layers=(1,))).adapter
    assert hooks() == 1
    engine.executor.drop_adapter(adapter)
    assert hooks() == 0


def test_halves_are_read_as_they_are(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny("llama")
    path = make_adapter(base, tmp_path / "one", seed=5, dtype=torch.bfloat16)
    engine = Harness.modules(base)
    adapter = load(engine, path).adapter
    prompt, expected = prompt_of(random.Random(5), [merged(base, path, tmp_path / "m")])
    engine.submit("x", prompt, adapter=adapter, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    engine.run()
    assert engine.tokens["x"][0] == expected[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"init_lora_weights": "pissa"}, "changes the base model"),
        ({"r": 17}, "r must be 1 to 16 .lora.max_rank., not 17"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"r": 4, "tensors": {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}}, "lm_head"),
        (
            {"tensors": {"base_model.model.model.layers.0.mlp.q_proj.lora_A.weight": torch.ones(4, 64)}},
            "can be adapted",
        ),
        (
            {"tensors": {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 64)}},
            "only one of lora_A and lora_B",
        ),
        (
            {"tensors": {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(5, 64)}},
            "not of rank 4",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused_by_name(
    options: dict[str, Any], words: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny("llama")
    engine = Harness.modules(base)
    refused = load(engine, make_adapter(base, tmp_path / "one", seed=1, **options))
    assert (refused.reason, refused.field) == ("INVALID_ARGUMENT", "lora_path")
    assert re.search(words, refused.message), refused.message


@pytest.mark.parametrize(
    ("change", "words"), [("layer", "the model has 3"), ("width", "64 × 64 in the model, 64 × 65")]
)
def test_an_adapter_of_another_model_is_refused(
    change: str, words: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny("llama")
    layer, width = (7, 64) if change == "layer" else (0, 65)
    key = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora"
    tensors = {f"{key}_A.weight": torch.ones(4, width), f"{key}_B.weight": torch.ones(64, 4)}
    engine = Harness.modules(base)
    refused = load(engine, make_adapter(base, tmp_path / "one", seed=1, tensors=tensors))
    assert (refused.reason, refused.field) == ("INVALID_ARGUMENT", "lora_path")
    assert words in refused.message
    tensors = {f"{key}_A.weight": torch.full((4, 64), float("nan")), f"{key}_B.weight": torch.ones(64, 4)}
    if layer == 0:
        assert "not finite" in load(engine, make_adapter(base, tmp_path / "nan", seed=1, tensors=tensors)).message


def test_damaged_files_are_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny("llama")
    engine = Harness.modules(base)
    path = make_adapter(base, tmp_path / "one", seed=1)
    weights = path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for content in (b"", b"junk", b"\xff" * 64, whole[:-10], whole[: len(whole) // 2]):
        weights.write_bytes(content)
        refused = load(engine, path)
        assert refused.reason == "INVALID_ARGUMENT", content[:8]
    weights.write_bytes(whole)
    config = path / "adapter_config.json"
    for text in ("", "[]", "{", "[" * 100_000):
        config.write_text(text)
        assert load(engine, path).reason == "INVALID_ARGUMENT"
    assert load(engine, tmp_path / "nothing").reason == "INVALID_ARGUMENT"
    engine.submit("x", range(10, 40), max_tokens=2, temperature=0.0)
    engine.run()
    assert "x" in engine.done


def test_every_target_is_a_layer_of_every_architecture() -> None:
    assert set(ALL) == set(TARGETS)


def test_without_weights_there_is_nothing_to_adapt(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    refused = load(Harness(), make_adapter(tiny("llama"), tmp_path / "one", seed=1))
    assert (refused.reason, refused.field) == ("INVALID_ARGUMENT", "lora_path")
