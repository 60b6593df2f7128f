import pytest

from tests.checkpoints import ARCHITECTURES, tiny_checkpoint
from tests.unit.engine.harness import Reference
from tests.unit.engine.pictures import Gallery
from tests.vlm_checkpoints import VLM_ARCHITECTURES, vlm_checkpoint


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


@pytest.fixture(scope="session")
def galleries(tmp_path_factory):
    """Gallery by architecture, each made once, when first asked for."""
    made: dict[str, Gallery] = {}
    root = tmp_path_factory.mktemp("vlm")

    def get(architecture: str) -> Gallery:
        if architecture not in made:
            made[architecture] = Gallery(vlm_checkpoint(architecture, root))
        return made[architecture]

    return get


@pytest.fixture(params=VLM_ARCHITECTURES)
def gallery(request, galleries) -> Gallery:
    return galleries(request.param)
