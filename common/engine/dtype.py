"""Which dtype suits this machine, found without torch: the service must know it before its engine runs."""

from pathlib import Path

import msgspec

from common.engine.settings import EngineSettings

# Without one of these a CPU emulates bfloat16, several times slower than float32.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_dtype(settings: EngineSettings, cpuinfo: str | None = None) -> EngineSettings:
    """Settings with `auto` replaced: bfloat16 on CUDA and on CPUs that compute in it, else float32.

    cpuinfo: text like /proc/cpuinfo's, by default that file's.
    """
    if settings.dtype != "auto":
        return settings
    cuda = settings.device.startswith("cuda") or (settings.device == "auto" and Path("/dev/nvidiactl").exists())
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text()
        except OSError:
            cpuinfo = ""
    native = cuda or not _BF16_FLAGS.isdisjoint(cpuinfo.split())
    return msgspec.structs.replace(settings, dtype="bfloat16" if native else "float32")
