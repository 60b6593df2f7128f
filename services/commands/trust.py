"""Whom a command trusts and who it says it is: from its options, or from the running mesh's run directory."""

from pathlib import Path

import msgspec

from common.rpc.tls import TlsOptions, from_directory
from services.commands.run_dir import MeshState, RunDir, default_run_dir

OPERATOR = "operator"  # the certificate for people, in a mesh that `epd up --tls` runs
SYSTEM = "system"  # as --ca: the authorities that this machine trusts anyway
_LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}


class Trust(msgspec.Struct, frozen=True):
    """ca: the authority's file. certs: a directory with it and a certificate of ours: the operator's, or what there is.

    name: whom the server's certificate must be of, when its address does not say; ours is the same if it is there.
    """

    ca: str = ""
    certs: str = ""
    name: str = ""

    def gateway(self, address: str) -> TlsOptions | None:
        """For a gateway's public server, or whoever is asked for its health; None: without TLS."""
        if self.ca:
            return TlsOptions(ca_file="" if self.ca == SYSTEM else self.ca, server_name=self.name)
        if self.certs:
            return self._own(self.certs)
        state = _running()
        if state and state.certs and _same(address, state.grpc):
            return TlsOptions(ca_file=str(Path(state.certs) / "ca.pem"), server_name=self.name)
        return None

    def worker(self) -> TlsOptions | None:
        """For reads that take a certificate; the worker's id has to be named when connecting."""
        if certs := self._directory():
            return self._own(certs)
        return TlsOptions(ca_file=self.ca) if self.ca else None

    def etcd(self, address: str) -> TlsOptions | None:
        """None: without TLS."""
        state = _running()
        if self.certs or (state and state.certs and _same(address, state.etcd)):
            return self._own(self._directory())
        return None

    def _directory(self) -> str:
        state = _running()
        return self.certs or (state.certs if state else "")

    def _own(self, certs: str) -> TlsOptions:
        there = sorted(path.stem for path in Path(certs).glob("*.pem") if path.name != "ca.pem")
        mine = next((name for name in (self.name, OPERATOR, *there) if name in there), OPERATOR)
        return from_directory(certs, mine).named(self.name)


def _running() -> MeshState | None:
    return RunDir(default_run_dir()).running()


def _same(address: str, other: str) -> bool:
    (host, _, port), (other_host, _, other_port) = address.rpartition(":"), other.rpartition(":")
    return port == other_port and (host == other_host or {host, other_host} <= _LOOPBACK)
