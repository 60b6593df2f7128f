"""`epd models`: its commands. What they need is imported when they run, as in services/cli.py."""

from pathlib import Path
from typing import Annotated

import typer

models_app = typer.Typer(
    help="Fetch, list and find models: in EPD_MODELS_DIR, else where the running mesh has its, else in your cache.",
    no_args_is_help=True,
)


def _default_model() -> str:
    from common.models.catalog import DEFAULT_MODEL

    return DEFAULT_MODEL


@models_app.command("get")
def models_get(model: Annotated[str, typer.Argument(default_factory=_default_model)]) -> None:
    """Fetch a model, once, and print its directory."""
    from services.commands import models

    print(models.get(model, models.directory()))


@models_app.command("list")
def models_list() -> None:
    """Models that are here, and those that can be fetched."""
    from services.commands import models

    models.show_list()


@models_app.command("path")
def models_path(model: Annotated[str, typer.Argument(default_factory=_default_model)]) -> None:
    """The directory of a model that is here."""
    from common.models.fetch import find_model
    from services.commands import models

    print(find_model(model, models.directory()))


@models_app.command("convert")
def models_convert(gguf: Path, name: str) -> None:
    """Make a model of a GGUF file."""
    from services.commands import models

    models.convert(gguf, name)
