"""From what a client sent to what workers need: token ids, checked limits, block keys. Before any worker is called."""

import asyncio
import functools
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from common.cache.keys import block_keys, root_key
from common.errors import ContextTooLong, InvalidArgument, NeverFits
from common.media.limits import MediaLimits
from common.media.remote import RemoteImages
from common.models.tokenizer import Tokenizer
from common.models.vision.spec import VisionSpec
from common.policies.routing import PREFILL, RouteRequest, blocks_needed
from common.registry.record import WorkerRecord
from common.rpc import wire
from common.sampling import MAX_CHOICES, SamplingParams
from epd.v1 import generation_pb2, types_pb2
from services.gateway import media
from services.gateway.fleet import Fleet
from services.gateway.grammars import GrammarChecks
from services.gateway.media import MediaItem, Source
from services.gateway.names import Names, Served
from services.gateway.prompt import prompt_ids
from services.gateway.settings import DEFAULT_TENANT
from services.gateway.tools.plan import ToolPlan, plan
from services.gateway.tools.schema import offer
from services.gateway.worker import keys_id

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STREAM_INTERVAL = 1024
MAX_LABEL = 256  # characters of request_id and session_id


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A request that workers can run."""

    internal_id: bytes  # 16 random bytes
    name: str  # what answers call the model: it, or the adapter
    model: str
    adapter: str = ""  # checksum of a LoRA adapter on it
    tenant: str
    salt: bytes
    tokenizer: Tokenizer
    prompt: list[int]
    sampling: SamplingParams
    sampling_proto: types_pb2.SamplingParams
    n: int
    stops: tuple[str, ...]
    affinity: bytes
    priority: int
    skip_special_tokens: bool
    stream_interval: int
    block_keys: Mapping[str, Sequence[bytes]]
    media: tuple[MediaItem, ...] = ()  # in prompt order
    cache_bytes: int = 0  # that a worker may keep for the tenant; 0: no bound
    echo: str | None = None  # the prompt's text, where it is to be sent back
    include_stop: bool = False  # the text ends with what ended it
    prompt_only: bool = False  # max_tokens 0: nothing but the prompt is wanted; `sampling` has 1
    tools: ToolPlan | None = None

    @property
    def single_token(self) -> bool:
        return self.sampling.max_tokens == 1

    def route_request(
        self, *, output_tokens: int, choices: int, exclude: frozenset[str], prefer_prefill: str
    ) -> RouteRequest:
        return RouteRequest(
            prompt_tokens=len(self.prompt) + output_tokens,
            choices=choices,
            # The whole prompt is computed for its log probabilities, whatever is cached.
            block_keys=self.block_keys if self.sampling.prompt_logprobs is None else {},
            affinity=self.affinity,
            single_token=self.single_token,
            min_output_tokens=max(1, _sure_tokens(self.sampling) - output_tokens),
            exclude=exclude,
            images=bool(self.media),
            adapter=self.adapter,
            prefer_prefill=prefer_prefill,
        )


class Preprocessor:
    """Tokenizers and whatever reads images run in threads, off the event loop."""

    def __init__(
        self,
        tokenizers: Mapping[str, Tokenizer],
        fleet: Fleet,
        *,
        specs: Mapping[str, VisionSpec],
        limits: MediaLimits,
        remote: RemoteImages,
        threads: int,
        salt_secret: str,
        wait_seconds: float,
        cache_bytes: Callable[[str], int] = lambda tenant: 0,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """specs: of the models that take images, by name. cache_bytes: of a tenant, as in Prepared. aliases: as in
        Names."""
        self.names = Names(tokenizers, specs, aliases or {}, fleet.adapters)
        self._cache_bytes = cache_bytes
        self.tokenizers = tokenizers
        self._grammars = GrammarChecks(tokenizers)
        self.specs = specs
        self._limits = limits
        self._remote = remote
        self._fleet = fleet
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._salt_secret = salt_secret.encode()
        self._wait_seconds = wait_seconds

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    async def prepare(self, request: generation_pb2.GenerateRequest, tenant: str) -> Prepared:
        """Raises InvalidArgument (ContextTooLong, NeverFits) naming field and limits, ModelNotFound, NoWorkers."""
        images = media.sources(request)
        served = self.names.find(request.model, images=bool(images))
        model = served.model
        check_parameters(request)
        self._check_images(model, images)
        sampling = wire.sampling_from_proto(request.sampling)
        prompt_only = sampling.max_tokens == 0 and wants_prompt(request)
        if prompt_only:
            sampling = msgspec.structs.replace(sampling, max_tokens=1, min_tokens=0)
        if not request.sampling.HasField("seed"):
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(64))
        records = self._fleet.records(model) or await self._fleet.wait_for_records(model, self._wait_seconds)
        sampling.validate(min(record.vocab_size for record in records))
        sampling, tools = await self._with_grammar(request, model, sampling)
        named = self._salt_secret or tenant != DEFAULT_TENANT
        salt = hmac.new(self._salt_secret, tenant.encode(), hashlib.sha256).digest() if named else b""
        fetched = await media.fetch(images, self._remote)
        prompt, found, keys = await asyncio.get_running_loop().run_in_executor(
            self._pool, self._read, request, served, images, fetched, records, salt
        )
        n = request.n if request.HasField("n") else 1
        check_limits(prompt, n, sampling, records)
        check_rows(found, records)
        first_key = next(iter(keys.values()), [])[:1]
        return Prepared(
            internal_id=secrets.token_bytes(16),
            name=served.name,
            model=model,
            adapter=served.adapter,
            tenant=tenant,
            salt=salt,
            tokenizer=self.tokenizers[model],
            prompt=prompt,
            media=found,
            sampling=sampling,
            sampling_proto=wire.sampling_to_proto(sampling),
            n=n,
            stops=tuple(request.stop),
            # Without a session, what shares its beginning stays together.
            affinity=request.session_id.encode() or b"".join(first_key),
            priority=request.priority,
            skip_special_tokens=not request.HasField("skip_special_tokens") or request.skip_special_tokens,
            stream_interval=request.stream_interval or 1,
            block_keys=keys,
            cache_bytes=self._cache_bytes(tenant),
            echo=await self._echo(request, self.tokenizers[model], prompt) if request.echo else None,
            include_stop=request.include_stop_in_output,
            prompt_only=prompt_only,
            tools=tools,
        )

    async def _echo(self, request: generation_pb2.GenerateRequest, tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
        if request.WhichOneof("prompt") == "text":
            return request.text
        skip = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        decode = functools.partial(tokenizer.decode, prompt, skip_special_tokens=skip)
        return await asyncio.get_running_loop().run_in_executor(self._pool, decode)

    async def tokenize(self, request: generation_pb2.GenerateRequest) -> tuple[str, Tokenizer, list[int]]:
        """(model, its tokenizer, the prompt's token ids as `prepare` makes them). Raises InvalidArgument,
        ModelNotFound."""
        images = media.sources(request)
        served = self.names.find(request.model, images=bool(images))
        model = served.model
        check_parameters(request)
        self._check_images(model, images)
        fetched = await media.fetch(images, self._remote)
        read = functools.partial(self._read, request, served, images, fetched, (), b"")
        prompt, _, _ = await asyncio.get_running_loop().run_in_executor(self._pool, read)
        return model, self.tokenizers[model], prompt

    async def detokenize(self, name: str, token_ids: Sequence[int]) -> tuple[str, str]:
        """(model, text), special tokens included. Raises InvalidArgument, ModelNotFound."""
        model = self.names.find(name).model
        tokenizer = self.tokenizers[model]
        if token_ids and max(token_ids) >= tokenizer.vocab_size:
            raise InvalidArgument(f"tokens must be below the vocabulary's size, {tokenizer.vocab_size}", field="tokens")
        decode = functools.partial(tokenizer.decode, token_ids, skip_special_tokens=False)
        return model, await asyncio.get_running_loop().run_in_executor(self._pool, decode)

    def _check_images(self, model: str, images: Sequence[Source]) -> None:
        if images and model not in self.specs:
            raise InvalidArgument(f"{images[0].field}: model {model} takes no images", field=images[0].field)
        self._limits.check_count(len(images), "images")

    async def _with_grammar(
        self, request: generation_pb2.GenerateRequest, model: str, sampling: SamplingParams
    ) -> tuple[SamplingParams, ToolPlan | None]:
        """The request's grammar, its tools' included, as workers take it. Raises InvalidArgument."""
        grammar, field = sampling.grammar, "grammar"
        tools = plan(offer(request.chat), self.tokenizers[model], grammar)
        if tools is not None and tools.grammar is not None:
            grammar, field = tools.grammar, "tools"
        if grammar is None:
            return sampling, tools
        grammar = await self._grammars.check(model, grammar, field=field)
        return msgspec.structs.replace(sampling, grammar=grammar), tools

    def _read(
        self,
        request: generation_pb2.GenerateRequest,
        served: Served,
        images: Sequence[Source],
        fetched: Mapping[int, bytes],
        records: Sequence[WorkerRecord],
        salt: bytes,
    ) -> tuple[list[int], tuple[MediaItem, ...], dict[str, list[bytes]]]:
        """Runs in a thread. Token ids, images in their places, and block keys by what names blocks alike: model,
        revision, block size."""
        spec = self.specs.get(served.model)
        pictures = media.read(images, fetched, self._limits)
        sizes = [picture.size for picture in pictures]
        prompt = prompt_ids(request, self.tokenizers[served.model], spec, sizes)
        found: tuple[MediaItem, ...] = ()
        if spec is not None:
            found = media.items(pictures, spec.place(prompt, sizes, field="prompt"), spec.options, salt)
        keys: dict[str, list[bytes]] = {}
        for layout in {keys_id(record.layout): record.layout for record in records}.values():
            root = root_key(layout.model, layout.revision, salt, served.adapter)
            spans = [item.span for item in found]
            keys[keys_id(layout)] = block_keys(root, prompt, layout.block_size, media=spans)
        return prompt, found, keys


def wants_prompt(request: generation_pb2.GenerateRequest) -> bool:
    """Of the prompt itself something is to be sent back."""
    return request.echo or request.sampling.HasField("prompt_logprobs")


def check_parameters(request: generation_pb2.GenerateRequest) -> None:
    """What needs neither tokenizer nor worker. Raises InvalidArgument naming the field."""
    if request.HasField("n") and not 1 <= request.n <= MAX_CHOICES:
        raise InvalidArgument(f"n must be at least 1 and at most {MAX_CHOICES}, got {request.n}", field="n")
    if len(request.stop) > MAX_STOPS:
        raise InvalidArgument(f"stop has {len(request.stop)} strings; at most {MAX_STOPS}", field="stop")
    for stop in request.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidArgument(
                f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(stop)}", field="stop"
            )
    if request.stream_interval > MAX_STREAM_INTERVAL:
        raise InvalidArgument(f"stream_interval must be at most {MAX_STREAM_INTERVAL}", field="stream_interval")
    for field in ("request_id", "session_id"):
        if len(getattr(request, field)) > MAX_LABEL:
            raise InvalidArgument(f"{field} must have at most {MAX_LABEL} characters", field=field)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("prompt is required: text, token_ids or chat", field="prompt")
    if kind == "chat":
        _check_chat(request.chat)
    if request.sampling.HasField("max_tokens") and not request.sampling.max_tokens and not wants_prompt(request):
        raise InvalidArgument(
            "max_tokens must be at least 1; 0 is for the prompt alone, with echo or prompt_logprobs", field="max_tokens"
        )


def check_limits(prompt: Sequence[int], n: int, sampling: SamplingParams, records: Sequence[WorkerRecord]) -> None:
    """Raises InvalidArgument when no worker could ever run this."""
    if not prompt:
        raise InvalidArgument("the prompt must have at least one token", field="prompt")
    sampling.check_prompt(len(prompt))
    vocab = min(record.vocab_size for record in records)
    if max(prompt) >= vocab:
        raise InvalidArgument(f"token ids must be below the vocabulary's size, {vocab}", field="prompt")
    context = max(record.max_context for record in records)
    if len(prompt) >= context:
        raise ContextTooLong(
            f"the prompt has {len(prompt)} tokens; the context of {context} tokens must hold it and an output token",
            field="prompt",
        )
    if sampling.max_tokens is not None and len(prompt) + sampling.max_tokens > context:
        raise ContextTooLong(
            f"the prompt's {len(prompt)} tokens and max_tokens {sampling.max_tokens} are "
            f"{len(prompt) + sampling.max_tokens} together; the context holds {context} tokens",
            field="max_tokens",
        )
    need = RouteRequest(prompt_tokens=len(prompt), choices=n, min_output_tokens=max(1, _sure_tokens(sampling)))
    blocks = [(blocks_needed(need, record.layout.block_size), record.num_blocks) for record in records]
    if all(needed > there for needed, there in blocks):
        needed, there = min(blocks, key=lambda pair: pair[0] - pair[1])
        raise NeverFits(
            f"the request needs at least {needed} KV blocks; the largest pool has {there} blocks", field="prompt"
        )


def check_rows(media: Sequence[MediaItem], records: Sequence[WorkerRecord]) -> None:
    """Raises NeverFits when no worker has room for the embeddings of all images of a prompt."""
    rows, rooms = sum(item.rows for item in media), [r.prompt_rows for r in records if PREFILL in r.roles]
    if rows > (room := max(rooms, default=rows)):  # none there just now: one may come
        raise NeverFits(
            f"the images are {rows} rows of embeddings together; the most that a worker takes with a prompt is {room}",
            field="images",
        )


def _sure_tokens(sampling: SamplingParams) -> int:
    """Output tokens that no end of text can spare."""
    if sampling.ignore_eos and sampling.max_tokens is not None and not sampling.stop_token_ids:
        return sampling.max_tokens
    return sampling.min_tokens


def _check_chat(chat: generation_pb2.Chat) -> None:
    if not chat.messages:
        raise InvalidArgument("messages must not be empty", field="messages")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidArgument(
            "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
        )
    for message in chat.messages:
        if not message.role:
            raise InvalidArgument("every message needs a role", field="messages")
        if any(part.WhichOneof("part") is None for part in message.content):
            raise InvalidArgument("a content part holds nothing that is known here", field="messages")
