"""dtype auto: what the machine computes in fast."""

import pytest

from common.engine.dtype import resolve_dtype
from common.engine.settings import EngineSettings


@pytest.mark.parametrize(
    ("device", "flags", "dtype"),
    [
        ("cpu", "flags : fpu avx2 avx512f", "float32"),
        ("cpu", "flags : fpu avx512_bf16", "bfloat16"),
        ("cpu", "Features : asimd bf16", "bfloat16"),
        ("cpu", "", "float32"),
        ("cuda:0", "flags : fpu", "bfloat16"),
    ],
)
def test_auto_follows_the_machine(device: str, flags: str, dtype: str) -> None:
    assert resolve_dtype(EngineSettings(device=device), flags).dtype == dtype


def test_a_given_dtype_stays() -> None:
    assert resolve_dtype(EngineSettings(dtype="float16", device="cpu"), "avx512_bf16").dtype == "float16"
