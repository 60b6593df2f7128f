"""The mesh with compose.tls.yaml: answers for who trusts it, for nobody else."""

from pathlib import Path

from common.models.catalog import DEFAULT_MODEL
from tests.compose.command import CommandFailed, run
from tests.compose.project import Project, inside
from tests.compose.traffic import QUESTION

_ETCD = (
    "import socket, ssl; s = ssl._create_unverified_context().wrap_socket(socket.create_connection(('etcd', 2379))); "
)
_ETCD += "s.sendall(b'GET /health HTTP/1.1\\r\\nHost: etcd\\r\\n\\r\\n'); print(s.recv(100))"


async def answers_by_tls(project: Project, epd: str, work: Path) -> str:
    """As the file's head tells users to do it: the authority copied out, then `epd generate --ca`."""
    authority = work / "ca.pem"
    project.compose("cp", "certs:/certs/gateway/ca.pem", str(authority))
    address = project.address("gateway", 50051)
    command = (epd, "generate", QUESTION, "--model", DEFAULT_MODEL, "--temperature", "0", "--max-tokens", "16")
    text = run(*command, "--address", address, "--ca", str(authority), seconds=300).strip()
    assert "Paris" in text, text
    try:
        run(*command, "--address", address, seconds=120)
    except CommandFailed as refused:
        said = str(refused).splitlines()[-1]
        assert "TLS" in said, said
    else:
        raise AssertionError("it answers without TLS, too")
    return f"{text!r} with the authority; without: {said!r}"


async def etcd_wants_a_certificate(project: Project) -> str:
    (observer,) = project.containers("jaeger")
    try:
        said = inside(observer.id, "python", "-c", _ETCD)
    except CommandFailed as refused:
        said = str(refused).splitlines()[-1]
    assert "certificate" in said.lower(), said
    return said
