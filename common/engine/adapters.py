"""Which adapters an engine holds."""

from collections.abc import Callable, Collection
from pathlib import Path

from common.engine.executor import Executor
from common.engine.messages import AdapterLoaded, LoadAdapter
from common.errors import EpdError, InvalidArgument, NotReady, Overloaded
from common.models.lora import read_adapter

_RUNNING_SECONDS = 5.0  # a hint


class Adapters:
    """By checksum. One that is let go stays until another needs its place, so requests that still run, wait or resume
    with it find it. in_use: those of the engine's sequences."""

    def __init__(self, executor: Executor, in_use: Callable[[], Collection[str]]) -> None:
        self._executor, self._in_use = executor, in_use
        self._held: dict[str, bool] = {}  # whether it may go; in the order of their loading

    def load(self, command: LoadAdapter) -> AdapterLoaded:
        """Blocks for as long as the files are read. What is wrong is told in the answer."""
        answer = AdapterLoaded(number=command.number)
        try:
            files = read_adapter(Path(command.path), max_rank=command.max_rank)
            answer.adapter, answer.base = files.checksum, files.base
            if files.checksum in self._held:
                self._held[files.checksum] = False
                return answer
            answer.dropped = self._make_room(command.max_adapters)
            self._executor.load_adapter(files)
            self._held[files.checksum] = False
        except EpdError as error:
            answer.reason, answer.message, answer.field = error.reason, error.message, error.field
            answer.retry_after_seconds = error.retry_after_seconds
        except OSError:
            answer.reason, answer.message = EpdError.reason, "the adapter's files cannot be read"
        return answer

    def let_go(self, adapter: str) -> None:
        if adapter in self._held:
            self._held[adapter] = True

    def check(self, adapter: str) -> None:
        """Raises NotReady for one that is not here."""
        if adapter and adapter not in self._held:
            raise NotReady("this worker does not have the adapter (any more)", field="model")

    def _make_room(self, most: int) -> list[str]:
        """Those that had to go. Raises Overloaded."""
        dropped: list[str] = []
        going = [adapter for adapter, may_go in self._held.items() if may_go]
        if len(self._held) - len(going) >= most:
            raise InvalidArgument(
                f"this worker serves {most} adapters, as many as its setting lora.max_adapters allows; unload one",
                field="lora_name",
            )
        free = [adapter for adapter in going if adapter not in self._in_use()]
        while len(self._held) >= most:
            if not free:
                raise Overloaded(
                    "running requests still need the adapters that were unloaded", retry_after_seconds=_RUNNING_SECONDS
                )
            dropped.append(free.pop(0))
            self._executor.drop_adapter(dropped[-1])
            del self._held[dropped[-1]]
        return dropped
