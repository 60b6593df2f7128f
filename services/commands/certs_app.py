"""`epd certs`: its commands. What they need is imported when they run, as in services/cli.py."""

import os
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


@certs_app.command("etcd-users")
def etcd_users(
    etcd: Annotated[str, typer.Option(help="host:port, several separated by commas", envvar="EPD_ETCD")],
    certs: Annotated[Path | None, typer.Option(help="a user for each certificate in this directory")] = None,
    passwords: Annotated[
        Path | None, typer.Option(help="JSON file, 0600: worker, gateway, client, root; made when missing")
    ] = None,
    prefix: Annotated[str, typer.Option(help="of the mesh's entries")] = "/epd",
    enable: Annotated[bool, typer.Option("--enable", help="then turn rights on")] = False,
    user: Annotated[str, typer.Option(help="who we are there, root once rights are on")] = "",
    ca: Annotated[str, typer.Option(help="etcd's authority [default: that of --certs]")] = "",
    cert: Annotated[str, typer.Option(help="our certificate [default: etcd's own in --certs]")] = "",
    key: Annotated[str, typer.Option(help="its key")] = "",
) -> None:
    """Make the mesh's users in an etcd that somebody else runs. Our own password there: EPD_ETCD_PASSWORD."""
    import msgspec

    from common.registry.settings import EtcdSettings, etcd_settings
    from common.rpc.peer_name import ETCD
    from common.rpc.tls import from_directory
    from services.commands.etcd_users import etcd_users as run

    settings = EtcdSettings(
        endpoints=tuple(etcd.split(",")),
        prefix=prefix,
        user=user,
        password=os.environ.get("EPD_ETCD_PASSWORD", ""),
        ca_file=ca,
        cert_file=cert,
        key_file=key,
    )
    if certs and not ca:
        own = etcd_settings(settings.endpoints, from_directory(certs, ETCD))
        settings = msgspec.structs.replace(own, prefix=prefix, user=user, password=settings.password)
    run(settings, certs, passwords, enable=enable)
