"""Quantised weights on a CUDA device, which is pretended: all of their tensors are there."""

from __future__ import annotations

import pytest
from layouts import ON_CUDA
from pretend_cuda import pretending
from quantized_models import assert_reads, generate, make_llm, make_quantized
from test_formats import ROWS, only_blocks


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=ON_CUDA)
        for name in ("gptq-4-asym", "gptq-desc-act", "squeezellm-sparse", "nvfp4", "fp8")
    ],
)
def test_readings_on_the_device(name, tmp_path):
    row = ROWS[name]
    quantized = make_quantized(tmp_path, only_blocks(row.pack), row.settings, num_hidden_layers=1)
    with pretending():
        outputs = generate(make_llm(tmp_path, device="cuda", enforce_eager=True))
    assert_reads(outputs, quantized.model)
