"""Link: this gateway's stream to one other, for the tenants which that one owns."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.policies.limits import Amounts
from common.registry.record import GatewayRecord
from common.rpc import deadline
from epd.v1 import quota_pb2 as pb
from epd.v1 import quota_pb2_grpc
from services.gateway.quota import wire
from services.gateway.quota.ledger import Account, Ledger

_log = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0
_WELCOME_SECONDS = 5.0


class Unsettled(Exception):
    """The owner cannot be asked now: this gateway counts for itself."""


class Link:
    """Opens the stream, and opens it again, until it is closed."""

    def __init__(self, record: GatewayRecord, ledger: Ledger, channel: grpc.aio.Channel, answer_seconds: float) -> None:
        self.record = record
        self._ledger = ledger
        self._channel = channel
        self._answer_seconds = answer_seconds
        self._stream: _Stream | None = None  # while it is open
        self._task = asyncio.create_task(self._run(), name="quota-link")

    @property
    def open(self) -> bool:
        return self._stream is not None

    async def acquire(self, tenant: str, amounts: Amounts) -> None:
        """Raises what the owner refuses with, and Unsettled. Cancelled or out of time, nothing stays taken."""
        stream = self._stream
        if stream is None:
            raise Unsettled
        await stream.acquire(tenant, amounts, self._answer_seconds)

    def charge(self, tenant: str, amounts: Amounts) -> None:
        """Tells the owner what was taken of this gateway's own part."""
        if (stream := self._telling(tenant)) is not None:
            stream.put(charge=pb.QuotaCharge(tenant=tenant, amounts=wire.amounts_to_proto(amounts)))

    def release(self, tenant: str, amounts: Amounts, at: float) -> None:
        if (stream := self._telling(tenant)) is not None:
            stream.release(tenant, amounts, at)

    def _telling(self, tenant: str) -> "_Stream | None":
        """None while the owner knows nothing of a tenant here: it will be told all at once."""
        account = self._ledger.accounts.get(tenant)
        return self._stream if account is not None and account.told is self._stream else None

    def settle(self) -> None:
        """Tells the owner of all tenants that are its own now and were not, and that these are all."""
        if self._stream is not None:
            self._tell(self._stream)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    async def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        name = self.record.gateway_id
        while True:
            try:
                with deadline.detached():
                    await self._stay()
                pause = _FIRST_PAUSE_SECONDS
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                _log.info("limits are not shared with gateway %s: %s", name, type(error).__name__)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # else it was the stream: an owner that did not answer
            except Exception:
                _log.exception("limits are not shared with gateway %s", name)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _stay(self) -> None:
        """One stream, from its hello until it ends."""
        stream = _Stream(self._ledger)
        stream.put(hello=self._hello())
        call = stream.call = quota_pb2_grpc.QuotaServiceStub(self._channel).ShareQuota(stream.outgoing())
        try:
            async with asyncio.timeout(_WELCOME_SECONDS):
                if await call.read() is grpc.aio.EOF:
                    return
            self._stream = stream
            self._tell(stream)
            while (response := await call.read()) is not grpc.aio.EOF:
                stream.answered(response.answer)
        finally:
            self._stream = None
            call.cancel()
            stream.end()

    def _hello(self) -> pb.QuotaHello:
        mine = self._ledger.members.mine
        return pb.QuotaHello(
            gateway_id=mine.gateway_id,
            incarnation=mine.incarnation,
            target_id=self.record.gateway_id,
            target_incarnation=self.record.incarnation,
        )

    def _tell(self, stream: "_Stream") -> None:
        ledger = self._ledger
        for tenant, account in ledger.accounts.items():
            if account.told is not stream and ledger.members.owner(tenant) == self.record.gateway_id:
                stream.tell(tenant, account)
        stream.put(settled=pb.QuotaSettled(members=ledger.members.digest))


class _Stream:
    """One life of a link."""

    def __init__(self, ledger: Ledger) -> None:
        self.call: Any = None
        self._ledger = ledger
        self._queue: asyncio.Queue[pb.ShareQuotaRequest] = asyncio.Queue()
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._ended = False

    def put(self, **kind: Any) -> None:
        if not self._ended:
            self._queue.put_nowait(pb.ShareQuotaRequest(**kind))

    def tell(self, tenant: str, account: Account) -> None:
        """What the tenant uses here, in place of what the owner knows."""
        account.told = self
        now = self._ledger.clock()
        if not account.mine.idle(now):
            self.put(state=wire.state_to_proto(tenant, account.mine, now))

    async def outgoing(self) -> AsyncIterator[pb.ShareQuotaRequest]:
        while True:
            yield await self._queue.get()

    async def acquire(self, tenant: str, amounts: Amounts, seconds: float) -> None:
        if self._ended:
            raise Unsettled
        number = next(self._numbers)
        asked = self._asked[number] = _Asked(tenant, amounts, self._ledger.clock())
        account = self._ledger.account(tenant)
        if account.told is not self:
            self.tell(tenant, account)
        account.asking += 1
        self.put(acquire=pb.QuotaAcquire(id=number, tenant=tenant, amounts=wire.amounts_to_proto(amounts)))
        try:
            async with asyncio.timeout(seconds):
                answer = await asked.answer
        except TimeoutError:
            self.call.cancel()  # it hangs; what it still has of ours ends with the stream
            raise Unsettled from None
        except asyncio.CancelledError:
            if asked.granted:  # just now, and nobody is left to use it
                self.release(tenant, amounts, asked.at)
            raise
        finally:
            account.asking -= 1
        kind = answer.WhichOneof("result") if answer is not None else None
        if answer is None or kind in (None, "unsettled"):
            raise Unsettled
        if kind == "refused":
            raise wire.refused_from_proto(answer.refused)

    def release(self, tenant: str, amounts: Amounts, at: float) -> None:
        age = self._ledger.clock() - at
        self.put(release=pb.QuotaRelease(tenant=tenant, amounts=wire.amounts_to_proto(amounts), age_seconds=age))

    def answered(self, answer: pb.QuotaAnswer) -> None:
        asked = self._asked.pop(answer.id, None)
        if asked is None:
            return
        if not asked.answer.done():
            asked.answer.set_result(answer)
        elif answer.HasField("granted"):  # nobody waits for it any more
            self.release(asked.tenant, asked.amounts, asked.at)

    def end(self) -> None:
        self._ended = True
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_result(None)
        self._asked.clear()


class _Asked:
    __slots__ = ("amounts", "answer", "at", "tenant")

    def __init__(self, tenant: str, amounts: Amounts, at: float) -> None:
        self.tenant, self.amounts, self.at = tenant, amounts, at
        self.answer: asyncio.Future[pb.QuotaAnswer | None] = asyncio.get_running_loop().create_future()

    @property
    def granted(self) -> bool:
        if not self.answer.done() or self.answer.cancelled():
            return False
        answer = self.answer.result()
        return answer is not None and answer.HasField("granted")
