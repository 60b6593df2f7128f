import pytest

from tests.checkpoints import ARCHITECTURES, tiny_checkpoint
from tests.unit.engine.harness import Reference


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """Reference by architecture, each made once, when first asked for."""
    made: dict[str, Reference] = {}

    def get(architecture: str) -> Reference:
        if architecture not in made:
            directory = tmp_path_factory.mktemp(architecture)
            made[architecture] = Reference(tiny_checkpoint(architecture, directory))
        return made[architecture]

    return get


@pytest.fixture(params=ARCHITECTURES)
def reference(request, references) -> Reference:
    return references(request.param)


@pytest.fixture
def llama(references) -> Reference:
    return references("llama")
