"""A worker's memory is that of all its processes."""

import subprocess
import sys

import psutil

from common.rpc.worker_service import resident_bytes

MIB = 2**20
HOLD = f"import sys; held = b'x' * (64 * {MIB}); print('ready', flush=True); sys.stdin.read()"


def test_children_count() -> None:
    before = resident_bytes()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        during = resident_bytes()
        assert during >= before + 60 * MIB
        assert during > psutil.Process().memory_info().rss
        child.stdin.close()
