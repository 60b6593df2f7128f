"""docs/security.md promises nothing that no test shows, and knows every service."""

import re
from pathlib import Path

import pytest

from common.rpc.access import allowed_roles
from tests.unit.house.test_cases import named_in

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "security.md").read_text()
TESTS = sorted(set(re.findall(r"`([^`\s]+)::([^`]+)`", TEXT)))
PUBLIC = {"GenerationService", "GRPCInferenceService"}


@pytest.mark.parametrize(("file", "test"), TESTS, ids=str)
def test_named_test_exists(file: str, test: str) -> None:
    assert test in named_in(file)


def test_every_row_of_what_they_cannot_names_a_test() -> None:
    rows = re.findall(r"^\| (?!cannot|wanted|service|---).+\|.+\|.+\|$", TEXT, re.MULTILINE)
    assert len(rows) > 15
    for row in rows:
        assert "::" in row, row


def test_every_service_inside_the_mesh_has_its_callers() -> None:
    """A new one is for nobody until the table says for whom."""
    for file in (ROOT / "protos" / "epd" / "v1").glob("*.proto"):
        for name in re.findall(r"^service (\w+)", file.read_text(), re.MULTILINE):
            methods = re.findall(r"^  rpc (\w+)", file.read_text(), re.MULTILINE)
            if name not in PUBLIC:
                assert all(allowed_roles(f"/epd.v1.{name}/{method}") for method in methods), name
