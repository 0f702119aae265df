"""Weights of each format of checkpoints are mapped with the bits that they would be packed to."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed_starts import check_starts, needs_kernels, packed  # noqa: F401 - a fixture
from quantized_models import make_quantized
from test_formats import ROWS, method_of, only_blocks

pytestmark = needs_kernels


# One of each method; the rows of one differ in what panels hold, not in what is kept.
NAMES = list({method_of(name): name for name in ROWS}.values())


@pytest.mark.parametrize("name", NAMES)
def test_starts_have_the_same_bits(name: str, tmp_path: Path, packed: Path) -> None:  # noqa: F811
    row = ROWS[name]
    folder = make_quantized(tmp_path / "model", only_blocks(row.pack), row.settings, where=row.where).folder
    check_starts(folder, quantization=method_of(name))
