"""What is read from a Hugging Face directory, against transformers' own reading of it."""

import json
import shutil

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from common.engine.settings import EngineSettings
from common.errors import InvalidArgument, ModelNotFound
from common.models.config import kv_layout, read_config


def test_as_transformers_reads_it(reference):
    config, theirs = read_config(reference.model_dir), AutoConfig.from_pretrained(reference.model_dir)
    assert config.architecture == theirs.architectures[0]
    assert config.num_layers == theirs.num_hidden_layers
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.vocab_size == theirs.vocab_size
    assert config.max_context == theirs.max_position_embeddings
    assert config.head_dim == reference.model.model.layers[0].self_attn.head_dim
    assert config.eos_token_ids == (2,)


def test_layout(llama):
    layout = kv_layout(EngineSettings(model_dir=str(llama.model_dir), served_name="tiny", dtype="float32"))
    assert (layout.model, layout.num_layers, layout.num_kv_heads, layout.head_dim) == ("tiny", 3, 2, 16)
    assert layout.unit_bytes == 2 * 2 * 16 * 16 * 4
    assert layout.revision == read_config(llama.model_dir).revision


@pytest.fixture
def copy(llama, tmp_path):
    shutil.copytree(llama.model_dir, tmp_path / "model")
    return tmp_path / "model"


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_revision_is_of_the_content(llama, copy):
    known = read_config(llama.model_dir).revision
    assert read_config(copy).revision == known
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert read_config(copy).revision != known
    shutil.copy(llama.model_dir / "model.safetensors", weights)
    assert read_config(copy).revision == known
    edit(copy / "config.json", rms_norm_eps=1e-3)
    assert read_config(copy).revision != known
    assert read_config(copy, revision="given").revision == "given"


def test_eos_of_the_generation_config_comes_first(copy):
    edit(copy / "generation_config.json", eos_token_id=[5, 6])
    assert read_config(copy).eos_token_ids == (5, 6)
    (copy / "generation_config.json").unlink()
    assert read_config(copy).eos_token_ids == (2,)


def test_head_dim_when_the_file_names_none(copy):
    config = json.loads((copy / "config.json").read_text())
    config.pop("head_dim", None)
    (copy / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(copy)
    assert read_config(copy).head_dim == model.model.layers[0].self_attn.head_dim


def test_refused_clearly(copy):
    edit(copy / "config.json", architectures=["MambaForCausalLM"])
    with pytest.raises(InvalidArgument, match="MambaForCausalLM is not supported; supported are LlamaForCausalLM"):
        read_config(copy)
    edit(copy / "config.json", architectures=["LlamaForCausalLM"], num_hidden_layers=0)
    with pytest.raises(InvalidArgument, match="num_hidden_layers must be a positive integer, got 0"):
        read_config(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match="not JSON"):
        read_config(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ModelNotFound):
        read_config(copy)


def test_weights_other_than_safetensors_are_refused(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match="safetensors"):
        read_config(copy)
    (copy / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidArgument, match="not a safetensors file"):
        read_config(copy)
