"""docs/configuration.md says what the code does."""

import contextlib
import re

import pytest

from common.config import load
from common.errors import InvalidArgument
from services.gateway.settings import GatewaySettings
from services.worker_settings import WorkerSettings
from tests import configuration

TEXT = configuration.FILE.read_text()


def test_the_table_is_up_to_date() -> None:
    assert configuration.document() == TEXT, "make docs"


def test_every_variable_is_taken() -> None:
    variables = set(re.findall(r"`(EPD_(?:GATEWAY|WORKER)_\w+)` \|", TEXT))
    assert len(variables) > 120
    for variable in variables:
        kind, section = (WorkerSettings, "worker") if "EPD_WORKER" in variable else (GatewaySettings, "gateway")
        with contextlib.suppress(InvalidArgument):  # "9" is not of every setting's type
            assert load(kind, section, environ={variable: "9"}) != kind()
        with pytest.raises(InvalidArgument, match="is no setting"):
            load(kind, section, environ={f"{variable}X": "9"})
    assert load(WorkerSettings, "worker", environ={"EPD_WORKER_ENGINE_NUM_BLOCKS": "9"}).engine.num_blocks == 9


def test_the_example_in_the_document_is_valid(tmp_path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    file = tmp_path / "epd.toml"
    file.write_text(example)
    gateway = load(GatewaySettings, "gateway", file=str(file), environ={})
    assert (gateway.max_in_flight, gateway.slo.ttft_seconds) == (512, 1.0)
    assert gateway.limits["acme"].requests_per_minute == 600
    assert load(WorkerSettings, "worker", file=str(file), environ={}).engine.num_blocks == 4096


@pytest.mark.parametrize(
    "line",
    [
        "max_in_fligth = 1",
        "slo.ttft = 1",
        "routing.weights = 1",
        "limits.acme.requests = 1",
        "slo_models.mine.ttft = 1",
        "media.max_image = 1",
    ],
)
def test_unknown_names_are_refused_at_every_depth(tmp_path, line: str) -> None:
    file = tmp_path / "epd.toml"
    file.write_text(f"[gateway]\n{line}\n")
    with pytest.raises(InvalidArgument, match=r"epd\.toml"):
        load(GatewaySettings, "gateway", file=str(file), environ={})
