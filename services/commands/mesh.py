"""A local mesh as a list of processes: how many, on which ports, with how many threads."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from common.errors import InvalidArgument
from common.process import available_cores
from common.rpc.peer_name import CLIENT, ETCD, GATEWAY, WORKER, PeerName
from services.commands.trust import OPERATOR
from services.supervisor import ProcessSpec


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one model. aliases: further names that they take requests for, each with the directory of its
    tokenizer."""

    served: str
    directory: Path
    workers: Mapping[str, str]  # name to roles
    aliases: Mapping[str, Path] = {}


class MeshOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `epd up` is asked for. Numbers of workers are those of each model."""

    model: str
    more: tuple[str, ...] = ()  # models
    served_name: str = ""
    encode: int = 1  # counts only for a model that takes images
    prefill: int = 1
    decode: int = 1
    aggregated: int = 0
    dtype: str = ""
    executor: str = "modules"
    threads: int = 0  # a worker; 0: fit the cores
    num_blocks: int = 0
    grpc_port: int = 50051
    http_port: int = 8000
    etcd: str = ""  # host:port of an existing one
    otlp_endpoint: str = ""
    config: str = ""  # TOML file
    drain_seconds: float = 10.0
    tls: bool = False  # everywhere, by an authority and certificates of this run's own

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.http_port}"

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, *self.more)

    def workers_of(self, number: int, *, images: bool = True) -> dict[str, str]:
        """Worker name to roles, of the model at this place. Names are numbered through all models. images: it takes
        some."""
        counts = {
            "encode": self.encode,
            "prefill": self.prefill,
            "decode": self.decode,
            "prefill,decode": self.aggregated,
        }
        return {
            f"{'both' if ',' in roles else roles}-{number * count + i}": roles
            for roles, count in counts.items()
            for i in range(count)
            if images or roles != "encode"
        }

    def validate(self) -> None:
        """Raises InvalidArgument when these workers could never answer a request."""
        if min(self.encode, self.prefill, self.decode, self.aggregated) < 0:
            raise InvalidArgument("numbers of workers cannot be negative", field="prefill")
        if self.more and self.served_name:
            raise InvalidArgument("--served-name names one model; several have their directories' names", field="model")
        if self.tls and self.etcd:
            raise InvalidArgument(
                "epd up --tls runs an etcd of its own; for another one start the roles one by one, with --certs",
                field="etcd",
            )
        if not self.aggregated and not (self.prefill and self.decode):
            raise InvalidArgument(
                "a mesh needs a prefill and a decode worker, or one with both roles (--aggregated 1)", field="prefill"
            )


def threads_per_worker(workers: int, cores: int) -> int:
    """Cores over workers, one left for gateway and etcd; never none, and one each where cores are few (design §9)."""
    return max(1, (cores - 1) // max(1, workers))


def process_specs(
    options: MeshOptions, pools: Sequence[Pool], run_dir: Path, sockets: Path, etcd: str, certs: str = ""
) -> list[ProcessSpec]:
    """Every process of the mesh in the order of its start; `etcd` is the host:port that all of them use.

    certs: where everyone's certificate is, for a mesh with TLS.
    """
    threads = options.threads or threads_per_worker(sum(len(pool.workers) for pool in pools), available_cores())
    specs: list[ProcessSpec] = []
    if not options.etcd:
        arguments = [
            "etcd",
            "--address",
            etcd,
            "--data-dir",
            str(run_dir / "etcd"),
            *(("--certs", certs) if certs else ()),
        ]
        specs.append(ProcessSpec(name="etcd", arguments=tuple(arguments)))
    shared: tuple[str, ...] = ("--etcd", etcd, "--drain-seconds", str(options.drain_seconds))
    if options.otlp_endpoint:
        shared += ("--otlp-endpoint", options.otlp_endpoint)
    if options.config:
        shared += ("--config", options.config)
    if certs:
        shared += ("--certs", certs)
    # The first is the gateway's default for text, the first that takes images for those.
    served = {name: path for pool in pools for name, path in {**pool.aliases, pool.served: pool.directory}.items()}
    names = [f"{name}={directory}" for name, directory in served.items()]
    specs.append(
        ProcessSpec(
            name="gateway",
            arguments=("gateway", *names, "--grpc", options.grpc, "--http", options.http, *shared),
            environment=_environment(1),
        )
    )
    for pool, name, roles in ((each, *worker) for each in pools for worker in each.workers.items()):
        arguments = ["worker", str(pool.directory), "--served-name", pool.served, "--roles", roles, "--worker-id", name]
        arguments += ["--threads", str(threads), "--run-dir", str(sockets), "--executor", options.executor]
        if pool.aliases:
            arguments += ["--aliases", ",".join(pool.aliases)]
        if options.dtype:
            arguments += ["--dtype", options.dtype]
        if options.num_blocks:
            arguments += ["--num-blocks", str(options.num_blocks)]
        specs.append(ProcessSpec(name=name, arguments=(*arguments, *shared), environment=_environment(threads)))
    return specs


def make_certificates(options: MeshOptions, directory: Path) -> None:
    """For every process and for people. The authority's key is kept nowhere: nobody can issue another."""
    from common.rpc.certificates import Authority

    authority = Authority.create(directory, keep_key=False)
    here = ("localhost", "127.0.0.1", "::1")
    authority.issue(PeerName(ETCD, ETCD), here)
    authority.issue(PeerName(GATEWAY, GATEWAY), here)
    authority.issue(PeerName(CLIENT, OPERATOR))
    for name in (name for number in range(len(options.models)) for name in options.workers_of(number)):
        authority.issue(PeerName(WORKER, name))


def _environment(threads: int) -> dict[str, str]:
    # Threads that spin while they wait would take the cores from the other workers.
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
