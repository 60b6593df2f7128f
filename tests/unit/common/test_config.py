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


def test_options_before_environment_before_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "epd.toml"
    file.write_text(
        '[gateway]\nname = "file"\nport = 1\ndtype = "bfloat16"\n[gateway.etcd]\nprefix = "/file"\n[worker]\nx = 1\n'
    )
    environ = {
        "EPD_GATEWAY_PORT": "2",
        "EPD_GATEWAY_NAME": "environment",
        "EPD_GATEWAY_ETCD_ENDPOINTS": "a:1, b:2",
        "EPD_GATEWAY_VERBOSE": "true",
        "EPD_WORKER_PORT": "3",
    }
    found = load(Settings, "gateway", file=str(file), options={"name": "option", "port": None}, environ=environ)
    assert (found.name, found.port, found.dtype, found.verbose) == ("option", 2, "bfloat16", True)
    assert found.limit_seconds is None
    assert found.etcd == EtcdSettings(endpoints=("a:1", "b:2"), prefix="/file")


def test_optional_numbers_tables_and_dotted_options() -> None:
    environ = {"EPD_GATEWAY_LIMIT_SECONDS": "2.5", "EPD_GATEWAY_WEIGHTS": '{"a": 1}'}
    found = load(Settings, "gateway", options={"name": "x", "etcd.user": "me"}, environ=environ)
    assert (found.limit_seconds, found.weights, found.etcd.user) == (2.5, {"a": 1}, "me")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", r"epd\.toml: \[gateway\] has no setting 'prot'"),
        ("etcd.endpoint = []", r"no setting 'etcd\.endpoint'"),
        ('port = "many"', r"epd\.toml: \[gateway\] port: Expected `int`"),
        ("port = ", r"epd\.toml is not valid TOML"),
        ("[gatway]\nport = 1", r"epd\.toml: there is no table \[gatway\]; there are worker, gateway"),
        ('dtype = "float8"', r"epd\.toml: \[gateway\] dtype"),
        ("port = 2", r"required field `name`"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "epd.toml"
    file.write_text(f"[gateway]\n{text}\n")
    with pytest.raises(InvalidArgument, match=message):
        load(Settings, "gateway", file=str(file), environ={})


def test_mistakes_elsewhere_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"the environment: .*port"):
        load(Settings, "gateway", options={"name": "x"}, environ={"EPD_GATEWAY_PORT": "x"})
    with pytest.raises(InvalidArgument, match=r"the options: .*'nam'"):
        load(Settings, "gateway", options={"nam": "x"}, environ={})
    with pytest.raises(InvalidArgument, match="EPD_GATEWAY_PROT is no setting"):
        load(Settings, "gateway", options={"name": "x"}, environ={"EPD_GATEWAY_PROT": "1"})
    with pytest.raises(InvalidArgument, match="EPD_GATEWAY_WEIGHTS must be a JSON object"):
        load(Settings, "gateway", environ={"EPD_GATEWAY_WEIGHTS": "a=1"})
    with pytest.raises(InvalidArgument, match="cannot be read"):
        load(Settings, "gateway", file=str(tmp_path / "gone.toml"), environ={})


def test_what_others_set_is_no_mistake() -> None:
    """Variables that Kubernetes makes of a service called epd-gateway, and those of other programs."""
    environ = {
        "EPD_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "EPD_GATEWAY_SERVICE_PORT_GRPC": "50051",
        "EPD_GATEWAY_PORT": "tcp://10.0.0.1:50051",
        "EPD_GATEWAY_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "EPD_GATEWAY_PORT_50051_TCP_ADDR": "10.0.0.1",
        "EPD_WORKER_PROT": "another role's",
        "EPD_ETCD": "etcd:2379",
        "EPD_GATEWAYS": "x",
    }
    assert load(Settings, "gateway", options={"name": "x"}, environ=environ) == Settings(name="x")
    assert load(EtcdSettings, "etcd", environ={"EPD_ETCD_BINARY": "/bin/etcd", "EPD_ETCD_USER": "me"}).user == "me"
