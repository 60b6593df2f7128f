"""buf's opinion of protos/: style, and what would break a client of the baseline.

After a release, or a change that is meant to break: `buf build protos -o protos/baseline.binpb`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROTOS = ROOT / "protos"
BASELINE = PROTOS / "baseline.binpb"


def buf(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("buf")), *arguments]
    environment = os.environ | {"BUF_CACHE_DIR": str(cache)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_lint(tmp_path: Path) -> None:
    done = buf("lint", str(PROTOS), cache=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_breaks_clients_of_the_baseline(tmp_path: Path) -> None:
    done = buf("breaking", str(PROTOS), "--against", str(BASELINE), cache=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("string id = 1;", "string name = 1;"),
        ("uint32 max_context_tokens = 2;", "string max_context_tokens = 2;"),
        ("string dtype = 3;", "string dtype = 13;"),
    ],
)
def test_a_break_is_seen(tmp_path: Path, old: str, new: str) -> None:
    changed = tmp_path / "protos"
    shutil.copytree(PROTOS, changed)
    file = changed / "epd/v1/generation.proto"
    assert file.read_text().count(old) == 1
    file.write_text(file.read_text().replace(old, new))
    done = buf("breaking", str(changed), "--against", str(BASELINE), cache=tmp_path / "cache")
    assert done.returncode != 0


def test_one_service_a_file() -> None:
    for file in sorted((PROTOS / "epd/v1").glob("*.proto")):
        services = [line for line in file.read_text().splitlines() if line.startswith("service ")]
        assert len(services) <= 1, file.name
        if services:
            assert services[0].split()[1] == f"{file.stem.title()}Service"
