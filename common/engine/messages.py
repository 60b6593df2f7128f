"""What goes between a worker's service process and its engine, in msgpack over a socket.

The engine runs apart from the event loop (docs/adr), so nothing else is shared but the pool's memory.
"""

import msgspec

from common.sampling import ChoiceTokens, SamplingParams


class Command(msgspec.Struct, tag=True, kw_only=True):
    """Service to engine."""


class Event(msgspec.Struct, tag=True, kw_only=True):
    """Engine to service."""


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt. The tokens in [start, start + length) that are the model's image token take its rows.

    blocks: of the worker's embedding pool, where the rows are; empty where nothing is computed from them. grid: (time,
    height, width) in image tokens for M-RoPE, else empty.
    """

    key: bytes
    start: int
    length: int
    rows: int
    grid: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()


# --- commands -------------------------------------------------------------------------------------------------------


class Submit(Command, kw_only=True):
    """Compute a prompt here. Answers: Started, Chunk…, then Tokens / Prefilled / Done, or Failed.

    publish: keep the blocks after the first token until Release. decode: go on decoding after the first token.
    """

    seq: str  # unique in this engine: request id, leg and attempt
    prompt: list[int]
    output: list[int] = []  # tokens of the single choice already given out, on a resume
    choices: list[int] = msgspec.field(default_factory=lambda: [0])
    sampling: SamplingParams
    salt: bytes = b""
    adapter: str = ""  # checksum of its LoRA adapter; empty: none
    cache_blocks: int | None = None  # that its tenant, all with this salt, may keep here; None: no bound
    priority: int = 0
    publish: bool = False
    decode: bool = True
    media: list[Media] = []  # in prompt order; the engine reads their blocks until EmbeddingsFreed


class Reserve(Command, kw_only=True):
    """Room for a prompt's KV that will be pulled: prompt blocks + one a choice. Answers: Reserved (when there is
    room), or Failed."""

    seq: str
    prompt: list[int]
    output: list[int] = []
    choices: list[int] = msgspec.field(default_factory=lambda: [0])
    sampling: SamplingParams
    salt: bytes = b""
    adapter: str = ""  # checksum of its LoRA adapter; empty: none
    cache_blocks: int | None = None  # that its tenant, all with this salt, may keep here; None: no bound
    priority: int = 0
    media: list[Media] = []


class Commit(Command):
    """The pull of a reserved sequence is complete and checked: index its blocks, fork the choices, decode. Answers:
    Tokens…, Done."""

    seq: str
    first: list[ChoiceTokens]  # the prefill worker's first tokens; finished choices are not decoded


class Release(Command):
    """The publication's lease ended: the blocks held for it may be reused. Idempotent."""

    seq: str


class Cancel(Command):
    """Stop a sequence in any state and free what it holds, publication included. Idempotent, also for unknown ids. No
    answer."""

    seq: str


class Finish(Command):
    """End single choices early (a stop string was found in them). Done follows when none is left."""

    seq: str
    choices: list[int]


class LoadAdapter(Command):
    """Read a LoRA adapter from a directory; requests may name it by its checksum then. Answers: AdapterLoaded, also for
    one that is there already."""

    number: int
    path: str
    max_rank: int
    max_adapters: int


class LetAdapterGo(Command):
    """Another one may take its place, once no sequence uses it."""

    adapter: str


class Inspect(Command):
    """Answers: Inspected."""

    number: int


class Drain(Command):
    """Admit nothing new; what runs goes on."""


class Shutdown(Command):
    """End the engine's loop."""


# --- events ---------------------------------------------------------------------------------------------------------


class Ready(Event):
    """The model is loaded. vocab_size and max_context in tokens; pool names are in the launch parameters."""

    vocab_size: int
    max_context: int
    executor: str
    eos_token_ids: list[int]
    weight_bytes: int = 0


class Started(Event):
    """Blocks allocated, first chunk scheduled."""

    seq: str
    cached_tokens: int
    blocks: list[int]  # ids in prompt order
    generations: list[int]
    queue_seconds: float
    lookup_seconds: float


class Chunk(Event):
    """Sent before the step runs: tokens [start, end) of the prompt are computed in this step. Only for published
    sequences.

    The pool's progress counter tells when: PoolMemory.progress() >= (step, layers).
    """

    seq: str
    step: int
    start: int
    end: int
    last: bool


class Tokens(Event):
    """One step's new tokens of all sequences: (seq, choice tokens)."""

    step: int
    items: list[tuple[str, ChoiceTokens]]


class Prefilled(Event):
    """The prompt is computed and the first token of each choice sampled (sent instead of Tokens when decode is
    False)."""

    seq: str
    first: list[ChoiceTokens]
    token_count: int  # tokens whose KV is in the blocks
    token_hash: bytes  # common.cache.keys.token_hash over them
    cached_tokens: int
    queue_seconds: float
    lookup_seconds: float
    forward_seconds: float


class Reserved(Event):
    """Blocks [0, hit_blocks) are already right here; the others are to be filled."""

    seq: str
    blocks: list[int]
    generations: list[int]
    hit_blocks: int
    wait_seconds: float


class EmbeddingsFreed(Event):
    """The engine reads the media blocks of this Submit no more, and will not: they may be given to another.

    Sent once for every Submit with media, however it ends: refused, computed, failed or cancelled.
    """

    seq: str


class Done(Event):
    """Every choice has ended and nothing is held any more."""

    seq: str
    cached_tokens: int
    queue_seconds: float = 0.0  # waiting for the first chunk or, after a commit, for the first step
    lookup_seconds: float = 0.0
    forward_seconds: float = 0.0  # prefill, when it happened here
    first_step_seconds: float = 0.0
    decode_seconds: float = 0.0  # from the first step's end to the last token


class Failed(Event):
    """The sequence is gone and holds nothing. reason is one of common.errors."""

    seq: str
    reason: str
    message: str
    field: str = ""
    retry_after_seconds: float | None = None


class Blocks(Event):
    """Prefix index changes since the last event, keys cut to 16 bytes, in order: stored then removed never names a
    key twice."""

    stored: list[bytes]
    removed: list[bytes]


class LoadReport(Event):
    running: int = 0
    waiting: int = 0
    pending_prefill_tokens: int = 0
    active_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    held_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    preemptions: int = 0


class AdapterLoaded(Event, kw_only=True):
    """adapter: its checksum. base: its base model, as its files call it. dropped: those that had to go for it. reason:
    one of common.errors, when it was refused."""

    number: int
    adapter: str = ""
    base: str = ""
    dropped: list[str] = []
    reason: str = ""
    message: str = ""
    field: str = ""
    retry_after_seconds: float | None = None


class Inspected(Event):
    number: int
    errors: list[str]  # empty: free + cached + active + held == total and all counts agree
    load: LoadReport


AnyCommand = (
    Submit | Reserve | Commit | Release | Cancel | Finish | LoadAdapter | LetAdapterGo | Inspect | Drain | Shutdown
)
AnyEvent = (
    Ready
    | Started
    | Chunk
    | Tokens
    | Prefilled
    | Reserved
    | EmbeddingsFreed
    | Done
    | Failed
    | Blocks
    | LoadReport
    | AdapterLoaded
    | Inspected
)
