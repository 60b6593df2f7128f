"""`epd worker`, `epd gateway` and `epd etcd`: one role in the foreground, until SIGTERM or Ctrl-C."""

import asyncio
import signal
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from common import config
from common.errors import InvalidArgument, Unavailable
from common.log import setup_logging
from common.models.fetch import find_model
from common.registry.settings import etcd_settings, port_of
from common.rpc.peer_name import ETCD, GATEWAY, PeerName
from common.rpc.tls import TlsOptions, from_directory


def worker(model: str, file: str, options: Mapping[str, Any], certs: str = "") -> None:
    """options: fields of WorkerSettings by dotted name. certs: directory of the worker's certificate."""
    from services.worker import run_worker
    from services.worker_settings import WorkerSettings

    chosen = dict(options)
    if certs:
        worker_id = options.get("worker_id")
        if not worker_id:
            raise InvalidArgument("--certs needs --worker-id, the name in the certificate", field="worker_id")
        with_certificates(chosen, certs, worker_id, {"tls": True})
    if model and options.get("engine.executor") != "timed":
        path = find_model(model)
        chosen["engine.model_dir"] = str(path)
        chosen["engine.served_name"] = options.get("engine.served_name") or path.name
    settings = config.load(WorkerSettings, "worker", file=file, options=chosen)
    _run("+".join(settings.roles), run_worker(settings))


def gateway(models: list[str], file: str, options: Mapping[str, Any], certs: str = "", cert_id: str = GATEWAY) -> None:
    """models: NAME=DIRECTORY, or a model as `epd models path` takes it. certs, cert_id: see worker."""
    from services.gateway.main import run_gateway
    from services.gateway.settings import GatewaySettings

    chosen = dict(options)
    if certs:
        with_certificates(chosen, certs, cert_id, {"tls": False, "worker_tls": True})
    if models:
        chosen["models"] = dict(_named(model) for model in models)
    _run("gateway", run_gateway(config.load(GatewaySettings, "gateway", file=file, options=chosen)))


def etcd(address: str, data_dir: Path, certs: str = "") -> None:
    """The packaged etcd server on loopback, for one machine. Its data is wiped at each start.

    certs: a directory of certificates: TLS, and a user for each of them, who may do what its role needs.
    """
    port = port_of(address, "address")
    asyncio.run(_etcd(port, data_dir, certs))


async def _etcd(port: int, data_dir: Path, certs: str) -> None:
    from common.registry.local_etcd import LocalEtcd

    tls = from_directory(certs, ETCD) if certs else None
    server = LocalEtcd(data_dir, client_port=port, tls=tls)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    if tls is not None:
        tls.check(PeerName(ETCD, ""))
        await _give_rights(data_dir, tls)
    await server.start(wipe=tls is None)
    assert server.process is not None
    print(f"etcd serves {server.endpoint}", flush=True)
    ended = loop.create_task(server.process.wait())
    stopped = loop.create_task(stop.wait())
    await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not stop.is_set():
        raise Unavailable(f"etcd ended with {ended.result()}; its log: {server.log_file}")
    await server.stop()


async def _give_rights(data_dir: Path, tls: TlsOptions) -> None:
    """At a port that nobody knows: when the real one opens, nobody can do more than it may."""
    from common.registry.adapter import EtcdConnection
    from common.registry.local_etcd import LocalEtcd
    from common.registry.users import make_users, turn_on
    from common.rpc.certificates import issued_names

    server = LocalEtcd(data_dir, tls=tls)
    await server.start()
    settings = etcd_settings((server.endpoint,), tls)
    connection = EtcdConnection(settings)
    try:
        await make_users(connection, settings, issued_names(Path(tls.ca_file).parent))
        await turn_on(connection)
    finally:
        await connection.close()
        await server.stop()


def with_certificates(chosen: dict[str, Any], certs: str, peer_id: str, fields: Mapping[str, bool]) -> None:
    """Adds settings that name the files of an id's certificate. fields: of TlsOptions, by whether they ask clients for
    a certificate."""
    tls = from_directory(certs, peer_id)
    for field, mutual in fields.items():
        files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
        chosen |= {f"{field}.{name}": path for name, path in files.items()} | {f"{field}.require_client_cert": mutual}
    etcd_of = etcd_settings(("127.0.0.1:1",), tls)
    for name in ("ca_file", "cert_file", "key_file", "server_name"):
        chosen[f"etcd.{name}"] = getattr(etcd_of, name)


def _named(model: str) -> tuple[str, str]:
    name, given, path = model.partition("=")
    if not given:
        name, path = "", model
    directory = find_model(path)
    return name or directory.name, str(directory)


def _run(service: str, running: Coroutine[Any, Any, None]) -> None:
    """Runs a role; it installs its own signal handlers and returns when it has drained."""
    setup_logging(service)
    asyncio.run(running)
