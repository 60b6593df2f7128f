"""How one worker is set up."""

import socket

import msgspec

from common.bounds import Port, Positive, Rate, Seconds, Share, Span
from common.encoder.settings import EncoderSettings
from common.engine.settings import EngineSettings, LoraSettings
from common.policies.handoff.terms import HandoffLimits
from common.registry.settings import EtcdSettings
from common.rpc.channel import KEEPALIVE_SECONDS
from common.rpc.tls import TlsOptions


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All knobs of one worker process; see docs for the table."""

    roles: tuple[str, ...] = ("prefill", "decode")  # and "encode"
    worker_id: str = ""  # default: roles, host name and process id
    host: str = "127.0.0.1"  # address to listen on
    port: Port = 0  # 0: any free one
    aliases: tuple[str, ...] = ()  # further model names to take requests for
    advertise: str = ""  # host that peers can reach; default: `host`
    etcd: EtcdSettings = EtcdSettings()
    lease_ttl_seconds: Positive = 10
    run_dir: str = ""  # 0700, of the shm channel's sockets; the same for all workers of a host. Default: in /tmp
    channels: tuple[str, ...] = ()  # allowed for transfers, best first; default: all, with TLS those that encrypt
    tls: TlsOptions | None = None  # of the server and towards other workers; the certificate must be of worker_id
    throttle_bytes_per_second: Rate = 0.0  # of all pulls of a worker together; 0: as fast as it goes
    pull_overlap: bool = True  # False: pull only after prefill has finished, as a baseline
    handoff: HandoffLimits = HandoffLimits()
    keepalive_seconds: Span = KEEPALIVE_SECONDS  # towards workers that are pulled from
    otlp_endpoint: str = ""  # host:port of an OTLP collector (gRPC), or of Jaeger; empty: spans stay here
    trace_sample_ratio: Share = 1.0
    metrics_port: int = -1  # -1: none, 0: any free one
    hang_seconds: Span = 5.0  # without a word or progress of the engine; then gateways hear nothing from here
    drain_seconds: Seconds = 30.0
    engine_in_thread: bool = False  # tests only: engine and encoder share this process
    engine: EngineSettings = EngineSettings()
    lora: LoraSettings = LoraSettings()
    encoder: EncoderSettings = EncoderSettings()  # of the role encode

    @property
    def reachable_host(self) -> str:
        if self.advertise:
            return self.advertise
        return socket.gethostname() if self.host in ("0.0.0.0", "::", "[::]") else self.host
