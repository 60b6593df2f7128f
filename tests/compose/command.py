"""Commands with a deadline, whose failure says what they printed."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TOLD_LINES = 30


class CommandFailed(Exception):
    """With the command and the end of what it printed."""


def run(*command: str, seconds: float = 60.0, environ: Mapping[str, str] | None = None) -> str:
    """What the command prints on stdout, run in the repository's root. Raises CommandFailed, also at the deadline."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=dict(os.environ) | dict(environ or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    except FileNotFoundError:
        raise CommandFailed(f"there is no {command[0]} here") from None
    except subprocess.TimeoutExpired as expired:
        said = (expired.stderr or b"").decode(errors="replace")
        raise CommandFailed(f"{_shown(command)}: not done after {seconds:.0f} s\n{_end(said)}") from None
    if done.returncode:
        raise CommandFailed(f"{_shown(command)}: ended with {done.returncode}\n{_end(done.stdout + done.stderr)}")
    return done.stdout


def works(*command: str, seconds: float = 60.0) -> bool:
    try:
        run(*command, seconds=seconds)
    except CommandFailed:
        return False
    return True


def _shown(command: tuple[str, ...]) -> str:
    return " ".join(Path(word).name if word.startswith("/") else word for word in command)


def _end(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TOLD_LINES:])
