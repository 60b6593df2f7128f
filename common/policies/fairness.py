"""Who is served next while workers are full: Virtual Token Counters (Sheng et al., OSDI 2024) and, inside a tenant,
priority and age.

A tenant's counter is the service it has had, in tokens, over its weight:

    admitted:    + prompt_cost · prompt tokens that no cache had / weight
    each token:  + output_cost / weight
    waits again: raised to the smallest counter of those that wait, or of who was served last when nobody does

The waiting tenant with the smallest counter is next. By the last rule an idle tenant saves nothing up. While two
tenants wait all the time, what they get (times 1/weight) differs by at most

    2 · max(prompt_cost · longest prompt, output_cost · M)

M being the tokens that admitted requests may still generate together. The order never leaves a worker idle: it says
who is next, not who must wait for what.
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec

_LEAST_WEIGHT = 1e-6


class FairnessPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Knobs of the order in which requests leave the gateway while workers are full. The costs are VTC's, the others
    ours."""

    order: Literal["vtc", "fcfs"] = "vtc"  # fcfs: as they came, whoever sent them
    prompt_cost: float = 1.0
    output_cost: float = 2.0
    ageing_tokens_per_second: float = 1000.0  # a prompt this long goes behind what comes up to a second after it
    overtaking_seconds: float = 10.0  # what comes later than this after a request never goes before it
    max_idle_tenants: int = 4096  # remembered with their counters


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits. tokens: of its prompt; arrival: seconds of any clock that does not go back.

    resumed: it has been admitted before; it goes first and is not charged again.
    """

    tenant: str
    tokens: int
    arrival: float
    priority: int = 0
    resumed: bool = False
    key: tuple[float, ...] = field(default=(), init=False)  # its place in the line


class Counters:
    """Service of each tenant, in tokens over weight. Those of idle tenants are forgotten, smallest first, beyond
    `policy.max_idle_tenants`: a new one starts where the others are, so only a debt can be lost."""

    def __init__(self, policy: FairnessPolicy, weight: Callable[[str], float]) -> None:
        self._policy = policy
        self._weight = weight
        self._value: dict[str, float] = {}
        self._last = ""  # served last

    def __getitem__(self, tenant: str) -> float:
        return self._value.get(tenant, 0.0)

    def __len__(self) -> int:
        return len(self._value)

    def weight(self, tenant: str) -> float:
        return max(_LEAST_WEIGHT, self._weight(tenant))

    def activate(self, tenant: str, waiting: Iterable[str]) -> None:
        """The tenant waits from now on; `waiting`: those that do already."""
        floor = min((self[each] for each in waiting), default=self[self._last])
        self._value[tenant] = max(self[tenant], floor)

    def admitted(self, tenant: str) -> None:
        self._last = tenant

    def prompt(self, tenant: str, tokens: int) -> None:
        """Prompt tokens to compute; fewer than 0: a correction, more came from a cache than was thought."""
        self._add(tenant, self._policy.prompt_cost * tokens)

    def output(self, tenant: str, tokens: int) -> None:
        self._add(tenant, self._policy.output_cost * tokens)

    def forget(self, waiting: Iterable[str]) -> None:
        """Keeps memory bounded. Cheap unless there are too many."""
        bound = self._policy.max_idle_tenants
        if len(self._value) <= 2 * bound:
            return
        kept = {self._last, *waiting}
        idle = sorted((value, tenant) for tenant, value in self._value.items() if tenant not in kept)
        for _, tenant in idle[: len(idle) - bound]:
            del self._value[tenant]

    def _add(self, tenant: str, cost: float) -> None:
        self._value[tenant] = self[tenant] + cost / self.weight(tenant)


class FairQueue:
    """Requests that wait, and who is next.

    Those that go on after a failure are first, as they came. Then, under `vtc`, the tenant with the smallest counter,
    and of its requests the one of the highest priority, among equals the smallest

        arrival + min(prompt tokens / ageing_tokens_per_second, overtaking_seconds)

    so that a short prompt does not wait behind a long one, and yet of the same priority only what comes less than
    min(tokens / ageing_tokens_per_second, overtaking_seconds) after a request can go before it. A priority counts
    among the requests of one tenant: nobody gains on others by calling all of his urgent.
    """

    def __init__(self, policy: FairnessPolicy, weight: Callable[[str], float] = lambda tenant: 1.0) -> None:
        self.counters = Counters(policy, weight)
        self._policy = policy
        self._resumed: list[Waiting] = []
        self._lines: dict[str, list[Waiting]] = {}  # by tenant; under fcfs a single one
        self._tokens: dict[str, int] = {}  # by tenant
        self._count = itertools.count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return sum(self._tokens.values())

    def tenants(self) -> Iterable[str]:
        return self._tokens.keys()

    def push(self, waiting: Waiting) -> None:
        if not waiting.resumed and waiting.tenant not in self._tokens:
            self.counters.activate(waiting.tenant, self._tokens)
        waiting.key = self._key(waiting, next(self._count))
        bisect.insort(self._line(waiting), waiting, key=lambda each: each.key)
        self._length += 1
        if not waiting.resumed:
            self._tokens[waiting.tenant] = self._tokens.get(waiting.tenant, 0) + waiting.tokens

    def remove(self, waiting: Waiting) -> None:
        """Whether it is served now or waits no longer. Raises ValueError when it is not there."""
        line = self._line(waiting)
        line.remove(waiting)
        self._length -= 1
        if waiting.resumed:
            return
        if not line:
            del self._lines[self._name(waiting.tenant)]
        self._tokens[waiting.tenant] -= waiting.tokens
        if not self._tokens[waiting.tenant] and not self._has(waiting.tenant):
            del self._tokens[waiting.tenant]
            self.counters.forget(self._tokens)

    def admit(self, tenant: str, tokens: int, *, waited: bool) -> None:
        """A request that is not resumed goes to its workers; tokens: of its prompt that no cache has, as far as one
        knows. waited: it was in the queue."""
        if not waited and tenant not in self._tokens:
            self.counters.activate(tenant, self._tokens)
        self.counters.admitted(tenant)
        self.counters.prompt(tenant, tokens)
        self.counters.forget(self._tokens)

    def in_order(self) -> Iterator[Waiting]:
        """Who is next, and who would be if that one could not be served: each tenant's first, then their second, …"""
        yield from self._resumed
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            yield from line
            return
        lines = sorted(self._lines, key=lambda name: (self.counters[name], self._lines[name][0].key))
        for rank in itertools.zip_longest(*(self._lines[name] for name in lines)):
            yield from filter(None, rank)

    def ahead(self, waiting: Waiting) -> tuple[int, int]:
        """(prompt tokens of its own tenant that go before this request, those of all that wait). It need not be in
        the queue; under fcfs both are the same."""
        total = self.tokens
        if self._policy.order == "fcfs":
            return total, total
        key = self._key(waiting, next(self._count))
        line = self._lines.get(waiting.tenant, ())
        return sum(each.tokens for each in line if each.key < key), total

    def share(self, tenant: str) -> float:
        """Of the service, while all that wait now go on doing so; more when they do not."""
        if self._policy.order == "fcfs":
            return 1.0
        mine = self.counters.weight(tenant)
        others = sum(self.counters.weight(each) for each in self._tokens if each != tenant)
        return mine / (mine + others)

    def to_leave(self, newcomer: Waiting, bound: int) -> list[Waiting] | None:
        """Who has to go so that with the newcomer no more than `bound` prompt tokens wait: the last of the tenant that
        has the most over its weight, as often as it takes. None: the newcomer, whose tenant has the most. Under fcfs
        it is always the newcomer."""
        excess = self.tokens + newcomer.tokens - bound
        if excess <= 0 or not self._tokens:
            return []
        if self._policy.order == "fcfs":
            return None
        held = dict(self._tokens)
        held[newcomer.tenant] = held.get(newcomer.tenant, 0) + newcomer.tokens
        lines = {tenant: list(line) for tenant, line in self._lines.items()}
        leaving = []
        while excess > 0:
            # Of equals the newcomer's: nobody is sent away for nothing.
            most = max(held, key=lambda each: (held[each] / self.counters.weight(each), each == newcomer.tenant))
            if most == newcomer.tenant:
                return None
            last = lines[most].pop()
            held[most] -= last.tokens
            excess -= last.tokens
            leaving.append(last)
        return leaving

    def _key(self, waiting: Waiting, number: int) -> tuple[float, ...]:
        if waiting.resumed or self._policy.order == "fcfs":
            return (number,)
        policy = self._policy
        late = min(waiting.tokens / policy.ageing_tokens_per_second, policy.overtaking_seconds)
        return (-waiting.priority, waiting.arrival + late, number)

    def _line(self, waiting: Waiting) -> list[Waiting]:
        return self._resumed if waiting.resumed else self._lines.setdefault(self._name(waiting.tenant), [])

    def _name(self, tenant: str) -> str:
        return tenant if self._policy.order == "vtc" else ""

    def _has(self, tenant: str) -> bool:
        return any(each.tenant == tenant for each in self._lines.get(self._name(tenant), ()))
