"""Encoders of each family equal transformers' modules, or the definitions of their papers."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from thread_ranks import make_thread_llm
from tiny_encoders import OTHERS, PROMPTS, SIZES, TOKENS, TOLERANCE, add_modules, other_config, save, tensors

from vllm import LLM


@pytest.mark.parametrize("kind", OTHERS)
def test_encoders_of_transformers_embed(tmp_path, kind):
    folder = save(tmp_path, other_config(kind))
    add_modules(folder, "mean_tokens", normalize=True)
    llm = LLM(str(folder), skip_tokenizer_init=True, max_num_batched_tokens=64)
    assert llm.model_config.max_model_len == 64
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = [model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]
    got = torch.stack(tensors(llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False)))
    if kind == "mpnet":
        with pytest.raises(
            ValueError, match="tensor_parallel_size=2 is not supported for MPNetModel.*data_parallel_size"
        ):
            make_thread_llm(folder, 2, skip_tokenizer_init=True, max_model_len=64)
    expected = torch.nn.functional.normalize(torch.stack([each.mean(0) for each in hidden]), dim=-1)
    torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["distilbert", "modernbert", "nomic_bert", "gte", "gemma3_text"])
def test_ranks_share_an_encoder(tmp_path, kind):
    """gemma3_text: a decoder whose tokens see those after them."""
    gemma = {
        "use_bidirectional_attention": True,
        "head_dim": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = transformers.Gemma3TextConfig(**SIZES, **gemma) if kind == "gemma3_text" else other_config(kind)
    folder = save(tmp_path, config)
    usual = {"skip_tokenizer_init": True, "max_model_len": 64}
    want, llm = LLM(str(folder), dtype="float32", **usual), make_thread_llm(folder, 2, **usual)
    for got, alone in zip(
        *(tensors(each.encode(PROMPTS, TOKENS, use_tqdm=False)) for each in (llm, want)), strict=True
    ):
        torch.testing.assert_close(got, alone, **TOLERANCE)
    assert llm.llm_engine.engine_core.stats()["collective_calls"]["all_reduce"] > 0
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert", "nomic_bert", "gte", "eurobert", "deberta-v2"])
@pytest.mark.parametrize("head", ["Sequence", "Token"])
def test_other_classifiers(tmp_path, kind, head):
    bert = transformers.BertConfig(**SIZES, max_position_embeddings=64, num_labels=3)
    config = bert if kind == "bert" else other_config(kind, num_labels=3)
    folder = save(tmp_path, config, getattr(transformers, f"AutoModelFor{head}Classification"))
    llm = LLM(str(folder), skip_tokenizer_init=True)
    model = getattr(transformers, f"AutoModelFor{head}Classification").from_pretrained(folder).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0].softmax(-1) for ids in PROMPTS]
    task = "classify" if head == "Sequence" else "token_classify"
    for got, want in zip(tensors(llm.encode(PROMPTS, pooling_task=task, use_tqdm=False)), expected, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)


NOMIC_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
# model_type: what published files say besides sizes, and an option that is refused.
PUBLISHED = {
    "distilbert": ({"tie_weights_": True, "sinusoidal_pos_embds": True}, {"unknown_option": 3}),
    "modernbert": (
        {
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "local_rope_theta": 10000.0,
            "layer_norm_eps": 1e-5,
            "position_embedding_type": "absolute",
            "reference_compile": None,
        },
        {"classifier_pooling": "max"},
    ),
    "gte": (
        {
            "model_type": "new",
            "architectures": ["NewModel"],
            "position_embedding_type": "rope",
            "layer_norm_type": "layer_norm",
            "logn_attention_clip1": False,
            "pack_qkv": True,
            "unpad_inputs": True,
            "use_memory_efficient_attention": False,
        },
        {"logn_attention_scale": True},
    ),
    "nomic_bert": (
        {
            "activation_function": "swiglu",
            "dense_seq_output": True,
            "fused_bias_fc": True,
            "max_trained_positions": 2048,
            "mlp_fc1_bias": False,
            "pad_vocab_size_multiple": 64,
            "parallel_block": False,
            "qkv_proj_bias": False,
            "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_scale_base": None,
            "scale_attn_weights": True,
            "use_flash_attn": True,
            "use_xentropy": True,
        },
        {"num_experts": 8},
    ),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_files(tmp_path, kind):
    folder = save(tmp_path, other_config(kind))
    model = transformers.AutoModel.from_pretrained(folder).eval()
    options, refused = PUBLISHED[kind]
    raw = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModel": "code.Model"}}
    for name in ("rope_parameters", "layer_types"):
        raw.pop(name, None)
    if kind == "nomic_bert":
        raw = {NOMIC_NAMES.get(name, name): value for name, value in raw.items()}
    if kind == "gte":
        raw["rope_theta"] = 160000.0
    (folder / "config.json").write_text(json.dumps(raw | options))
    llm = LLM(str(folder), skip_tokenizer_init=True)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]
    for got, want in zip(tensors(llm.encode(PROMPTS, TOKENS, use_tqdm=False)), expected, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    (folder / "config.json").write_text(json.dumps(raw | options | refused))
    with pytest.raises(ValueError, match=f"{next(iter(refused))}(=.* is not supported|, got 3)"):
        LLM(str(folder), skip_tokenizer_init=True)


def test_scaled_positions_of_gte(tmp_path):
    """Their "ntk": the base times the factor, and frequencies by factor ** (2 / dim)."""
    folder = save(tmp_path, other_config("gte", rope_parameters={"rope_type": "default", "rope_theta": 80000.0}))
    model = transformers.AutoModel.from_pretrained(folder).eval()
    model.rotary_emb.inv_freq /= 8.0 ** (2 / 8)
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    raw |= {"architectures": ["NewModel"], "rope_theta": 10000.0, "rope_scaling": {"type": "ntk", "factor": 8.0}}
    (folder / "config.json").write_text(json.dumps(raw))
    llm = LLM(str(folder), skip_tokenizer_init=True)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]
    for got, want in zip(tensors(llm.encode(PROMPTS, TOKENS, use_tqdm=False)), expected, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)


def jina_bert(weights: dict[str, torch.Tensor], ids: list[int], slopes: list[float], act) -> torch.Tensor:
    """Hidden states [L, H] by the definitions of arXiv:2310.19923."""

    def linear(x, name):
        return torch.nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        return torch.nn.functional.layer_norm(
            x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12
        )

    places = torch.arange(len(ids))
    bias = -torch.tensor(slopes)[:, None, None] * (places[:, None] - places).abs()
    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    for layer in range(2):
        at = f"encoder.layer.{layer}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{name}").unflatten(-1, (len(slopes), -1)).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        attended = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v
        attended = linear(attended.transpose(0, 1).flatten(1), f"{at}.attention.output.dense")
        x = norm(x + attended, f"{at}.attention.output.LayerNorm")
        gate, up = linear(x, f"{at}.mlp.gated_layers").chunk(2, -1)
        x = norm(x + linear(act(gate) * up, f"{at}.mlp.wo"), f"{at}.mlp.layernorm")
    return x


@pytest.mark.parametrize("kind", ["geglu", "reglu"])
def test_jina_v2(tmp_path, kind):
    hidden, inner, torch_act = 24, 40, torch.nn.functional.gelu if kind == "geglu" else torch.relu
    shapes = {"embeddings.word_embeddings.weight": (50, hidden), "embeddings.token_type_embeddings.weight": (2, hidden)}
    norms = ["embeddings.LayerNorm"]
    for layer in range(2):
        at = f"encoder.layer.{layer}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= {
                f"{at}.attention.{name}.weight": (hidden, hidden),
                f"{at}.attention.{name}.bias": (hidden,),
            }
        shapes |= {f"{at}.mlp.gated_layers.weight": (2 * inner, hidden), f"{at}.mlp.wo.weight": (hidden, inner)}
        shapes[f"{at}.mlp.wo.bias"] = (hidden,)
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.mlp.layernorm"]
    shapes |= {f"{name}.{part}": (hidden,) for name in norms for part in ("weight", "bias")}
    torch.manual_seed(0)
    weights = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    save_file({f"bert.{name}": values for name, values in weights.items()}, tmp_path / "model.safetensors")
    raw = {
        "architectures": ["JinaBertForMaskedLM"],
        "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
        "model_type": "bert",
        "vocab_size": 50,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "intermediate_size": inner,
        "feed_forward_type": kind,
        "position_embedding_type": "alibi",
        "max_position_embeddings": 1024,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "emb_pooler": "mean",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    llm = LLM(str(tmp_path), skip_tokenizer_init=True)
    prompts = [*PROMPTS[:4], [index % 50 for index in range(600)]]
    # The paper says: 4 heads have 2^-2 ... 2^-8, two more the first and third of 8.
    slopes = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    expected = [jina_bert(weights, ids, slopes, torch_act) for ids in prompts]
    for got, want in zip(tensors(llm.encode(prompts, TOKENS, use_tqdm=False)), expected, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    shared = make_thread_llm(tmp_path, 2, skip_tokenizer_init=True, max_model_len=1024)
    for got, want in zip(tensors(shared.encode(prompts, TOKENS, use_tqdm=False)), expected, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    shared.llm_engine.engine_core.shutdown()
    for got, want in zip(llm.embed(prompts, use_tqdm=False), expected, strict=True):
        mean = torch.nn.functional.normalize(want.mean(0), dim=-1)
        torch.testing.assert_close(torch.tensor(got.outputs.embedding), mean, **TOLERANCE)
    (tmp_path / "config.json").write_text(json.dumps({**raw, "feed_forward_type": "other"}))
    with pytest.raises(ValueError, match="feed_forward_type='other' is not supported"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_windows_of_long_sequences(tmp_path):
    """ModernBERT's layers whose queries are taken in blocks."""
    folder = save(tmp_path, other_config("modernbert", max_position_embeddings=1024, local_attention=20))
    model = transformers.AutoModel.from_pretrained(folder).eval()
    prompts = [[index % 200 for index in range(length)] for length in (600, 3, 257)]
    llm = LLM(str(folder), skip_tokenizer_init=True)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    for got, want in zip(tensors(llm.encode(prompts, TOKENS, use_tqdm=False)), expected, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)
    half = LLM(str(folder), skip_tokenizer_init=True, dtype="bfloat16")
    for got, want in zip(tensors(half.encode(prompts, TOKENS, use_tqdm=False)), expected, strict=True):
        # Two layers round to 8 bits.
        assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.999


def test_a_length_that_only_the_tokenizer_says(tmp_path):
    """T5's positions are relative, and its config.json names no longest text."""
    sizes = {"vocab_size": 200, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    folder = save(tmp_path, transformers.T5Config(**sizes), transformers.AutoModelForTextEncoding)
    add_modules(folder, "mean_tokens", normalize=False)
    with pytest.raises(ValueError, match="no max_position_embeddings"):
        LLM(str(folder), skip_tokenizer_init=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 40}))
    llm = LLM(str(folder), skip_tokenizer_init=True)
    assert llm.model_config.max_model_len == 40
    model = transformers.T5EncoderModel.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in PROMPTS]
    got = tensors(llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False))
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), **TOLERANCE)


# Encoders whose types, positions or architectures have names of their own.
LESS_USUAL = {
    "xlm": {"emb_dim": 32, "n_layers": 2, "n_heads": 4},
    "splinter": {},
    "ibert": {},
    "bert": {"architectures": ["BertLMHeadModel"]},
    "roberta": {"pad_token_id": 1},
}


@pytest.mark.parametrize("kind", LESS_USUAL)
def test_less_usual_encoders(tmp_path, kind):
    options = {**SIZES, "max_position_embeddings": 66, **LESS_USUAL[kind]}
    folder = save(tmp_path, transformers.CONFIG_MAPPING[kind](**options))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {n: v for n, v in options.items() if n == "architectures"}))
    add_modules(folder, "mean_tokens", normalize=False)
    llm = LLM(str(folder), skip_tokenizer_init=True)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    # A padding token inside a text, and the longest text.
    prompts = [*PROMPTS, [5, 1, 7, 1], [index % 190 + 5 for index in range(llm.model_config.max_model_len)]]
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    for got, want in zip(tensors(llm.encode(prompts, TOKENS, use_tqdm=False)), expected, strict=True):
        torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"model_type": "bart", "architectures": ["BartForSequenceClassification"]}, "it is an encoder-decoder"),
        ({"model_type": "funnel", "architectures": ["FunnelForSequenceClassification"]}, "a type of its own"),
        ({"model_type": "big_bird", "architectures": ["BigBirdForMaskedLM"]}, "hf_overrides.*original_full"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "hf_overrides=.*T5EncoderModel"),
        ({"model_type": "llama", "architectures": ["LlamaEncoderModel"]}, "hf_overrides=.*'LlamaModel'"),
        ({"model_type": "bert", "architectures": ["BertSpladeModel"]}, "hf_overrides=.*'BertModel'"),
        ({"model_type": "tapas", "architectures": ["TapasModel"]}, "cannot run on token ids alone"),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_encoders_that_are_refused(tmp_path, raw, problem):
    sizes = {name: value for name, value in SIZES.items() if raw["model_type"] != "funnel" or "hidden" not in name}
    raw = {**sizes, "max_position_embeddings": 64, "type_vocab_sizes": [2], **raw}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=problem):
        LLM(str(tmp_path), skip_tokenizer_init=True, load_format="dummy")
