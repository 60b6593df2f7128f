"""Every example, run as its header says, against `epd up` with the default models: foreign clients, unmodified."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.models.pictures import draw
from tests.serving import Serving

EXAMPLES = Path(__file__).parents[2] / "examples"
TRACE = EXAMPLES / "traces" / "mooncake-conversation.jsonl"
SECONDS = 600.0  # a bound for broken code

PICTURE = next(drawn for drawn in map(draw, range(100)) if drawn.background == "green" and len(drawn.things) == 1)
CLIENTS = Path(__file__).parents[1] / "clients" / "foreign_clients.py"  # of those whose packages do not go with ours


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("examples"), "--dtype", "float32") as serving:
        yield serving


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "picture.png"
    path.write_bytes(PICTURE.png())
    return str(path)


def run(serving: Serving, name: str, *arguments: str) -> str:
    """Its output. It must end well."""
    path = EXAMPLES / name
    starter = {".py": [sys.executable], ".mjs": ["node"], ".sh": []}[path.suffix]
    command = [*starter, str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=serving.client_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_grpc_in_python(serving: Serving) -> None:
    shown = run(serving, "grpc_stream.py", "What is the capital of France?")
    assert shown.startswith("The capital of France is Paris.\n8 tokens, first after ")
    assert "prefill.forward prefill-0" in shown
    assert "epd trace " in shown


def test_a_picture_by_grpc(serving: Serving, picture: str) -> None:
    shown = run(serving, "grpc_image.py", picture)
    assert shown.startswith("> What colour is the background?\ngreen\n")
    assert "encoded by encode-0" in shown
    assert "images known the second time: 1" in shown


def test_openais_client(serving: Serving) -> None:
    lines = run(serving, "openai_chat.py").splitlines()
    assert lines[0] == lines[-2] == "The capital of France is Paris."
    assert lines[1].startswith("8 tokens; ")
    assert lines[2].startswith("[0] ")
    assert lines[3].startswith("[1] ")
    assert lines[4].startswith("'The' ")
    assert [line for line in lines if line.startswith("[0]' Paris")]
    assert [line for line in lines if line.startswith("[1]' Rome")]
    assert lines[-1] == "8 tokens"


def test_openais_client_with_a_picture(serving: Serving, picture: str) -> None:
    assert run(serving, "openai_image.py", picture) == "green\n"


def test_openais_client_with_schemas_and_tools(serving: Serving) -> None:
    lines = run(serving, "openai_structured.py").splitlines()
    assert lines[0] in {f"{city} {truth}" for city in ("Paris", "Rome") for truth in (True, False)}
    assert lines[1].startswith("Weather(sky='")
    assert lines[2] in ("tool_calls: temperature({'city': 'Rome'})", "tool_calls: temperature({'city': 'Paris'})")
    assert lines[-1] in ("call temperature: {'city': 'Rome'}", "call temperature: {'city': 'Paris'}")


def test_openais_client_and_errors(serving: Serving) -> None:
    lines = [line for line in run(serving, "openai_errors.py").splitlines() if not line.startswith("  request ")]
    expected = [
        "BadRequestError 400 invalid_argument temperature:",
        "NotFoundError 404 model_not_found model:",
        "BadRequestError 400 context_too_long ",
        "BadRequestError 400 invalid_argument wibble:",
        "BadRequestError 400 invalid_argument messages[0].content[0]:",
    ]
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


def test_prompt_log_probabilities_choose_the_right_answers(serving: Serving) -> None:
    assert run(serving, "evaluate.py").endswith("accuracy 4/4\n")


def test_kserve(serving: Serving) -> None:
    shown = run(serving, "kserve_grpc.py")
    assert ", in: text_input, " in shown
    assert "\n Paris." in shown
    assert "8 tokens, length" in shown
    assert "\n Rome|" in shown


def test_curl(serving: Serving, picture: str) -> None:
    shown = run(serving, "curl.sh", picture)
    models, answer, *events, image, error, ready = filter(None, shown.splitlines())
    assert [model["id"] for model in json.loads(models)["data"]] == ["SmolLM2-135M-Instruct", "picture-vlm"]
    assert json.loads(answer)["id"] == "chatcmpl-example-1"
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == " Paris"
    assert json.loads(image)["choices"][0]["message"]["content"] == "green"
    assert json.loads(error)["error"]["param"] == "temperature"
    assert ready == "ready: 200"


def test_grpcurl(serving: Serving, picture: str) -> None:
    shown = run(serving, "grpcurl.sh", picture)
    for part in ("epd.v1.GenerationService\n", "optional float temperature = 1;", '"SERVING"', '"images": true'):
        assert part in shown
    assert '"text": " Paris"' in shown
    assert '"text": "green"' in shown
    assert "text_output" in shown
    assert "epd-reason: INVALID_ARGUMENT" in shown
    assert "epd-field: temperature" in shown


def test_buf_curl(serving: Serving) -> None:
    shown = run(serving, "buf_curl.sh")
    assert "epd.v1.GenerationService/Generate\n" in shown
    assert '"text": " Paris"' in shown
    assert '"decodeWorker": "decode-0"' in shown


def test_node(serving: Serving, picture: str) -> None:
    shown = run(serving, "node/generate.mjs")
    assert shown.startswith("The capital of France is Paris.\n8 tokens, epd trace ")
    assert "\ncancelled\nINVALID_ARGUMENT INVALID_ARGUMENT temperature: " in shown
    assert run(serving, "node/generate.mjs", "What colour is the background?", picture).startswith("green\n")


def test_epd_bench(serving: Serving, tmp_path: Path) -> None:
    """The command, its exit code and its files; both ways in, a trace, pictures."""
    for number, options in enumerate(
        (
            ("--rate", "5", "--requests", "4", "--images", "0.5", "--plot", str(tmp_path / "plot.svg")),
            ("--http", serving.http, "--concurrency", "2", "--requests", "4"),
            ("--trace", str(TRACE), "--limit", "3", "--length-scale", "0.01"),
        )
    ):
        file = tmp_path / f"{number}.json"
        sizes = ("--prompt-tokens", "8-16", "--output-tokens", "3", "--warm-up", "1", "--timeout", str(SECONDS))
        done = serving.epd("bench", *options, *sizes, "--output", str(file))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "attainment" in done.stdout
        (result,) = json.loads(file.read_text())["runs"]
        assert result["summary"]["answered"] == len(result["outcomes"]) == (3 if number == 2 else 4), result["outcomes"]
        assert all(each["output_tokens"] >= 1 for each in result["outcomes"])
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_no_example_is_left_out() -> None:
    names = [str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".sh", ".mjs")]
    ours = [name for name in names if "node_modules" not in name]
    assert len(ours) > 10
    here, elsewhere = Path(__file__).read_text(), CLIENTS.read_text()
    for name in ours:
        assert (f'run(serving, "{name}"' in here) != (f'"{name}"' in elsewhere), name
