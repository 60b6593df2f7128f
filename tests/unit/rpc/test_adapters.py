"""The adapters of one worker: what the registry wants, what gateways ask for, and what cannot be had."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.engine.messages import AdapterLoaded, LetAdapterGo
from common.engine.settings import LoraSettings
from common.errors import InvalidArgument, ModelNotFound
from common.registry.record import AdapterRecord
from common.rpc.adapters import Named, WorkerAdapters

MODEL, ALIAS = "m", "n"


class FakeEngine:
    """Holds whatever it is given; a directory's checksum is what its file says."""

    def __init__(self) -> None:
        self.let_go: list[str] = []

    async def load_adapter(self, path: str, *, max_rank: int, max_adapters: int) -> AdapterLoaded:
        checksum, base = (Path(path) / "adapter").read_text().split()
        return AdapterLoaded(number=1, adapter=checksum, base=base)

    def send(self, command: Any) -> None:
        assert isinstance(command, LetAdapterGo)
        self.let_go.append(command.adapter)


def put(root: Path, path: str, letter: str, base: str = "someone/else") -> str:
    (root / path).mkdir(parents=True, exist_ok=True)
    (root / path / "adapter").write_text(f"{letter * 32} {base}")
    return letter * 32


def record(name: str, path: str, checksum: str, model: str = MODEL) -> AdapterRecord:
    return AdapterRecord(name=name, model=model, path=path, checksum=checksum)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def adapters(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[WorkerAdapters]:
    made = WorkerAdapters(LoraSettings(directory=str(tmp_path)), engine, (MODEL, ALIAS))  # type: ignore[arg-type]
    yield made
    await made.stop()


async def follow(adapters: WorkerAdapters, *records: AdapterRecord) -> None:
    adapters.follow({each.name: each for each in records})
    async with asyncio.timeout(5):
        await adapters.settled()


async def test_what_the_registry_wants_comes_changes_and_goes(
    adapters: WorkerAdapters, engine: FakeEngine, tmp_path: Path
) -> None:
    a, b = put(tmp_path, "a", "a"), put(tmp_path, "b", "b")
    others = record("other", "a", a, model="another")
    await follow(adapters, record("x", "a", a), record("y", "b", b, model=ALIAS), others)
    assert adapters.names == {"x": Named(a, MODEL), "y": Named(b, ALIAS)}
    await follow(adapters, record("x", "b", b), record("y", "b", b, model=ALIAS))
    assert adapters.names == {"x": Named(b, MODEL), "y": Named(b, ALIAS)}
    assert engine.let_go == [a]
    await follow(adapters, record("y", "b", b, model=ALIAS))
    assert engine.let_go == [a]  # the other name still means it
    await follow(adapters)
    assert (adapters.names, engine.let_go) == ({}, [a, b])


async def test_what_cannot_be_had_keeps_nothing_else_away(
    adapters: WorkerAdapters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = put(tmp_path, "a", "a"), put(tmp_path, "b", "b")
    await follow(adapters, record("gone", "nowhere", a), record("forged", "b", a), record("x", "b", b))
    assert adapters.names == {"x": Named(b, MODEL)}
    told = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert [message.partition(" is not")[0] for message in told] == ["adapter gone", "adapter forged"]
    put(tmp_path, "nowhere", "a")
    await follow(adapters, record("gone", "nowhere", a), record("x", "b", b))
    assert adapters.names == {"x": Named(b, MODEL), "gone": Named(a, MODEL)}


async def test_what_gateways_have_named_the_registry_does_not_take_away(
    adapters: WorkerAdapters, tmp_path: Path
) -> None:
    a = put(tmp_path, "a", "a")
    await adapters.serve("a", name="x", model=MODEL)
    await follow(adapters)
    assert adapters.names == {"x": Named(a, MODEL)}
    assert await adapters.drop("x")
    assert not await adapters.drop("x")


async def test_the_base_model_is_the_one_its_files_name(adapters: WorkerAdapters, tmp_path: Path) -> None:
    a = put(tmp_path, "a", "a", base=f"/models/{ALIAS}/")
    assert await adapters.serve("a", name="x") == Named(a, ALIAS)
    b = put(tmp_path, "b", "b")
    assert await adapters.serve("b", name="y") == Named(b, MODEL)
    with pytest.raises(ModelNotFound):
        await adapters.serve("b", name="y", model="another")


async def test_only_loaded_is_not_served(adapters: WorkerAdapters, engine: FakeEngine, tmp_path: Path) -> None:
    a = put(tmp_path, "a", "a")
    await adapters.serve("a")
    assert (adapters.names, adapters.held, engine.let_go) == ({}, {a}, [a])


async def test_without_a_directory_there_are_none(engine: FakeEngine, tmp_path: Path) -> None:
    put(tmp_path, "a", "a")
    off = WorkerAdapters(LoraSettings(), engine, (MODEL,))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"lora\.directory"):
        await off.serve(str(tmp_path / "a"), name="x")
    wrong = WorkerAdapters(LoraSettings(directory=str(tmp_path), adapters={"x": "b"}), engine, (MODEL,))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument) as caught:
        await wrong.start()
    assert caught.value.field == "lora.adapters"
