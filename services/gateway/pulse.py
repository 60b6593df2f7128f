"""Looks again and again whether every worker is still heard, and says so to those who wait for one that is not."""

import asyncio

from common.policies.silence import SilencePolicy, silences
from services.gateway.fleet import Fleet

LOOK_SECONDS = 0.1


class Pulse:
    """Suspects the silent ones of a fleet. Those that have never sent a beat are not judged."""

    def __init__(self, fleet: Fleet, policy: SilencePolicy) -> None:
        self._fleet = fleet
        self._policy = policy
        self._task: asyncio.Task[None] | None = None
        self._awake_since = asyncio.get_running_loop().time()

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_looking(), name="pulse")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(LOOK_SECONDS)
            if loop.time() - before > LOOK_SECONDS + self._policy.late_seconds:
                self._awake_since = loop.time()
            self.look()

    def look(self) -> None:
        policy = self._policy
        judged = [worker for worker in self._fleet.in_use() if worker.beats and not worker.gone]
        heard = {number: worker.heard_at for number, worker in enumerate(judged)}
        for number, silence in silences(heard, self._awake_since).items():
            worker = judged[number]
            if silence >= policy.suspect_seconds:
                worker.suspect(True)  # until it is heard
            if silence >= policy.stuck_seconds and self._fleet.can_replace(worker):
                worker.give_up()
