"""EngineProcess: the same engine behind a socket, in a thread and in a process of its own."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

import common.engine.messages as msg
from common.engine.process import EngineProcess
from common.engine.settings import EngineSettings, TimedModel
from common.engine.timed_executor import expected_kv
from common.errors import DuplicateRequest, EngineFailed, InvalidArgument, ModelNotFound
from common.sampling import ChoiceTokens, SamplingParams

SLOW = TimedModel(base_seconds=0.02, seconds_per_prefill_token=0.001)
PROMPT = list(range(20, 60))


def settings(**changes) -> EngineSettings:
    return EngineSettings(**{"executor": "timed", "num_blocks": 64, **changes})


def submit(seq="s", prompt=PROMPT, max_tokens=8, **options) -> msg.Submit:
    return msg.Submit(
        seq=seq, prompt=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens), **options
    )


async def collect(stream) -> list:
    return [event async for event in stream]


def tokens(events) -> list[int]:
    return [
        token
        for event in events
        if isinstance(event, msg.Tokens)
        for _, each in event.items
        for token in each.token_ids
    ]


@pytest.fixture(params=["thread", "process"])
async def engine(request):
    async with asyncio.timeout(180):
        engine = await EngineProcess.launch(settings(), in_thread=request.param == "thread")
        yield engine
        assert (await engine.inspect()).errors == []
        await engine.close()
        assert await engine.closed()


async def test_streams_are_routed_apart(engine):
    streams = [engine.open(submit(f"s{number}", PROMPT[number:])) for number in range(5)]
    results = await asyncio.gather(*map(collect, streams))
    assert len({tuple(tokens(events)) for events in results}) == 5
    for number, events in enumerate(results):
        assert [type(event) for event in (events[0], events[-1])] == [msg.Started, msg.Done]
        assert len(tokens(events)) == 8
        assert {seq for event in events if isinstance(event, msg.Tokens) for seq, _ in event.items} == {f"s{number}"}
    again = await collect(engine.open(submit("again")))
    assert tokens(again) == tokens(results[0])
    assert again[-1].cached_tokens == 32


async def test_hand_off_by_hand(engine):
    """Chunks before their step, progress through the doorbell, blocks readable in the pool, reserve, commit."""
    stream = engine.open(submit("p", decode=False, publish=True))
    started = await anext(stream)
    chunk = await anext(stream)
    assert (chunk.start, chunk.end, chunk.last) == (0, 40, True)
    layers = engine.layout.num_layers
    await engine.wait_progress(chunk.step, layers)
    kv = engine.pool.data.view("float32").reshape(layers, 64, 2, 16, 2)[:, started.blocks]
    rows = kv.transpose(0, 2, 1, 3, 4).reshape(layers, 2, 48, 2)
    assert (rows[:, :, :40] == expected_kv(PROMPT, range(40), layers)).all()
    assert (rows[:, :, 40:] == 0).all()
    prefilled = await anext(stream)
    held = (await engine.inspect()).load.held_blocks
    reserve = msg.Reserve(seq="d", prompt=PROMPT, sampling=SamplingParams(temperature=0.0, max_tokens=8))
    decode = engine.open(reserve)
    reserved = await anext(decode)
    assert reserved.hit_blocks == 2
    target, source = reserved.blocks[2], started.blocks[2]
    engine.pool.data[:, target] = engine.pool.data[:, source]
    engine.send(msg.Release(seq="p"))
    assert [type(event) for event in await collect(stream)] == [msg.Done]
    engine.send(msg.Commit(seq="d", first=prefilled.first))
    rest = await collect(decode)
    first = prefilled.first[0].token_ids
    assert first + tokens(rest) == tokens(await collect(engine.open(submit("whole"))))
    assert held == 3


async def test_prefill_alone_ends_with_its_first_token(engine):
    events = await collect(engine.open(submit(decode=False)))
    assert [type(event) for event in events] == [msg.Started, msg.Prefilled]


async def test_load_and_block_callbacks(engine):
    loads, stored, quiet = [], set(), asyncio.Event()

    def on_load(load):
        loads.append(load)
        if load.running == 0 and load.steps:
            quiet.set()

    engine.on_load(on_load)
    engine.on_blocks(lambda event: stored.update(event.stored))
    await collect(engine.open(submit()))
    await quiet.wait()
    assert len(stored) == 2
    assert loads[-1] == engine.load
    assert (engine.load.cached_blocks, engine.load.total_blocks) == (2, 64)


async def test_bad_requests_do_not_hurt(engine):
    events = await collect(engine.open(submit("bad", [])))
    assert [(event.reason, event.field) for event in events] == [("INVALID_ARGUMENT", "prompt")]
    engine.open(submit("twice"))
    with pytest.raises(DuplicateRequest):
        engine.open(submit("twice"))
    engine.send(msg.Cancel(seq="never seen"))
    engine.send(msg.Commit(seq="never seen", first=[ChoiceTokens(choice=0, token_ids=[1])]))
    assert len(tokens(await collect(engine.open(submit("good"))))) == 8


async def test_cancel_ends_the_stream_and_the_work():
    async with asyncio.timeout(180):
        engine = await EngineProcess.launch(settings(timed=SLOW), in_thread=True)
        stream = engine.open(submit(max_tokens=900))
        while not isinstance(await anext(stream), msg.Tokens):
            pass
        engine.send(msg.Cancel(seq="s"))
        steps = engine.pool.progress()[0]
        inspected = await engine.inspect()
        assert inspected.load.steps <= steps + 2
        assert inspected.load.active_blocks == 0
        assert all(isinstance(event, msg.Tokens) for event in await collect(stream))
        engine.open(submit())  # the name is free again
        await engine.close()


async def test_killed_engine_fails_everything_with_the_cause():
    async with asyncio.timeout(180):
        engine = await EngineProcess.launch(settings(timed=SLOW))
        stream = engine.open(submit(max_tokens=900))
        await anext(stream)
        progress = asyncio.create_task(engine.wait_progress(10**6, 0))
        await asyncio.sleep(0)
        os.kill(engine.pid, signal.SIGKILL)
        assert await engine.closed() == "the engine process ended with code -9"
        last = (await collect(stream))[-1]
        assert (last.reason, last.seq) == ("ENGINE_FAILED", "s")
        for waiting in (progress, engine.inspect()):
            with pytest.raises(EngineFailed):
                await waiting
        with pytest.raises(EngineFailed):
            engine.open(submit("after"))
        await engine.close()
        await engine.close()


async def test_broken_step_fails_all_and_ends_the_engine(monkeypatch):
    from common.engine import timed_executor

    def broken(self, batch, layer_done):
        raise RuntimeError("a bug")

    monkeypatch.setattr(timed_executor.TimedExecutor, "execute", broken)
    async with asyncio.timeout(180):
        engine = await EngineProcess.launch(settings(), in_thread=True)
        results = await asyncio.gather(*(collect(engine.open(submit(f"s{number}"))) for number in range(3)))
        assert [events[-1].reason for events in results] == ["ENGINE_FAILED"] * 3
        assert "RuntimeError" in await engine.closed()
        await engine.close()


async def test_engine_ends_with_its_service():
    """Whoever dies without a word leaves a closed socket."""
    async with asyncio.timeout(180):
        engine = await EngineProcess.launch(settings(timed=SLOW))
        engine.open(submit(max_tokens=900))
        engine._transport.abort()
        assert await engine.closed() == "the engine process ended with code 0"
        await engine.close()


async def test_what_cannot_be_served_is_told_at_launch(tmp_path):
    with pytest.raises(ModelNotFound):
        await EngineProcess.launch(settings(executor="modules", model_dir=str(tmp_path)))
    with pytest.raises(InvalidArgument, match="multiple of 16"):
        await EngineProcess.launch(settings(block_size=20))


async def test_model_in_a_process_of_its_own(llama):
    async with asyncio.timeout(300):
        engine = await EngineProcess.launch(
            settings(executor="modules", model_dir=str(llama.model_dir), dtype="float32", device="cpu")
        )
        prompt = llama.prompt(37)
        assert tokens(await collect(engine.open(submit(prompt=prompt)))) == llama.tokens(prompt)
        assert (engine.ready.vocab_size, engine.ready.max_context, engine.ready.eos_token_ids) == (512, 512, [2])
        await engine.close()


async def test_broken_weights_are_told_at_launch(llama, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((llama.model_dir / name).read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20000])
    async with asyncio.timeout(300):
        with pytest.raises(EngineFailed, match="did not start"):
            await EngineProcess.launch(settings(executor="modules", model_dir=str(tmp_path), dtype="float32"))


@pytest.mark.parametrize("module", ["common.engine.process", "common.engine.timed_executor"])
def test_no_torch_on_the_service_side(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=180).returncode == 0


SERVICE = """
import asyncio
import common.engine.messages as msg
from common.engine.process import EngineProcess
from common.engine.settings import EngineSettings, TimedModel
from common.sampling import SamplingParams

async def main():
    engine = await EngineProcess.launch(EngineSettings(executor="timed", timed=TimedModel(base_seconds=600)))
    engine.open(msg.Submit(seq="s", prompt=[1, 2, 3], sampling=SamplingParams()))
    print(engine.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_an_engine_ends_with_its_service_also_within_a_step():
    """In a step it reads no socket. This one takes ten minutes."""
    with subprocess.Popen([sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, text=True) as service:
        engine = psutil.Process(int(service.stdout.readline()))
        time.sleep(1)  # for the step to begin: before, it would end by its socket
        service.kill()
    _, left = psutil.wait_procs([engine], timeout=60)
    for process in left:
        process.kill()
    assert not left
