"""Decoders that pool: embeddings, classes and rewards are those of transformers, whatever shares the batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from safetensors.torch import load_file, save_file
from torch import nn

from vllm import LLM, PoolingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

SIZES = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
SHARED = list(range(20, 61))
# The last ones share a prefix of several blocks; the budget of a step is less than the longest.
PROMPTS = [[5, 7, 9], [11, 12, 13, 14, 15, 16, 17], [3], SHARED, [*SHARED, 8, 9], [*SHARED[:35], 7, *range(60, 90)]]
BUDGET = 24
INTERNLM2 = {
    "self_attn.o_proj": "attention.wo",
    "self_attn": "attention",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
# float32, summed in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def config_of(name: str, **options) -> transformers.PretrainedConfig:
    own = {"num_key_value_heads": 4, "n_inner": 48} if name == "GPT2Config" else {}
    return getattr(transformers, name)(**{**SIZES, **own, **options})


def save(folder: Path, config: transformers.PretrainedConfig, kind: str = "") -> nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModel{kind}").from_config(config).eval()
    for parameter in model.parameters():
        # Norms and biases begin as ones and zeros, which would hide that one is not read.
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def run(folder: Path, **options) -> LLM:
    options = {"max_num_batched_tokens": BUDGET, "skip_tokenizer_init": True, "dtype": "float32"} | options
    return LLM(str(folder), **options)


def tensors(outputs) -> list[torch.Tensor]:
    return [output.outputs.data for output in outputs]


@torch.no_grad()
def hidden_states(model: nn.Module) -> list[torch.Tensor]:
    return [model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]


def check_twice(call, expected) -> None:
    """The second call finds the prompts in the prefix cache."""
    for _ in range(2):
        for got, want in zip(call(), expected, strict=True):
            torch.testing.assert_close(got, want, **TOLERANCE)


def normalized(vectors):
    return [nn.functional.normalize(each, dim=-1) for each in vectors]


@pytest.mark.parametrize("name", ["Qwen3Config", "LlamaConfig", "GPT2Config", "Qwen3MoeConfig"])
def test_a_decoder_embeds_by_its_last_token(tmp_path, name):
    sizes = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2} if "Moe" in name else {}
    model = save(tmp_path, config_of(name, **sizes))
    llm = run(tmp_path)
    hidden = hidden_states(model)
    check_twice(
        lambda: tensors(llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False)),
        normalized(each[-1] for each in hidden),
    )
    plain = PoolingParams(use_activation=False)
    check_twice(lambda: tensors(llm.encode(PROMPTS, plain, pooling_task="token_embed", use_tqdm=False)), hidden)
    outputs = llm.embed(PROMPTS[-2:], use_tqdm=False)
    assert all(output.num_cached_tokens >= len(output.prompt_token_ids) - 2 for output in outputs)
    skipped = PoolingParams(skip_reading_prefix_cache=True)
    assert llm.embed(PROMPTS[-1], pooling_params=skipped, use_tqdm=False)[0].num_cached_tokens == 0


def test_a_generating_model_embeds_by_the_mean_with_two_ranks(tmp_path):
    model = save(tmp_path, config_of("Qwen2Config"), "ForCausalLM")
    llm = run(tmp_path, runner="pooling", pooler_config={"pooling_type": "MEAN"}, tensor_parallel_size=2)
    expected = normalized(each.mean(0) for each in hidden_states(model.model))
    check_twice(lambda: tensors(llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False)), expected)


@pytest.mark.parametrize(("name", "num_labels"), [("LlamaConfig", 1), ("Gemma2Config", 3), ("GPT2Config", 2)])
def test_a_classifier_on_a_decoder(tmp_path, name, num_labels):
    model = save(tmp_path, config_of(name, num_labels=num_labels), "ForSequenceClassification")
    llm = run(tmp_path)
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
    expected = [each.sigmoid() if num_labels == 1 else each.softmax(-1) for each in logits]
    check_twice(lambda: [torch.tensor(each.outputs.probs) for each in llm.classify(PROMPTS, use_tqdm=False)], expected)
    rewards = tensors(llm.reward(PROMPTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False))
    for got, ids, want in zip(rewards, PROMPTS, logits, strict=True):
        assert got.shape == (len(ids), num_labels)
        torch.testing.assert_close(got[-1], want, **TOLERANCE)
    with pytest.raises(VLLMValidationError, match="classify, token_classify"):
        llm.embed(PROMPTS, use_tqdm=False)


def test_a_classifier_that_is_not_there(tmp_path):
    save(tmp_path, config_of("Qwen2Config"), "ForCausalLM")
    problem = "lacks a classifier .score.weight., which Qwen2ForCausalLM served with convert='classify' needs: hf_overr"
    with pytest.raises(ValueError, match=problem):
        run(tmp_path, runner="pooling", convert="classify")


def test_tokens_are_classified(tmp_path):
    model = save(tmp_path, config_of("Qwen3Config", num_labels=3), "ForTokenClassification")
    llm = run(tmp_path)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0].softmax(-1) for ids in PROMPTS]
    check_twice(lambda: tensors(llm.encode(PROMPTS, pooling_task="token_classify", use_tqdm=False)), expected)


@pytest.mark.parametrize("name", ["Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"])
def test_rewards_of_tokens_and_of_steps(tmp_path, name):
    num_labels = 2 if "Process" in name else 1
    model = save(tmp_path, config_of("Qwen2Config"))
    head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, num_labels))
    weights = {f"model.{key}": value for key, value in load_file(tmp_path / "model.safetensors").items()}
    weights |= {f"score.{key}": value for key, value in head.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "architectures": [name]}))
    llm = run(tmp_path)
    with torch.no_grad():
        values = [head(each) for each in hidden_states(model)]
    expected = [each.softmax(-1) for each in values] if num_labels == 2 else values
    check_twice(lambda: tensors(llm.reward(PROMPTS, use_tqdm=False)), expected)
    steps = PoolingParams(step_tag_id=7, returned_token_ids=[num_labels - 1])
    got = tensors(llm.reward(PROMPTS, pooling_params=steps, use_tqdm=False))
    assert [len(each) for each in got] == [ids.count(7) for ids in PROMPTS]
    want = values[0][1:2, -1:] if num_labels == 1 else values[0][1:2, -1:].sigmoid()
    torch.testing.assert_close(got[0], want, **TOLERANCE)


def test_a_reward_head_of_one_layer(tmp_path):
    """InternLM2's, in its own names: q, k and v of a group of heads are one after the other in one matrix."""
    model = save(tmp_path, config_of("LlamaConfig"))
    own = {}
    for name, value in load_file(tmp_path / "model.safetensors").items():
        for before, after in INTERNLM2.items():
            name = name.replace(before, after)
        own[name if name.startswith("layers.") else name.replace("embed_tokens", "tok_embeddings")] = value
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"layers.{layer}.attention"
        q, k, v = (own.pop(f"{at}.{name}_proj.weight").unflatten(0, (2, -1, 8)) for name in "qkv")
        own[f"{at}.wqkv.weight"] = torch.cat([q, k, v], 1).flatten(0, 2)
    head = nn.Linear(32, 1, bias=False)
    weights = {f"model.{name}": value for name, value in own.items()} | {"v_head.weight": head.weight.data}
    save_file({name: value.contiguous() for name, value in weights.items()}, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    changed = {"architectures": ["InternLM2ForRewardModel"], "model_type": "internlm2", "bias": False}
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changed}))
    llm = run(tmp_path)
    with torch.no_grad():
        expected = [head(each) for each in hidden_states(model)]
    check_twice(lambda: tensors(llm.reward(PROMPTS, use_tqdm=False)), expected)


def test_llama_bidirectional(tmp_path):
    """NVIDIA's: no mask, and a pooling that config.json names."""
    model = save(tmp_path, config_of("LlamaConfig"))
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec", "temperature": 0.02}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "pooling": "avg"}))
    llm = run(tmp_path)
    length = max(map(len, PROMPTS))
    everything = torch.zeros(1, 1, length, length)
    with torch.no_grad():
        expected = [
            model(torch.tensor([ids]), attention_mask=everything[:, :, : len(ids), : len(ids)]).last_hidden_state[0]
            for ids in PROMPTS
        ]
    want = [nn.functional.normalize(each.mean(0), dim=-1) for each in expected]
    check_twice(lambda: tensors(llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False)), want)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "pooling": "max"}))
    with pytest.raises(ValueError, match="pooling='max' is not supported"):
        run(tmp_path)
    raw |= {"architectures": ["LlamaBidirectionalForSequenceClassification"], "pooling": "avg"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="temperature=0.02"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("name", "options"),
    [("LlamaConfig", {}), ("GPT2Config", {}), ("Gemma3TextConfig", {"use_bidirectional_attention": True})],
)
def test_a_classifier_looks_past_padding(tmp_path, name, options):
    """As transformers', which reads the last token that is not the padding one, wherever that is."""
    model = save(tmp_path, config_of(name, num_labels=3, pad_token_id=9, **options), "ForSequenceClassification")
    prompts = [[5, 7, 9, 9], [9], [9, 9], [11, 9, 12], [5, 6]]
    llm = run(tmp_path)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0].softmax(-1) for ids in prompts]
    outputs = llm.classify(prompts, use_tqdm=False)
    for output, ids, want in zip(outputs, prompts, expected, strict=True):
        torch.testing.assert_close(torch.tensor(output.outputs.probs), want, **TOLERANCE)
        assert output.prompt_token_ids == ids


def test_embedding_gemma_sees_all_tokens(tmp_path):
    options = {"use_bidirectional_attention": True, "sliding_window": 8, "layer_types": None, "num_hidden_layers": 6}
    config = config_of("Gemma3TextConfig", **options)
    save(tmp_path, config)
    model = transformers.AutoModel.from_pretrained(tmp_path).eval()  # halves the window of the file
    kinds = ["models.Transformer", "models.Pooling", "models.Dense", "models.Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}", "type": f"sentence_transformers.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1").mkdir()
    (tmp_path / "1/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (tmp_path / "2").mkdir()
    identity = "torch.nn.modules.linear.Identity"
    dense = {"in_features": 32, "out_features": 48, "bias": False, "activation_function": identity}
    (tmp_path / "2/config.json").write_text(json.dumps(dense))
    weight = torch.randn(48, 32)
    save_file({"linear.weight": weight}, tmp_path / "2/model.safetensors")
    llm = run(tmp_path, hf_overrides={"is_matryoshka": True})
    expected = normalized(each.mean(0) @ weight.T for each in hidden_states(model))
    check_twice(lambda: [torch.tensor(each.outputs.embedding) for each in llm.embed(PROMPTS, use_tqdm=False)], expected)
    cut = llm.embed(PROMPTS[0], pooling_params=PoolingParams(dimensions=40), use_tqdm=False)
    assert cut[0].outputs.hidden_size == 40  # more than the decoder's width
    with pytest.raises(ValueError, match="one does not: use 'pooling'"):
        EngineArgs(model=str(tmp_path), runner="generate").create_engine_config()


@pytest.mark.parametrize("argument", [{"convert": "reward"}, {"task": "draft"}])
def test_what_a_pooling_model_cannot_be_is_refused(tmp_path, argument):
    config_of("Qwen3Config", architectures=["Qwen3Model"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=next(iter(argument))):
        EngineArgs(model=str(tmp_path), load_format="dummy", **argument).create_engine_config()


@pytest.mark.parametrize("is_tied", [False, True])
def test_words_as_classes(tmp_path, is_tied):
    """As upstream's programs load Qwen3-Reranker and bge-reranker-v2-gemma."""
    config = config_of("Qwen3Config", vocab_size=VOCAB_SIZE, tie_word_embeddings=is_tied)
    model = save(tmp_path, config, "ForCausalLM")
    encode = make_byte_tokenizer(tmp_path).encode
    no, yes = encode("n")[-1], encode("y")[-1]
    with torch.no_grad():
        logits = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in PROMPTS])
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    llm = run(tmp_path, runner="pooling", hf_overrides=overrides, skip_tokenizer_init=False)
    expected = logits[:, [no, yes]].softmax(-1)[:, 1:]
    check_twice(lambda: [torch.tensor(each.outputs.probs) for each in llm.classify(PROMPTS, use_tqdm=False)], expected)
    query, documents = "<Query>: a", ["<Document>: b", "<Document>: c, d"]
    with torch.no_grad():
        pairs = [model(torch.tensor([encode(query + each)])).logits[0, -1] for each in documents]
    scores = [each.outputs.score for each in llm.score([query] * 2, documents, use_tqdm=False)]
    assert scores == pytest.approx([float(each[[no, yes]].softmax(-1)[1]) for each in pairs], abs=1e-5)
    overrides |= {"method": "no_post_processing", "classifier_from_token": ["y"]}
    outputs = run(tmp_path, hf_overrides=overrides).classify(PROMPTS, use_tqdm=False)
    got = torch.tensor([each.outputs.probs for each in outputs])
    torch.testing.assert_close(got, logits[:, [yes]].sigmoid(), **TOLERANCE)
    with pytest.raises(ValueError, match="'yn' has 2 tokens"):
        run(tmp_path, runner="pooling", hf_overrides={**overrides, "classifier_from_token": ["yn"]})


def test_qwen3_embedding_as_its_card_runs_it(tmp_path):
    model = save(tmp_path, config_of("Qwen3Config", vocab_size=VOCAB_SIZE, tie_word_embeddings=True), "ForCausalLM")
    encode = make_byte_tokenizer(tmp_path).encode
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(
        json.dumps({"pooling_mode_lasttoken": True, "include_prompt": True})
    )
    task = "Given a web search query, retrieve relevant passages that answer the query"
    texts = [f"Instruct: {task}\nQuery:Explain gravity", "Gravity is a force.", "The capital of China is Beijing."]
    llm = LLM(model=str(tmp_path), task="embed", max_model_len=128)
    embeddings = torch.tensor([each.outputs.embedding for each in llm.embed(texts)])
    with torch.no_grad():
        hidden = [model.model(torch.tensor([encode(text)])).last_hidden_state[0, -1] for text in texts]
    torch.testing.assert_close(embeddings, torch.stack(normalized(hidden)), **TOLERANCE)
