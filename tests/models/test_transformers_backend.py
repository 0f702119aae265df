"""model_impl="transformers": readings are those of transformers' own float32 run, whatever the architecture, however a
prompt is split over steps, and whatever shares them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import make_thread_llm
from tiny_llm import make_tiny_llm
from tiny_models import VOCAB_SIZE, make_tiny, reference

from vllm import LLM, SamplingParams
from vllm.selftest.invariance import InvarianceTest

NUM_TOKENS = 6
IDS = [5, 17, 60, 198]
# float32's rounding over four layers, summed in another order.
TOLERANCE = 1e-4

ARCHITECTURES = [
    "afmoe", "apertus", "arcee", "bert", "bitnet", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5_moe",
    "exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_neox", "gpt_oss", "granite", "granitemoe",
    "helium", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe",
    "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
]  # fmt: skip


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


USUAL = {"model_impl": "transformers", "skip_tokenizer_init": True, "max_model_len": 64}


def start(folder: Path, **fields: Any) -> LLM:
    return make_tiny_llm(folder, **{**USUAL, **fields})


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprob_token_ids=IDS, **fields
    )


def check(output: Any, prompt: list[int], model: Any, reads_prompt: bool = True) -> None:
    """Tokens, logprobs and ranks of a request are transformers'."""
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    expected = reference(model, prompt + tokens)
    assert tokens == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
    if reads_prompt:
        for position in range(1, len(prompt)):
            reading = output.prompt_logprobs[position][prompt[position]]
            assert reading.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=TOLERANCE)
    for step, entries in enumerate(completion.logprobs):
        row = expected[len(prompt) - 1 + step]
        for token_id in {*IDS, tokens[step]}:
            assert entries[token_id].logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
            # A neighbour within the rounding may stand on either side.
            ranks = [1 + int((row > row[token_id] + margin).sum()) for margin in (TOLERANCE, -TOLERANCE)]
            assert ranks[0] <= entries[token_id].rank <= ranks[1] + 1


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_readings_are_transformers(tmp_path: Path, model_type: str) -> None:
    model = make_tiny(model_type, tmp_path)
    batch = prompts((40, 3, 23))
    llm = start(tmp_path, max_num_batched_tokens=16)
    together = llm.generate(batch, params(prompt_logprobs=0), use_tqdm=False)
    for output, prompt in zip(together, batch, strict=True):
        check(output, prompt, model)
    continued = [*batch[0][:33], 7, 9, 11]
    (output,) = llm.generate([continued], params(), use_tqdm=False)
    assert output.num_cached_tokens >= 32
    check(output, continued, model, reads_prompt=False)


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3", "olmo2", "phi"])
def test_two_ranks_give_the_same_readings(tmp_path: Path, model_type: str) -> None:
    """Sinks and experts; latent attention; attention that every rank computes a part of; biases."""
    model = make_tiny(model_type, tmp_path)
    batch = prompts((20, 5))
    llm = make_thread_llm(tmp_path, 2, **USUAL)
    for output, prompt in zip(llm.generate(batch, params(prompt_logprobs=0), use_tqdm=False), batch, strict=True):
        check(output, prompt, model)


def test_half_precision_runs(tmp_path: Path) -> None:
    model = make_tiny("mixtral", tmp_path)
    (prompt,) = prompts((20,))
    (output,) = start(tmp_path, dtype="bfloat16").generate([prompt], params(prompt_logprobs=0), use_tqdm=False)
    expected = reference(model, prompt)
    errors = [
        abs(output.prompt_logprobs[i][prompt[i]].logprob - float(expected[i - 1, prompt[i]]))
        for i in range(1, len(prompt))
    ]
    # bfloat16 keeps 8 bits; four layers with random weights multiply its rounding.
    assert sum(errors) / len(errors) < 0.3


def test_overrides_reach_the_module(tmp_path: Path) -> None:
    model = make_tiny("mixtral", tmp_path)
    (prompt,) = prompts((40,))
    llm = start(tmp_path, hf_overrides={"sliding_window": None, "rms_norm_eps": 0.5})
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5
    model.config.sliding_window = None
    (output,) = llm.generate([prompt], params(prompt_logprobs=0), use_tqdm=False)
    check(output, prompt, model)


def test_growing_rotations_end_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    model = make_tiny("mixtral", tmp_path, rope_parameters=rope, sliding_window=None)
    with pytest.raises(ValueError, match="max_model_len must be at most .*32, got 64"):
        start(tmp_path)
    (prompt,) = prompts((20,))
    (output,) = start(tmp_path, max_model_len=32).generate([prompt], params(prompt_logprobs=0), use_tqdm=False)
    check(output, prompt, model)


@pytest.mark.parametrize(
    ("model_type", "fields", "problem"),
    [
        ("mamba", {}, "MambaForCausalLM cannot run .*: it has a recurrent state"),
        ("bart", {}, "BartForCausalLM cannot run .*: it is an encoder-decoder"),
        ("roformer", {}, "RoFormerForCausalLM cannot run .*: its attention does not go through"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention"] * 16},
            "Lfm2ForCausalLM cannot run .*: its layers of the kind conv",
        ),
        ("llama4_text", {}, "Llama4ForCausalLM cannot run .*: its mask"),
        ("roberta", {"is_decoder": True}, "RobertaForCausalLM cannot run .*: its positions begin after"),
    ],
)
def test_what_cannot_run_is_refused_with_the_class_and_the_reason(
    tmp_path: Path, model_type: str, fields: dict[str, Any], problem: str
) -> None:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = CONFIG_MAPPING[model_type](**fields)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=problem):
        start(tmp_path, load_format="dummy")
    config.architectures = ["NobodysForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="NobodysForCausalLM, which is no causal language model of transformers"):
        start(tmp_path, load_format="dummy")


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3"])
def test_bits_that_follow_the_batch_are_refused_where_none_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """The products that choose experts are PyTorch's."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    make_tiny(model_type, tmp_path)
    if model_type == "mixtral":
        with pytest.raises(ValueError, match="MixtralForCausalLM cannot run .*VLLM_BATCH_INVARIANT=1 cannot be kept"):
            start(tmp_path)
        return
    checks = InvarianceTest(start(tmp_path, max_logprob_token_ids=-1).llm_engine).run()
    assert [check.name for check in checks if not check.passed] == []


REMOTE = """
from transformers import ArceeConfig, ArceeForCausalLM

class TheirConfig(ArceeConfig):
    model_type = "theirs"

class TheirForCausalLM(ArceeForCausalLM):
    config_class = TheirConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 3 * output.logits
        return output
"""


def test_code_of_a_checkpoint_runs_if_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "their_model"
    model = make_tiny("arcee", folder)
    (folder / "their_code.py").write_text(REMOTE, encoding="utf-8")
    path = folder / "config.json"
    auto_map = {"AutoConfig": "their_code.TheirConfig", "AutoModelForCausalLM": "their_code.TheirForCausalLM"}
    theirs = {"model_type": "theirs", "architectures": ["TheirForCausalLM"], "auto_map": auto_map}
    path.write_text(json.dumps(json.loads(path.read_text()) | theirs))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        start(folder)
    (prompt,) = prompts((20,))
    llm = start(folder, trust_remote_code=True)
    (output,) = llm.generate([prompt], params(logprobs_mode="raw_logits"), use_tqdm=False)
    expected = 3 * model(input_ids=torch.tensor([prompt])).logits[0, -1].detach()
    for token_id in IDS:
        assert output.outputs[0].logprobs[0][token_id].logit == pytest.approx(float(expected[token_id]), abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_norms_and_gated_mlps_are_replaced_in_every_dtype(dtype: torch.dtype) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    from vllm.models.transformers.layers import make_mlp, make_norm

    class OtherNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 0.01

    class OtherMLP(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).abs())

    torch.set_default_dtype(dtype)
    try:
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
        configs = [LlamaConfig(**sizes, hidden_act=act) for act in ("silu", "gelu")]
        assert make_norm(LlamaRMSNorm(8)) is not None and make_norm(OtherNorm(8)) is None
        assert all(make_mlp(LlamaMLP(config), "mlp", {}) is not None for config in configs)
        assert make_mlp(OtherMLP(configs[0]), "mlp", {}) is None
    finally:
        torch.set_default_dtype(torch.float32)
