"""What the model name of a request stands for: a model that is served here, another name of one, or a LoRA adapter."""

from collections.abc import Callable, Collection, Mapping

import msgspec

from common.errors import InvalidArgument, ModelNotFound

MAX_NAME_CHARACTERS = 256


class Adapter(msgspec.Struct, frozen=True):
    """checksum: of its files. model: its base model."""

    checksum: str
    model: str


class Served(msgspec.Struct, frozen=True):
    """name: as answers have it. model: whose tokenizer, workers and limits it has. adapter: its checksum, or empty."""

    name: str
    model: str
    adapter: str = ""


class Names:
    """models: by their order, the first is the default; images: those of them that take images. aliases: further names,
    each with the model that it means; answers name the model, as vLLM's name its first one. adapters: by name, as they
    are now."""

    def __init__(
        self,
        models: Collection[str],
        images: Collection[str],
        aliases: Mapping[str, str],
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
    ) -> None:
        """Raises InvalidArgument for an alias of nothing, or that is a model's name."""
        for alias, model in aliases.items():
            if model not in models:
                raise InvalidArgument(f"alias {alias!r} is of {model!r}, which is no model here", field="aliases")
            if alias in models or not 1 <= len(alias) <= MAX_NAME_CHARACTERS:
                raise InvalidArgument(
                    f"alias {alias!r} must be a name of at most {MAX_NAME_CHARACTERS} characters that no model has",
                    field="aliases",
                )
        self.models = tuple(models)
        self._images = tuple(model for model in models if model in images)
        self.aliases = dict(aliases)
        self._adapters = adapters

    def is_model(self, name: str) -> bool:
        return name in self.models or name in self.aliases

    def find(self, name: str, *, images: bool = False) -> Served:
        """Without a name the first model, with images the first that takes them. Raises ModelNotFound, which tells all
        names."""
        if not name and self.models:
            name = (self._images if images and self._images else self.models)[0]
        model = self.aliases.get(name, name)
        if model in self.models:
            return Served(model, model)
        adapter = self._adapters().get(name)
        if adapter is not None and adapter.model in self.models:
            return Served(name, adapter.model, adapter.checksum)
        raise self._not_found(name, self.all())

    def find_model(self, name: str) -> str:
        """As `find`, of models alone."""
        if not self.is_model(name) and name:
            raise self._not_found(name, sorted({*self.models, *self.aliases}))
        return self.find(name).model

    def adapters(self) -> dict[str, Adapter]:
        """Those whose base model is served here, and that no model's name hides."""
        return {
            name: adapter
            for name, adapter in sorted(self._adapters().items())
            if adapter.model in self.models and not self.is_model(name)
        }

    def all(self) -> list[str]:
        return sorted({*self.models, *self.aliases, *self.adapters()})

    def _not_found(self, name: str, known: Collection[str]) -> ModelNotFound:
        told = f"model {name[:MAX_NAME_CHARACTERS]!r} is not served here; served: {', '.join(known) or 'none'}"
        return ModelNotFound(told, field="model")
