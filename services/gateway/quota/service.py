"""QuotaService: the owner's side. Everything it does is done at once, so that one stream's messages never mix."""

from collections.abc import AsyncIterator
from typing import Any

from common.errors import InvalidArgument, NeverFits, Overloaded, PermissionDenied, RateLimited, WrongIncarnation
from common.rpc.peer_name import GATEWAY, PeerName, caller
from epd.v1 import quota_pb2 as pb
from epd.v1 import quota_pb2_grpc
from services.gateway.quota import wire
from services.gateway.quota.ledger import Ledger

QUOTA_SERVICE = "epd.v1.QuotaService"


class _Session:
    """One gateway's stream. members: the digest of the gateways that it sees, once all its states are here."""

    def __init__(self) -> None:
        self.members: bytes | None = None


class QuotaService(quota_pb2_grpc.QuotaServiceServicer):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._sessions: dict[str, _Session] = {}
        ledger.settled = self.settled

    def settled(self, gateway: str) -> bool:
        """Its streams are here, and it sees the same gateways as this one: the two count together."""
        session = self._sessions.get(gateway)
        return session is not None and session.members == self._ledger.members.digest

    async def ShareQuota(
        self, requests: AsyncIterator[pb.ShareQuotaRequest], context: Any
    ) -> AsyncIterator[pb.ShareQuotaResponse]:
        gateway = ""
        session = _Session()
        try:
            async for request in requests:
                kind = request.WhichOneof("kind")
                if not gateway:
                    if kind != "hello":
                        raise InvalidArgument("the first message is a hello", field="kind")
                    gateway = self._greet(request.hello)
                    self._sessions[gateway] = session  # in place of one that has broken off without our knowing
                    self._ledger.end_holds(gateway)
                    yield pb.ShareQuotaResponse(welcome=pb.QuotaWelcome())
                elif self._sessions.get(gateway) is not session:
                    raise WrongIncarnation("this gateway has opened another stream since")
                elif kind == "acquire":
                    yield pb.ShareQuotaResponse(answer=self._acquire(gateway, request.acquire))
                elif kind == "release":
                    self._release(gateway, request.release)
                elif kind == "charge":
                    charge = request.charge
                    self._ledger.add(charge.tenant, wire.amounts_from_proto(charge.amounts), gateway)
                elif kind == "state":
                    self._state(gateway, request.state)
                elif kind == "settled":
                    session.members = request.settled.members
                else:
                    raise InvalidArgument("a message says nothing that is known here", field="kind")
        finally:
            if gateway and self._sessions.get(gateway) is session:
                del self._sessions[gateway]
                self._ledger.end_holds(gateway)

    def _greet(self, hello: pb.QuotaHello) -> str:
        mine = self._ledger.members.mine
        if (hello.target_id, hello.target_incarnation) != (mine.gateway_id, mine.incarnation):
            raise WrongIncarnation(f"this is {mine.gateway_id}, but not the incarnation that was called")
        if not hello.gateway_id or hello.gateway_id == mine.gateway_id:
            raise InvalidArgument("gateway_id must be another gateway's", field="gateway_id")
        name = caller()  # None without TLS
        if name is not None and name != PeerName(GATEWAY, hello.gateway_id):
            raise PermissionDenied(f"{name} may not speak for gateway {hello.gateway_id}")
        return str(hello.gateway_id)

    def _acquire(self, gateway: str, asked: pb.QuotaAcquire) -> pb.QuotaAnswer:
        if not self._owns(asked.tenant) or not self.settled(gateway):
            return pb.QuotaAnswer(id=asked.id, unsettled=pb.QuotaUnsettled())
        try:
            self._ledger.take(asked.tenant, wire.amounts_from_proto(asked.amounts), gateway)
        except (RateLimited, NeverFits, Overloaded) as error:
            return pb.QuotaAnswer(id=asked.id, refused=wire.refused_to_proto(error))
        return pb.QuotaAnswer(id=asked.id, granted=pb.QuotaGranted())

    def _release(self, gateway: str, released: pb.QuotaRelease) -> None:
        at = self._ledger.clock() - wire.age_from_proto(released.age_seconds)
        self._ledger.release(released.tenant, wire.amounts_from_proto(released.amounts), at, gateway)

    def _state(self, gateway: str, state: pb.QuotaState) -> None:
        # Also of a tenant that is another's as far as is known here: its sender may have heard of a change before us.
        account = self._ledger.account(state.tenant)
        account.others[gateway] = wire.usage_from_proto(state, self._ledger.clock())

    def _owns(self, tenant: str) -> bool:
        members = self._ledger.members
        return members.owner(tenant) == members.mine.gateway_id
