"""An encoder as a process: `python -m common.encoder SOCKET_FD POOL_FD`.

Settings and layout come as the socket's first frame.
"""

import contextlib
import signal
import socket
import sys

import msgspec

from common.encoder.loop import run_encoder
from common.encoder.wire import Launch
from common.engine.wire import read_frame
from common.log import setup_logging
from common.process import end_with_parent
from common.transfer.pool_memory import PoolMemory


def main() -> None:
    end_with_parent()  # also in a step, or while a model loads
    setup_logging("encoder")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which drains and then ends us
    socket_fd, pool_fd = map(int, sys.argv[1:])
    sock = socket.socket(fileno=socket_fd)
    launch = msgspec.json.decode(read_frame(sock), type=Launch)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the service is gone; so shall we be
        run_encoder(sock, PoolMemory.attach(pool_fd, writable=True), launch)


if __name__ == "__main__":
    main()
