"""Who may call what inside a mesh with TLS: one table, by the role in the caller's certificate."""

from collections import OrderedDict

import grpc

from common.errors import PermissionDenied
from common.metrics import Metrics
from common.rpc.peer_name import CLIENT, GATEWAY, WORKER, PeerName, from_uri

_ALLOWED: dict[str, tuple[str, ...]] = {
    "epd.v1.EncodeService": (GATEWAY,),
    "epd.v1.PrefillService": (GATEWAY,),
    "epd.v1.DecodeService": (GATEWAY,),
    "epd.v1.TransferService": (WORKER,),
    "epd.v1.QuotaService": (GATEWAY,),
    "epd.v1.WorkerService/Watch": (GATEWAY,),
    "epd.v1.WorkerService/ServeAdapter": (GATEWAY,),
    "epd.v1.WorkerService/DropAdapter": (GATEWAY,),
    "epd.v1.WorkerService/GetStatus": (GATEWAY, CLIENT),
    "epd.v1.TraceService": (GATEWAY, CLIENT),
    "grpc.health.v1.Health": (GATEWAY, WORKER, CLIENT),
    "grpc.reflection.v1alpha.ServerReflection": (GATEWAY, CLIENT),
}
_MAX_PEERS = 4096


def allowed_roles(method: str) -> tuple[str, ...]:
    """method: "/package.Service/Method". What the table does not name is for nobody."""
    service = method.strip("/")
    return _ALLOWED.get(service) or _ALLOWED.get(service.partition("/")[0], ())


class Access:
    """Checks the callers of one server whose clients all have certificates of the mesh's authority."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._peers: OrderedDict[str, None] = OrderedDict()  # connections seen, the oldest forgotten first

    def opened(self) -> None:
        """A connection, not known yet whose."""
        self._metrics.tls_connections.labels(state="opened").inc()

    def check(self, method: str, context: grpc.aio.ServicerContext) -> PeerName:
        """Who calls. Raises PermissionDenied, and counts it, when the role may not."""
        name = self._name(context)
        self._count(context.peer())
        if name is None or name.role not in allowed_roles(method):
            role = name.role if name else "none"
            self._metrics.access_refusals.labels(method=method, role=role).inc()
            raise PermissionDenied(f"{name or 'a caller without a name of the mesh'} may not call {method}")
        return name

    def _name(self, context: grpc.aio.ServicerContext) -> PeerName | None:
        uris = context.auth_context().get("peer_uri", ())
        return from_uri(uris[0].decode(errors="replace")) if len(uris) == 1 else None

    def _count(self, peer: str) -> None:
        if peer not in self._peers:
            self._metrics.tls_connections.labels(state="authenticated").inc()
            if len(self._peers) >= _MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers[peer] = None
        self._peers.move_to_end(peer)
