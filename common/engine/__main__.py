"""An engine as a process: `python -m common.engine SOCKET_FD DOORBELL_FD POOL_FD [EMBEDDINGS_FD]`.

Settings and layouts come as the socket's first frame.
"""

import contextlib
import signal
import socket
import sys

import msgspec

from common.engine.loop import run_engine
from common.engine.wire import Launch, read_frame
from common.log import setup_logging
from common.process import end_with_parent
from common.transfer.pool_memory import PoolMemory


def main() -> None:
    end_with_parent()  # also in a step, or while a model loads
    setup_logging("engine")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which drains and then ends us
    socket_fd, doorbell, pool_fd, *embeddings_fd = map(int, sys.argv[1:])
    sock = socket.socket(fileno=socket_fd)
    launch = msgspec.json.decode(read_frame(sock), type=Launch)
    memory = PoolMemory.attach(pool_fd, writable=True)
    embeddings = PoolMemory.attach(embeddings_fd[0]) if embeddings_fd else None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the service is gone; so shall we be
        run_engine(sock, doorbell, launch, memory, embeddings)


if __name__ == "__main__":
    main()
