"""The `timed` executor: takes the time a model would take and answers deterministic tokens, without a model."""

import hashlib
import time
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from common.engine.executor import Batch, Row, Sampled
from common.engine.prompt_media import ImageRules
from common.engine.sequence import Choice
from common.engine.settings import EngineSettings
from common.errors import InvalidArgument
from common.models.lora import LoraFiles
from common.sampling import TokenLogprob
from common.transfer.pool_memory import PoolMemory

_FIRST_TOKEN = 16  # lower ids are often special


class TimedExecutor:
    """Stand-in for planner, routing and load tests: step seconds by settings.timed's formula, spent asleep.

    A token is a function of all tokens before it, of the images among them (their keys and places; no embedding is
    read) and of the choice's index, so a resume, a retry or any form of the mesh gives the same. Its pool has
    num_layers layers, one KV head, head_dim 2, float32; `expected_kv` says what it holds. There is no end-of-text
    token: requests run to max_tokens or a stop token. Sampling parameters do not change the tokens.
    """

    name = "timed"
    eos_token_ids: tuple[int, ...] = ()
    weight_bytes = 0

    def __init__(
        self,
        settings: EngineSettings,
        memory: PoolMemory,
        images: ImageRules | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.images = images
        self._model = settings.timed
        self.vocab_size = settings.timed.vocab_size
        self.max_context = settings.timed.max_context
        self.num_layers = settings.timed.num_layers
        self._block_size = settings.block_size
        self._sleep = sleep
        # [layer, block, k|v, offset, 2]
        self._kv = memory.data.view(np.float32).reshape(self.num_layers, settings.num_blocks, 2, settings.block_size, 2)
        self._hashes: WeakKeyDictionary[Choice, tuple[int, hashlib.blake2b]] = WeakKeyDictionary()

    def load_adapter(self, files: LoraFiles) -> None:
        raise InvalidArgument("the timed executor has no weights that an adapter could change", field="lora_path")

    def drop_adapter(self, adapter: str) -> None:
        pass

    def execute(self, batch: Batch, layer_done: Callable[[int], None]) -> list[list[Sampled | None]]:
        model = self._model
        prefill = sum(row.end - row.start for row in batch.rows[batch.decodes :])
        seconds = (
            model.base_seconds + model.seconds_per_prefill_token * prefill + model.seconds_per_decode * batch.decodes
        )
        self._write(batch.rows)
        if batch.by_layer:
            for layer in range(self.num_layers):
                self._sleep(seconds / self.num_layers)
                layer_done(layer + 1)
        else:
            self._sleep(seconds)
        batch.scored = {
            number: [TokenLogprob(token, 0.0, rank=1) for token in row.scored] for number, row in enumerate(batch.rows)
        }
        return [[self._next(choice) for choice in row.samples] for row in batch.rows]

    def _write(self, rows: Sequence[Row]) -> None:
        """The pattern of all rows at once."""
        size = self._block_size
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for row in rows:
            tokens += row.choice.tokens(row.start, row.end)
            positions += range(row.start, row.end)
            blocks += [row.choice.blocks[position // size] for position in range(row.start, row.end)]
        where = np.asarray(positions)
        # Indexes on both sides of a slice: their dimension comes first, [token, layer, k|v, 2].
        self._kv[:, blocks, :, where % size] = expected_kv(tokens, where, self.num_layers).transpose(2, 0, 1, 3)

    def _next(self, choice: Choice) -> Sampled:
        length = choice.length
        count, digest = self._hashes.get(choice) or (0, _images_digest(choice))
        if count > length:
            count, digest = 0, _images_digest(choice)
        digest.update(np.asarray(choice.tokens(count, length), dtype="<u4").tobytes())
        self._hashes[choice] = length, digest
        final = digest.copy()
        final.update(choice.index.to_bytes(4, "little"))
        token = _FIRST_TOKEN + int.from_bytes(final.digest(), "little") % (self.vocab_size - _FIRST_TOKEN)
        wanted = choice.sequence.sampling.top_logprobs is not None
        return Sampled(token, TokenLogprob(token, 0.0) if wanted else None)

    def zero(self, blocks: Sequence[int], start: int = 0) -> None:
        for block in blocks:
            self._kv[:, block, :, start:] = 0

    def copy(self, source: int, target: int) -> None:
        self._kv[:, target] = self._kv[:, source]

    def export_blocks(self, blocks: Sequence[int]) -> None:
        pass  # the shared memory is the only pool

    def import_blocks(self, blocks: Sequence[int]) -> None:
        pass


def _images_digest(choice: Choice) -> "hashlib.blake2b":
    digest = hashlib.blake2b(digest_size=8)
    media = choice.sequence.media
    for span in media.spans if media is not None else ():
        digest.update(span.start.to_bytes(8, "little") + span.key)
    return digest


def expected_kv(token_ids: Sequence[int], positions: Sequence[int] | np.ndarray, num_layers: int) -> np.ndarray:
    """What the pool holds for tokens at positions: float32 [layer, k|v, token, 2].

    Keys are (token id, position), values (layer + 1, position).
    """
    values = np.empty((num_layers, 2, len(token_ids), 2), np.float32)
    values[:, 0, :, 0] = token_ids
    values[:, 1, :, 0] = np.arange(1, num_layers + 1)[:, None]
    values[:, :, :, 1] = positions
    return values
