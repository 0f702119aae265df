"""GGUF files of mixtures of experts, whose matrices the file stacks, against the models they were made from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from quantized_models import assert_reads, generate, make_llm
from test_gguf_architectures import (
    COMMON,
    CONVS,
    GEMMA4,
    GEMMA4_HEADER,
    GEMMA_HEADER,
    GROUPS,
    HEADS,
    KINDS,
    MODERN,
    SIZE,
    SLIDES,
    VOCAB,
    WIDTH,
    YARN,
    YARN_HEADER,
    make,
    neighbours,
    rope,
    taps,
    write,
)
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
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
ROUTED_HEADER = {"leading_dense_block_count": 1, "expert_shared_count": 1}
SCALED_HEADER = {"expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2}
LATENT = COMMON | EXPERTS | ROUTED
LATENT |= {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64}
LATENT |= {"num_key_value_heads": HEADS}
LATENT_HEADER = ROUTED_HEADER | {"attention.kv_lora_rank": 32, "rope.dimension_count": 16}
OLD_HEADER = LATENT_HEADER | {"attention.key_length": 48, "attention.value_length": 64}
NEW_HEADER = LATENT_HEADER | {"attention.key_length": 48, "attention.value_length": 32, "attention.head_count_kv": 1}
NEW_HEADER |= {"attention.key_length_mla": 48, "attention.value_length_mla": 64}
YARN_SCALES = YARN_HEADER | {"rope.scaling.yarn_log_multiplier": 0.1}
LORA = {"q_lora_rank": 32}
THETAS = {
    kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
    for kind, theta in {"full_attention": 20000.0, "sliding_attention": 10000.0}.items()
}
# As CASES, with what the header has beside the usual.
MORE: dict[str, Any] = {
    "gpt-oss": (
        "gpt-oss",
        "GptOssForCausalLM",
        MODERN
        | EXPERTS
        | {"num_local_experts": 4, "intermediate_size": 32, "sliding_window": 8}
        | {"rope_parameters": {**YARN, "mscale": None, "mscale_all_dim": None, "truncate": False}},
        None,
        YARN_HEADER | {"attention.sliding_window": 8},
    ),
    "granitemoe": (
        "granitemoe",
        "GraniteMoeForCausalLM",
        COMMON
        | rope()
        | EXPERTS
        | {"num_local_experts": 4, "intermediate_size": 32}
        | {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0},
        neighbours,
        {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0},
    ),
    "deepseek2-lite": (
        "deepseek2",
        "DeepseekV2ForCausalLM",
        LATENT | {"q_lora_rank": None, "norm_topk_prob": False, "topk_method": "greedy", "rope_parameters": YARN},
        None,
        OLD_HEADER | YARN_SCALES | {"expert_weights_scale": 2.5},
    ),
    "deepseek3-split": (
        "deepseek2",
        "DeepseekV3ForCausalLM",
        LATENT | LORA | {"num_local_experts": 4, "n_group": 2, "topk_group": 1, "rope_parameters": YARN},
        None,
        NEW_HEADER
        | SCALED_HEADER
        | YARN_SCALES
        | {"attention.q_lora_rank": 32, "expert_group_count": 2, "expert_group_used_count": 1},
    ),
    "glm4moe": (
        "glm4moe",
        "Glm4MoeForCausalLM",
        COMMON
        | rope(10000.0, 0.5)
        | EXPERTS
        | ROUTED
        | {"head_dim": WIDTH, "attention_bias": True, "use_qk_norm": True},
        None,
        ROUTED_HEADER | SCALED_HEADER | {"rope.dimension_count": WIDTH // 2},
    ),
    "dots1": (
        "dots1",
        "Dots1ForCausalLM",
        MODERN | EXPERTS | ROUTED | {"sliding_window": None, "num_key_value_heads": HEADS},
        None,
        ROUTED_HEADER | SCALED_HEADER,
    ),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        "Ernie4_5_MoeForCausalLM",
        COMMON
        | rope()
        | EXPERTS
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 1, "tie_word_embeddings": True},
        None,
        ROUTED_HEADER | {"interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": 32},
    ),
    "hunyuan-moe": (
        "hunyuan-moe",
        "HunYuanMoEV1ForCausalLM",
        MODERN | EXPERTS | {"num_experts": 4, "moe_topk": 2, "intermediate_size": 32},
        None,
        {"expert_shared_feed_forward_length": 32},
    ),
    "gemma4-26b": (
        "gemma4",
        "Gemma4ForCausalLM",
        GEMMA4
        | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 32},
        None,
        GEMMA_HEADER
        | GEMMA4_HEADER
        | {"attention.head_count_kv": [GROUPS if slides else 1 for slides in SLIDES]}
        | {"attention.shared_kv_layers": 0, "embedding_length_per_layer_input": 0},
    ),
    "minimax-m2": (
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        MODERN | rope(10000.0, 0.5) | EXPERTS | {"num_local_experts": 4, "intermediate_size": 32},
        None,
        {"rope.dimension_count": WIDTH // 2, "expert_gating_func": 2},
    ),
}
SHARED = {"num_experts": 4, "num_shared_experts": 1, "moe_intermediate_size": 32, "sliding_window": 8}
SHARED_HEADER = ROUTED_HEADER | {"attention.sliding_window": 8}
GRANITE = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
LING = {"num_experts": 4, "moe_intermediate_size": 32}
TEMPERATURE = {
    "attention.temperature_scale": 0.1,
    "attention.temperature_length": 8,
    "attention.q_lora_rank": 32,
    "expert_gating_func": 1,
}
MISTRAL = (
    "Mistral4ForCausalLM",
    LATENT
    | LORA
    | {"routed_scaling_factor": 1.0, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}}
    | {"intermediate_size": 96},
    None,
    NEW_HEADER | YARN_SCALES | TEMPERATURE | {"expert_weights_norm": True, "expert_weights_scale": 1.0},
)
MORE |= {
    "afmoe": (
        "afmoe",
        "AfmoeForCausalLM",
        MODERN | EXPERTS | SHARED | {"num_dense_layers": 1, "route_scale": 2.5, "mup_enabled": True},
        None,
        SHARED_HEADER | SCALED_HEADER,
    ),
    "exaone-moe": (
        "exaone-moe",
        "ExaoneMoeForCausalLM",
        MODERN | EXPERTS | SHARED | {"first_k_dense_replace": 1, "layer_types": KINDS},
        None,
        SHARED_HEADER | SCALED_HEADER | {"attention.sliding_window_pattern": SLIDES},
    ),
    "lfm2moe": (
        "lfm2moe",
        "Lfm2MoeForCausalLM",
        COMMON
        | rope()
        | EXPERTS
        | {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "layer_types": CONVS,
            "tie_word_embeddings": True,
        },
        taps,
        {"attention.head_count_kv": [GROUPS * (kind != "conv") for kind in CONVS], "shortconv.l_cache": 3}
        | {"leading_dense_block_count": 1, "attention.layer_norm_rms_epsilon": 1e-5},
    ),
    "phimoe": (
        "phimoe",
        "PhimoeForCausalLM",
        COMMON
        | rope()
        | EXPERTS
        | {"num_local_experts": 4, "intermediate_size": 32, "attention_bias": True, "lm_head_bias": True},
        None,
        {},
    ),
    "bailingmoe": (
        "bailingmoe",
        "Ernie4_5_MoeForCausalLM",
        COMMON
        | rope()
        | EXPERTS
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 0, "tie_word_embeddings": False},
        None,
        ROUTED_HEADER | {"leading_dense_block_count": 0, "expert_weights_norm": True, "expert_weights_scale": 1.0},
    ),
    "bailingmoe2": (
        "bailingmoe2",
        "Glm4MoeForCausalLM",
        COMMON
        | rope(10000.0, 0.5)
        | EXPERTS
        | ROUTED
        | {"head_dim": WIDTH, "use_qk_norm": True, "n_group": 2, "num_local_experts": 4},
        None,
        ROUTED_HEADER
        | SCALED_HEADER
        | {"rope.dimension_count": WIDTH // 2, "expert_group_count": 2, "expert_group_used_count": 1}
        | {"expert_shared_feed_forward_length": 32},
    ),
    "granitemoe-shared": (
        "granitemoe",
        "GraniteMoeSharedForCausalLM",
        COMMON
        | rope()
        | EXPERTS
        | GRANITE
        | {"num_local_experts": 4, "intermediate_size": 32, "shared_intermediate_size": 64},
        neighbours,
        {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0}
        | {"expert_shared_feed_forward_length": 64},
    ),
    "mistral4-split": ("mistral4", *MISTRAL),
    "deepseek2-mistral-split": ("deepseek2", *MISTRAL),
    "minicpm3": (
        "minicpm3",
        "MiniCPM3ForCausalLM",
        COMMON
        | rope()
        | LORA
        | {"num_hidden_layers": 7, "num_key_value_heads": HEADS, "kv_lora_rank": 32, "qk_nope_head_dim": 32}
        | {"qk_rope_head_dim": 16, "tie_word_embeddings": True},
        None,
        {"attention.q_lora_rank": 32, "attention.kv_lora_rank": 32, "rope.dimension_count": 16}
        | {"attention.key_length": 48},
    ),
    "mimo2": (
        "mimo2",
        "MiMoV2FlashForCausalLM",
        COMMON
        | EXPERTS
        | {"n_routed_experts": 4, "moe_intermediate_size": 32, "sliding_window": 8, "layer_types": KINDS}
        | {"head_dim": WIDTH, "v_head_dim": 32, "num_key_value_heads": 1, "attention_value_scale": 0.5}
        | {"mlp_layer_types": ["dense", *["sparse"] * 6], "rope_parameters": THETAS},
        None,
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": SLIDES, "attention.value_length": 32}
        | {"attention.head_count_kv": [2 if slides else 1 for slides in SLIDES], "attention.value_scale": 0.5}
        | {"rope.dimension_count": WIDTH // 2, "rope.freq_base": 20000.0, "rope.freq_base_swa": 10000.0},
    ),
}


def stacks(model: Any, splits_latent: bool = False, joins_heads: bool = False) -> SimpleNamespace:
    """The model with its experts' matrices as GGUF has them: those of a kind in one tensor, gates and ups apart; and,
    if `splits_latent`, with keys' and values' parts of what widens them apart, if `joins_heads`, with queries', keys'
    and values' matrices in one."""
    config = model.config

    def state_dict() -> dict[str, Tensor]:
        state = {}
        for name, value in model.state_dict().items():
            stem, _, own = name.rpartition("experts.")
            stem = f"{stem.replace('block_sparse_moe', 'mlp')}experts."
            if own == "gate_up_proj" and config.model_type == "gemma4_text":
                state[f"{name}.weight"] = value
            elif name.endswith("shared_mlp.input_linear.weight"):
                parts = value.chunk(2)
                stem = name.replace("shared_mlp.input_linear.weight", "mlp.shared_mlp.")
                state[f"{stem}gate_proj.weight"], state[f"{stem}up_proj.weight"] = parts
            elif joins_heads and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                state.setdefault(joined := f"{name[:-23]}attention.query_key_value.weight", value)
                if state[joined] is not value:
                    state[joined] = torch.cat((state[joined], value))
            elif own.startswith("gate_up_proj"):
                ending = ".bias" if own.endswith("_bias") else ".weight"
                gate, up = _gate_and_up(config, value)
                state[f"{stem}gate_proj{ending}"], state[f"{stem}up_proj{ending}"] = gate, up
            elif own == "down_proj":
                state[f"{stem}down_proj.weight"] = value.mT if config.model_type == "gpt_oss" else value
            elif own == "down_proj_bias":
                state[f"{stem}down_proj.bias"] = value
            elif splits_latent and name.endswith("kv_b_proj.weight"):
                heads = value.unflatten(0, (HEADS, -1))
                own_stem = name.removesuffix("kv_b_proj.weight")
                state[f"{own_stem}k_b_proj.weight"] = heads[:, : config.qk_nope_head_dim].mT
                state[f"{own_stem}v_b_proj.weight"] = heads[:, config.qk_nope_head_dim :]
            elif not name.endswith("statics.e_score_correction_bias") or value.any():
                state[_renamed(name)] = (
                    value[0]
                    if name.endswith(("shared_expert_gate.weight", "statics.e_score_correction_bias"))
                    else value
                )
        return state

    return SimpleNamespace(config=config, state_dict=state_dict)


def _gate_and_up(config: Any, stack: Tensor) -> tuple[Tensor, ...]:
    if config.model_type != "gpt_oss":
        return stack.chunk(2, 1)
    rows = stack if stack.dim() == 2 else stack.mT
    return rows[:, ::2], rows[:, 1::2]


def _renamed(name: str) -> str:
    """To the names of published checkpoints, which GGUF's table has."""
    name = name.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer.")
    name = name.replace("gate.moe_statics", "moe_statics").replace("e_score_correction_bias", "e_score_correction.bias")
    if name.endswith("expert_bias"):
        return f"{name}.bias"
    return f"{name}.weight" if name.endswith("sinks") else name


ROUTERS = (
    *("conv.conv.weight", "gate.weight", "router.proj.weight", "router.weight"),
    *("gate.wg.weight", "correction_bias", "expert_bias", "conv1d.weight", "A_log"),
)


def round_to(kind: Any, model: Any, splits_latent: bool = False) -> None:
    """Give the matrices that are stored in blocks the values that these have."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or name.endswith((*ROUTERS, "_bias")):
            continue
        value = parameter.detach()
        is_turned = "experts." in name and model.config.model_type == "gpt_oss"
        if splits_latent and name.endswith("kv_b_proj.weight"):
            heads, width = value.unflatten(0, (HEADS, -1)), model.config.qk_nope_head_dim
            parts = rounded(kind, heads[:, :width].mT).mT, rounded(kind, heads[:, width:])
            parameter.data.copy_(torch.cat(parts, 1).flatten(0, 1))
        else:
            parameter.data.copy_(rounded(kind, value.mT).mT if is_turned else rounded(kind, value))


def rounded(kind: Any, value: Tensor) -> Tensor:
    blocks = gguf.quants.quantize(value.contiguous().numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind))


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


@pytest.mark.parametrize("case", MORE)
def test_more_readings_equal_the_original(case, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    arch, class_name, options, change, header = MORE[case]
    model, kind, splits = make(class_name, options), gguf.GGMLQuantizationType.Q8_0, "split" in case
    for name, bias in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            # Ling's first models have none.
            bias.data.copy_(torch.linspace(-1, 1, bias.numel()).view(bias.shape) * (case != "bailingmoe"))
    round_to(kind, model, splits)
    path = tmp_path / "m.gguf"
    write(path, arch, stacks(model, splits, case == "bailingmoe2"), HEADER | header, change, kind)
    llm = make_llm(path)
    assert llm.llm_engine.vllm_config.model_config.hf_config.architectures == (class_name,)
    assert_reads(generate(llm, PROMPTS), model, PROMPTS)


def test_the_first_files_of_mixtral(tmp_path, monkeypatch):
    """Which have a matrix of each expert."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    _, class_name, options, change = CASES["mixtral"]
    model = make(class_name, options)
    write(tmp_path / "m.gguf", "llama", stacks(model), HEADER, change)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "old.gguf", "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if "_exps" not in tensor.name:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        for expert, matrix in enumerate(tensor.data):
            writer.add_tensor(tensor.name.replace("_exps", f".{expert}"), matrix)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    assert_reads(generate(make_llm(tmp_path / "old.gguf"), PROMPTS), model, PROMPTS)


def test_another_number_of_experts(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    arch, class_name, options, change = CASES["qwen3moe"]
    write(tmp_path / "m.gguf", arch, stacks(make(class_name, options)), HEADER | {"expert_count": 5}, change)
    problem = rf"m.gguf: tensors ffn_\w+_exps have shape \(4, .*{SIZE}.*\), but qwen3moe.expert_count is 5"
    with pytest.raises(ValueError, match=problem):
        make_llm(tmp_path / "m.gguf")
