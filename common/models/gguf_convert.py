"""GGUF file → Hugging Face directory (safetensors in bfloat16, tokenizer, chat template, generation config).

Run as `python -m common.models.gguf_convert FILE DIRECTORY NAME`, in a process of its own: whoever waits for it needs
no torch, and can kill it. Every stage is one line on stdout: `stage <number> <of> <what>`.
"""

import json
import sys
from pathlib import Path
from typing import Any

CONVERTER = "gguf-bf16-1"
STAGES = ("loading libraries", "unpacking tensors", "reading the tokenizer", "writing")


def convert(gguf: Path, directory: Path, name: str) -> None:
    """Write the model of `gguf` into the existing empty `directory`.

    Raises ValueError for a GGUF file that transformers cannot read.
    """
    _stage(0)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": gguf.name, "trust_remote_code": False}

    _stage(1)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16, **source
    )
    _stage(2)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)

    _stage(3)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(directory)
    _restore_pre_tokenizer(directory / "tokenizer.json", gguf)
    _tidy_config(directory / "config.json", name)


def _stage(number: int) -> None:
    print("stage", number, len(STAGES), STAGES[number], flush=True)


def _restore_pre_tokenizer(path: Path, gguf: Path) -> None:
    """GGUF names the split before BPE (`tokenizer.ggml.pre`) and the reader drops it.

    For `smollm` digits stand alone, which decides how a run of blanks before a digit is cut.
    """
    from gguf import GGUFReader
    from tokenizers import Tokenizer, pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is None or field.contents() != "smollm":
        return
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(path))


def _tidy_config(path: Path, name: str) -> None:
    """Undo the rounding of the file's float32 fields, and name the model."""
    config = json.loads(path.read_text())
    config["_name_or_path"] = name
    config.pop("_model_name_or_path", None)
    if (epsilon := config.get("rms_norm_eps")) is not None:
        config["rms_norm_eps"] = float(f"{epsilon:.6g}")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    gguf, directory, name = sys.argv[1:]
    convert(Path(gguf), Path(directory), name)


if __name__ == "__main__":
    main()
