"""`epd keys`: its commands. What they need is imported when they run, as in services/cli.py."""

from typing import Annotated

import typer

keys_app = typer.Typer(
    help="API keys of tenants, in the file or the etcd that gateways read them from.", no_args_is_help=True
)

File = Annotated[str, typer.Option(help="YAML file with keys and tenants", envvar="EPD_GATEWAY_IDENTITY_FILE")]
Etcd = Annotated[str, typer.Option(help="host:port of an etcd, instead of a file; several separated by commas")]


@keys_app.command("create")
def create(
    tenant: Annotated[str, typer.Argument()],
    name: Annotated[str, typer.Option(help="what the key is for")] = "",
    file: File = "",
    etcd: Etcd = "",
) -> None:
    """Make a key for a tenant and print it: this once, only its hash is kept."""
    from services.commands import keys

    print(keys.create(keys.store(file, etcd), tenant, name))


@keys_app.command("list")
def show(file: File = "", etcd: Etcd = "") -> None:
    """All keys, without the keys: id, tenant, date, name."""
    from services.commands import keys

    for record in keys.store(file, etcd).all():
        print(f"{record.key_id}  {record.tenant}  {record.created}  {record.name}".rstrip())


@keys_app.command("revoke")
def revoke(key_id: Annotated[str, typer.Argument(metavar="ID")], file: File = "", etcd: Etcd = "") -> None:
    """Take a key back, by the id that `list` shows. Gateways refuse it as soon as they see the change."""
    from services.commands import keys

    record = keys.revoke(keys.store(file, etcd), key_id)
    print(f"{record.key_id} of {record.tenant} is revoked")
