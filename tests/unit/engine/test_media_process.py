"""EngineProcess: the embedding pool handed to the engine, and the wait until the engine reads it no more."""

import asyncio
import os
import signal

import numpy as np
import pytest

import common.engine.messages as msg
from common.engine.process import EngineProcess
from common.engine.settings import EngineSettings, TimedModel
from common.errors import EngineFailed
from common.sampling import SamplingParams
from tests.unit.engine.media import IMAGES, image, with_blocks
from tests.unit.engine.pictures import Gallery
from tests.unit.engine.test_media_tokens import three

SLOW = TimedModel(**{**IMAGES, "base_seconds": 0.05})
RED = with_blocks(image("red", 10), (1, 0))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def settings(**changes) -> EngineSettings:
    return EngineSettings(**{"executor": "timed", "timed": SLOW, "num_blocks": 64, "token_budget": 16, **changes})


def submit(seq: str = "s", **options) -> msg.Submit:
    options = {"prompt": list(range(20, 100)), "media": [RED], "sampling": GREEDY, **options}
    return msg.Submit(seq=seq, **options)


async def tokens(stream) -> list[int]:
    events = [event async for event in stream]
    assert isinstance(events[-1], msg.Done), events[-1]
    items = [each for event in events if isinstance(event, msg.Tokens) for _, each in event.items]
    return [token for each in items for token in each.token_ids]


@pytest.fixture(params=["thread", "process"])
async def engine(request):
    async with asyncio.timeout(180):
        engine = await EngineProcess.launch(settings(), in_thread=request.param == "thread")
        yield engine
        assert (await engine.inspect()).errors == []
        await engine.close()


async def test_free_once_the_prompt_is_computed(engine):
    assert engine.embeddings.num_blocks == 4096 // engine.embedding_layout.block_rows
    await engine.embeddings_freed("never seen")
    stream = engine.open(submit())
    freed = asyncio.create_task(engine.embeddings_freed("s"))
    assert isinstance(await anext(stream), msg.Started)
    assert not freed.done()
    await freed
    assert engine.pool.progress()[0] >= 5
    assert len(await tokens(stream)) == 8
    await engine.embeddings_freed("s")


async def test_free_after_a_cancel_has_ended_the_stream(engine):
    first = engine.open(submit())
    await anext(first)
    engine.send(msg.Cancel(seq="s"))
    freed = asyncio.create_task(engine.embeddings_freed("s"))
    await asyncio.sleep(0)
    assert not freed.done()  # a step reads them yet
    second = engine.open(submit())  # the same name again, and its embeddings are read
    await asyncio.wait_for(engine.embeddings_freed("s"), 60)
    await freed
    assert len(await tokens(second)) == 8


async def test_waiting_in_vain_takes_nothing_from_others(engine):
    stream = engine.open(submit())
    gone, stays = (asyncio.create_task(engine.embeddings_freed("s")) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await stays
    assert gone.cancelled()
    assert len(await tokens(stream)) == 8


async def test_free_when_refused(engine):
    stream = engine.open(submit(media=[with_blocks(RED, ())]))
    await engine.embeddings_freed("s")
    events = [event async for event in stream]
    assert [(type(event), event.field) for event in events] == [(msg.Failed, "media")]


async def test_free_when_the_engine_is_killed():
    async with asyncio.timeout(180):
        engine = await EngineProcess.launch(settings(timed=TimedModel(**{**IMAGES, "base_seconds": 30})))
        engine.open(submit())
        freed = asyncio.create_task(engine.embeddings_freed("s"))
        engine.send(msg.Cancel(seq="other"))
        await asyncio.sleep(0)
        assert not freed.done()
        os.kill(engine.pid, signal.SIGKILL)
        await freed
        with pytest.raises(EngineFailed):
            engine.open(submit("t"))
        await engine.embeddings_freed("t")
        await engine.close()


async def test_no_pool_without_images_or_room():
    async with asyncio.timeout(180):
        for changes in ({"timed": TimedModel()}, {"embedding_rows": 0}):
            engine = await EngineProcess.launch(settings(**changes), in_thread=True)
            assert engine.embeddings is None
            assert (engine.embedding_layout is None) == ("timed" in changes)
            [event] = [event async for event in engine.open(submit())]
            assert (event.reason, event.field) == ("INVALID_ARGUMENT", "media")
            await engine.embeddings_freed("s")
            await engine.close()


async def test_model_in_a_process_of_its_own(galleries):
    gallery: Gallery = galleries("qwen3_vl")
    prompt = three(gallery)
    changes = {"executor": "modules", "model_dir": str(gallery.checkpoint), "dtype": "float32", "device": "cpu"}
    async with asyncio.timeout(300):
        engine = await EngineProcess.launch(settings(**changes, embedding_rows=512))
        layout = engine.embedding_layout
        pool = engine.embeddings.data.view(np.float32).reshape(layout.levels, -1, layout.hidden_size)
        media, block = [], 0
        for item, picture in zip(prompt.media, prompt.images, strict=True):
            start = block * layout.block_rows
            pool[:, start : start + item.rows] = gallery.embedding(picture).view(np.float32)
            media.append(with_blocks(item, range(block, block + layout.blocks(item.rows))))
            block += layout.blocks(item.rows)
        sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        stream = engine.open(msg.Submit(seq="s", prompt=prompt.ids, media=media, sampling=sampling))
        await engine.embeddings_freed("s")
        pool[:] = np.nan
        assert await tokens(stream) == gallery.tokens(prompt)
        text = gallery.engine().executor
        assert engine.ready.weight_bytes == text.weight_bytes
        await engine.close()
