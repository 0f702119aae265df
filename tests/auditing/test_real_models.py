"""The embedded model's file and an adapter against a folder of its weights in bfloat16: readings are transformers'."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from readers_here import read_here
from tiny_adapters import make_adapter, merged

import vllm
from vllm.loader.gguf.convert import converted_folder
from vllm.loader.resolve import embedded_model_path

LABELS = [" positive", " negative", " not good"]
TEMPLATE = "Review: {text}\nThe review is"
TEXTS = ["A fine pen, I love it.", "It came on a Tuesday, in a box."]


def label_logprobs(model: Any, tokenizer: Any) -> np.ndarray:
    """float64 [texts, labels], by transformers."""
    found = np.zeros((len(TEXTS), len(LABELS)))
    for row, text in enumerate(TEXTS):
        prompt = tokenizer.encode(TEMPLATE.format(text=text))
        for column, label in enumerate(LABELS):
            ids = tokenizer.encode(label)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
            found[row, column] = float(logits.log_softmax(1)[torch.arange(len(ids)), torch.tensor(ids)].sum())
    return found


def test_a_file_and_an_adapter_against_a_folder(
    embedded_reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_here(monkeypatch)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    folder = converted_folder(Path(str(embedded_model_path())), "bfloat16")
    rounded = copy.deepcopy(embedded_reference)
    for weight in rounded.parameters():
        # Not the whole module, whose angles would be rounded, too.
        weight.data = weight.data.to(torch.bfloat16).float()
    adapter = make_adapter(tmp_path / "adapter", rounded, targets=("q_proj", "v_proj"), lora_alpha=3)
    found = vllm.audit(
        TEXTS,
        labels=LABELS,
        template=TEMPLATE,
        reference=f"{folder}:float32",
        candidates=["embedded:float32", f"adapter={adapter}"],
        max_model_len=128,
    )
    tokenizer = vllm.tokenizers.tokenizer.get_tokenizer(folder)
    own, file, adapted = (
        label_logprobs(each, tokenizer) for each in (rounded, embedded_reference, merged(rounded, adapter))
    )
    for candidate, expected in zip(found.candidates, (file, adapted), strict=True):
        table = candidate.label_tables[""]
        assert table.reference == pytest.approx(own, abs=1e-4) and table.candidate == pytest.approx(expected, abs=1e-4)
        assert candidate.labels.flips == (own.argmax(1) != expected.argmax(1)).sum()
    assert 0 < found.candidates[0].labels.kl_mean < 1e-3 < found.candidates[1].labels.kl_mean
