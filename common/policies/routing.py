"""Which workers serve a request: a pure function over a snapshot of the fleet.

Every cost is in tokens, so that load, cache hits and transfers can be added up:

    prefill cost = prompt tokens not cached there + prefill tokens pending there
    decode cost  = active blocks · block_size + transfer_weight · prompt tokens not cached there
    local cost   = prefill cost + active blocks · block_size            (one worker with both roles)

The pair with the lowest sum wins; since the two terms are independent, within one compat_id that is the best prefill
worker and the best decode worker. Load is compared a worker at a time, so one hot worker never changes how the others
are chosen.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from common.cache.keys import INDEX_KEY_BYTES, hit_limit

PREFILL = "prefill"
DECODE = "decode"


class RoutingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs; the values are ours."""

    local_below_tokens: int = 512  # fewer uncached prompt tokens than this stay on one worker with both roles
    transfer_weight: float = 0.25  # cost of moving a prompt token, in tokens of decode load
    tie_tokens: float = 16.0  # costs this close to the best count as equal
    hold: bool = True  # requests wait at the gateway while every decode worker is full; False: in decode's own queue
    # A prefill worker has room while fewer prompt tokens than this have been sent there and are not computed; as many
    # again may have images that are being encoded. 0: always. Splitwise's bound of a prompt queue.
    dispatch_tokens: int = 8192


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One routable worker as the router sees it."""

    worker_id: str
    incarnation: str
    roles: tuple[str, ...]
    compat_id: str
    keys_id: str  # workers with the same one name blocks alike: model, revision, block size
    block_size: int
    num_blocks: int
    max_context: int
    pending_prefill_tokens: int = 0
    queued_tokens: int = 0  # of prompts that this gateway has sent there and that are not computed yet
    encoding_tokens: int = 0  # of those that will be when their images are encoded
    active_blocks: int = 0
    free_blocks: int | None = None  # for new sequences, cached ones that may be evicted included; None: not known
    cached: Collection[bytes] = frozenset()  # prefix keys, cut to INDEX_KEY_BYTES
    unreachable: Collection[str] = frozenset()  # ids of workers that it cannot pull from now
    adapters: Collection[str] = frozenset()  # checksums of the LoRA adapters that it holds

    def has(self, role: str) -> bool:
        return role in self.roles


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int  # prompt and resumed output
    choices: int = 1
    block_keys: Mapping[str, Sequence[bytes]] = {}  # by keys_id: the prompt's complete blocks
    affinity: bytes = b""  # session id, or what else should stay together
    single_token: bool = False  # max_tokens = 1: no decode
    min_output_tokens: int = 1  # will surely be generated for each choice
    exclude: Collection[str] = frozenset()  # worker ids that failed this request
    images: bool = False  # to be encoded first
    adapter: str = ""  # checksum of a LoRA adapter to compute with
    prefer_prefill: str = ""  # worker id that computed this prompt before: counts as a whole hit


class Score(msgspec.Struct, frozen=True):
    """One candidate of one role. Costs and tokens as in the module's formulas."""

    worker_id: str
    role: Literal["prefill", "decode", "local"]
    cost: float
    uncached_tokens: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """prefill alone (one token), decode alone (one worker does both), or both."""

    prefill: WorkerView | None = None
    decode: WorkerView | None = None
    reason: Literal["pair", "local-short", "local-cached", "local-only", "single-token"]
    scores: tuple[Score, ...] = ()

    @property
    def kind(self) -> Literal["disaggregated", "aggregated", "prefill-only"]:
        if self.prefill and self.decode:
            return "disaggregated"
        return "aggregated" if self.decode else "prefill-only"


class Hold(msgspec.Struct, frozen=True):
    """There are workers for the request, but those of `role` are full: wait for one here, where the request holds
    nothing yet and others can still go before it, rather than there."""

    role: Literal["prefill", "decode"]


def cached_tokens(worker: WorkerView, request: RouteRequest) -> int:
    """Prompt tokens that the worker can take from its cache: whole leading blocks, never the whole prompt."""
    limit = hit_limit(request.prompt_tokens, worker.block_size)
    if request.prefer_prefill == worker.worker_id:
        return limit * worker.block_size
    hits = 0
    for key in request.block_keys.get(worker.keys_id, ())[:limit]:
        if key[:INDEX_KEY_BYTES] not in worker.cached:
            break
        hits += 1
    return hits * worker.block_size


def blocks_needed(request: RouteRequest, block_size: int) -> int:
    """Blocks a request surely takes: the prompt's complete ones shared, and each choice's own tail and output."""
    shared, tail = divmod(request.prompt_tokens, block_size)
    own = -(-(tail + request.min_output_tokens) // block_size)
    return shared + request.choices * own


def fits(worker: WorkerView, request: RouteRequest) -> bool:
    return (
        blocks_needed(request, worker.block_size) <= worker.num_blocks
        and request.prompt_tokens < worker.max_context
        and (not request.adapter or request.adapter in worker.adapters)
    )


def has_room(worker: WorkerView, request: RouteRequest) -> bool:
    """Whether a decode worker can reserve the prompt's blocks, and one a choice, at once."""
    if worker.free_blocks is None:
        return True
    blocks = -(-(request.prompt_tokens - cached_tokens(worker, request)) // worker.block_size)
    return blocks + request.choices <= worker.free_blocks


def takes_prompts(worker: WorkerView, request: RouteRequest, policy: RoutingPolicy) -> bool:
    """Whether a prefill worker has room. That depends on the worker alone, so a long prompt finds room as soon as a
    short one; no more than dispatch_tokens go before either of them there."""
    bound = policy.dispatch_tokens
    return not bound or (worker.queued_tokens < bound and not (request.images and worker.encoding_tokens >= bound))


def route(workers: Iterable[WorkerView], request: RouteRequest, policy: RoutingPolicy) -> Plan | Hold | None:
    """The plan, or None when no worker, or no pair that can exchange blocks, is there."""
    able = [w for w in workers if w.worker_id not in request.exclude and fits(w, request)]
    every_prefill = [_prefill_score(w, request) for w in able if w.has(PREFILL)]
    prefills = [scored for scored in every_prefill if takes_prompts(scored[0], request, policy)]
    if request.single_token:
        if not prefills:
            return Hold("prefill") if every_prefill else None
        best, _ = _pick(prefills, request, policy)
        return Plan(prefill=best, reason="single-token", scores=_scores(prefills))
    locals_ = [_local_score(w, request) for w, _ in prefills if w.has(DECODE)]
    decodes = [_decode_score(w, request, policy) for w in able if w.has(DECODE)]
    roomy = [scored for scored in decodes if not policy.hold or has_room(scored[0], request)]
    pair = _best_pair(prefills, roomy, request, policy)
    everything = _scores(prefills, decodes, locals_)
    if locals_:
        worker, score = _pick(locals_, request, policy)
        reason = _local_reason(score, pair, request, policy)
        if reason:
            return Plan(decode=worker, reason=reason, scores=everything)
    if pair is None:
        if _best_pair(prefills, decodes, request, policy):
            return Hold("decode")
        both = any(w.has(DECODE) for w, _ in every_prefill)
        return Hold("prefill") if both or _best_pair(every_prefill, decodes, request, policy) else None
    return Plan(prefill=pair[0], decode=pair[1], reason="pair", scores=everything)


_Scored = tuple[WorkerView, Score]


def _prefill_score(worker: WorkerView, request: RouteRequest) -> _Scored:
    uncached = request.prompt_tokens - cached_tokens(worker, request)
    return worker, Score(worker.worker_id, "prefill", uncached + worker.pending_prefill_tokens, uncached)


def _decode_score(worker: WorkerView, request: RouteRequest, policy: RoutingPolicy) -> _Scored:
    uncached = request.prompt_tokens - cached_tokens(worker, request)
    cost = worker.active_blocks * worker.block_size + policy.transfer_weight * uncached
    return worker, Score(worker.worker_id, "decode", cost, uncached)


def _local_score(worker: WorkerView, request: RouteRequest) -> _Scored:
    uncached = request.prompt_tokens - cached_tokens(worker, request)
    cost = uncached + worker.pending_prefill_tokens + worker.active_blocks * worker.block_size
    return worker, Score(worker.worker_id, "local", cost, uncached)


def _local_reason(
    score: Score, pair: tuple[WorkerView, WorkerView] | None, request: RouteRequest, policy: RoutingPolicy
) -> Literal["local-short", "local-cached", "local-only"] | None:
    """Why the request stays on one worker, or None when it does not."""
    if pair is None or all(w.has(PREFILL) and w.has(DECODE) for w in pair):
        return "local-only"  # moving blocks between two workers that could each do both gains nothing
    if score.uncached_tokens >= policy.local_below_tokens:
        return None
    return "local-short" if request.prompt_tokens < policy.local_below_tokens else "local-cached"


def _best_pair(
    prefills: list[_Scored], decodes: list[_Scored], request: RouteRequest, policy: RoutingPolicy
) -> tuple[WorkerView, WorkerView] | None:
    """The cheapest pair among those that can exchange blocks."""
    pairs: list[_Scored] = []
    chosen: dict[str, tuple[WorkerView, WorkerView]] = {}
    for compat_id in sorted({w.compat_id for w, _ in prefills} & {w.compat_id for w, _ in decodes}):
        mine = [s for s in prefills if s[0].compat_id == compat_id]
        takers = [s for s in decodes if s[0].compat_id == compat_id]
        if not any(taker.unreachable for taker, _ in takers):
            mine = [_pick(mine, request, policy)]  # the two terms are independent
        for prefill, p in mine:
            reaching = [s for s in takers if prefill.worker_id not in s[0].unreachable]
            if reaching:
                decode, d = _pick(reaching, request, policy)
                chosen[prefill.worker_id] = (prefill, decode)
                pairs.append((prefill, Score(prefill.worker_id, "prefill", p.cost + d.cost, p.uncached_tokens)))
    return chosen[_pick(pairs, request, policy)[0].worker_id] if pairs else None


def _pick(scored: list[_Scored], request: RouteRequest, policy: RoutingPolicy) -> _Scored:
    """The cheapest; among equals the one that rendezvous hashing gives to this session, in any gateway."""
    least = min(score.cost for _, score in scored)
    return max(
        # A difference, since a sum with a huge cost could be rounded to less than the cost itself.
        (item for item in scored if item[1].cost - least <= policy.tie_tokens),
        key=lambda item: (_rendezvous(request.affinity, item[0].worker_id), item[0].worker_id),
    )


def _rendezvous(affinity: bytes, worker_id: str) -> bytes:
    return hashlib.sha256(len(affinity).to_bytes(4, "little") + affinity + worker_id.encode()).digest()


def _scores(*groups: list[_Scored]) -> tuple[Score, ...]:
    return tuple(score for group in groups for _, score in group)
