"""Who is at the other end of a call, as the certificate says."""

from contextvars import ContextVar

import msgspec

GATEWAY, WORKER, CLIENT, ETCD = ROLES = ("gateway", "worker", "client", "etcd")
_URI = "spiffe://epd-mesh/"


class PeerName(msgspec.Struct, frozen=True):
    """A role of the mesh and the id it is registered by; `client` is a person or a tool that looks into the mesh."""

    role: str
    id: str

    @property
    def uri(self) -> str:
        """How a certificate carries it, as a subject alternative name."""
        return f"{_URI}{self.role}/{self.id}"

    def __str__(self) -> str:
        return f"{self.role} {self.id}"


def from_uri(uri: str) -> PeerName | None:
    """None for what is no name of the mesh."""
    role, slash, peer_id = uri.removeprefix(_URI).partition("/")
    known = uri.startswith(_URI) and role in ROLES and slash and peer_id and "/" not in peer_id
    return PeerName(role, peer_id) if known else None


_caller: ContextVar[PeerName | None] = ContextVar("epd_caller", default=None)


def set_caller(name: PeerName | None) -> None:
    """By the server's interceptor, for the handler that runs next in this context."""
    _caller.set(name)


def caller() -> PeerName | None:
    """Whose certificate the running call came with; None in a mesh without TLS."""
    return _caller.get()
