"""Authorities and certificates for tests."""

from pathlib import Path

from common.rpc.certificates import Authority
from common.rpc.peer_name import CLIENT, ETCD, GATEWAY, WORKER, PeerName
from common.rpc.tls import TlsOptions, from_directory

HERE = ("localhost", "127.0.0.1")


def mesh_certificates(directory: Path, workers: tuple[str, ...] = ("prefill-0", "decode-0")) -> Authority:
    """Of a gateway, an etcd, an operator and these workers."""
    authority = Authority.create(directory)
    authority.issue(PeerName(GATEWAY, "gateway"), HERE)
    authority.issue(PeerName(ETCD, "etcd"), HERE)
    authority.issue(PeerName(CLIENT, "operator"))
    for worker in workers:
        authority.issue(PeerName(WORKER, worker))
    return authority


def tls_of(authority: Authority, peer_id: str) -> TlsOptions:
    return from_directory(authority.directory, peer_id)
