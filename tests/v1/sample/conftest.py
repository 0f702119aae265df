"""One tiny model for the tests that need an engine."""

from __future__ import annotations

import pytest
from tiny_llm import make_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
