"""How etcd is reached."""

import msgspec


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
    connect_timeout_seconds: float = 10.0  # at start; later, retries never end
    call_timeout_seconds: float = 5.0  # of one call with its retries

    @property
    def workers_prefix(self) -> str:
        return f"{self.prefix.rstrip('/')}/workers/"
