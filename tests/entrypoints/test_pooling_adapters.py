"""LoRA adapters of pooling models, decoders and encoders, against transformers' model with the adapter merged in."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from test_pooling_decoders import SIZES, config_of, save
from tiny_adapters import PREFIX, make_adapter, merged
from tiny_encoders import other_config

from vllm import LLM
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.models.transformers.encoder import TransformersEncoder

TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}
TARGETS = ("query", "value", "q_proj", "down_proj")
PROMPTS = [[5, 7, 9], list(range(20, 61)), [3], [*range(20, 55), 7, 9]]


def adapters_of(folder, model, count):
    """Requests of random adapters, and the merged model of each; None stands for no adapter."""
    models = {None: model}
    requests = []
    for number in range(1, count + 1):
        path = make_adapter(folder / f"a{number}", model, rank=3, seed=number)
        requests.append(LoRARequest(f"a{number}", number, str(path)))
        models[f"a{number}"] = merged(model, path)
    return requests, models


def start(folder, **fields):
    options = {"skip_tokenizer_init": True, "dtype": "float32", "gpu_memory_utilization": 0.3, "enable_lora": True}
    return LLM(str(folder), **{**options, **fields})


def ids_of(prompts):
    return [{"prompt_token_ids": each} for each in prompts]


@torch.no_grad()
def test_embeddings_of_a_decoder(tmp_path):
    model = save(tmp_path / "model", config_of("Qwen3Config"))
    requests, models = adapters_of(tmp_path, model, 3)
    llm = start(tmp_path / "model", runner="pooling", max_loras=2, max_num_batched_tokens=24, max_model_len=100)
    each = [requests[0], None, requests[1], requests[2]]
    for _ in range(2):
        for prompt, own, output in zip(PROMPTS, each, llm.embed(ids_of(PROMPTS), lora_request=each), strict=True):
            hidden = models[own and own.lora_name](torch.tensor([prompt])).last_hidden_state[0, -1]
            torch.testing.assert_close(
                torch.tensor(output.outputs.embedding), torch.nn.functional.normalize(hidden, dim=0), **TOLERANCE
            )
        # The same prompts with other adapters: no prefix is shared.
        each = [requests[1], requests[2], None, requests[0]]
    with pytest.raises(VLLMValidationError, match="lora_request has 4 entries for 1 prompts"):
        llm.embed(ids_of(PROMPTS[:1]), lora_request=each)


@torch.no_grad()
def test_classes_of_an_encoder(tmp_path):
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    config = transformers.BertConfig(**sizes, initializer_range=0.3, num_labels=3)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    requests, models = adapters_of(tmp_path, model, 3)
    llm = start(tmp_path / "model", max_model_len=100)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == [type(model).__name__]
    each = [requests[0], None, requests[1], requests[2]]
    outputs = llm.classify(ids_of(PROMPTS), lora_request=each)
    for prompt, own, output in zip(PROMPTS, each, outputs, strict=True):
        logits = models[own and own.lora_name](torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(torch.tensor(output.outputs.probs), logits.softmax(0), **TOLERANCE)
    outputs = llm.classify(ids_of(PROMPTS), lora_request=requests[2])
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        logits = models["a3"](torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(torch.tensor(output.outputs.probs), logits.softmax(0), **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("kind", ("encoder", "decoder"))
def test_each_adapter_has_its_own_classifier(kind, tmp_path):
    """peft stores a classifier's training as modules_to_save."""
    torch.manual_seed(0)
    if kind == "encoder":
        sizes = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
        own = {"initializer_range": 0.3, "num_labels": 3, "pad_token_id": 1, "max_position_embeddings": 130}
        config = transformers.RobertaConfig(**(sizes | own))
        model = transformers.RobertaForSequenceClassification(config).eval()
        names = ("classifier.dense.weight", "classifier.dense.bias", "classifier.out_proj.weight")
    else:
        config = transformers.Qwen3Config(**(SIZES | {"initializer_range": 0.3, "num_labels": 3, "pad_token_id": 0}))
        model = transformers.Qwen3ForSequenceClassification(config).eval()
        names = ("score.weight",)
    model.save_pretrained(tmp_path / "model")
    requests, models = [], {None: model}
    for number in (1, 2):
        tensors = {PREFIX + name: torch.randn(model.get_parameter(name).shape) * 0.3 for name in names}
        folder = make_adapter(tmp_path / f"a{number}", model, seed=number, tensors=tensors, targets=TARGETS)
        requests.append(LoRARequest(f"a{number}", number, str(folder)))
        models[f"a{number}"] = merged(model, folder)
    llm = start(tmp_path / "model", max_model_len=64, max_loras=2, runner="pooling")
    each = [requests[0], None, requests[1], requests[0]]
    for prompt, own, output in zip(PROMPTS, each, llm.classify(ids_of(PROMPTS), lora_request=each), strict=True):
        logits = models[own and own.lora_name](torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(torch.tensor(output.outputs.probs), logits.softmax(0), **TOLERANCE)


@torch.no_grad()
def test_words_as_classes_are_the_adapted_heads(tmp_path):
    """As rerankers ask for Yes and No: the head's rows of two words, which an adapter changes, too."""
    model = save(tmp_path / "model", config_of("Qwen3Config", vocab_size=VOCAB_SIZE), "ForCausalLM")
    encode = make_byte_tokenizer(tmp_path / "model").encode
    words = [encode("n")[-1], encode("y")[-1]]
    folder = make_adapter(tmp_path / "a1", model, targets=("q_proj", "lm_head"))
    models = {None: model, "a1": merged(model, folder)}
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    options = {"runner": "pooling", "hf_overrides": overrides, "max_model_len": 64, "skip_tokenizer_init": False}
    llm = start(tmp_path / "model", **options)
    request = LoRARequest("a1", 1, str(folder))
    for each in ([None] * 4, [request, None, None, request]):
        outputs = llm.classify(ids_of(PROMPTS), lora_request=each)
        for prompt, own, output in zip(PROMPTS, each, outputs, strict=True):
            logits = models[own and own.lora_name](torch.tensor([prompt])).logits[0, -1, words]
            torch.testing.assert_close(torch.tensor(output.outputs.probs), logits.softmax(0)[1:], **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["deberta-v2", "electra", "mpnet"])
def test_encoders_that_run_as_transformers_own_module(kind, tmp_path):
    config = other_config(kind, num_labels=3)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "model")
    requests, models = adapters_of(tmp_path, model, 3)
    llm = start(tmp_path / "model", max_model_len=60, max_loras=2)
    encoder = llm.llm_engine.engine_core.executor.worker.model_runner.model
    assert isinstance(encoder, TransformersEncoder)
    each = [requests[0], None, requests[1], requests[2], requests[1]]
    prompts = [*PROMPTS, PROMPTS[2]]
    for prompt, own, output in zip(prompts, each, llm.classify(ids_of(prompts), lora_request=each), strict=True):
        logits = models[own and own.lora_name](torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(torch.tensor(output.outputs.probs), logits.softmax(0), **TOLERANCE)


def test_a_weight_that_a_module_reads_itself_has_no_adapter(tmp_path, monkeypatch):
    """As it would have no effect."""
    config = other_config("electra")
    model = transformers.AutoModel.from_config(config).eval()
    model.save_pretrained(tmp_path / "model")
    folder = make_adapter(tmp_path / "a1", model)

    def read(self, hidden):
        return torch.nn.functional.gelu(hidden @ self.dense.weight.T + self.dense.bias)

    monkeypatch.setattr("transformers.models.electra.modeling_electra.ElectraIntermediate.forward", read)
    llm = start(tmp_path / "model", max_model_len=60)
    with pytest.raises(VLLMValidationError, match=r"intermediate\.dense: the model has no such layer"):
        llm.embed(ids_of(PROMPTS[:1]), lora_request=LoRARequest("a1", 1, str(folder)))
