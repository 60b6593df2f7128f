"""How an engine is set up."""

from typing import Literal

import msgspec

from common.bounds import Count, Positive, Seconds, Share


class TimedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Latency model of the `timed` executor: step seconds = base + per_token · prefill tokens + per_sequence ·
    decodes."""

    base_seconds: Seconds = 0.002
    seconds_per_prefill_token: Seconds = 0.00002
    seconds_per_decode: Seconds = 0.0001
    num_layers: Positive = 4
    vocab_size: Positive = 49152
    max_context: Positive = 8192
    image_hidden_size: Count = 0  # of image embeddings; 0: takes no images


class LoraSettings(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA adapters of a worker that prefills or decodes."""

    directory: str = ""  # below which adapters are, the same for all workers of a model; empty: none can be loaded
    adapters: dict[str, str] = {}  # name to path below `directory`, of those to have from the start
    max_adapters: Positive = 8  # at once; one that was unloaded stays until another needs its place
    max_rank: Positive = 64  # larger ones are refused


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All knobs of one engine."""

    executor: Literal["modules", "timed"] = "modules"
    model_dir: str = ""  # a Hugging Face directory with safetensors; unused by `timed`
    served_name: str = ""  # enters the layout and the block keys
    revision: str = ""  # checksum of the checkpoint; computed from its files when empty
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: what this machine computes in fast
    device: str = "auto"  # auto | cpu | cuda[:n]
    block_size: Positive = 16  # a multiple of 16
    num_blocks: Positive = 1024
    token_budget: Positive = 256  # per step, decodes and prefill chunks together
    oldest_share: Share = 0.5  # of a step's prompt tokens, to the oldest; the rest to the shortest. 1: as they came
    max_running: Positive = 64  # sequences in one step
    max_waiting: Count = 256  # queued submissions and reservations; more are refused with Overloaded
    max_context: Count = 0  # 0: the model's
    prefix_cache: bool = True
    embedding_rows: Count = 4096  # room for pulled image embeddings, where prompts with images are computed
    threads: Positive = 1
    mirror: bool = False  # keep the pool apart from the published memory, as on CUDA; for tests on a CPU
    timed: TimedModel = TimedModel()
