"""An engine as a process: `python -m common.engine SOCKET_FD POOL_FD DOORBELL_FD`.

Settings and layout come as the socket's first frame.
"""

import logging
import os
import signal
import socket
import struct
import sys

import msgspec

from common.engine.loop import run_engine
from common.engine.wire import Launch
from common.transfer.pool_memory import PoolMemory


def main() -> None:
    logging.basicConfig(level=os.environ.get("EPD_LOG_LEVEL", "INFO").upper())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which drains and then ends us
    socket_fd, pool_fd, doorbell = map(int, sys.argv[1:4])
    sock = socket.socket(fileno=socket_fd)
    (length,) = struct.unpack("<I", _exactly(sock, 4))
    launch = msgspec.json.decode(_exactly(sock, length), type=Launch)
    memory = PoolMemory.attach(pool_fd, writable=True)
    run_engine(sock, memory, doorbell, launch.settings, launch.layout)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise SystemExit("the service is gone")
        data += part
    return data


if __name__ == "__main__":
    main()
