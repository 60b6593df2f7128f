"""Programs of others, unmodified, from an environment of their own, against `epd up`: `make clients-test`.

Not named like a test, so that `make test` leaves it out: what they install is larger than the mesh, and does not go
with its protobuf.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.models.catalog import DEFAULT_MODEL
from common.models.fetch import find_model
from tests.serving import ROOT, Serving

BIN = Path(os.environ["EPD_CLIENTS"])  # bin/ of their environment
HERE = Path(__file__).parent
SECONDS = 900.0  # a bound for broken code


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("clients"), "--dtype", "float32") as serving:
        yield serving


def run(serving: Serving, directory: Path, *command: str) -> str:
    environment = serving.client_environment | {"HF_HOME": str(directory / "hub")}
    environment.pop("PYTHONPATH")  # theirs must not see our packages
    options = {"capture_output": True, "text": True, "timeout": SECONDS, "env": environment, "cwd": directory}
    done = subprocess.run([str(BIN / command[0]), *command[1:]], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tritons_client(serving: Serving, tmp_path: Path) -> None:
    shown = run(serving, tmp_path, "python", str(ROOT / "examples" / "kserve_triton.py"))
    assert shown.startswith(" Paris")
    assert "\n Rome|" in shown


def test_aiperf(serving: Serving, tmp_path: Path) -> None:
    run(
        serving,
        tmp_path,
        *("aiperf", "profile", "--model", DEFAULT_MODEL, "--tokenizer", str(find_model(DEFAULT_MODEL))),
        *("--url", serving.http, "--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *(
            "--isl",
            "24",
            "--osl",
            "4",
            "--extra-inputs",
            "ignore_eos:true",
            "--request-count",
            "4",
            "--concurrency",
            "2",
        ),
        *("--no-gpu-telemetry", "--no-server-metrics", "--ui", "none", "--artifact-dir", str(tmp_path / "out")),
    )
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 4
    assert found["output_sequence_length"]["avg"] == 4
    assert found["time_to_first_token"]["avg"] > 0


def test_lm_evaluation_harness(serving: Serving, tmp_path: Path) -> None:
    for name in ("capitals.yaml", "capitals.jsonl"):
        (tmp_path / name).write_bytes((HERE / name).read_bytes())
    url, tokenizer = f"{serving.http}/v1/completions", find_model(DEFAULT_MODEL)
    model = f"model={DEFAULT_MODEL},base_url={url},tokenizer={tokenizer},tokenizer_backend=huggingface"
    shown = run(
        serving,
        tmp_path,
        *("lm_eval", "--model", "local-completions", "--model_args", model),
        *("--tasks", "capitals", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")),
    )
    assert "capitals" in shown
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["capitals"]["acc,none"] == 1.0
