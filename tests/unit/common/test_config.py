import logging
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from common.config import load
from common.errors import InvalidArgument
from common.registry.settings import EtcdSettings


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    port: int = 50051
    dtype: Literal["float32", "bfloat16"] = "float32"
    verbose: bool = False
    limit_seconds: float | None = None
    weights: dict[str, int] = {}
    etcd: EtcdSettings = EtcdSettings()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "epd.toml"
    path.write_text('[gateway]\nname = "file"\nport = 1\ndtype = "bfloat16"\n[gateway.etcd]\nprefix = "/file"\n')
    return path


def test_flags_before_environment_before_file_before_defaults(file: Path) -> None:
    found = load(
        Settings,
        flags={"name": "flag", "port": None},
        env={"EPD_PORT": "2", "EPD_NAME": "env", "EPD_ETCD_ENDPOINTS": "a:1, b:2", "EPD_VERBOSE": "true", "HOME": "/"},
        file=file,
        section="gateway",
    )
    assert found.name == "flag"
    assert found.port == 2
    assert found.dtype == "bfloat16"
    assert found.verbose is True
    assert found.limit_seconds is None
    assert found.etcd == EtcdSettings(endpoints=("a:1", "b:2"), prefix="/file")


def test_optional_numbers_dicts_and_dotted_flags() -> None:
    env = {"EPD_LIMIT_SECONDS": "2.5", "EPD_WEIGHTS": '{"a": 1}'}
    found = load(Settings, flags={"name": "x", "etcd.user": "me"}, env=env)
    assert (found.limit_seconds, found.weights, found.etcd.user) == (2.5, {"a": 1}, "me")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", r"unknown setting 'prot' from .*epd\.toml; did you mean 'port'"),
        ("[etcd]\nendpoint = []", r"unknown setting 'etcd\.endpoint'"),
        ('port = "many"', r"setting 'port' from .*epd\.toml: Expected `int`"),
        ("port = ", r"epd\.toml: Invalid value"),
        ('dtype = "float8"', r"setting 'dtype'"),
        ("port = 2", r"required field `name`"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "epd.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        load(Settings, env={}, file=path)


def test_mistakes_elsewhere_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="setting 'port' from EPD_PORT"):
        load(Settings, env={"EPD_PORT": "x"})
    with pytest.raises(InvalidArgument, match="unknown setting 'nam' from --nam"):
        load(Settings, flags={"nam": "x"}, env={})
    with pytest.raises(InvalidArgument, match="EPD_WEIGHTS must be a JSON object"):
        load(Settings, env={"EPD_WEIGHTS": "a=1"})
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load(Settings, env={}, file=tmp_path / "gone.toml")


def test_mistyped_variable_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    load(Settings, flags={"name": "x"}, env={"EPD_ETCD_ENDPOINT": "a:1", "EPD_ETCD_BINARY": "/bin/etcd"})
    assert [record.getMessage() for record in caplog.records] == [
        "EPD_ETCD_ENDPOINT is not a setting; did you mean EPD_ETCD_ENDPOINTS?"
    ]
