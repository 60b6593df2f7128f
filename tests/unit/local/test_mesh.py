"""How a local mesh is laid out, and its run directory."""

import os
import socket
import stat
from pathlib import Path

import pytest

from common.errors import AddressTaken, EpdError, InvalidArgument
from services.commands.checks import check_config, check_ports
from services.commands.mesh import MeshOptions, Pool, process_specs, threads_per_worker
from services.commands.run_dir import MeshState, RunDir


@pytest.mark.parametrize(
    ("workers", "cores", "threads"), [(2, 2, 1), (1, 2, 1), (4, 2, 1), (2, 8, 3), (1, 8, 7), (2, 1, 1)]
)
def test_threads_fit_the_cores(workers: int, cores: int, threads: int) -> None:
    assert threads_per_worker(workers, cores) == threads


def test_every_process_of_the_default_mesh(tmp_path: Path) -> None:
    options = MeshOptions(model="m")
    m = Pool(served="m", directory=Path("/models/m"), workers=options.workers_of(0), aliases={"t": Path("/models/t")})
    specs = process_specs(options, [m], tmp_path, tmp_path / "s", "127.0.0.1:4")
    assert [spec.name for spec in specs] == ["etcd", "gateway", "encode-0", "prefill-0", "decode-0"]
    assert specs[1].arguments[1:3] == ("t=/models/t", "m=/models/m")
    for spec in specs[2:]:
        assert spec.arguments[spec.arguments.index("--aliases") + 1] == "t"
        assert spec.environment["OMP_WAIT_POLICY"] == "passive"
        assert spec.environment["OMP_NUM_THREADS"] == spec.arguments[spec.arguments.index("--threads") + 1]


def test_counts_and_options_reach_the_workers(tmp_path: Path) -> None:
    options = MeshOptions(
        model="m",
        encode=0,
        prefill=2,
        decode=0,
        aggregated=1,
        dtype="float32",
        num_blocks=64,
        etcd="h:1",
        threads=3,
        served_name="x",
    )
    x = Pool(served="x", directory=Path("/models/m"), workers=options.workers_of(0))
    specs = process_specs(options, [x], tmp_path, tmp_path / "s", "h:1")
    assert [spec.name for spec in specs] == ["gateway", "prefill-0", "prefill-1", "both-0"]
    line = " ".join(specs[3].arguments)
    for part in ("--roles prefill,decode", "--dtype float32", "--num-blocks 64", "--etcd h:1", "--threads 3"):
        assert part in line
    assert specs[0].arguments[1] == "x=/models/m"


def test_several_models_have_workers_of_their_own(tmp_path: Path) -> None:
    options = MeshOptions(model="a", more=("b", "c"), prefill=2)
    options.validate()
    made = [
        Pool(served=name, directory=Path("/models") / name, workers=options.workers_of(i, images=name == "b"))
        for i, name in enumerate(options.models)
    ]
    gateway, *workers = process_specs(options, made, tmp_path, tmp_path / "s", "h:1")[1:]
    assert gateway.arguments[1:4] == ("a=/models/a", "b=/models/b", "c=/models/c")
    served = {spec.name: spec.arguments[spec.arguments.index("--served-name") + 1] for spec in workers}
    assert served == {
        **{"prefill-0": "a", "prefill-1": "a", "decode-0": "a"},
        **{"encode-1": "b", "prefill-2": "b", "prefill-3": "b", "decode-1": "b"},
        **{"prefill-4": "c", "prefill-5": "c", "decode-2": "c"},
    }


def test_one_name_for_several_models_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--served-name"):
        MeshOptions(model="a", more=("b",), served_name="x").validate()


@pytest.mark.parametrize("counts", [(0, 1, 0), (1, 0, 0), (0, 0, 0), (1, 1, -1)])
def test_a_mesh_that_could_not_answer_is_refused(counts: tuple[int, int, int]) -> None:
    prefill, decode, aggregated = counts
    with pytest.raises(InvalidArgument):
        MeshOptions(model="m", prefill=prefill, decode=decode, aggregated=aggregated).validate()


def test_a_taken_port_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(AddressTaken) as caught:
            check_ports(MeshOptions(model="m", grpc_port=port))
    for part in (str(port), "this process", "--grpc-port"):
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[gateway]\nnonsense = 1", "nonsense"),
        ("[worker]\nnonsense = 1", "nonsense"),
        ("[worker.engine]\ntoken_budget = 'x'", "token_budget"),
        ("[worker.engine]\ntoken_budget = -4", "token_budget: Expected `int` >= 1"),
        ("[gateway.identity]\nsource = 'file'\nfile = '/nowhere.yaml'", "/nowhere.yaml"),
        ("[gateway.identity]\nsource = 'etcd'", "EPD_API_KEY"),
    ],
)
def test_mistakes_of_the_file_are_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    monkeypatch.delenv("EPD_API_KEY", raising=False)
    file = tmp_path / "mesh.toml"
    file.write_text(text)
    options = MeshOptions(model="m", config=str(file))
    with pytest.raises(EpdError, match=told):
        check_config(options)
    file.write_text("[gateway]\nhold_seconds = 3.0\n[worker]\ndrain_seconds = 3.0")
    check_config(options)


def state(pid: int = 1) -> MeshState:
    return MeshState(pid=pid, model="m", grpc="127.0.0.1:1", http="127.0.0.1:2", etcd="127.0.0.1:3")


def test_one_mesh_a_run_directory(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path / "run"), RunDir(tmp_path / "run")
    assert second.running() is None
    first.acquire()
    assert stat.S_IMODE(os.stat(first.path).st_mode) == 0o700
    first.write_state(state(7))
    running = second.running()
    assert running is not None
    assert running.pid == 7
    with pytest.raises(AddressTaken, match="pid 7"):
        second.acquire()
    first.release()
    assert second.running() is None
    second.acquire()
    second.release()


def test_an_open_directory_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    run = RunDir(tmp_path / "run")
    run.acquire()
    assert stat.S_IMODE(os.stat(run.path).st_mode) == 0o700
    run.release()


def test_sockets_of_a_deep_directory_go_elsewhere(tmp_path: Path) -> None:
    """The whole path of a unix socket has 107 bytes at most."""
    run = RunDir(tmp_path / ("d" * 80) / "run")
    run.acquire()
    assert len(str(run.sockets)) < 70
    assert stat.S_IMODE(os.stat(run.sockets).st_mode) == 0o700
    run.release()
    assert not run.sockets.exists()
