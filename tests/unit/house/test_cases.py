"""docs/cases.md names every case, each with tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
REQUIRED = [
    *(f"A{number}" for number in range(1, 19)),
    *(f"B{number}" for number in range(1, 11)),
    *(f"C{number}" for number in range(1, 15)),
    *(f"D{number}" for number in range(1, 15)),
    *(f"E{number}" for number in range(1, 5)),
]
_ROW = re.compile(r"^\| ([A-E]\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`([^`]+)::([^`]+)`")


def cases(text: str) -> dict[str, list[tuple[str, str]]]:
    """(file, test) pairs of every case of the tables. Raises ValueError for a case that is there twice."""
    found: dict[str, list[tuple[str, str]]] = {}
    for case, _, tests in _ROW.findall(text):
        if case in found:
            raise ValueError(f"{case} is there twice")
        found[case] = _TEST.findall(tests)
    return found


@cache
def named_in(file: str) -> frozenset[str]:
    """Names of the test functions of a file below tests/, as written in its source."""
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


CASES = cases((ROOT / "docs" / "cases.md").read_text())


@pytest.mark.parametrize("case", REQUIRED)
def test_case_has_tests(case: str) -> None:
    assert CASES[case]


@pytest.mark.parametrize(("file", "test"), sorted({pair for pairs in CASES.values() for pair in pairs}), ids=str)
def test_named_test_exists(file: str, test: str) -> None:
    assert test in named_in(file)


def test_what_is_missing_is_found() -> None:
    assert cases("| A1 | right | `unit/x.py::test_y` |\n| A2 | right | none |") == {
        "A1": [("unit/x.py", "test_y")],
        "A2": [],
    }
    assert not named_in("unit/x.py")
    assert "cases" not in named_in("unit/house/test_cases.py")
    with pytest.raises(ValueError, match="A1"):
        cases("| A1 | a | b |\n| A1 | a | b |")
