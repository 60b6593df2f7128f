import asyncio
import gc
import io
import json
import logging
from collections.abc import Iterator

import pytest

from common import errors, telemetry
from common.log import setup_logging

SECRET = "canary-4711"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield io.StringIO()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def test_json_lines_carry_service_and_trace(stream: io.StringIO) -> None:
    setup_logging("gateway", stream=stream)
    owner = telemetry.setup("gateway")
    logging.getLogger("mine").info("hello %s", "world")
    with owner.start_span("gateway.generate"):
        ids = telemetry.current_trace_ids()
        logging.getLogger("mine").warning("inside")
    outside, inside = map(json.loads, stream.getvalue().splitlines())
    assert (outside["level"], outside["service"], outside["message"]) == ("INFO", "gateway", "hello world")
    assert "trace_id" not in outside
    assert (inside["trace_id"], inside["span_id"]) == ids


@pytest.mark.parametrize(("wanted", "begin"), [("json", "{"), ("PRETTY", "1"), ("pretty", "1"), ("", "{")])
def test_the_environment_names_form_and_level(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, wanted: str, begin: str
) -> None:
    monkeypatch.setenv("EPD_LOG_FORMAT", wanted)
    monkeypatch.setenv("EPD_LOG_LEVEL", "warning")
    monkeypatch.setattr("time.strftime", lambda *_: "12:00:00")
    setup_logging("decode", stream=stream)
    log = logging.getLogger("mine")
    log.info("left out")
    log.warning("told")
    (line,) = stream.getvalue().splitlines()
    assert line.startswith(begin)


@pytest.mark.parametrize("name", ["EPD_LOG_FORMAT", "EPD_LOG_LEVEL"])
def test_variables_that_say_something_else_are_refused(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "loud")
    with pytest.raises(errors.InvalidArgument, match=name):
        setup_logging("decode", stream=stream)


def test_pretty_lines(stream: io.StringIO) -> None:
    setup_logging("decode", stream=stream, as_json=False)
    logging.getLogger("mine").warning("attention")
    assert stream.getvalue().endswith("WARNING decode attention\n")


@pytest.mark.parametrize("as_json", [True, False])
def test_text_of_foreign_exceptions_is_left_out(stream: io.StringIO, as_json: bool) -> None:
    setup_logging("gateway", stream=stream, as_json=as_json)

    def fail() -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as cause:
            raise ValueError(f"cannot read {SECRET}") from cause

    try:
        fail()
    except ValueError:
        logging.getLogger("mine").exception("failed")
    written = stream.getvalue()
    assert SECRET not in written
    assert "KeyError" in written
    assert "ValueError" in written
    assert "in fail" in written


def test_our_own_errors_keep_their_text(stream: io.StringIO) -> None:
    setup_logging("gateway", stream=stream)
    try:
        raise errors.Unavailable("etcd is away")
    except errors.Unavailable:
        logging.getLogger("mine").exception("failed")
    assert "Unavailable: etcd is away" in json.loads(stream.getvalue())["exception"]


async def test_lost_task_exceptions_do_not_leak(stream: io.StringIO) -> None:
    setup_logging("gateway", stream=stream)

    async def fail() -> None:
        raise ValueError(SECRET)

    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    del task
    gc.collect()
    assert "never retrieved" in stream.getvalue()
    assert SECRET not in stream.getvalue()
