"""The embedded model as transformers reads it from its GGUF file: the truth for ours, made once for all tests."""

from __future__ import annotations

import fcntl
from typing import Any

import pytest
from forked_tests import shared_folder

from vllm.loader import NO_EMBEDDED_MODEL, embedded_model_path


@pytest.fixture(scope="session")
def embedded_reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A LlamaForCausalLM in float32. Taking the file apart takes transformers as long as many a test, so the first
    process that needs the model keeps it as a folder for the others."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    path = embedded_model_path()
    if path is None:
        pytest.skip(NO_EMBEDDED_MODEL)
    shared = shared_folder(tmp_path_factory)
    folder = shared / "embedded-reference"
    with open(shared / "embedded-reference.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            model = AutoModelForCausalLM.from_pretrained(
                path.parent,
                gguf_file=path.name,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
            )
            unfinished = shared / "embedded-reference-unfinished"
            model.save_pretrained(unfinished)
            unfinished.rename(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
