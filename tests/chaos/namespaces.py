"""Network namespaces on one bridge, made for a run and removed after it. Needs root and iproute2."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

_PREFIX = "epd-chaos-"
_SECONDS = 10.0  # for one command


class CannotMake(Exception):
    """Why there are no namespaces here."""


class Namespace:
    """One machine's network, as its processes see it."""

    def __init__(self, hub: str, name: str, port: str, address: str) -> None:
        self._hub, self.name, self._port, self.address = hub, name, port, address

    @property
    def command(self) -> tuple[str, ...]:
        """What a command begins with to run there; it keeps its process id."""
        return ("ip", "netns", "exec", self.name)

    def link(self, *, up: bool) -> None:
        """The cable, at the bridge's end: nobody inside is told."""
        _ip("-n", self._hub, "link", "set", self._port, "up" if up else "down")

    def lose(self, address: str) -> None:
        """Nothing that is sent to this address arrives any more."""
        _ip("-n", self.name, "route", "replace", "blackhole", address)

    def find(self, address: str) -> None:
        with contextlib.suppress(CannotMake):
            _ip("-n", self.name, "route", "del", "blackhole", address)

    def reset_connections(self) -> int:
        """Ends all TCP connections of its processes, both sides told at once; how many there were."""
        answer = _run("ip", "netns", "exec", self.name, "ss", "-HKtn", "state", "established")
        return len(answer.splitlines())


class Namespaces:
    """A bridge in a namespace of its own, whose firewall is nobody else's, and one cable from it to us."""

    def __init__(self, count: int) -> None:
        """Raises CannotMake, with nothing left behind."""
        if os.geteuid() or not shutil.which("ip") or not shutil.which("ss"):
            raise CannotMake("network namespaces need root, ip and ss")
        _remove_stale()
        self._base, self._ours = f"{_PREFIX}{os.getpid()}", f"ech{os.getpid()}"
        self._made: list[str] = []
        net = self._free_net()
        self.address = f"{net}.1"
        try:
            self._namespace(self._base)
            _ip("-n", self._base, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._base, "link", "set", "bridge", "up")
            _ip("link", "add", self._ours, "type", "veth", "peer", "name", "root", "netns", self._base)
            self._plug("root")
            _ip("addr", "add", f"{self.address}/24", "dev", self._ours)
            _ip("link", "set", self._ours, "up")
            self.each = [self._machine(number, f"{net}.{number + 10}") for number in range(count)]
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        for name in reversed(self._made):
            with contextlib.suppress(CannotMake):
                _ip("netns", "del", name)
        self._made.clear()
        with contextlib.suppress(CannotMake):
            _ip("link", "del", self._ours)

    def _free_net(self) -> str:
        """198.18.0.0/15 is there for benchmarks of networks."""
        used = _ip("-4", "-o", "addr")
        start = os.getpid() % 250
        for number in range(250):
            net = f"198.18.{(start + number) % 250}"
            if f" {net}." not in used:
                return net
        raise CannotMake("no network is free in 198.18.0.0/16")

    def _machine(self, number: int, address: str) -> Namespace:
        name, port = f"{self._base}-{number}", f"port{number}"
        self._namespace(name)
        _ip("-n", self._base, "link", "add", port, "type", "veth", "peer", "name", "net", "netns", name)
        self._plug(port)
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "net")
        _ip("-n", name, "link", "set", "net", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        return Namespace(self._base, name, port, address)

    def _plug(self, port: str) -> None:
        _ip("-n", self._base, "link", "set", port, "master", "bridge", "up")

    def _namespace(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)


def _remove_stale() -> None:
    """Those of runs that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0] if line.strip() else ""
        owner = name.removeprefix(_PREFIX).split("-")[0]
        if name.startswith(_PREFIX) and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(CannotMake):
                _ip("netns", "del", name)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotMake(f"{' '.join(command)}: {error}") from None
    if done.returncode:
        raise CannotMake(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
