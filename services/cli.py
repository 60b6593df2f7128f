"""The `epd` command. Every command imports what it needs when it runs, so that `epd --help` is quick."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from common.process import end_with_parent
from services.commands.bench_app import bench
from services.commands.certs_app import certs_app
from services.commands.keys_app import keys_app
from services.commands.models_app import models_app
from services.commands.options import Certs, Config, Drain, Dtype, Otlp
from services.commands.use_app import chat, generate, health, status, trace

EXIT_REFUSED = 2  # as services.supervisor, which is not imported here for its cost

app = typer.Typer(
    name="epd",
    help="A mesh that serves language and vision models in separate stages: encode, prefill, decode, one gateway.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(models_app, name="models")
app.add_typer(certs_app, name="certs")
app.add_typer(keys_app, name="keys")

LOCAL, ROLES, USE = "On one machine", "One role", "Use a running mesh"


def _default_model() -> str:
    from common.models.catalog import DEFAULT_VISION_MODEL

    return DEFAULT_VISION_MODEL


@app.command("up", rich_help_panel=LOCAL)
@app.command("serve", rich_help_panel=LOCAL)
def up(
    models: Annotated[
        list[str] | None, typer.Argument(help="Models' names or directories [default: picture-vlm]", show_default=False)
    ] = None,
    encode: Annotated[int, typer.Option(help="encode workers of each model that takes images")] = 1,
    prefill: Annotated[int, typer.Option(help="prefill workers of each model")] = 1,
    decode: Annotated[int, typer.Option(help="decode workers")] = 1,
    aggregated: Annotated[int, typer.Option(help="workers with both roles")] = 0,
    dtype: Dtype = None,
    threads: Annotated[int, typer.Option(help="threads of each worker [default: what the cores allow]")] = 0,
    num_blocks: Annotated[int, typer.Option(help="KV blocks of each worker")] = 0,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535)] = 50051,
    http_port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    served_name: Annotated[str, typer.Option(help="the model's name for clients [default: its directory's]")] = "",
    executor: Annotated[str, typer.Option(help="modules, or timed (answers without a model, for tests)")] = "modules",
    etcd: Annotated[str, typer.Option(help="an existing etcd instead of one of our own", envvar="EPD_ETCD")] = "",
    otlp_endpoint: Otlp = None,
    config: Config = "",
    drain_seconds: Drain = None,
    tls: Annotated[bool, typer.Option("--tls", help="TLS everywhere, with certificates made for this run")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="run in the background; `epd down` ends it")] = False,
    ready_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Start a whole mesh on this machine: etcd, gateway, workers. Ask first questions. Ctrl-C ends it.

    `epd up` and `epd serve MODEL` are the same.
    """
    if detach:
        from services.commands.background import up_detached

        up_detached([argument for argument in sys.argv[2:] if argument != "--detach"])
        return
    from services.commands.mesh import MeshOptions
    from services.commands.up import up as run

    model, *more = models or [_default_model()]
    options = MeshOptions(
        model=model,
        more=tuple(more),
        served_name=served_name,
        encode=encode,
        prefill=prefill,
        decode=decode,
        aggregated=aggregated,
        dtype=dtype or "",
        executor=executor,
        threads=threads,
        num_blocks=num_blocks,
        grpc_port=grpc_port,
        http_port=http_port,
        etcd=etcd,
        otlp_endpoint=otlp_endpoint or "",
        config=config,
        tls=tls,
        **({} if drain_seconds is None else {"drain_seconds": drain_seconds}),
    )
    run(options, ready_fd=ready_fd)


@app.command(rich_help_panel=LOCAL)
def down() -> None:
    """End the mesh that runs in the background."""
    from services.commands.background import down as run

    run()


@app.command(rich_help_panel=ROLES)
def worker(
    model: Annotated[str, typer.Argument(help="A model's name or directory")] = "",
    roles: Annotated[str | None, typer.Option(help="encode, prefill, decode, or several: prefill,decode")] = None,
    aliases: Annotated[str | None, typer.Option(help="further model names to take requests for")] = None,
    served_name: Annotated[str | None, typer.Option()] = None,
    worker_id: Annotated[str | None, typer.Option(help="[default: roles, host name and process id]")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0: any free one")] = None,
    advertise: Annotated[str | None, typer.Option(help="host that gateways and workers reach it by")] = None,
    etcd: Annotated[str | None, typer.Option(help="host:port, several separated by commas", envvar="EPD_ETCD")] = None,
    executor: Annotated[str | None, typer.Option(help="modules or timed")] = None,
    dtype: Dtype = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N")] = None,
    threads: Annotated[int | None, typer.Option()] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks of 16 tokens")] = None,
    run_dir: Annotated[str | None, typer.Option(help="0700 directory for the socket of the shm channel")] = None,
    metrics_port: Annotated[int | None, typer.Option(min=0, max=65535, help="Prometheus; 0: any free one")] = None,
    otlp_endpoint: Otlp = None,
    drain_seconds: Drain = None,
    config: Config = "",
    certs: Certs = "",
) -> None:
    """An encode, prefill or decode worker, or several roles in one."""
    from services.commands import roles as role

    role.worker(
        model,
        config,
        {
            "roles": _split(roles),
            "aliases": _split(aliases),
            "worker_id": worker_id,
            "host": host,
            "port": port,
            "advertise": advertise,
            "etcd.endpoints": _split(etcd),
            "engine.served_name": served_name,
            "engine.executor": executor,
            "engine.dtype": dtype,
            "engine.device": device,
            "engine.threads": threads,
            "engine.num_blocks": num_blocks,
            "run_dir": run_dir,
            "metrics_port": metrics_port,
            "otlp_endpoint": otlp_endpoint,
            "drain_seconds": drain_seconds,
        },
        certs,
    )


@app.command(rich_help_panel=ROLES)
def gateway(
    models: Annotated[list[str] | None, typer.Argument(help="NAME=DIRECTORY, a name, or a directory")] = None,
    grpc: Annotated[str | None, typer.Option(help="host:port to listen on")] = None,
    http: Annotated[str | None, typer.Option(help="host:port to listen on")] = None,
    etcd: Annotated[str | None, typer.Option(help="host:port, several separated by commas", envvar="EPD_ETCD")] = None,
    otlp_endpoint: Otlp = None,
    drain_seconds: Drain = None,
    config: Config = "",
    certs: Certs = "",
    cert_id: Annotated[str, typer.Option(help="whose certificate, of those in --certs")] = "gateway",
) -> None:
    """The public server: gRPC and OpenAI HTTP."""
    from services.commands import roles as role

    role.gateway(
        models or [],
        config,
        {
            "grpc_bind": grpc,
            "http_bind": http,
            "etcd.endpoints": _split(etcd),
            "otlp_endpoint": otlp_endpoint,
            "drain_seconds": drain_seconds,
        },
        certs,
        cert_id,
    )


@app.command(rich_help_panel=ROLES)
def etcd(
    address: Annotated[str, typer.Option(help="host:port to listen on; loopback only")] = "127.0.0.1:2379",
    data_dir: Annotated[Path, typer.Option(help="wiped at each start")] = Path(".run/etcd"),
    certs: Certs = "",
) -> None:
    """The packaged etcd server, for one machine."""
    from services.commands import roles as role

    role.etcd(address, data_dir, certs)


for command in (generate, chat, status, trace, health, bench):
    app.command(rich_help_panel=USE)(command)


def _split(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def main() -> None:
    """Errors are told in words; EPD_DEBUG=1 shows where they came from."""
    end_with_parent()
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("EPD_DEBUG"):
            raise
        from common import errors

        if not isinstance(error, errors.EpdError | OSError):
            raise  # a bug of ours: its traceback is what helps
        print(f"epd: {getattr(error, 'message', error)}", file=sys.stderr)
        refused = errors.InvalidArgument | errors.ModelNotFound | errors.AddressTaken | errors.NotReady
        sys.exit(EXIT_REFUSED if isinstance(error, refused) else 1)


if __name__ == "__main__":
    main()
