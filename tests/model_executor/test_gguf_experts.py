"""GGUF files of mixtures of experts, whose matrices the file stacks, against the models they were made from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from quantized_models import assert_reads, generate, make_llm
from test_gguf_architectures import COMMON, MODERN, SIZE, VOCAB, make, neighbours, rope, write
from torch import Tensor

PROMPTS = [[5, 9, 33, 7, 21, 64, 3], [17], list(range(3, VOCAB, 5))]
EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 7}
HEADER = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
OWN = {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [], "decoder_sparse_step": 1}
CASES = {
    "mixtral": (
        "llama",
        "MixtralForCausalLM",
        MODERN | EXPERTS | {"num_local_experts": 4, "sliding_window": None},
        neighbours,
    ),
    "qwen2moe": (
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        COMMON | rope() | EXPERTS | OWN | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False},
        None,
    ),
    "qwen3moe": ("qwen3moe", "Qwen3MoeForCausalLM", MODERN | EXPERTS | OWN | {"norm_topk_prob": True}, None),
    "olmoe": (
        "olmoe",
        "OlmoeForCausalLM",
        COMMON | rope() | EXPERTS | {"num_experts": 4, "intermediate_size": 32, "norm_topk_prob": False},
        None,
    ),
}


def stacks(model: Any) -> SimpleNamespace:
    """The model with its experts' matrices as GGUF has them: those of a kind in one tensor, gates and ups apart."""

    def state_dict() -> dict[str, Tensor]:
        state = {}
        for name, value in model.state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                stem = name.removesuffix("gate_up_proj")
                state[f"{stem}gate_proj.weight"], state[f"{stem}up_proj.weight"] = value.chunk(2, 1)
            elif name.endswith("experts.down_proj"):
                state[f"{name}.weight"] = value
            else:
                state[name] = value[0] if name.endswith("shared_expert_gate.weight") else value
        return state

    return SimpleNamespace(config=model.config, state_dict=state_dict)


def round_to(kind: Any, model: Any) -> None:
    """Give the matrices that are stored in blocks the values that these have."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            blocks = gguf.quants.quantize(parameter.detach().numpy(), kind)
            parameter.data.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, kind)))


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("case", CASES)
def test_readings_equal_the_original(case, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    arch, class_name, options, change = CASES[case]
    model = make(class_name, options)
    if kind is not None:
        round_to(kind, model)
    path = tmp_path / "m.gguf"
    write(path, arch, stacks(model), HEADER, change, kind)
    llm = make_llm(path)
    assert llm.llm_engine.vllm_config.model_config.hf_config.architectures == (class_name,)
    assert_reads(generate(llm, PROMPTS), model, PROMPTS)


def test_another_number_of_experts(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    arch, class_name, options, change = CASES["qwen3moe"]
    write(tmp_path / "m.gguf", arch, stacks(make(class_name, options)), HEADER | {"expert_count": 5}, change)
    problem = rf"m.gguf: tensors ffn_\w+_exps have shape \(4, .*{SIZE}.*\), but qwen3moe.expert_count is 5"
    with pytest.raises(ValueError, match=problem):
        make_llm(tmp_path / "m.gguf")
