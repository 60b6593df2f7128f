"""Generates the gRPC code of protos/ into the package `epd`, which is never committed."""

from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def generate() -> None:
    from grpc_tools import protoc

    sources = sorted((ROOT / "protos").rglob("*.proto"))
    include = Path(protoc.__file__).parent / "_proto"
    flags = [f"--{kind}_out={ROOT}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT / 'protos'}", f"-I{include}", *flags, *map(str, sources)]):
        raise SystemExit("protoc failed")
    for package in {ROOT / "epd", *(ROOT / source.parent.relative_to(ROOT / "protos") for source in sources)}:
        (package / "__init__.py").touch()


generate()
setup()
