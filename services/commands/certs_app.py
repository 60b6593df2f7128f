"""`epd certs`: its commands. What they need is imported when they run, as in services/cli.py."""

from pathlib import Path
from typing import Annotated

import typer

certs_app = typer.Typer(
    help="Certificates for a mesh on several hosts or in containers; `epd up --tls` makes its own.",
    no_args_is_help=True,
)

Dir = Annotated[Path, typer.Option("--dir", help="the authority's directory, 0700")]


@certs_app.command("ca")
def make_authority(directory: Dir = Path("certs"), days: Annotated[int, typer.Option(min=1)] = 3650) -> None:
    """Make an authority: ca.pem for everyone, ca.key for whoever issues."""
    from common.rpc.certificates import CA_CERT, Authority

    Authority.create(directory, days=days)
    print(directory / CA_CERT)


@certs_app.command("issue")
def issue(
    role: Annotated[str, typer.Argument(help="gateway, worker, etcd, or client: whoever looks into the mesh")],
    peer_id: Annotated[str, typer.Argument(metavar="ID", help="a worker's id as it registers, or a name")],
    host: Annotated[
        list[str] | None, typer.Option(help="name or address that a gateway or an etcd is reached by; several times")
    ] = None,
    into: Annotated[Path | None, typer.Option(help="directory to copy all that this service needs into")] = None,
    directory: Dir = Path("certs"),
    days: Annotated[int, typer.Option(min=1)] = 365,
) -> None:
    """Issue a service's certificate, ID.pem with ID.key; an old one of the same ID is replaced."""
    from common.rpc.certificates import Authority
    from common.rpc.peer_name import PeerName

    print(Authority.load(directory).issue(PeerName(role, peer_id), host or (), days=days, into=into))
