"""Options that the command line itself refuses, and where the models of the commands are."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.errors import InvalidArgument
from common.models.catalog import DEFAULT_MODEL, models_dir
from services.cli import app
from services.commands import models
from services.commands.run_dir import MeshState, RunDir


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port"])
@pytest.mark.parametrize("port", ["70000", "0", "-1", "65536"])
def test_ports_that_do_not_exist(option: str, port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_RUN_DIR", str(tmp_path / "run"))
    result = CliRunner().invoke(app, ["up", option, port])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)  # no traceback
    assert option in result.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_ports_of_a_worker(option: str) -> None:
    result = CliRunner().invoke(app, ["worker", option, "65536"])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert option in result.output


@pytest.mark.parametrize(
    "command", [["etcd", "--address", "127.0.0.1:port"], ["worker", "--roles", "decode", "--etcd", "a:b"]]
)
def test_an_address_without_a_port(command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, InvalidArgument)
    assert "is not host:port" in result.exception.message


def test_models_are_where_the_running_mesh_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EPD_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("EPD_MODELS_DIR", raising=False)
    assert models.directory() == models_dir() == tmp_path / "cache" / "epd-mesh" / "models"
    theirs = tmp_path / "theirs"
    (theirs / "tiny").mkdir(parents=True)
    (theirs / "tiny" / "config.json").write_text("{}")
    run = RunDir(tmp_path / "run")
    run.acquire()
    try:
        run.write_state(MeshState(pid=1, model="m", grpc="h:1", http="h:2", etcd="h:3", models_dir=str(theirs)))
        assert models.directory() == theirs
        models.show_list()
        lines = capsys.readouterr().out.splitlines()
        assert str(theirs) in "".join(lines[:2])
        assert [line.split()[1] for line in lines if line.startswith("tiny ")] == ["here"]
        assert [line.split()[1:3] for line in lines if line.startswith(f"{DEFAULT_MODEL} ")] == [["not", "here"]]
        monkeypatch.setenv("EPD_MODELS_DIR", str(tmp_path / "mine"))
        assert models.directory() == tmp_path / "mine"
    finally:
        run.release()
