"""Adapters over quantised weights: readings are those of the de-quantised weights with the adapter added."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapted_models import check_adapters
from quantized_models import make_llm, make_quantized
from test_formats import ROWS, only_blocks
from test_on_load import make_rounded

pytestmark = pytest.mark.usefixtures("one_thread")

# Codes with scales of groups, in another order, of rows, of blocks, of values in a table.
FORMATS = ("gptq-desc-act", "awq-64", "int8", "fp8-block", "nf4")


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    quantized = make_quantized(tmp_path / "model", only_blocks(row.pack), row.settings, where=row.where)
    check_adapters(make_llm(quantized.folder, enable_lora=True, max_loras=2), quantized.model, tmp_path)


def test_weights_that_are_rounded_when_they_are_loaded(tmp_path: Path) -> None:
    model = make_rounded("fp8", tmp_path / "model")
    check_adapters(make_llm(tmp_path / "model", quantization="fp8", enable_lora=True, max_loras=2), model, tmp_path)
