"""The one mutable object that flows through the engine, from its submission to its last token."""

from dataclasses import dataclass, field
from enum import Enum

from common.cache.keys import block_keys
from common.engine.messages import Reserve, Submit
from common.engine.prompt_media import PromptMedia
from common.errors import ContextTooLong, InvalidArgument, NeverFits
from common.grammar.compiler import GrammarState
from common.sampling import SamplingParams, TokenLogprob


class State(Enum):
    WAITING = "waiting"  # for its first chunk
    RESERVING = "reserving"  # for blocks to pull into
    RESERVED = "reserved"  # being filled by the service
    RUNNING = "running"  # admitted; choices may be preempted and wait again
    PUBLISHED = "published"  # nothing left to compute, blocks kept for a puller


@dataclass(slots=True, eq=False)
class Limits:
    """What bounds every sequence of one engine, in tokens and blocks."""

    vocab_size: int
    max_context: int
    block_size: int
    num_blocks: int
    max_running: int
    eos_token_ids: frozenset[int]

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def longest(self) -> int:
        """Tokens, prompt and output, of the longest single sequence; the last token needs no KV."""
        return min(self.max_context, self.num_blocks * self.block_size + 1)

    def check(self, sequence: "Sequence") -> None:
        """Raises InvalidArgument, ContextTooLong or NeverFits for what can never run here."""
        sampling, total = sequence.sampling, len(sequence.prompt) + sequence.given
        if not sequence.prompt:
            raise InvalidArgument("the prompt is empty", field="prompt")
        if min(sequence.prompt) < 0 or max(sequence.prompt) >= self.vocab_size:
            raise InvalidArgument(f"prompt token ids must be in [0, {self.vocab_size})", field="prompt")
        numbers = [choice.index for choice in sequence.choices]
        if not numbers or len(set(numbers)) != len(numbers) or min(numbers) < 0:
            raise InvalidArgument("choices must be distinct indexes from 0 on", field="choices")
        sampling.validate(self.vocab_size)
        sampling.check_prompt(len(sequence.prompt))
        if sequence.given:
            output = sequence.choices[0].output
            if len(numbers) != 1:
                raise InvalidArgument("a resume has exactly one choice", field="choices")
            if min(output) < 0 or max(output) >= self.vocab_size:
                raise InvalidArgument(f"output token ids must be in [0, {self.vocab_size})", field="output")
            if sampling.max_tokens is not None and sequence.given >= sampling.max_tokens:
                raise InvalidArgument(f"all max_tokens={sampling.max_tokens} tokens are there already", field="output")
        wanted = len(sequence.prompt) + (sampling.max_tokens or sequence.given + 1)
        if wanted > self.max_context:
            raise ContextTooLong(
                f"{len(sequence.prompt)} prompt tokens and {wanted - len(sequence.prompt)} output tokens exceed the "
                f"context of {self.max_context} tokens",
                field="prompt" if total >= self.max_context else "max_tokens",
            )
        rows = len(numbers) if sequence.decode else 1
        if rows > self.max_running:
            raise NeverFits(f"{rows} choices exceed the {self.max_running} sequences of one step", field="choices")
        blocks = self.blocks(total) + (rows if sequence.decode else 0)
        if sequence.decode and wanted > 0:
            blocks = max(blocks, self.blocks(wanted - 1))
        if blocks > self.num_blocks:
            raise NeverFits(f"the request needs {blocks} KV blocks; the pool has {self.num_blocks}", field="prompt")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Choice:
    """One continuation of the prompt. Until the fork only the first choice holds blocks and computes.

    output: tokens after the prompt, those given by a resume included. blocks: ids in token order, maybe more than
    needed. computed: tokens whose KV is in the blocks. indexed: blocks already offered to the prefix index (hits
    included). grammar: where the output is in the request's grammar, if it has one.
    """

    sequence: "Sequence"
    index: int
    output: list[int]
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    computed: int = 0
    indexed: int = 0
    prefilling: bool = True
    preemptions: int = 0
    finished: bool = False
    grammar: GrammarState | None = None

    @property
    def length(self) -> int:
        return len(self.sequence.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Tokens without KV; the last of them yields the next token."""
        return self.length - self.computed

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at [start, end), prompt and output counted as one."""
        prompt = self.sequence.prompt
        size = len(prompt)
        if start >= size:
            return self.output[start - size : end - size]
        if end <= size:
            return prompt[start:end]
        return prompt[start:] + self.output[: end - size]

    def extend_keys(self, block_size: int, end: int) -> list[bytes]:
        """Keys of the complete blocks of tokens [0, end) at least."""
        known = len(self.keys) * block_size
        if end - known >= block_size:
            parent = self.keys[-1] if self.keys else self.sequence.root
            media = self.sequence.media
            spans = media.spans if media is not None else ()
            self.keys += block_keys(parent, self.tokens(known, end), block_size, media=spans, start=known)
        return self.keys

    def append(self, token: int, limits: Limits) -> tuple[str | None, int | None]:
        """Takes a sampled token. Returns (finish reason, stop token) when it was the last."""
        sampling = self.sequence.sampling
        self.output.append(token)
        count = len(self.output)
        stops = token in sampling.stop_token_ids or (token in limits.eos_token_ids and not sampling.ignore_eos)
        if stops and count > sampling.min_tokens:
            return "stop", token
        if self.grammar is not None and self.grammar.ended(self.output):
            return "stop", None
        if sampling.max_tokens is not None and count >= sampling.max_tokens:
            return "length", None
        if self.length >= limits.longest:
            return "length", None
        return None, None


@dataclass(slots=True, eq=False)
class Timings:
    """Seconds by the engine's clock; 0 where it did not happen."""

    arrived: float
    started: float = 0.0
    lookup: float = 0.0
    prefilled: float = 0.0
    first_step_end: float = 0.0
    first_step: float = 0.0
    last_token: float = 0.0

    def note_step(self, begin: float, now: float, *, prefill: bool) -> None:
        """A step from `begin` to `now` gave the sequence tokens; prefill: its first ones, from its prompt."""
        self.last_token = now
        if prefill:
            self.prefilled = now
        elif not self.first_step_end:
            # After a commit the wait for this step counts as queueing; after a local prefill as the step's own time.
            committed = not self.prefilled
            if committed:
                self.started = begin
            self.first_step = now - (begin if committed else self.prefilled)
            self.first_step_end = now

    @property
    def queue(self) -> float:
        return max(0.0, self.started - self.arrived - self.lookup)

    @property
    def forward(self) -> float:
        return max(0.0, self.prefilled - self.started)

    @property
    def decode(self) -> float:
        return max(0.0, self.last_token - self.first_step_end) if self.first_step_end else 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One submission or reservation with all its choices.

    publish: its blocks are wanted by a puller, from the submission (leased) until the release.
    spare: blocks kept for the fork, one a choice. published: blocks kept for a puller. given: output tokens at the
    start. cached_tokens: hits of the first admission. started: Started was sent, a preempted prompt is not announced
    again. reads_embeddings: steps may read its images' rows, until EmbeddingsFreed. cache_blocks: that its tenant may
    keep here; None: no bound. prompt_logprobs: of the prompt's tokens from the second on, as far as they are computed.
    """

    seq: str
    prompt: list[int]
    choices: list[Choice]
    sampling: SamplingParams
    root: bytes
    priority: int
    arrival: int
    given: int
    publish: bool
    leased: bool
    decode: bool
    state: State
    timings: Timings
    spare: list[int] = field(default_factory=list)
    published: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    hit_blocks: int = 0
    cached_tokens: int = 0
    forked: bool = False
    started: bool = False
    media: PromptMedia | None = None
    reads_embeddings: bool = False
    adapter: str = ""  # checksum of its LoRA adapter
    salt: bytes = b""  # of its tenant: blocks of equal salts are one tenant's
    cache_blocks: int | None = None
    computes: bool = True  # its prompt, instead of pulling it
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @classmethod
    def of(cls, command: Submit | Reserve, root: bytes, arrival: int, now: float) -> "Sequence":
        """As a command asks for it, nothing checked. root: parent key of its first block."""
        submit = isinstance(command, Submit)
        sequence = cls(
            seq=command.seq,
            prompt=list(command.prompt),
            choices=[],
            sampling=command.sampling,
            root=root,
            priority=command.priority,
            arrival=arrival,
            given=len(command.output),
            publish=isinstance(command, Submit) and command.publish,
            leased=isinstance(command, Submit) and command.publish,
            decode=not isinstance(command, Submit) or command.decode,
            state=State.WAITING if submit else State.RESERVING,
            timings=Timings(arrived=now),
            adapter=command.adapter,
            salt=command.salt,
            cache_blocks=command.cache_blocks,
            computes=submit,
        )
        sequence.choices = [Choice(sequence, index, list(command.output)) for index in command.choices]
        return sequence

    @property
    def leader(self) -> Choice:
        return self.choices[0]

    @property
    def total(self) -> int:
        """Tokens whose KV a first token needs: prompt and given output."""
        return len(self.prompt) + self.given

    @property
    def rows(self) -> int:
        """Sequences it becomes in a step once it decodes."""
        return len(self.choices) if self.decode else 1

    @property
    def scores_prompt(self) -> bool:
        """The log probabilities of the prompt's tokens are still to be made: no cached block spares their logits."""
        return self.computes and self.sampling.prompt_logprobs is not None and not self.forked

    def take_scores(self, start: int, entries: list[TokenLogprob]) -> None:
        """Of the tokens from start + 1 on; a prompt that was preempted begins again."""
        self.prompt_logprobs[start:] = entries

    def open_choices(self) -> list[Choice]:
        return [choice for choice in self.choices if not choice.finished]
