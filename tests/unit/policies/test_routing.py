"""Routing formulas with values computed by hand, and what holds for any fleet."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cache.keys import block_keys, root_key
from common.policies.routing import Hold, RouteRequest, RoutingPolicy, WorkerView, blocks_needed, cached_tokens, route

POLICY = RoutingPolicy()
KEYS = block_keys(root_key("m", "r"), range(1024), 16)


def view(worker_id: str, roles: str = "p", **fields: object) -> WorkerView:
    names = {"p": "prefill", "d": "decode"}
    base = {
        "worker_id": worker_id,
        "incarnation": "1",
        "roles": tuple(names[role] for role in roles),
        "compat_id": "c",
        "keys_id": "k",
        "block_size": 16,
        "num_blocks": 1000,
        "max_context": 8192,
    }
    return WorkerView(**base | fields)


def ask(tokens: int = 1024, **fields: object) -> RouteRequest:
    return RouteRequest(prompt_tokens=tokens, block_keys={"k": KEYS}, **fields)


def cached(blocks: int) -> frozenset[bytes]:
    return frozenset(key[:16] for key in KEYS[:blocks])


def costs(plan) -> dict[tuple[str, str], float]:
    return {(score.role, score.worker_id): score.cost for score in plan.scores}


def test_costs_by_hand() -> None:
    workers = [
        view("p0", pending_prefill_tokens=500),
        view("p1", pending_prefill_tokens=900, cached=cached(30)),
        view("d0", "d", active_blocks=20),
        view("d1", "d", active_blocks=30, cached=cached(60)),
    ]
    plan = route(workers, ask(), POLICY)
    assert costs(plan) == {
        ("prefill", "p0"): 1024 + 500,
        ("prefill", "p1"): 1024 - 480 + 900,
        ("decode", "d0"): 20 * 16 + 0.25 * 1024,
        ("decode", "d1"): 30 * 16 + 0.25 * (1024 - 960),
    }
    # 1444 < 1524 and 496 < 576
    assert (plan.prefill.worker_id, plan.decode.worker_id, plan.reason) == ("p1", "d1", "pair")


def test_an_adapters_requests_go_to_those_that_hold_it() -> None:
    workers = [
        view("p0"),
        view("p1", adapters={"a"}, pending_prefill_tokens=4000),
        view("d0", "d", adapters={"b"}),
        view("d1", "d", adapters={"a", "b"}, active_blocks=500),
    ]
    plan = route(workers, ask(adapter="a"), POLICY)
    assert (plan.prefill.worker_id, plan.decode.worker_id) == ("p1", "d1")
    plan = route(workers, ask(), POLICY)
    assert (plan.prefill.worker_id, plan.decode.worker_id) == ("p0", "d0")
    assert route(workers, ask(adapter="b"), POLICY) is None  # it has no prefill worker


def test_the_whole_prompt_is_never_cached() -> None:
    everything = view("p0", cached=cached(64))
    assert cached_tokens(everything, ask(1024)) == 1008  # 64 blocks exactly: the last is computed anew
    assert cached_tokens(everything, ask(1023)) == 1008
    assert cached_tokens(everything, ask(1025)) == 1024
    assert cached_tokens(everything, ask(5)) == 0


def test_only_leading_blocks_count() -> None:
    holes = view("p0", cached=cached(10) - cached(4) | cached(3))
    assert cached_tokens(holes, ask()) == 48


def test_keys_of_another_model_do_not_count() -> None:
    assert cached_tokens(view("p0", keys_id="other", cached=cached(64)), ask()) == 0


@pytest.mark.parametrize(
    ("tokens", "hits", "reason", "kind"),
    [
        (511, 0, "local-short", "aggregated"),
        (512, 0, "pair", "disaggregated"),
        (1024, 32, "pair", "disaggregated"),  # 512 uncached
        (1024, 33, "local-cached", "aggregated"),  # 496
        (1024, 64, "local-cached", "aggregated"),
    ],
)
def test_conditional_disaggregation(tokens: int, hits: int, reason: str, kind: str) -> None:
    workers = [view("p0"), view("d0", "d"), view("b0", "pd", cached=cached(hits), active_blocks=100)]
    plan = route(workers, ask(tokens), POLICY)
    assert (plan.reason, plan.kind) == (reason, kind)
    if kind == "aggregated":
        assert plan.decode.worker_id == "b0"


def test_only_aggregated_workers_stay_aggregated_whatever_the_length() -> None:
    plan = route([view("b0", "pd"), view("b1", "pd", pending_prefill_tokens=5000)], ask(4000), POLICY)
    assert (plan.kind, plan.decode.worker_id, plan.reason) == ("aggregated", "b0", "local-only")


def test_short_prompts_need_a_worker_with_both_roles_to_stay() -> None:
    assert route([view("p0"), view("d0", "d")], ask(10), POLICY).kind == "disaggregated"


def test_never_pairs_what_cannot_exchange_blocks() -> None:
    assert route([view("p0", compat_id="a"), view("d0", "d", compat_id="b")], ask(), POLICY) is None
    workers = [
        view("p0", compat_id="a"),
        view("p1", compat_id="b", pending_prefill_tokens=4000),
        view("d1", "d", compat_id="b"),
    ]
    plan = route(workers, ask(), POLICY)
    assert (plan.prefill.worker_id, plan.decode.worker_id) == ("p1", "d1")


def test_single_token_needs_no_decode_worker() -> None:
    plan = route([view("p0")], ask(single_token=True), POLICY)
    assert (plan.kind, plan.prefill.worker_id) == ("prefill-only", "p0")
    assert route([view("d0", "d")], ask(single_token=True), POLICY) is None


def test_excluded_and_preferred() -> None:
    workers = [view("p0"), view("p1", pending_prefill_tokens=600), view("d0", "d")]
    assert route(workers, ask(), POLICY).prefill.worker_id == "p0"
    assert route(workers, ask(exclude={"p0"}), POLICY).prefill.worker_id == "p1"
    # As a whole hit p1 costs 16 + 600 < 1024.
    assert route(workers, ask(prefer_prefill="p1"), POLICY).prefill.worker_id == "p1"
    assert route(workers, ask(exclude={"p0", "p1"}), POLICY) is None


def test_a_pool_too_small_is_no_candidate() -> None:
    workers = [view("p0", num_blocks=64), view("p1", num_blocks=65, pending_prefill_tokens=9999), view("d0", "d")]
    assert route(workers, ask(), POLICY).prefill.worker_id == "p1"
    assert route(workers[:1] + workers[2:], ask(), POLICY) is None


@pytest.mark.parametrize(
    ("prompt", "choices", "output", "blocks"), [(16, 1, 1, 2), (15, 1, 1, 1), (40, 3, 1, 2 + 3), (40, 3, 9, 2 + 6)]
)
def test_blocks_needed(prompt: int, choices: int, output: int, blocks: int) -> None:
    request = RouteRequest(prompt_tokens=prompt, choices=choices, min_output_tokens=output)
    assert blocks_needed(request, 16) == blocks


def test_b9_one_hot_worker_leaves_affinity_of_the_others_alone() -> None:
    """Load is weighed a worker at a time, in tokens: no global switch from affinity to load."""
    holders = [view(f"p{i}", cached=cached(60)) for i in range(2)]
    cold = view("p2")
    hot = view("p3", pending_prefill_tokens=1_000_000)
    for affinity in (b"a", b"b", b"c"):
        without = route([*holders, cold, view("d0", "d")], ask(affinity=affinity), POLICY)
        with_hot = route([*holders, cold, hot, view("d0", "d")], ask(affinity=affinity), POLICY)
        assert without.prefill.worker_id == with_hot.prefill.worker_id
        assert with_hot.prefill.worker_id in ("p0", "p1")


def test_affinity_breaks_ties_and_only_ties() -> None:
    workers = [view(f"p{i}") for i in range(4)] + [view("d0", "d")]
    chosen = {bytes([i]): route(workers, ask(affinity=bytes([i])), POLICY).prefill.worker_id for i in range(64)}
    assert len(set(chosen.values())) == 4  # sessions spread
    for affinity, worker_id in chosen.items():
        assert route(list(reversed(workers)), ask(affinity=affinity), POLICY).prefill.worker_id == worker_id
        # Another worker leaving moves nobody else's session.
        others = [w for w in workers if w.worker_id != ("p0" if worker_id != "p0" else "p1")]
        assert route(others, ask(affinity=affinity), POLICY).prefill.worker_id == worker_id
    loaded = [view(w.worker_id, pending_prefill_tokens=17) if w.worker_id == chosen[b"\0"] else w for w in workers[:4]]
    assert route([*loaded, workers[4]], ask(affinity=b"\0"), POLICY).prefill.worker_id != chosen[b"\0"]


def test_b7_repeated_tokens_have_distinct_blocks() -> None:
    keys = block_keys(root_key("m", "r"), [7] * 160, 16)
    assert len(set(keys)) == 10
    assert (
        cached_tokens(view("p0", cached={keys[9][:16]}), RouteRequest(prompt_tokens=161, block_keys={"k": keys})) == 0
    )
    one = RouteRequest(prompt_tokens=161, block_keys={"k": keys})
    assert cached_tokens(view("p0", cached={keys[0][:16]}), one) == 16


views = st.builds(
    view,
    st.sampled_from([f"w{i}" for i in range(6)]),
    st.sampled_from(["p", "d", "pd"]),
    compat_id=st.sampled_from(["a", "b"]),
    pending_prefill_tokens=st.integers(0, 5000),
    active_blocks=st.integers(0, 500),
    num_blocks=st.sampled_from([10, 100, 1000]),
    cached=st.integers(0, 64).map(cached),
)
fleets = st.lists(views, max_size=6, unique_by=lambda w: w.worker_id)
requests = st.builds(
    ask,
    st.integers(1, 1024),
    choices=st.integers(1, 4),
    single_token=st.booleans(),
    affinity=st.binary(max_size=3),
    exclude=st.frozensets(st.sampled_from([f"w{i}" for i in range(6)]), max_size=3),
)


@settings(deadline=None)
@given(fleets, requests)
def test_any_plan_can_be_carried_out(workers: list[WorkerView], request: RouteRequest) -> None:
    plan = route(workers, request, POLICY)
    able = [
        w
        for w in workers
        if w.worker_id not in request.exclude
        and blocks_needed(request, 16) <= w.num_blocks
        and request.prompt_tokens < 8192
    ]
    prefills = [w for w in able if w.has("prefill")]
    decodes = [w for w in able if w.has("decode")]
    possible = (
        bool(prefills) if request.single_token else any(p.compat_id == d.compat_id for p in prefills for d in decodes)
    )
    assert (plan is not None) == possible
    if plan is None:
        return
    if plan.kind == "disaggregated":
        assert plan.prefill in prefills
        assert plan.decode in decodes
        assert plan.prefill.compat_id == plan.decode.compat_id
    elif plan.kind == "aggregated":
        assert plan.decode in prefills
        assert plan.decode in decodes
        assert not request.single_token
    else:
        assert plan.prefill in prefills
        assert request.single_token


@settings(deadline=None)
@given(fleets, requests, st.randoms())
def test_the_order_of_the_snapshot_does_not_matter(workers: list[WorkerView], request: RouteRequest, random) -> None:
    shuffled = list(workers)
    random.shuffle(shuffled)
    one, other = route(workers, request, POLICY), route(shuffled, request, POLICY)
    assert (one and (one.prefill, one.decode)) == (other and (other.prefill, other.decode))


@settings(deadline=None)
@given(fleets, requests)
def test_no_candidate_is_clearly_cheaper(workers: list[WorkerView], request: RouteRequest) -> None:
    plan = route(workers, request, POLICY)
    if plan is None or plan.kind != "disaggregated":
        return
    by = costs(plan)
    chosen = by["prefill", plan.prefill.worker_id] + by["decode", plan.decode.worker_id]
    pairs = [
        by["prefill", p.worker_id] + by["decode", d.worker_id]
        for p in workers
        for d in workers
        if ("prefill", p.worker_id) in by and ("decode", d.worker_id) in by and p.compat_id == d.compat_id
    ]
    assert chosen <= min(pairs) + 4 * POLICY.tie_tokens


def test_a_full_decode_worker_is_not_chosen() -> None:
    # 1024 tokens are 64 blocks, and one for the choice.
    workers = [view("p0"), view("d0", "d", free_blocks=64), view("d1", "d", active_blocks=500, free_blocks=65)]
    assert route(workers, ask(), POLICY).decode.worker_id == "d1"
    # What it has cached needs no room.
    workers[1] = view("d0", "d", free_blocks=34, cached=cached(31))
    assert route(workers, ask(), POLICY).decode.worker_id == "d0"


def test_hold_while_every_decode_worker_is_full() -> None:
    full = [view("p0"), view("d0", "d", free_blocks=0)]
    assert route(full, ask(), POLICY) == Hold("decode")
    # Nothing to wait for: no pair, or one worker does it all and queues by itself.
    assert route(full[1:], ask(), POLICY) is None
    assert route([*full, view("b0", "pd", free_blocks=0)], ask(), POLICY).reason == "local-only"
    assert route(full, ask(single_token=True), POLICY).kind == "prefill-only"
    # Where the decode workers' own queue is wanted.
    assert route(full, ask(), RoutingPolicy(hold=False)).decode.worker_id == "d0"


def test_a_prefill_worker_takes_prompts_while_few_are_under_way() -> None:
    """However long the next one is; any other worker with room is better than none."""
    policy = RoutingPolicy(dispatch_tokens=100)
    workers = [
        view("p0", queued_tokens=100),
        view("p1", queued_tokens=99, pending_prefill_tokens=9999),
        view("d0", "d"),
    ]
    assert route(workers, ask(), policy).prefill.worker_id == "p1"
    workers[1] = view("p1", queued_tokens=100)
    assert route(workers, ask(), policy) == Hold("prefill")
    assert route(workers, ask(single_token=True), policy) == Hold("prefill")
    assert route([view("b0", "pd", queued_tokens=100)], ask(), policy) == Hold("prefill")
    assert route([view("b0", "pd", queued_tokens=99)], ask(), policy).reason == "local-only"
    assert route(workers, ask(), RoutingPolicy(dispatch_tokens=0)).kind == "disaggregated"
    assert route(workers[2:], ask(), policy) is None


def test_images_under_way_leave_room_for_text() -> None:
    policy = RoutingPolicy(dispatch_tokens=100)
    workers = [view("p0", encoding_tokens=100), view("d0", "d")]
    assert route(workers, ask(), policy).kind == "disaggregated"
    assert route(workers, ask(images=True), policy) == Hold("prefill")
