"""The `modules` executor: transformers' own modelling code over the paged pool."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from common.cache.keys import EmbeddingLayout
from common.engine import prompt_scores
from common.engine.embedding_pool import EmbeddingRows
from common.engine.executor import Batch, Sampled
from common.engine.image_inputs import ImageInputs
from common.engine.lora import LoraLayers
from common.engine.paged_attention import NAME, PagedStep
from common.engine.prompt_media import ImageRules
from common.engine.sampler import Sampler
from common.engine.wire import Launch
from common.models.config import ModelConfig, read_config
from common.models.lora import LoraFiles
from common.models.vision.partial import LOADING, load_language, weight_bytes
from common.transfer.pool_memory import PoolMemory


class ModulesExecutor:
    """A Hugging Face checkpoint on CPU or CUDA, in float32, bfloat16 or float16; of a vision-language one the text
    model only.

    The KV tensor is the pool's shared memory itself, or, mirrored (always on CUDA), a tensor of its own on the
    device, from which published blocks are copied to the shared memory and into which pulled ones are.
    """

    name = "modules"

    def __init__(self, launch: Launch, memory: PoolMemory, embeddings: PoolMemory | None) -> None:
        settings, layout = launch.settings, launch.layout
        config = read_config(settings.model_dir, revision=layout.revision)
        self.vocab_size = config.vocab_size
        self.max_context = config.max_context
        self.eos_token_ids = config.eos_token_ids
        self.num_layers = layout.num_layers
        self._device = _device(settings.device)
        dtype = getattr(torch, layout.dtype)
        with LOADING:  # it sets torch's default dtype for the whole process, so engines that share one load in turn
            self._model = _load(settings.model_dir, dtype, vision=config.vision).to(self._device)
        self.weight_bytes = weight_bytes(self._model)
        self.images = _image_rules(config, launch.embedding_layout, embeddings)
        self._inputs = self._image_inputs(launch.embedding_layout, embeddings)
        shape = (
            layout.num_layers,
            memory.num_blocks,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        self._shared = torch.from_numpy(memory.data.reshape(-1)).view(dtype).view(shape)
        self._mirrored = settings.mirror or self._device.type != "cpu"
        self._kv = torch.zeros(shape, dtype=dtype, device=self._device) if self._mirrored else self._shared
        self._lora = LoraLayers(self._model.model.layers)
        self._sampler = Sampler(self.eos_token_ids)
        # transformers' Gemma3ForConditionalGeneration has none, whatever its text model's config says.
        softcap = None if config.vision else getattr(self._model.config, "final_logit_softcapping", None)
        self._softcap: float | None = softcap

    def _image_inputs(self, layout: EmbeddingLayout | None, embeddings: PoolMemory | None) -> ImageInputs | None:
        if self.images is None:
            return None
        rows = EmbeddingRows(layout, embeddings) if layout is not None and embeddings is not None else None
        return ImageInputs(self._model.embed_tokens, rows, mrope=self.images.mrope)

    @torch.inference_mode()
    def execute(self, batch: Batch, layer_done: Callable[[int], None]) -> list[list[Sampled | None]]:
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for row in batch.rows:
            tokens += row.choice.tokens(row.start, row.end)
            positions += range(row.start, row.end)
            if row.samples:
                last.append(len(tokens) - 1)
        touched = self._touched(batch) if self._mirrored else []

        def layer_written(layers: int) -> None:
            if touched:
                self._shared[layers - 1, touched] = self._kv[layers - 1, touched].to("cpu")
            if batch.by_layer:
                layer_done(layers)

        by_layer = layer_written if touched or batch.by_layer else None
        token_ids = torch.tensor([tokens], device=self._device)
        position_ids = torch.tensor([positions], device=self._device)
        if self._inputs is not None:
            inputs = self._inputs.of(batch, token_ids, position_ids)
        else:
            inputs = {"input_ids": token_ids, "position_ids": position_ids}
        paged = PagedStep.of(self._kv, batch, by_layer)
        self._lora.begin(batch.rows)
        hidden = self._model.model(**inputs, use_cache=False, paged=paged).last_hidden_state[0]
        batch.scored = prompt_scores.score(hidden, batch.rows, self._logits)
        sampled = iter(
            self._sampler.sample(self._logits(hidden[last]), [row.samples for row in batch.rows if row.samples])
        )
        return [next(sampled) if row.samples else [] for row in batch.rows]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] → logits [rows, vocab_size], as the model's own forward makes them."""
        logits: torch.Tensor = self._model.lm_head(hidden)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _touched(self, batch: Batch) -> list[int]:
        """Blocks that published rows write in this step."""
        size = self._kv.shape[4]
        return [
            block for row in batch.published for block in row.choice.blocks[row.start // size : -(-row.end // size)]
        ]

    def load_adapter(self, files: LoraFiles) -> None:
        self._lora.load(files)

    def drop_adapter(self, adapter: str) -> None:
        self._lora.drop(adapter)

    def zero(self, blocks: Sequence[int], start: int = 0) -> None:
        if blocks:
            self._kv[:, list(blocks), :, :, start:] = 0

    def copy(self, source: int, target: int) -> None:
        self._kv[:, target] = self._kv[:, source]

    def export_blocks(self, blocks: Sequence[int]) -> None:
        if self._mirrored and blocks:
            self._shared[:, list(blocks)] = self._kv[:, list(blocks)].to("cpu")

    def import_blocks(self, blocks: Sequence[int]) -> None:
        if self._mirrored and blocks:
            self._kv[:, list(blocks)] = self._shared[:, list(blocks)].to(self._device)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _image_rules(
    config: ModelConfig, layout: EmbeddingLayout | None, embeddings: PoolMemory | None
) -> ImageRules | None:
    if layout is None:
        return None
    return ImageRules(
        token_id=config.image_token_id,
        mrope=bool(config.mrope_section),
        bidirectional=config.bidirectional_images,
        block_rows=layout.block_rows,
        num_blocks=embeddings.num_blocks if embeddings is not None else 0,
    )


def _load(model_dir: str, dtype: torch.dtype, *, vision: bool) -> Any:
    """Weights from safetensors only; no code from the directory runs."""
    logging.disable_progress_bar()  # a log is no terminal
    if vision:
        model: Any = load_language(model_dir, dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    model.set_attn_implementation(NAME)
    model.requires_grad_(False)
    return model.eval()
