"""The HTTP edge against the OpenAPI document that it publishes: schemathesis makes requests by it and past it."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CheckContext
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from services.gateway.openapi import BODIES
from tests.fuzz.oracle import Fault, check_words
from tests.tokenizer_files import byte_tokenizer
from tests.unit.gateway.conftest import Mesh

EXAMPLES = 40  # an operation
OPERATIONS = (
    *(
        ("/v1/chat/completions", "POST"),
        ("/v1/completions", "POST"),
        ("/v1/responses", "POST"),
        ("/tokenize", "POST"),
        ("/detokenize", "POST"),
        ("/v1/load_lora_adapter", "POST"),
        ("/v1/unload_lora_adapter", "POST"),
        ("/v1/models", "GET"),
        ("/v1/models/{model}", "GET"),
    ),
    *(("/debug/trace/{trace}", "GET"), ("/health", "GET"), ("/ready", "GET"), ("/live", "GET"), ("/metrics", "GET")),
)


class Gateway:
    """A gateway with fake workers, on an event loop of its own: schemathesis blocks."""

    def __init__(self, directory: Path) -> None:
        self._mesh = Mesh(byte_tokenizer(directory))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def __enter__(self) -> "Gateway":
        self._thread.start()
        self._run(self._mesh.start(default_timeout_seconds=5.0))
        self._run(self._mesh.pair(num_blocks=64, max_context=512))
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._mesh.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://{self._mesh.gateway.http_address}"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("model")) as made:
        yield made


def no_fault_of_ours(context: CheckContext, response: Any, case: Any) -> None:
    """No error without a name, and none that shows the program."""
    if response.status_code == 500:
        raise Fault(response.text)
    if response.status_code >= 400 and "error" in (body := response.json()):
        message = body["error"]["message"]
        for name in given_names(case):  # hypothesis likes words of our own code
            message = message.replace(name, "")
        check_words(message)


def given_names(case: Any) -> list[str]:
    """What an error may repeat: the name of a model that is not there."""
    body = case.body if isinstance(case.body, dict) else {}
    names = [*(case.path_parameters or {}).values(), body.get("model")]
    return [name for name in names if isinstance(name, str) and name]


@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=lambda each: each.strip("/"))
def test_operation(path: str, method: str, gateway: Gateway) -> None:
    schema = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    operation = schema[path][method]
    checks = [
        no_fault_of_ours,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
        unsupported_method,
        negative_data_rejection,
    ]

    @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    def one(case: Any) -> None:
        case.call_and_validate(checks=checks, timeout=30)

    one()


def test_every_field_that_is_taken_is_told(gateway: Gateway) -> None:
    document = httpx.get(f"{gateway.url}/openapi.json").json()
    for kind in BODIES:
        told = document["components"]["schemas"][kind.__name__]
        assert set(told["properties"]) == set(kind.__struct_fields__)
        assert told["additionalProperties"] is False
    routes = {path for path in document["paths"]}
    assert routes == {path for path, _ in OPERATIONS}
