"""Encoders of real checkpoints: rows equal to the whole model's, bad files that hurt only their call."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from common.encoder.encoder import Encoder
from common.encoder.settings import EncoderSettings
from common.engine.settings import EngineSettings
from common.errors import InvalidArgument
from common.models.vision.spec import VisionSpec
from tests.checkpoints import tiny_checkpoint, vlm_checkpoint
from tests.oracle import image_inputs, reference_vlm
from tests.unit.encoder.harness import EncodeWorker, PromptWorker, Shown, encode_worker, file, new_key


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = vlm_checkpoint(architecture, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    return get


def settings(directory: Path) -> EngineSettings:
    return EngineSettings(model_dir=str(directory), dtype="float32", device="cpu")


def picture(seed: int, size: tuple[int, int] = (90, 70)) -> Image.Image:
    noise = torch.randint(
        0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    return Image.fromarray(noise.numpy())


def stock_levels(directory: Path, image: Image.Image) -> torch.Tensor:
    """[levels, rows, hidden] of the whole model."""
    inputs = image_inputs(directory, [image])
    names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    with torch.inference_mode():
        out = reference_vlm(directory).get_image_features(
            **{name: inputs[name] for name in names if name in inputs}, return_dict=True
        )
    levels = (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))
    flat = [torch.cat(list(each)) if isinstance(each, list | tuple) else each for each in levels]
    return torch.stack([each.reshape(-1, each.shape[-1]) for each in flat])


async def fetched(worker: EncodeWorker, run_dir: Path, images: list[Shown], channel: str) -> list[torch.Tensor]:
    key = new_key()
    call = worker.call(images, key)
    await call.finished()
    async with PromptWorker(worker.encoder.layout, run_dir, channel) as prompt:
        pull = prompt.open(key, [worker.source(image, 1000 * number) for number, image in enumerate(images)])
        found = [torch.from_numpy(prompt.rows(media).copy()).view(torch.float32) for media in await pull.pull()]
        pull.close()
    await call.ended()
    return found


@pytest.mark.parametrize("architecture", ["llava", "qwen3_vl"])
async def test_pulled_rows_are_the_whole_models(
    architecture: str, checkpoint: Callable[[str], Path], run_dir: Path, channel: str
) -> None:
    """Deepstack levels included; images of two sizes in one batch, and one that is in the call twice."""
    directory = checkpoint(architecture)
    spec = VisionSpec.read(directory)
    assert spec is not None
    pictures = [picture(1), picture(2, (56, 120)), picture(1)]
    images = [Shown(file(each), spec.rows(each.size), index) for index, each in enumerate(pictures)]
    async with encode_worker(run_dir, settings(directory), rows=1024) as worker:
        for original, levels in zip(pictures, await fetched(worker, run_dir, images, channel), strict=True):
            torch.testing.assert_close(levels, stock_levels(directory, original), rtol=1e-5, atol=1e-5)
        await worker.idle()
        assert worker.encoder.images == 2
        assert worker.encoder.ready.weight_bytes > 0


async def test_bad_files_fail_their_call_by_index(checkpoint: Callable[[str], Path], run_dir: Path) -> None:
    directory = checkpoint("llava")
    good = Shown(file(picture(1)), VisionSpec.read(directory).rows((90, 70)))  # type: ignore[union-attr]
    bad = {
        "not an image": b"no image at all",
        "cut off": good.data[: len(good.data) // 2],
        "rows": good.data + b" ",
    }
    async with encode_worker(run_dir, settings(directory)) as worker:
        for number, (name, data) in enumerate(bad.items()):
            rows = good.rows + 1 if name == "rows" else good.rows
            with pytest.raises(InvalidArgument, match=f"^image {number + 5}: ") as refused:
                await worker.call([good, Shown(data, rows, number + 5)]).finished()
            assert refused.value.field == f"images[{number + 5}]"
            await worker.idle()
        call = worker.call([good])
        assert (await call.finished()).cached_images == 1  # the good one beside the bad ones was encoded
        call.close()
        await worker.idle()


async def test_in_a_process_of_its_own(checkpoint: Callable[[str], Path], run_dir: Path) -> None:
    directory, original = checkpoint("llava"), picture(3)
    image = Shown(file(original), VisionSpec.read(directory).rows(original.size))  # type: ignore[union-attr]
    async with encode_worker(run_dir, settings(directory), in_thread=False) as worker:
        (levels,) = await fetched(worker, run_dir, [image], "shm")
        torch.testing.assert_close(levels, stock_levels(directory, original), rtol=1e-5, atol=1e-5)
        with pytest.raises(InvalidArgument, match=r"^image 0: "):
            await worker.call([Shown(b"no image", 5)]).finished()
        await worker.idle()


async def test_a_text_model_has_nothing_to_encode(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="takes no images"):
        await Encoder.launch(settings(tiny_checkpoint("llama", tmp_path)), EncoderSettings(), in_thread=True)
