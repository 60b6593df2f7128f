"""The engine's own loop, in a process or thread apart from the service's event loop."""

import logging
import os
import socket
import time

import common.engine.messages as msg
from common.cache.keys import KvLayout
from common.engine.core import EngineCore
from common.engine.executor import Executor
from common.engine.grammars import load_grammars
from common.engine.prompt_media import ImageRules
from common.engine.settings import EngineSettings
from common.engine.wire import Launch, command_reader, encode
from common.process import readable
from common.sampling import SamplingParams
from common.transfer.pool_memory import PoolMemory

log = logging.getLogger(__name__)

LOAD_INTERVAL_SECONDS = 0.1
_READ_BYTES = 1 << 20
_QUIET_SECONDS = 0.2


def load_executor(launch: Launch, memory: PoolMemory, embeddings: PoolMemory | None = None) -> Executor:
    """The executor that the settings name; only here is torch imported, and only when it is needed.

    embeddings: the pool of pulled image embeddings, None where prompts with images are not computed.
    """
    settings = launch.settings
    if settings.executor == "timed":
        from common.engine.timed_executor import TimedExecutor

        images = None
        if launch.embedding_layout is not None:
            rows, blocks = launch.embedding_layout.block_rows, embeddings.num_blocks if embeddings else 0
            images = ImageRules(block_rows=rows, num_blocks=blocks)
        return TimedExecutor(settings, memory, images)
    import torch

    from common.engine.modules_executor import ModulesExecutor

    torch.set_num_threads(settings.threads)
    return ModulesExecutor(launch, memory, embeddings)


class EngineLoop:
    """Commands in, steps, events out, until Shutdown or the service's end of the socket closes.

    One frame of events before a step and one after it. `doorbell` is an eventfd, written when the progress counter
    moved.
    """

    def __init__(
        self,
        sock: socket.socket,
        memory: PoolMemory,
        doorbell: int,
        settings: EngineSettings,
        layout: KvLayout,
        executor: Executor,
    ) -> None:
        self._sock = sock
        self._doorbell = doorbell
        self._reader = command_reader()
        self._events: list[msg.AnyEvent] = []
        self._core = EngineCore(
            settings,
            executor,
            memory,
            model=layout.model,
            revision=layout.revision,
            emit=self._events.append,
            ring=self._ring,
            grammars=load_grammars(settings, executor),
        )
        self._executor = executor
        self._open = True
        self._load: msg.LoadReport | None = None
        self._load_at = 0.0

    def run(self) -> None:
        """Returns when it was told to end; raises what broke a step, after every sequence was failed."""
        self._sock.setblocking(True)
        self._warm_up()
        limits = self._core.limits
        self._events.append(
            msg.Ready(
                vocab_size=limits.vocab_size,
                max_context=limits.max_context,
                executor=self._executor.name,
                eos_token_ids=sorted(limits.eos_token_ids),
                weight_bytes=self._executor.weight_bytes,
            )
        )
        self._report(final=True)
        idle = 0  # steps in a row that found nothing to compute
        try:
            while self._open:
                # One more try after an empty step: it may have preempted, which lets the next one admit.
                if self._read(block=idle > 1):
                    idle = 0
                if not self._open:
                    break
                idle = 0 if self._core.step(self._flush) else idle + 1
                self._report(final=idle > 1)
        except (BrokenPipeError, ConnectionResetError):
            log.info("the service is gone, the engine ends")
        except Exception:
            self._core.fail_all()
            self._flush()
            raise

    def _warm_up(self) -> None:
        """One short request before the first real one pays for paging in the weights and for the libraries' start.

        It fills no block, so the prefix index stays empty.
        """
        if self._executor.name == "timed":
            return
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        self._core.handle(msg.Submit(seq="warm-up", prompt=[0] * 8, sampling=sampling))
        while self._core.sequences:
            self._core.step()
        self._events.clear()

    def _read(self, *, block: bool) -> bool:
        """Handles all commands that are there, with block waits for the first; False when there was none."""
        if block and not self._anything(_QUIET_SECONDS):
            if not self._core.scheduler.busy:
                self._check()  # late enough that it never delays a request that follows at once
            self._anything(None)
        any_command = False
        while self._open and self._readable(0):
            data = self._sock.recv(_READ_BYTES)
            self._open = bool(data)
            for command in self._reader.feed(data):
                any_command = True
                if isinstance(command, msg.Shutdown):
                    self._open = False
                    break
                self._core.handle(command)
        return any_command

    def _readable(self, timeout: float | None) -> bool:
        return bool(readable((self._sock,), timeout))

    def _anything(self, timeout: float | None) -> bool:
        """Waits for a command or a compiled grammar, and no longer than the latter may take."""
        grammars = self._core.grammars
        if grammars is None:
            return self._readable(timeout)
        if (most := grammars.timeout()) is not None:
            timeout = most if timeout is None else min(timeout, most)
        found = readable((self._sock, grammars.wake), timeout)
        if grammars.wake in found:
            grammars.heard()  # the next step takes it
        return bool(found)

    def _report(self, *, final: bool) -> None:
        """Sends what happened, and the load when it changed: at most ten times a second, and once more before
        idling."""
        now = time.monotonic()
        if final or now - self._load_at >= LOAD_INTERVAL_SECONDS:
            load = self._core.load()
            if load != self._load:
                self._events.append(load)
                self._load, self._load_at = load, now
        self._flush()

    def _flush(self) -> None:
        if self._events:
            self._sock.sendall(encode(self._events))
            self._events.clear()

    def _ring(self) -> None:
        os.eventfd_write(self._doorbell, 1)

    def _check(self) -> None:
        for error in self._core.check_integrity():
            log.error("block pool integrity: %s", error)


def run_engine(
    sock: socket.socket, doorbell: int, launch: Launch, memory: PoolMemory, embeddings: PoolMemory | None
) -> None:
    """Loads the model and serves until the end. Blocking."""
    executor = load_executor(launch, memory, embeddings)
    EngineLoop(sock, memory, doorbell, launch.settings, launch.layout, executor).run()
