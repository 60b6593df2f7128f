"""The layout's rules, read from the source text: who may import whom, and how long a file may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from common import telemetry

ROOT = Path(__file__).parents[3]
FILES = sorted(path.relative_to(ROOT) for top in ("common", "services") for path in (ROOT / top).rglob("*.py"))
LONGEST = 350

# Packages of services/ that hold one service each. The others put services together and may import them.
SERVICES = ("gateway", "encode", "prefill", "decode", "store", "planner")

# Where tensors are. transformers imports torch.
TORCH_FILES = {
    "common/encoder/loop.py",
    "common/encoder/vision_executor.py",
    "common/engine/loop.py",
    "common/engine/image_inputs.py",
    "common/engine/lora.py",
    "common/engine/modules_executor.py",
    "common/engine/paged_attention.py",
    "common/engine/prompt_scores.py",
    "common/engine/sampler.py",
    "common/models/gguf_convert.py",
    "common/models/vision_tower.py",
    "common/models/vlm_assemble.py",
    "common/models/vision/partial.py",
    "common/models/vision/tower.py",
}
# Policies are pure: they decide over snapshots on a clock that they are given.
IMPURE = {
    "asyncio",
    "grpc",
    "time",
    "random",
    "socket",
    "os",
    "threading",
    "subprocess",
    "pathlib",
    "torch",
    "etcd3aio",
}


def imports(source: str, package: str) -> set[str]:
    """Absolute dotted names of everything imported, at any depth; `package` resolves relative imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def violations(path: Path, names: set[str]) -> list[str]:
    """What this file must not import and does."""
    top, *inner = path.with_suffix("").parts
    banned: list[str] = []
    for name in sorted(names):
        head = name.split(".")[0]
        if top == "common" and head == "services":
            banned.append(f"common imports {name}")
        if top == "services" and inner[0] in SERVICES and head == "services":
            other = name.split(".")[1] if "." in name else ""
            if other in SERVICES and other != inner[0]:
                banned.append(f"a service imports {name}")
        computes = path.parts[:2] in (("common", "engine"), ("common", "encoder"))
        if computes and (head == "grpc" or name.startswith("epd.")):
            banned.append(f"the engine imports {name}")
        if path.parts[:2] == ("common", "policies") and head in IMPURE:
            banned.append(f"a policy imports {name}")
        if head in ("torch", "transformers") and path.as_posix() not in TORCH_FILES:
            banned.append(f"imports {name} outside the files with tensors")
        if head == "etcd3aio" and path.as_posix() != "common/registry/adapter.py":
            banned.append(f"imports {name} outside its adapter")
    return banned


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_follow_the_layout(path: Path) -> None:
    package = ".".join(path.parent.parts)
    assert violations(path, imports((ROOT / path).read_text(), package)) == []


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_stay_short(path: Path) -> None:
    assert len((ROOT / path).read_text().splitlines()) <= LONGEST


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("common/rpc/x.py", "from services.gateway import main"),
        ("services/prefill/x.py", "def f():\n    import services.decode.service"),
        ("services/prefill/x.py", "from ..decode import service"),
        ("common/engine/x.py", "import grpc"),
        ("common/encoder/x.py", "import grpc"),
        ("common/engine/x.py", "from epd.v1 import types_pb2"),
        ("common/policies/x.py", "import asyncio"),
        ("services/gateway/x.py", "from transformers import AutoTokenizer"),
        ("common/registry/watch.py", "import etcd3aio"),
    ],
)
def test_every_rule_finds_its_breach(path: str, source: str) -> None:
    file = Path(path)
    assert violations(file, imports(source, ".".join(file.parent.parts)))


def test_span_names_are_declared_once() -> None:
    names = {
        value
        for name, value in vars(telemetry).items()
        if name.isupper() and isinstance(value, str) and "." in value and not value.startswith(("epd.", "gen_ai."))
    }
    assert "gateway.generate" in names
    repeated = [
        f"{path}: {node.value}"
        for path in FILES
        if path.as_posix() != "common/telemetry.py"
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert repeated == []


@pytest.mark.parametrize(
    "module", ["services.cli", "services.gateway.main", "services.supervisor", "services.commands.up"]
)
def test_torch_is_not_loaded_by(module: str) -> None:
    """The gateway and whatever starts processes stay small."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, services.cli; print(*sorted({'grpc', 'numpy', 'fastapi', 'msgspec'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.split() == []
