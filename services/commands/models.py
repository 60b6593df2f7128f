"""`epd models`: fetching, listing and finding models."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.errors import InvalidArgument
from common.models import checkpoint, fetch
from common.models.catalog import models_dir
from services.commands.render import make_console


@contextmanager
def progress_bar(model: str) -> Iterator[checkpoint.Progress]:
    """A bar on stderr for as long as something takes time."""
    console = make_console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(model, total=None)

        def show(stage: str, done: int, total: int) -> None:
            progress.update(task, description=f"{model}: {stage}", completed=done, total=total or None)

        yield show


def get(model: str) -> Path:
    """The model's directory, fetched when it is not there."""
    with progress_bar(Path(model).name) as progress:
        return fetch.get_model(model, progress=progress)


def show_list() -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("model", "MB", "from", "path", ""):
        table.add_column(heading, justify="right" if heading == "MB" else "left", overflow="fold")
    for model in fetch.list_models():
        path = str(model.path) if model.path else f"not here; epd models get {model.name}"
        table.add_row(model.name, f"{model.size / 1e6:,.0f}", model.source, path, model.description)
    make_console().print(table)


def convert(gguf: Path, name: str) -> Path:
    """A GGUF file as a model of the models directory."""
    if not gguf.is_file() or gguf.suffix != ".gguf":
        raise InvalidArgument(f"{gguf} is not a .gguf file", field="gguf")
    if not name or name.startswith(".") or "/" in name:
        raise InvalidArgument(f"{name!r} cannot be the name of a model", field="name")
    target = models_dir() / name
    if target.exists():
        raise InvalidArgument(f"{target} exists already; remove it, or choose another name", field="name")
    target.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar(name) as progress:
        fetch.convert_gguf(gguf, target, name, "", str(gguf.name), progress)
    print(target, file=sys.stdout)
    return target
