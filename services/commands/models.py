"""`epd models`: fetching, listing and finding models."""

import os
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
from services.commands.run_dir import RunDir, default_run_dir


def directory() -> Path:
    """Where models are: EPD_MODELS_DIR, else as the mesh of the run directory has it, else the user's cache."""
    if not os.environ.get("EPD_MODELS_DIR") and (state := RunDir(default_run_dir()).running()) and state.models_dir:
        return Path(state.models_dir)
    return models_dir()


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
        told = ""

        def show(stage: str, done: int, total: int) -> None:
            nonlocal told
            kind = stage.partition(":")[0]
            if kind != told and not console.is_terminal:  # a log: a line for each kind of stage
                console.print(f"{model}: {kind}", highlight=False)
            told = kind
            progress.update(task, description=f"{model}: {stage}", completed=done, total=total or None)

        yield show


def get(model: str, root: Path | None = None) -> Path:
    """The model's directory, fetched when it is not there. root: the models directory, if not the default one."""
    with progress_bar(Path(model).name) as progress:
        return fetch.get_model(model, root, progress=progress)


def show_list() -> None:
    root = directory()
    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left", title_style="")
    table.title = f"models in {root}"
    for heading in ("model", "state", "MB", "from", "path", ""):
        whole = heading in ("model", "state", "MB")
        table.add_column(heading, justify="right" if heading == "MB" else "left", overflow="fold", no_wrap=whole)
    for model in fetch.list_models(root):
        state, path = ("here", str(model.path)) if model.path else ("not here", f"epd models get {model.name}")
        table.add_row(model.name, state, f"{model.size / 1e6:,.0f}", model.source, path, model.description)
    make_console().print(table)


def convert(gguf: Path, name: str) -> Path:
    """A GGUF file as a model of the models directory."""
    if not gguf.is_file() or gguf.suffix != ".gguf":
        raise InvalidArgument(f"{gguf} is not a .gguf file", field="gguf")
    if not name or name.startswith(".") or "/" in name:
        raise InvalidArgument(f"{name!r} cannot be the name of a model", field="name")
    target = directory() / name
    if target.exists():
        raise InvalidArgument(f"{target} exists already; remove it, or choose another name", field="name")
    target.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar(name) as progress:
        fetch.convert_gguf(gguf, target, name, "", str(gguf.name), progress)
    print(target, file=sys.stdout)
    return target
