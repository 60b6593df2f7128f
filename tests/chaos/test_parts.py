"""The harness itself must be able to fail: what it finds wrong, what its proxy and its namespaces do."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.registry.local_etcd import free_port
from epd.v1 import generation_pb2
from tests.chaos import verdict
from tests.chaos.namespaces import CannotMake, Namespaces
from tests.chaos.pool import Known
from tests.chaos.proxy import Proxy
from tests.chaos.report import Account, Left
from tests.chaos.traffic import take, take_event
from tests.chaos.verdict import Seen, differences

RIGHT = [7, 3, 9, 9, 4, 8, 1, 6, 2, 5]


@pytest.mark.parametrize(
    ("got", "whole", "found"),
    [
        (RIGHT, True, {}),
        (RIGHT[:4], False, {}),
        ([], False, {}),
        (RIGHT[:4], True, {"moved": 6}),
        (RIGHT + RIGHT[-1:], True, {"moved": 1}),
        (RIGHT[:4] + RIGHT[5:], True, {"moved": 1}),
        (RIGHT[:5] + RIGHT[3:], False, {"moved": 2}),
        ([*RIGHT[:4], 99, *RIGHT[5:]], True, {"wrong": 1}),
        ([99], False, {"wrong": 1}),
    ],
)
def test_differences(got: list[int], whole: bool, found: dict[str, int]) -> None:
    assert differences(got, RIGHT, whole=whole) == Counter(found)


def known() -> Known:
    return Known(name="two", options={"n": 2}, tokens={0: [1, 2], 1: [3, 4]}, texts={0: "ab", 1: "cd"})


def test_an_end_without_all_choices_is_no_end() -> None:
    seen = Seen(known(), "gateway-0", "grpc")
    message = generation_pb2.GenerateResponse()
    message.choices.add(index=0, token_ids=[1, 2], text="ab", finish_reason=2)
    take(seen, message)
    seen.end()
    assert seen.outcome == verdict.FALSE_END
    assert seen.faults() == {"moved": 4}
    message.choices[0].index, message.choices[0].text = 1, "cd"
    take(seen, message)
    seen.end()
    assert seen.outcome == verdict.COMPLETED
    assert seen.faults() == {"wrong": 2}


def test_what_an_error_has_delivered_before_it_is_compared_as_well() -> None:
    seen = Seen(known(), "gateway-0", "http")
    take_event(seen, {"choices": [{"index": 0, "text": "aX"}]})
    take_event(seen, {"error": {"code": "worker_lost", "message": "gone"}})
    assert seen.outcome == verdict.ERROR
    assert seen.faults() == {"wrong": 1}


def account(**changes: Any) -> Account:
    good = Seen(known(), "gateway-0", "grpc")
    good.tokens, good.texts, good.outcome, good.resumed = known().tokens, known().texts, verdict.COMPLETED, True
    fields: dict[str, Any] = {
        **{"seed": 0, "minutes": 2.0, "namespaces": "", "faults": Counter({("cut", "decode"): 3}), "kills": 0},
        **{"seen": [good] * 9, "left": Left(), "ends": []},
    }
    return Account(**fields | changes)


def test_every_figure_that_is_not_nothing_fails_the_run(tmp_path: Any) -> None:
    assert not account().failures()
    lost = Seen(known(), "gateway-0", "grpc")
    lost.outcome = verdict.HUNG
    for changes in (
        {"left": Left(blocks=["decode-0: 1 held block"])},
        {"left": Left(spans=["gateway-0: open span"])},
        {"left": Left(processes=["orphan"])},
        {"ends": ["prefill-0 ended"]},
        {"seen": [*account().seen, lost]},
        {"seen": [Seen(known(), "gateway-0", "grpc")]},  # an error: nothing completed
        {"minutes": 20.0},
        {"faults": Counter()},
    ):
        assert account(**changes).failures(), changes
    account().write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["requests"] == 9


@asynccontextmanager
async def echo() -> AsyncIterator[Proxy]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = Proxy(("127.0.0.1", free_port()), ("127.0.0.1", server.sockets[0].getsockname()[1]))
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
        server.close()


async def test_proxy_passes_holds_and_cuts() -> None:
    async with asyncio.timeout(30), echo() as proxy:
        reader, writer = await asyncio.open_connection(*proxy._listen)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        proxy.hold()
        writer.write(b"two")
        held = asyncio.ensure_future(reader.readexactly(3))
        await asyncio.wait((held,), timeout=0.2)
        assert not held.done()
        proxy.go_on()
        assert await held == b"two"
        assert proxy.cut() == 1
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()


async def _greets(address: str, port: int) -> bool:
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(address, port)
            greeting = await reader.readexactly(2)
            writer.close()
            return greeting == b"hi"
    except (OSError, TimeoutError):
        return False


async def test_a_namespace_can_be_reached_until_its_link_is_down() -> None:
    """Where there can be none there is nothing to test; the harness says why, and goes on with proxies."""
    try:
        namespaces = await asyncio.to_thread(Namespaces, 1)
    except CannotMake:
        return
    (namespace,) = namespaces.each
    server = (
        "import socket\ns = socket.create_server(('', 9))\nprint('up', flush=True)\n"
        "while True:\n    s.accept()[0].send(b'hi')"
    )
    process = None
    try:
        async with asyncio.timeout(60):
            process = await asyncio.create_subprocess_exec(
                *namespace.command, sys.executable, "-c", server, stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            assert await process.stdout.readline() == b"up\n"
            assert await _greets(namespace.address, 9)
            for begin, end in (
                (lambda: namespace.link(up=False), lambda: namespace.link(up=True)),
                (lambda: namespace.lose(namespaces.address), lambda: namespace.find(namespaces.address)),
            ):
                begin()
                assert not await _greets(namespace.address, 9)
                end()
                assert await _greets(namespace.address, 9)
    finally:
        if process is not None:
            process.kill()
            await process.wait()
        await asyncio.to_thread(namespaces.remove)
