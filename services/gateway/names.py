"""What the model name of a request stands for: a model that is served here, or another name of one."""

from collections.abc import Collection, Mapping

import msgspec

from common.errors import InvalidArgument, ModelNotFound

MAX_NAME_CHARACTERS = 256


class Served(msgspec.Struct, frozen=True):
    """name: as answers have it. model: whose tokenizer, workers and limits it has."""

    name: str
    model: str


class Names:
    """models: by their order, the first is the default; images: those of them that take images. aliases: further names,
    each with the model that it means; answers name the model, as vLLM's name its first one."""

    def __init__(self, models: Collection[str], images: Collection[str], aliases: Mapping[str, str]) -> None:
        """Raises InvalidArgument for an alias of nothing, or that is a model's name."""
        for alias, model in aliases.items():
            if model not in models:
                raise InvalidArgument(f"alias {alias!r} is of {model!r}, which is no model here", field="aliases")
            if alias in models or not 1 <= len(alias) <= MAX_NAME_CHARACTERS:
                raise InvalidArgument(
                    f"alias {alias!r} must be a name of at most {MAX_NAME_CHARACTERS} characters that no model has",
                    field="aliases",
                )
        self._models = tuple(models)
        self._images = tuple(model for model in models if model in images)
        self.aliases = dict(aliases)

    def find(self, name: str, *, images: bool = False) -> Served:
        """Without a name the first model, with images the first that takes them. Raises ModelNotFound, which tells all
        names."""
        if not name and self._models:
            name = (self._images if images and self._images else self._models)[0]
        model = self.aliases.get(name, name)
        if model in self._models:
            return Served(model, model)
        known = ", ".join(self.all()) or "none"
        raise ModelNotFound(f"model {name[:MAX_NAME_CHARACTERS]!r} is not served here; served: {known}", field="model")

    def all(self) -> list[str]:
        return sorted({*self._models, *self.aliases})
