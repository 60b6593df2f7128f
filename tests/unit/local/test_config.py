"""Settings from a TOML file, the environment and options, in that order."""

from pathlib import Path

import msgspec
import pytest

from common.config import load
from common.errors import InvalidArgument


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    size: int = 1
    kind: str = "a"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ratio: float = 0.5
    on: bool = False
    roles: tuple[str, ...] = ()
    table: dict[str, str] = {}
    inner: Inner = Inner()
    maybe: Inner | None = None


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "epd.toml"
    path.write_text(
        '[worker]\nname = "file"\nratio = 0.1\nroles = ["x"]\n[worker.inner]\nsize = 2\n[worker.table]\nk = "v"\n'
        "[gateway]\nz = 1\n"
    )
    return str(path)


def test_later_sources_win(file: str) -> None:
    environ = {
        "EPD_WORKER_NAME": "environment",
        "EPD_WORKER_INNER_SIZE": "3",
        "EPD_WORKER_ON": "true",
        "EPD_WORKER_ROLES": "p, d",
    }
    found = load(Settings, "worker", file=file, environ=environ, options={"name": "option", "ratio": None})
    assert found == Settings(
        name="option", ratio=0.1, on=True, roles=("p", "d"), table={"k": "v"}, inner=Inner(size=3), maybe=None
    )


def test_an_optional_struct_appears_with_its_first_field() -> None:
    assert load(Settings, "worker", environ={"EPD_WORKER_MAYBE_KIND": "b"}, options={"name": "n"}).maybe == Inner(
        kind="b"
    )


def test_tables_in_the_environment_are_json() -> None:
    environ = {"EPD_WORKER_TABLE": '{"a": "b"}', "EPD_WORKER_NAME": "n"}
    assert load(Settings, "worker", environ=environ).table == {"a": "b"}


@pytest.mark.parametrize(
    ("environ", "options", "parts"),
    [
        ({}, {}, ["name"]),
        ({"EPD_WORKER_RATIO": "much"}, {"name": "n"}, ["environment", "ratio"]),
        ({"EPD_WORKER_TABLE": "{"}, {"name": "n"}, ["EPD_WORKER_TABLE", "JSON"]),
        ({}, {"name": "n", "inner.size": "x"}, ["options", "inner.size"]),
        ({}, {"name": "n", "nmae": "n"}, ["nmae"]),
    ],
)
def test_errors_name_source_and_field(environ: dict[str, str], options: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load(Settings, "worker", environ=environ, options=options)
    for part in parts:
        assert part in caught.value.message


def test_errors_of_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load(Settings, "worker", file=str(tmp_path / "absent.toml"), environ={})
    bad = tmp_path / "bad.toml"
    bad.write_text("[worker")
    with pytest.raises(InvalidArgument, match="not valid TOML"):
        load(Settings, "worker", file=str(bad), environ={})
    bad.write_text("[worker]\nname = 'n'\nunknown = 1\n")
    with pytest.raises(InvalidArgument, match="unknown"):
        load(Settings, "worker", file=str(bad), environ={})
