"""What loading a model writes into a worker's log."""

import pytest
from transformers.utils import logging

from tests.unit.engine.harness import Harness, Reference


def test_loading_draws_no_progress_bars(llama: Reference, capfd: pytest.CaptureFixture[str]) -> None:
    logging.enable_progress_bar()
    Harness.modules(llama.model_dir)
    assert "weights" not in capfd.readouterr().err
