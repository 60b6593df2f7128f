"""Clients: a bounded number at once, each asking, reading, at times leaving or running out of time, over and over."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import grpc
import httpx

from common.telemetry import GATEWAY_RETRY
from epd.v1 import generation_pb2, generation_pb2_grpc
from tests.chaos import verdict
from tests.chaos.mesh import ChaosMesh, Process
from tests.chaos.pool import Known
from tests.chaos.verdict import Seen

DEADLINE_SECONDS = 60.0
PATIENCE_SECONDS = 10.0  # beyond the deadline: then it hangs
LONGEST_HINT_SECONDS = 2.0
_REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


class Traffic:
    """`seen` holds every request that has ended."""

    def __init__(self, mesh: ChaosMesh, pool: Sequence[Known], seed: int, clients: int) -> None:
        self._mesh, self._pool, self._seed, self._clients = mesh, pool, seed, clients
        self.seen: list[Seen] = []
        self.under_way = 0
        self._stop = asyncio.Event()
        self._gateways = mesh.of("gateway")
        self._stubs: dict[str, generation_pb2_grpc.GenerationServiceStub] = {}

    async def run(self) -> None:
        """Until `stop`; what is under way then is read to its end."""
        channels = {each.name: grpc.aio.insecure_channel(each.role.address) for each in self._gateways}
        self._stubs = {name: generation_pb2_grpc.GenerationServiceStub(channel) for name, channel in channels.items()}
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._clients):
                    group.create_task(self._client(random.Random(f"client {self._seed} {number}")))
        finally:
            for channel in channels.values():
                await channel.close()

    def stop(self) -> None:
        self._stop.set()

    async def _client(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            known = rng.choice(self._pool)
            gateway = rng.choice([each for each in self._gateways if each.ready] or self._gateways)
            seen = Seen(known, gateway.name, "http" if rng.random() < 0.2 else "grpc")
            leave, deadline = 0, DEADLINE_SECONDS
            match rng.random():
                case draw if draw < 0.08:
                    leave = rng.randrange(1, known.options["max_tokens"])
                case draw if draw < 0.14:
                    deadline = rng.uniform(0.2, 2.5)
            await self._ask(seen, gateway, leave, deadline)
            if seen.outcome not in (verdict.COMPLETED, verdict.CANCELLED, verdict.LATE):
                await asyncio.sleep(rng.uniform(0.2, LONGEST_HINT_SECONDS))

    async def _ask(self, seen: Seen, gateway: Process, leave: int, deadline: float) -> None:
        seen.started = time.monotonic()
        self.under_way += 1
        read = self._grpc if seen.way == "grpc" else self._http
        try:
            async with asyncio.timeout(deadline + PATIENCE_SECONDS):
                await read(seen, gateway, leave, deadline)
        except TimeoutError:
            seen.outcome, seen.detail = verdict.HUNG, f"no end {PATIENCE_SECONDS:g} s after its deadline"
        finally:
            self.under_way -= 1
        seen.finished = time.monotonic()
        if (
            seen.outcome == verdict.ERROR
            and deadline < DEADLINE_SECONDS
            and seen.detail.startswith("DEADLINE_EXCEEDED")
        ):
            seen.outcome = verdict.LATE
        # The only gateway that a client can blame is the one it spoke to.
        broken = seen.outcome in (verdict.ERROR, verdict.REFUSED, verdict.HUNG)
        if broken and gateway.was_disturbed(seen.started, seen.finished):
            seen.outcome = verdict.GATEWAY
        self.seen.append(seen)

    async def _grpc(self, seen: Seen, gateway: Process, leave: int, deadline: float) -> None:
        call = self._stubs[gateway.name].Generate(seen.known.message(), timeout=deadline)
        try:
            async for message in call:
                take(seen, message)
                if leave and sum(map(len, seen.tokens.values())) >= leave:
                    seen.outcome = verdict.CANCELLED
                    return
            seen.end()
        except grpc.aio.AioRpcError as error:
            metadata = dict(error.trailing_metadata() or ())
            reason = metadata.get("epd-reason", "")
            seen.detail = f"{error.code().name} {reason} {error.details()}"
            hint = "retry-after-ms" in metadata
            refused = error.code() in _REFUSALS and reason and not seen.started_stream
            seen.outcome = verdict.REFUSED if refused and hint else verdict.ERROR
        finally:
            call.cancel()

    async def _http(self, seen: Seen, gateway: Process, leave: int, deadline: float) -> None:
        path, body = seen.known.http()
        over = time.monotonic() + deadline
        limits = httpx.Timeout(deadline, connect=5.0)
        try:
            async with (
                asyncio.timeout(deadline),
                httpx.AsyncClient(base_url=self._mesh.http(gateway), timeout=limits) as client,
                client.stream("POST", path, json=body, headers={"x-epd-timing": "1"}) as answer,
            ):
                if answer.status_code != 200:
                    error = json.loads(await answer.aread())["error"]
                    seen.detail = f"{answer.status_code} {error['code']} {error['message']}"
                    refused = answer.status_code in (429, 503) and "retry-after" in answer.headers
                    seen.outcome = verdict.REFUSED if refused else verdict.ERROR
                    return
                done = False
                async with aclosing(answer.aiter_lines()) as lines:
                    async for line in lines:
                        if line == "data: [DONE]":
                            done = True
                        elif line.startswith("data: "):
                            take_event(seen, json.loads(line.removeprefix("data: ")))
                        if leave and sum(map(len, seen.texts.values())) >= leave:
                            seen.outcome = verdict.CANCELLED
                            return
                if seen.detail:
                    return  # an event has told of an error
                # A connection that ends in order without the last event is an end no client takes for a good one.
                seen.detail = "ended without [DONE]"
                if done or seen.ended == set(seen.known.tokens):
                    seen.detail = ""
                    seen.end()
        except TimeoutError:
            seen.outcome = verdict.LATE if deadline < DEADLINE_SECONDS else verdict.ERROR
            seen.detail = "DEADLINE_EXCEEDED of the client's"
        except httpx.TimeoutException as error:
            late = deadline < DEADLINE_SECONDS and time.monotonic() >= over
            seen.outcome, seen.detail = verdict.LATE if late else verdict.ERROR, repr(error)
        except httpx.HTTPError as error:
            seen.detail = repr(error)


def take(seen: Seen, message: generation_pb2.GenerateResponse) -> None:
    for delta in message.choices:
        seen.tokens.setdefault(delta.index, []).extend(delta.token_ids)
        seen.texts[delta.index] = seen.texts.get(delta.index, "") + delta.text
        if delta.finish_reason:
            seen.ended.add(delta.index)
    if message.HasField("accounting"):
        account = message.accounting
        seen.attempts, seen.trace = account.attempts, account.trace_id
        ttft, total = (
            sum(hop.duration.ToTimedelta().total_seconds() for hop in hops if hop.name == GATEWAY_RETRY)
            for hops in (account.ttft_hops, account.total_hops)
        )
        seen.resumed = total > ttft


def take_event(seen: Seen, event: dict[str, Any]) -> None:
    if "error" in event:
        seen.outcome = verdict.ERROR
        seen.detail = f"{event['error']['code']} {event['error']['message']}"
        return
    if account := event.get("epd"):
        seen.attempts, seen.trace = account["attempts"], account["trace_id"]
        spent = [
            sum(hop["seconds"] for hop in account[hops] if hop["name"] == GATEWAY_RETRY)
            for hops in ("ttft_hops", "total_hops")
        ]
        seen.resumed = spent[1] > spent[0]
    for choice in event.get("choices", ()):
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        seen.texts[choice["index"]] = seen.texts.get(choice["index"], "") + text
        if choice.get("finish_reason"):
            seen.ended.add(choice["index"])
