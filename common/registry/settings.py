"""How etcd is reached."""

from collections.abc import Sequence

import msgspec

from common.errors import InvalidArgument
from common.rpc.peer_name import ETCD
from common.rpc.tls import TlsOptions


class EtcdSettings(msgspec.Struct, frozen=True, kw_only=True):
    """An existing cluster or the local default; host names are looked up again at each reconnect."""

    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)  # host:port
    prefix: str = "/epd"  # meshes with different prefixes do not see each other
    user: str = ""
    password: str = ""
    ca_file: str = ""  # PEM; set: TLS
    cert_file: str = ""  # of this client, for mutual TLS
    key_file: str = ""
    server_name: str = ""  # expected in the server's certificate; default: the first endpoint's host
    connect_timeout_seconds: float = 60.0  # at start, with a model loaded by then; later, retries never end
    call_timeout_seconds: float = 5.0  # of one call with its retries

    def __post_init__(self) -> None:
        for endpoint in self.endpoints:
            port_of(endpoint, "etcd")

    @property
    def workers_prefix(self) -> str:
        return self.folder("workers")

    def folder(self, name: str) -> str:
        """Prefix of one kind of entries: workers, gateways, keys, tenants."""
        return f"{self.prefix.rstrip('/')}/{name}/"


def etcd_settings(endpoints: Sequence[str], tls: TlsOptions | None) -> EtcdSettings:
    """With the files of a mesh's certificate; an etcd of the mesh has the name `etcd` in its own."""
    if tls is None:
        return EtcdSettings(endpoints=tuple(endpoints))
    return EtcdSettings(
        endpoints=tuple(endpoints),
        ca_file=tls.ca_file,
        cert_file=tls.cert_file,
        key_file=tls.key_file,
        server_name=ETCD,
    )


def port_of(address: str, field: str) -> int:
    """The port of host:port. Raises InvalidArgument when it has none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgument(f"{address!r} is not host:port", field=field)
    return int(port)
