"""What is looked at before a mesh starts: a mistake is told at once, not by a process that has loaded a model."""

import os
import socket
from pathlib import Path

from common import config
from common.errors import AddressTaken, InvalidArgument, Unauthenticated
from services.commands.client import credentials
from services.commands.mesh import MeshOptions

NO_KEY = "the gateway wants a key: put one, as `epd keys create` makes it, into EPD_API_KEY"


def check_config(options: MeshOptions) -> None:
    """Reads the file and the environment as gateway and workers will.

    Raises InvalidArgument, and Unauthenticated when the first questions could not be asked for want of a key.
    """
    from services.gateway.identity import file
    from services.gateway.settings import GatewaySettings
    from services.worker_settings import WorkerSettings

    gateway = config.load(GatewaySettings, "gateway", file=options.config, options={"models": {options.model: "."}})
    config.load(WorkerSettings, "worker", file=options.config, options={"roles": ("prefill",), "engine.model_dir": "."})
    if gateway.identity.source == "file":
        file.read(Path(gateway.identity.file))
    if gateway.identity.source != "off" and not credentials():
        raise Unauthenticated(NO_KEY)


def check_ports(options: MeshOptions) -> None:
    """Raises AddressTaken, naming who holds it, when one of the mesh's ports is in use."""
    for option, port in (("--grpc-port", options.grpc_port), ("--http-port", options.http_port)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except PermissionError as error:
                raise InvalidArgument(f"port {port} needs privileges; choose one above 1023 with {option}") from error
            except OSError as error:
                raise AddressTaken(
                    f"port {port} is taken{_holder(port)}; end that process, or choose another port with {option}"
                ) from error


def _holder(port: int) -> str:
    """' by NAME (pid N)' when the system lets us know."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                name = "this process" if connection.pid == os.getpid() else psutil.Process(connection.pid).name()
                return f" by {name} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""
