"""Certificates of a server or a client, from PEM files, and what a refused handshake means."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec

from common.errors import InvalidArgument
from common.rpc.peer_name import PeerName


class TlsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One set of options for both ends: a server needs cert and key, mutual TLS needs all three at both ends."""

    ca_file: str = ""  # whom to trust; a client without it trusts the system's authorities
    cert_file: str = ""
    key_file: str = ""
    require_client_cert: bool = True  # servers: refuse clients without a certificate of ca_file's authority
    server_name: str = ""  # clients: the name to look for in the server's certificate instead of the address

    def named(self, server_name: str) -> "TlsOptions":
        """For a channel to the one who has this name, at whatever address."""
        return msgspec.structs.replace(self, server_name=server_name)

    def check(self, expected: PeerName | None = None) -> float:
        """When the certificate ends, in Unix seconds. expected: whose it must be, of any id if that is empty.

        Raises InvalidArgument saying what to do when it is missing, expired, not valid yet, or another's.
        """
        from common.rpc import certificates  # not before TLS is used: it takes a while to load

        cert, key = self._pair()
        return certificates.check(cert, key, _read("ca_file", self.ca_file), self.cert_file, expected).timestamp()

    def server_credentials(self, on_connection: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """on_connection: told, in a thread of gRPC's, of every connection before its handshake.

        Raises InvalidArgument naming a missing option or file.
        """
        cert, key = self._pair()
        ca = _read("ca_file", self.ca_file)
        if self.require_client_cert and ca is None:
            raise InvalidArgument("TLS: require_client_cert needs ca_file", field="tls")

        def fetch() -> None:
            on_connection()  # the certificates stay what they are

        first = grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)
        return grpc.dynamic_ssl_server_credentials(first, fetch, require_client_authentication=self.require_client_cert)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidArgument naming a missing file."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read("ca_file", self.ca_file),
            private_key=_read("key_file", self.key_file),
            certificate_chain=_read("cert_file", self.cert_file),
        )

    def uvicorn_options(self) -> dict[str, Any]:
        """The same for an HTTPS server. Raises InvalidArgument naming a missing option or file."""
        self._pair()
        options: dict[str, Any] = {"ssl_certfile": self.cert_file, "ssl_keyfile": self.key_file}
        if self.require_client_cert:
            _read("ca_file", self.ca_file)
            options |= {"ssl_ca_certs": self.ca_file, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options

    def prometheus_options(self) -> dict[str, Any]:
        """The same for Metrics.serve: metrics, too, are for those who have a certificate."""
        files = {"certfile": self.cert_file, "keyfile": self.key_file, "client_cafile": self.ca_file}
        return {**files, "client_auth_required": True}

    def _pair(self) -> tuple[bytes, bytes]:
        cert, key = _read("cert_file", self.cert_file), _read("key_file", self.key_file)
        if cert is None or key is None:
            raise InvalidArgument("TLS: a server needs cert_file and key_file", field="tls")
        return cert, key


def from_directory(directory: str | Path, peer_id: str) -> TlsOptions:
    """The certificate of an id and its authority's, in a directory that `epd certs` has filled."""
    where = Path(directory)
    return TlsOptions(
        ca_file=str(where / "ca.pem"), cert_file=str(where / f"{peer_id}.pem"), key_file=str(where / f"{peer_id}.key")
    )


# What gRPC says of a handshake that we broke off, the first that fits: reason for the metric, words for people.
_REFUSALS = (
    ("Hostname Verification Check failed", "name", "its certificate is another's"),
    (
        "certificate has expired",
        "expired",
        "its certificate has expired; get it a new one: `epd certs issue`",
    ),
    (
        "certificate is not yet valid",
        "not_yet_valid",
        "its certificate is not valid yet; compare the machines' clocks",
    ),
    ("WRONG_VERSION_NUMBER", "no_tls", "it does not speak TLS"),
    ("CERTIFICATE_VERIFY_FAILED", "untrusted", "its certificate is of an authority that we do not trust"),
    ("Tls handshake failed", "handshake", "the TLS handshake failed"),
)


def handshake_refusal(details: str) -> tuple[str, str] | None:
    """(reason, words) of a call that failed because we did not accept the peer's certificate; None for all else."""
    for text, reason, words in _REFUSALS:
        if text in details:
            return reason, words
    return None


def _read(option: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"TLS: {option} cannot be read: {error.strerror}: {path}", field="tls") from None
