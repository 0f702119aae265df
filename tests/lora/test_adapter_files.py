"""A damaged adapter, or one that cannot be served, is refused by name; nothing changes then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_util import make_random_model
from safetensors.torch import load_file, save_file
from tiny_adapters import PREFIX, make_adapter

from vllm import LLM
from vllm.lora.request import LoRARequest
from vllm.v1.features.adapters.adapter import read_adapter

SIDE_A, SIDE_B = f"{PREFIX}model.layers.1.mlp.side.lora_A.weight", f"{PREFIX}model.layers.1.mlp.side.lora_B.weight"
A, B = f"{PREFIX}model.layers.1.mlp.up_proj.lora_A.weight", f"{PREFIX}model.layers.1.mlp.up_proj.lora_B.weight"


def set_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def set_tensors(**tensors: Any) -> Callable[[Path], None]:
    """None takes one away."""

    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        kept = load_file(path) | {{"A": A, "B": B}.get(name, name): value for name, value in tensors.items()}
        save_file({name: value for name, value in kept.items() if value is not None}, path)

    return change


def write(name: str, text: str | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text)

    return change


# Damages to a good adapter, and what the error must name.
DAMAGES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no configuration": (write("adapter_config.json", None), ["has no adapter_config.json"]),
    "no weights": (write("adapter_model.safetensors", None), ["adapter_model.safetensors", "adapter_model.bin"]),
    "no JSON": (write("adapter_config.json", "{"), ["adapter_config.json", "JSON"]),
    "no object": (write("adapter_config.json", "[]"), ["adapter_config.json", "list"]),
    "cut weights": (write("adapter_model.safetensors", "abc"), ["adapter_model.safetensors"]),
    "another method": (set_config(peft_type="IA3"), ["peft_type", "IA3"]),
    "no rank": (set_config(r=0), ["r must", "0"]),
    "no alpha": (set_config(lora_alpha="a"), ["lora_alpha", "'a'"]),
    "a changed base": (set_config(init_lora_weights="pissa"), ["init_lora_weights", "pissa"]),
    "an unknown option": (set_config(alora_invocation_tokens=[1, 2]), ["alora_invocation_tokens=[1, 2]"]),
    "no pattern": (set_config(rank_pattern={"(": 3}), ["rank_pattern", "("]),
    "no rank in a pattern": (set_config(rank_pattern={"x": 0}), ["rank_pattern", "'x'", "0"]),
    "another rank": (set_config(r=5), ["down_proj", "rank 4", "5"]),
    "rank above": (set_tensors(A=torch.zeros(20, 64), B=torch.zeros(96, 20)), ["up_proj", "20", "max_lora_rank=16"]),
    "no B": (set_tensors(B=None), ["layers.1.mlp.up_proj.lora_B"]),
    "no matrix": (set_tensors(A=torch.zeros(4)), ["up_proj.lora_A", "(4,)"]),
    "ranks differ": (set_tensors(A=torch.zeros(3, 64)), ["up_proj.lora_A", "(3, 64)", "(96, 4)"]),
    "NaN": (set_tensors(A=torch.full((4, 64), float("nan"))), ["adapter_model.safetensors", A, "NaN"]),
    "integers": (set_tensors(A=torch.zeros(4, 64, dtype=torch.int32)), [A, "int32"]),
    "another base": (set_tensors(A=torch.zeros(4, 60)), ["layers.1.mlp.up_proj", "(96, 64)", "(96, 60)"]),
    "another base's outputs": (set_tensors(B=torch.zeros(90, 4)), ["layers.1.mlp.up_proj", "(96, 64)", "(90, 64)"]),
    "an unknown layer": (
        set_tensors(**{SIDE_A: torch.zeros(4, 64), SIDE_B: torch.zeros(96, 4)}),
        ["model.layers.1.mlp.side", "no such layer"],
    ),
    "an unknown tensor": (
        set_tensors(**{A.replace("lora_A", "lora_C"): torch.zeros(4, 64)}),
        ["model.layers.1.mlp.up_proj.lora_C"],
    ),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Any]:
    folder, model = make_random_model("llama", "small", tmp_path_factory.mktemp("model"))
    fields: Any = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "enable_lora": True}
    return LLM(str(folder), **fields), model


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_adapter_changes_nothing(damage: str, engine: tuple[LLM, Any], tmp_path: Path) -> None:
    llm, model = engine
    change, named = DAMAGES[damage]
    folder = make_adapter(tmp_path / "adapter", model)
    worker = llm.llm_engine.engine_core.executor.worker
    change(folder)
    with pytest.raises(ValueError) as error:
        worker.add_lora(LoRARequest("a", 1, str(folder)))
    for part in ("adapter", *named):
        assert part in str(error.value)
    assert worker.list_loras() == set()


def test_weights_may_be_in_a_bin_file(engine: tuple[LLM, Any], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path, engine[1])
    path = folder / "adapter_model.safetensors"
    stored = read_adapter(folder, 16)
    torch.save(load_file(path), folder / "adapter_model.bin")
    path.unlink()
    again = read_adapter(folder, 16)
    assert again.modules.keys() == stored.modules.keys()
    for name, tensors in stored.modules.items():
        assert torch.equal(again.modules[name].a, tensors.a) and torch.equal(again.modules[name].b, tensors.b)
