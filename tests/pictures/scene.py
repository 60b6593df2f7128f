"""What the pictures show: one request to the default model; a mesh under load of three tenants in which a few things go
wrong. The load is for a tiny model with random weights, so that two cores answer enough for rates and percentiles."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from common.models.fetch import find_model
from common.models.pictures import heldout
from common.registry.local_etcd import free_port
from services.commands import keys
from services.commands.ask import Message, Question
from services.worker_settings import WorkerSettings
from tests.checkpoints import vlm_checkpoint
from tests.etcd import etcd_server
from tests.mesh import collect
from tests.processes import ProcessMesh

DEFAULT_MODEL = "picture-vlm"
TINY_MODEL = "tiny-qwen2_vl"
TENANTS = ("alice", "bob", "carol")
BLOCKS = 96  # of each worker of the load, 16 tokens each: few, so that they fill
TARGETS = {"ttft_seconds": 0.5, "tpot_seconds": 0.05}
ANSWER_SECONDS = 120.0


class Scene:
    """A mesh, where Prometheus finds its metrics, and each tenant's key."""

    def __init__(self, mesh: ProcessMesh, targets: Mapping[str, Sequence[str]], tenants: Mapping[str, str]) -> None:
        self.mesh, self.targets, self.keys = mesh, targets, tenants

    async def epd(self, tenant: str, *arguments: str, end_after: float = 0.0) -> None:
        """A command of `epd` with a tenant's key. end_after: seconds until it gets Ctrl-C; 0: it ends by itself."""
        command, *options = arguments
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli", command, "--address", self.mesh.gateway.address, *options),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env={**os.environ, "EPD_API_KEY": self.keys[tenant], "OMP_NUM_THREADS": "1"},
        )
        try:
            if end_after:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(end_after):
                        await process.wait()
                if process.returncode is None:
                    process.send_signal(signal.SIGINT)
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def load(self, seconds: float) -> None:
        """Texts with a common beginning; pictures; a burst beyond its tenant's limit; a client that gives up; a decode
        worker that is stopped for a while, and one that is killed and started again."""
        steady = ("--seconds", f"{seconds:g}")
        await asyncio.gather(
            self._bench("alice", 0, seconds, *steady, "--rate", "1.5", *_lengths("48-128", "6-20", 32)),
            self._bench("bob", 0, seconds, *steady, "--rate", "0.6", "--images", "0.8", *_lengths("32", "4-10")),
            self._bench("carol", 0.35 * seconds, 0.2 * seconds, "--concurrency", "16", *_lengths("200-300", "24")),
            self._bench("carol", 0.85 * seconds, 0.05 * seconds, "--concurrency", "3", *_lengths("64", "64")),
            self._faults(seconds),
        )

    async def _bench(self, tenant: str, begin: float, seconds: float, *options: str) -> None:
        """A load from `begin` on; what is unanswered at its end is given up."""
        await asyncio.sleep(begin)
        await self.epd(tenant, "bench", "--model", self.mesh.model, "--warm-up", "0", *options, end_after=seconds)

    async def _faults(self, seconds: float) -> None:
        silent, killed = self.mesh.workers["decode-0"], self.mesh.workers["decode-1"]
        await asyncio.sleep(0.62 * seconds)
        silent.hang()
        try:
            await asyncio.sleep(10)
        finally:
            silent.wake()
        await asyncio.sleep(0.1 * seconds)
        await killed.kill()
        await asyncio.sleep(5)
        await killed.start()

    async def trace(self, file: Path) -> None:
        """Of the second of two questions about pictures: the first one finds everything cold. file: an SVG."""
        for drawn in heldout(2, seed=1):
            message = Message("user", drawn.questions()[0].text, (drawn.png(),))
            asked = Question(model=self.mesh.model, max_tokens=8, temperature=0.0).request([message])
            asked.sampling.ignore_eos = True
            answer = await collect(self.mesh.stub.Generate(asked, metadata=self.mesh.metadata, timeout=ANSWER_SECONDS))
        await self.mesh.settled()
        await self.epd(TENANTS[0], "trace", answer.accounting.trace_id, "--svg", str(file))


def _lengths(prompt: str, output: str, prefix: int = 0) -> tuple[str, ...]:
    return ("--prompt-tokens", prompt, "--output-tokens", output, "--prefix-tokens", str(prefix))


def default_scene(directory: Path) -> AbstractAsyncContextManager[Scene]:
    """The default model, one worker of each role, as `epd up` starts them."""
    return _scene(directory, find_model(DEFAULT_MODEL), DEFAULT_MODEL, ("encode", "prefill", "decode"), 1024)


def loaded_scene(directory: Path) -> AbstractAsyncContextManager[Scene]:
    """The tiny model, two decode workers."""
    model = vlm_checkpoint("qwen2_vl", directory / "model")
    return _scene(directory, model, TINY_MODEL, ("encode", "prefill", "decode", "decode"), BLOCKS)


@asynccontextmanager
async def _scene(
    directory: Path, checkpoint: Path, name: str, roles: Sequence[str], blocks: int
) -> AsyncIterator[Scene]:
    """Whole when it is given, and ended afterwards. directory: an empty one."""
    identities = directory / "keys.yaml"
    tenants = {tenant: keys.create(keys.store(str(identities), ""), tenant, "pictures") for tenant in TENANTS}
    metrics = f"127.0.0.1:{free_port()}"
    gateway = {
        "identity": {"source": "file", "file": str(identities)},
        "limits": {"carol": {"requests_in_flight": 12}},
        "metrics_bind": metrics,
        "slo": TARGETS,
    }
    async with etcd_server(directory / "etcd") as etcd:
        key = tenants[TENANTS[0]]
        mesh = ProcessMesh(
            etcd,
            checkpoint,
            directory / "mesh",
            roles,
            model=name,
            gateway=gateway,
            worker={"lease_ttl_seconds": WorkerSettings().lease_ttl_seconds},
            key=key,
            num_blocks=blocks,
        )
        targets: dict[str, list[str]] = {"gateway": [metrics]}
        for worker in mesh.workers.values():
            port = free_port()
            worker.settings["metrics_port"] = port
            for role in worker.settings["roles"]:
                targets.setdefault(role, []).append(f"127.0.0.1:{port}")
        async with mesh:
            yield Scene(mesh, targets, tenants)
