"""Certificates of a server or a client, from PEM files."""

from pathlib import Path

import grpc
import msgspec

from common.errors import InvalidArgument


class TlsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One set of options for both ends: a server needs cert and key, mutual TLS needs all three at both ends."""

    ca_file: str = ""  # whom to trust; a client without it trusts the system's authorities
    cert_file: str = ""
    key_file: str = ""
    require_client_cert: bool = True  # servers: refuse clients without a certificate of ca_file's authority
    server_name: str = ""  # clients: the name to look for in the server's certificate instead of the address

    def server_credentials(self) -> grpc.ServerCredentials:
        """Raises InvalidArgument naming a missing option or file."""
        cert, key = _read("cert_file", self.cert_file), _read("key_file", self.key_file)
        ca = _read("ca_file", self.ca_file)
        if cert is None or key is None:
            raise InvalidArgument("TLS: a server needs cert_file and key_file", field="tls")
        if self.require_client_cert and ca is None:
            raise InvalidArgument("TLS: require_client_cert needs ca_file", field="tls")
        return grpc.ssl_server_credentials(
            [(key, cert)], root_certificates=ca, require_client_auth=self.require_client_cert
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidArgument naming a missing file."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read("ca_file", self.ca_file),
            private_key=_read("key_file", self.key_file),
            certificate_chain=_read("cert_file", self.cert_file),
        )


def _read(option: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"TLS: {option} cannot be read: {error.strerror}: {path}", field="tls") from None
