"""Jina's models on XLM-RoBERTa, with the names of their published files, equal transformers' modules."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_encoders import PROMPTS, SIZES, TOLERANCE, add_modules, other_config, save, tensors

from vllm import LLM

TASKS = ["retrieval.query", "separation", "text-matching"]
# As published beside sizes.
CONFIG = {
    "auto_map": {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_lora.XLMRobertaLoRA"},
    "emb_pooler": None,
    "load_trained_adapters": True,
    "lora_adaptations": TASKS,
    "lora_alpha": 3,
    "lora_dropout_p": 0.0,
    "lora_main_params_trainable": False,
    "lora_rank": 2,
    "matryoshka_dimensions": [16, 32],
    "model_type": "xlm-roberta",
    "position_embedding_type": "rotary",
    "rotary_emb_base": 20000.0,
    "task_instructions": {"retrieval.query": "Represent the query: "},
    "truncate_dim": None,
    "use_flash_attn": True,
    "use_reg_tokens": False,
}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, transformers.PreTrainedModel]:
    """A folder, in which transformers writes the published names, and its model."""
    folder = save(tmp_path / "saved", other_config("jina_embeddings_v3"))
    return folder, transformers.AutoModel.from_pretrained(folder).eval()


def config_as_published(folder: Path, **changes) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | CONFIG | changes
    del raw["rope_parameters"]
    path.write_text(json.dumps(raw))


@torch.no_grad()
def hidden_states(model: transformers.PreTrainedModel) -> list[torch.Tensor]:
    return [model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]


@pytest.mark.parametrize("task", [None, "retrieval.query"])
def test_adapters_of_a_task(saved, tmp_path, task):
    folder, _ = saved
    adapted, published = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(".bias") or "norm" in name or "_ln" in name:
            published[f"roberta.{name}"] = adapted[name] = weight
            continue
        rows, columns = weight.shape
        is_embedding = "embeddings" in name
        shapes = ((3, rows, 2), (3, 2, columns)) if is_embedding else ((3, 2, columns), (3, rows, 2))
        a, b = (0.3 * torch.randn(shape) for shape in shapes)
        index = TASKS.index(task or "text-matching")
        first, second = (a, b) if is_embedding else (b, a)
        adapted[name] = weight + 1.5 * first[index] @ second[index]
        place = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        published |= {f"{place}.original": weight, f"{place}.0.lora_A": a, f"{place}.0.lora_B": b}
    save_file(adapted, folder / "model.safetensors", metadata={"format": "pt"})
    expected = [each.mean(0) for each in hidden_states(transformers.AutoModel.from_pretrained(folder).eval())]
    save_file(published, folder / "model.safetensors")
    config_as_published(folder, architectures=["XLMRobertaModel"])
    add_modules(folder, "mean_tokens", normalize=True)
    overrides = {} if task is None else {"default_task": task}
    llm = LLM(str(folder), skip_tokenizer_init=True, hf_overrides=overrides)
    got = torch.stack(tensors(llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False)))
    torch.testing.assert_close(got, torch.nn.functional.normalize(torch.stack(expected), dim=-1), **TOLERANCE)
    llm.collective_rpc("reload_weights")
    again = torch.stack(tensors(llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False)))
    assert torch.equal(again, got)
    with pytest.raises(ValueError, match="default_task must be one of retrieval.query, .* got 'no'"):
        LLM(str(folder), skip_tokenizer_init=True, hf_overrides={"default_task": "no"})
    some = {name: each for name, each in published.items() if "layers.1.mlp.fc1.parametrizations.weight.0" not in name}
    save_file(some, folder / "model.safetensors")
    with pytest.raises(ValueError, match="layers.1.mlp.fc1.parametrizations.weight.original .* not all there"):
        LLM(str(folder), skip_tokenizer_init=True)


@pytest.mark.parametrize("name", ["HF_ColBERT", "ColBERTJinaRobertaModel"])
def test_colbert(saved, name):
    """jina-colbert-v2: under its own name, and under the one that upstream's users override it with."""
    folder, model = saved
    weights = {f"roberta.{name}": weight for name, weight in load_file(folder / "model.safetensors").items()}
    weight = torch.randn(24, 32)
    save_file({**weights, "linear.weight": weight}, folder / "model.safetensors")
    config_as_published(
        folder, architectures=["HF_ColBERT"], dim=24, lora_adaptations=None, load_trained_adapters=False
    )
    overrides = {"architectures": [name]}
    llm = LLM(str(folder), skip_tokenizer_init=True, hf_overrides=overrides, trust_remote_code=True)
    assert llm.model_config.pooling_tasks == ("token_embed",)
    got = tensors(llm.encode(PROMPTS, pooling_task="token_embed", use_tqdm=False))
    for each, want in zip(got, hidden_states(model), strict=True):
        torch.testing.assert_close(each, torch.nn.functional.normalize(want @ weight.T, dim=-1), **TOLERANCE)


@pytest.mark.parametrize("head", ["Sequence", "Token"])
def test_classifiers_as_transformers_saves_them(tmp_path, head):
    auto = getattr(transformers, f"AutoModelFor{head}Classification")
    folder = save(tmp_path, other_config("jina_embeddings_v3", num_labels=3), auto)
    model = auto.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0].softmax(-1) for ids in PROMPTS]
    task = "classify" if head == "Sequence" else "token_classify"
    llm = LLM(str(folder), skip_tokenizer_init=True)
    for got, want in zip(tensors(llm.encode(PROMPTS, pooling_task=task, use_tqdm=False)), expected, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)


# From BERT's names to those of files for FlashAttention.
FLASH_NAMES = (
    ("embeddings.LayerNorm", "emb_ln"),
    ("encoder.layer.", "encoder.layers."),
    ("attention.output.dense", "mixer.out_proj"),
    ("attention.output.LayerNorm", "norm1"),
    ("intermediate.dense", "mlp.fc1"),
    (r"(?<!mixer\.)output.dense", "mlp.fc2"),
    ("output.LayerNorm", "norm2"),
)


def test_cross_encoder_with_absolute_positions(tmp_path):
    """jina-reranker-v2."""
    config = transformers.XLMRobertaConfig(**SIZES, max_position_embeddings=66, type_vocab_size=1, num_labels=1)
    folder = save(tmp_path, config, transformers.AutoModelForSequenceClassification)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0].sigmoid() for ids in PROMPTS]
    published, apart = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if match := re.fullmatch(r"(.*)attention\.self\.(query|key|value)\.(.*)", name):
            apart.setdefault((match[1], match[3]), {})[match[2]] = weight
            continue
        for ours, theirs in FLASH_NAMES:
            name = re.sub(ours, theirs, name)
        published[name] = weight
    for (layer, kind), parts in apart.items():
        place = layer.replace("encoder.layer.", "encoder.layers.")
        published[f"{place}mixer.Wqkv.{kind}"] = torch.cat([parts[each] for each in ("query", "key", "value")])
    save_file(published, folder / "model.safetensors")
    llm = LLM(str(folder), skip_tokenizer_init=True, hf_overrides={"use_flash_attn": True, "emb_pooler": None})
    got = tensors(llm.encode(PROMPTS, pooling_task="classify", use_tqdm=False))
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), **TOLERANCE)
