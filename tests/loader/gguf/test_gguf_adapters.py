"""Adapters over the blocks of a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapted_models import check_adapters
from quantized_models import make_llm
from test_gguf_blocks import write

pytestmark = pytest.mark.usefixtures("one_thread")


def test_blocks_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose queries and keys have another order than the adapter's."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    model = write(tmp_path / "m.gguf", {"v_proj": "Q6_K", "down_proj": "Q8_0", "up_proj": "BF16", "": "Q4_K"})
    options = {"quantization": "gguf", "enable_lora": True, "max_loras": 2}
    check_adapters(make_llm(tmp_path / "m.gguf", **options), model, tmp_path)
