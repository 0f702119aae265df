"""Quantised encoders, decoders and heads that pool: results are transformers' with the de-quantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from quantized_models import PROMPTS, TOLERANCE
from safetensors.torch import load_file, save_file
from test_formats import ROWS
from test_on_load import ROUNDED
from thread_ranks import make_thread_llm
from torch.nn.functional import normalize

from vllm import LLM, PoolingParams

ROW_NAMES = ["gptq-4-asym", "awq-32", "nf4", "int8", "fp8", "fp8-block"]
SIZES = {
    # Packed weights have whole words of outputs.
    "vocab_size": -(-VOCAB_SIZE // 32) * 32,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
    "num_labels": 32,
}
DECODER = {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
OWN: dict[str, dict[str, Any]] = {"modernbert": {"local_attention": 16}, "qwen3": DECODER, "llama": DECODER}
DECODERS = ("llama", "qwen3")
RAW = PoolingParams(use_activation=False)


def save(folder: Path, kind: str, head: str = "") -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**(SIZES | OWN.get(kind, {})))
    model = getattr(transformers, f"AutoModel{head}").from_config(config).float().eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def save_quantized(folder: Path, row: str, kind: str, head: str = "") -> Any:
    """The folder has every linear layer quantised, its head too; the model has what that means."""
    model = save(folder, kind, head)
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    tensors, values = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module not in linears or not name.endswith(".weight"):
            tensors[name] = tensor
            continue
        stored = ROWS[row].pack(tensor)
        values[name] = stored.value
        tensors |= {f"{module}.{own}": each.clone().contiguous() for own, each in stored.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {**ROWS[row].settings, "ignore": [], "lm_head": True}
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    assert not model.load_state_dict(values, strict=False).unexpected_keys
    return model


def run(folder: Path, **fields: Any) -> LLM:
    usual = {"runner": "pooling", "dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True}
    # Less than the longest prompt, which decoders take in parts.
    return LLM(str(folder), **(usual | {"max_num_batched_tokens": 16, "max_num_seqs": 8} | fields))


def pooled(llm: LLM, task: Any, prompts: list[list[int]] = PROMPTS) -> list[torch.Tensor]:
    return [each.outputs.data for each in llm.encode(prompts, RAW, pooling_task=task, use_tqdm=False)]


@torch.no_grad()
def results(model: Any) -> list[torch.Tensor]:
    """Hidden states or logits."""
    return [model(torch.tensor([prompt]))[0][0] for prompt in PROMPTS]


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3"])
@pytest.mark.parametrize("row", ROW_NAMES)
def test_embeddings(row, kind, tmp_path):
    hidden = results(save_quantized(tmp_path, row, kind))
    llm = run(tmp_path, **({} if kind == "qwen3" else {"max_num_batched_tokens": 64}))
    tokens = pooled(llm, "token_embed")
    assert_close(tokens, hidden)
    place = -1 if kind == "qwen3" else 0
    outputs = llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False)
    assert_close([each.outputs.data for each in outputs], [normalize(each[place], dim=-1) for each in hidden])
    for prompt, others in zip(PROMPTS, tokens, strict=True):
        (alone,) = pooled(llm, "token_embed", [prompt])
        torch.testing.assert_close(alone, others, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "head", "task"),
    [
        ("bert", "ForSequenceClassification", "classify"),
        ("modernbert", "ForSequenceClassification", "classify"),
        ("roberta", "ForSequenceClassification", "classify"),
        ("llama", "ForSequenceClassification", "classify"),
        ("qwen3", "ForTokenClassification", "token_classify"),
    ],
)
@pytest.mark.parametrize("row", ["gptq-4-asym", "nf4", "fp8-block"])
def test_quantised_classifiers(row, kind, head, task, tmp_path):
    model = save_quantized(tmp_path, row, kind, head)
    fields = {} if kind in DECODERS else {"max_num_batched_tokens": 64}
    assert_close(pooled(run(tmp_path, **fields), task), results(model))


@pytest.mark.parametrize("row", ["gptq-4-asym", "int8", "fp8"])
def test_words_of_a_quantised_head(row, tmp_path):
    model = save_quantized(tmp_path, row, "qwen3", "ForCausalLM")
    no, yes = (make_byte_tokenizer(tmp_path).token_to_id(word) for word in ("stop", "the"))
    named = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["stop", "the"]}
    llm = run(tmp_path, skip_tokenizer_init=False, hf_overrides={**named, "is_original_qwen3_reranker": True})
    want = [logits[-1, yes] - logits[-1, no] for logits in results(model)]
    assert_close([each.flatten() for each in pooled(llm, "classify")], [each[None] for each in want])


@pytest.mark.parametrize("name", ["gptq-4-asym", "nf4", "fp8-block", "int4", "fp8"])
def test_sparse_embeddings(name, tmp_path):
    """Whose head has the table of tokens for a weight, which checkpoints do not quantise."""
    quantization = name if name in ROUNDED else None
    model = (
        save(tmp_path, "bert", "ForMaskedLM") if quantization else save_quantized(tmp_path, name, "bert", "ForMaskedLM")
    )
    for module in model.modules():
        if quantization and isinstance(module, torch.nn.Linear):
            # The table itself stays as it was.
            module.weight = torch.nn.Parameter(ROUNDED[name](module.weight.data))
    named = {"architectures": ["BertSpladeSparseEmbeddingModel"]}
    llm = run(tmp_path, quantization=quantization, hf_overrides=named, max_num_batched_tokens=64)
    want = [logits.relu().log1p().amax(0) for logits in results(model)]
    assert_close([each.outputs.data for each in llm.encode(PROMPTS, use_tqdm=False)], want)


@pytest.mark.parametrize(("row", "kind"), [("gptq-4-asym", "bert"), ("nf4", "qwen3"), ("fp8-block", "modernbert")])
def test_two_ranks(row, kind, tmp_path):
    model = save_quantized(tmp_path, row, kind)
    llm = make_thread_llm(tmp_path, 2, runner="pooling", max_model_len=64, skip_tokenizer_init=True)
    assert_close(pooled(llm, "token_embed"), results(model))


@pytest.mark.parametrize("kind", ["bert", "nomic_bert", "gte", "qwen3"])
@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_on_load(name, kind, tmp_path):
    model = save(tmp_path, kind)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data.copy_(ROUNDED[name](module.weight.data))
    llm = run(tmp_path, quantization=name, max_num_batched_tokens=64)
    assert_close(pooled(llm, "token_embed"), results(model))


def test_encoders_of_transformers_are_refused_by_name(tmp_path):
    save(tmp_path, "electra")
    problem = "quantization='int4' is not supported for ElectraModel, which runs as transformers' module with plain "
    with pytest.raises(ValueError, match=problem):
        run(tmp_path, quantization="int4", max_num_batched_tokens=64)
