"""What the engine asks of whatever computes its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from common.engine.prompt_media import ImageRules
from common.engine.sequence import Choice
from common.models.lora import LoraFiles
from common.sampling import TokenLogprob


class Row(NamedTuple):
    """Tokens [start, end) of one choice, computed in one step.

    samples: the choices that get a token from the last position; empty for a chunk that is not a prompt's last.
    """

    choice: Choice
    start: int
    end: int
    samples: tuple[Choice, ...]

    @property
    def published(self) -> bool:
        return self.choice.sequence.publish and self.choice.prefilling

    @property
    def scored(self) -> list[int]:
        """Prompt tokens whose log probability is wanted from this row: those after its positions, in order."""
        sequence = self.choice.sequence
        return sequence.prompt[self.start + 1 : self.end + 1] if sequence.scores_prompt else []


@dataclass(slots=True)
class Batch:
    """Work of one step. Decode rows (one token each, `decodes` of them) come first, then prefill chunks.

    scored: filled by the executor: by a row's number the log probabilities of the tokens that it wants scored.
    """

    step: int
    rows: list[Row]
    decodes: int
    scored: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    @property
    def published(self) -> list[Row]:
        return [row for row in self.rows if row.published]

    @property
    def by_layer(self) -> bool:
        """Layers are announced one by one: a published prompt ends in this step, so its puller waits for nothing
        else."""
        return any(row.published and row.samples for row in self.rows)


class Sampled(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None


class Executor(Protocol):
    """A model with its KV pool. Blocking; one caller.

    The methods after `drop_adapter` move KV only: block ids are positions in the pool.
    """

    name: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    images: ImageRules | None  # None: the model takes no images
    weight_bytes: int

    def execute(self, batch: Batch, layer_done: Callable[[int], None]) -> list[list[Sampled | None]]:
        """Computes the rows. For every row one entry per choice in `samples`; None where the logits were not finite.
        Fills batch.scored.

        In a by_layer batch layer_done(n) is called once layers [0, n) of all published rows are in the pool's shared
        memory; when it returns, all layers of all published rows are.
        """

    def load_adapter(self, files: LoraFiles) -> None:
        """Rows whose sequence has this adapter are computed with it from now on. Raises InvalidArgument for one that
        does not fit the model."""

    def drop_adapter(self, adapter: str) -> None:
        """No sequence uses it any more. adapter: its checksum."""

    def zero(self, blocks: Sequence[int], start: int = 0) -> None:
        """Zeroes positions [start, block_size) of blocks: what a partial block holds beyond its tokens must be
        finite."""

    def copy(self, source: int, target: int) -> None:
        """Copies a block, all layers."""

    def export_blocks(self, blocks: Sequence[int]) -> None:
        """Blocks are about to be read by a puller: bring them to the pool's shared memory, where they are not there
        already."""

    def import_blocks(self, blocks: Sequence[int]) -> None:
        """Blocks were filled by a pull: bring them from the pool's shared memory to where the model reads them."""
