"""Sparse embeddings (SPLADE): of each word log(1 + max(logit, 0)), pooled over the tokens, by transformers' heads of
masked words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from asgi import Serve
from safetensors.torch import load_file, save_file
from thread_ranks import make_thread_llm
from tiny_encoders import OTHERS, PROMPTS, SIZES, TOLERANCE, tensors
from tiny_late_models import WORDS, add_tokenizer

from vllm import LLM, PoolingParams
from vllm.exceptions import VLLMValidationError

VOCAB = SIZES["vocab_size"]
MODULES = "sentence_transformers.base.modules.transformer.Transformer"
OLDER = "sentence_transformers.sparse_encoder.models.MLMTransformer"


def save(folder: Path, kind: str, **fields: Any) -> Any:
    """A random model of masked words; the head's biases are not 0."""
    torch.manual_seed(0)
    own = {"pad_token_id": 0, "max_position_embeddings": 64} | OTHERS.get(kind, {})
    config = transformers.CONFIG_MAPPING[kind](**(SIZES | own | fields))
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    for values in model.parameters():
        values.data += 0.2 * torch.randn_like(values)
    model.save_pretrained(folder)
    return model


def add_modules(folder: Path, transformer: str = MODULES, **pooling: Any) -> None:
    kinds = [("", transformer), ("1_SpladePooling", "sentence_transformers.sparse_encoder.models.SpladePooling")]
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling/config.json").write_text(json.dumps(pooling))


@torch.no_grad()
def expected(model: Any, strategy: str = "max", is_flat: bool = False, prompts: Any = PROMPTS) -> list[torch.Tensor]:
    found = []
    for prompt in prompts:
        weights = (1 + model(torch.tensor([prompt])).logits[0].relu()).log()
        weights = (1 + weights).log() if is_flat else weights
        found.append(weights.amax(0) if strategy == "max" else weights.sum(0))
    assert any((each == 0).any() for each in found) and all((each > 0).any() for each in found)
    return found


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def run(folder: Path, **fields: Any) -> LLM:
    return LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **fields)


@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "xlm-roberta", "modernbert"])
def test_sparse_encoders(kind: str, tmp_path: Path) -> None:
    model = save(tmp_path, kind)
    # More tokens than have their words at once.
    long = [[5 + (7 * i) % 180 for i in range(60)]] if kind == "modernbert" else []
    add_modules(tmp_path, OLDER if kind == "distilbert" else MODULES, pooling_strategy="max")
    llm = run(tmp_path)
    assert llm.model_config.pooling_tasks == ("embed",) and llm.model_config.embedding_size == VOCAB
    together = tensors(llm.encode(PROMPTS + long, use_tqdm=False))
    assert_close(together, expected(model, prompts=PROMPTS + long))
    for prompt, other in zip(PROMPTS, together, strict=False):
        assert_close(tensors(llm.encode([prompt], use_tqdm=False)), [other])
    (one,) = llm.embed(PROMPTS[:1], use_tqdm=False)
    assert one.outputs.embedding == pytest.approx(together[0].tolist(), abs=1e-6)
    with pytest.raises(VLLMValidationError, match="token_embed"):
        llm.encode(PROMPTS, pooling_task="token_embed", use_tqdm=False)


@pytest.mark.parametrize(("strategy", "activation"), [("sum", "relu"), ("max", "log1p_relu"), ("sum", "log1p_relu")])
def test_other_poolings(strategy: str, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.layers.pooler._WORD_ROWS", 3)
    model = save(tmp_path, "bert")
    add_modules(tmp_path, pooling_strategy=None if strategy == "max" else strategy, activation_function=activation)
    want = expected(model, strategy, activation == "log1p_relu")
    assert_close(tensors(run(tmp_path).encode(PROMPTS, use_tqdm=False)), want)
    normalized = run(tmp_path).encode(PROMPTS, PoolingParams(use_activation=True), use_tqdm=False)
    assert_close(tensors(normalized), [each / each.norm() for each in want])


def test_upstreams_name_and_a_head_of_its_own(tmp_path: Path) -> None:
    """As naver/splade-v3 is loaded in upstream's documentation, with and without a table of tokens for the head."""
    overrides = {"architectures": ["BertSpladeSparseEmbeddingModel"]}
    for is_tied in (True, False):
        folder = tmp_path / str(is_tied)
        model = save(folder, "bert", tie_word_embeddings=is_tied)
        path = folder / "model.safetensors"
        stored = load_file(path)
        if is_tied:
            # Older files have the copies, too.
            words = stored["bert.embeddings.word_embeddings.weight"]
            stored["cls.predictions.decoder.weight"] = words.clone()
            stored["cls.predictions.decoder.bias"] = stored["cls.predictions.bias"].clone()
            save_file(stored, path, metadata={"format": "pt"})
        else:
            assert not torch.equal(stored["cls.predictions.decoder.bias"], stored["cls.predictions.bias"])
        got = tensors(run(folder, hf_overrides=overrides).encode(PROMPTS, use_tqdm=False))
        assert_close(got, expected(model))


def test_two_ranks(tmp_path: Path) -> None:
    model = save(tmp_path, "bert")
    add_modules(tmp_path)
    llm = make_thread_llm(tmp_path, 2, max_model_len=64, skip_tokenizer_init=True)
    assert_close(tensors(llm.encode(PROMPTS, use_tqdm=False)), expected(model))


def test_over_http(serve: Serve, tmp_path: Path) -> None:
    model = save(tmp_path, "bert", vocab_size=len(WORDS))
    add_modules(tmp_path)
    add_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["the cat sits", "stop"]
    want = expected(model, prompts=[tokenizer(text).input_ids for text in texts])
    server = serve({"max_model_len": 32}, tmp_path)
    data = server.post("/v1/embeddings", input=texts)["data"]
    for each, theirs in zip(data, want, strict=True):
        assert each["embedding"] == pytest.approx(theirs.tolist(), abs=1e-5)
    (score,) = server.post("/score", text_1=texts[0], text_2=texts[1])["data"]
    assert score["score"] == pytest.approx(torch.cosine_similarity(*want, dim=0).item(), abs=1e-5)


def test_what_pools_no_words(tmp_path: Path) -> None:
    save(tmp_path / "m", "bert")
    add_modules(tmp_path / "m", pooling_strategy="mean")
    with pytest.raises(
        ValueError, match="1_SpladePooling/config.json: pooling_strategy must be max or sum, got 'mean'"
    ):
        run(tmp_path / "m")
    (tmp_path / "m/1_SpladePooling/config.json").write_text("{}")
    for pooler in ({"pooling_type": "MEAN"}, {"enable_chunked_processing": True}):
        with pytest.raises(ValueError, match=f"{next(iter(pooler))}=.* is not supported for sparse embeddings"):
            run(tmp_path / "m", pooler_config=pooler)
    modules = json.loads((tmp_path / "m/modules.json").read_text())
    (tmp_path / "m/modules.json").write_text(json.dumps([*modules, {"type": "x.Normalize", "path": "2"}]))
    with pytest.raises(ValueError, match="SpladePooling must follow a Transformer alone, got Transformer, Spla"):
        run(tmp_path / "m")
    save(tmp_path / "electra", "electra")
    add_modules(tmp_path / "electra")
    problem = "SpladePooling needs an architecture among BertForMaskedLM, .*, and config.json names ElectraForMaskedLM"
    with pytest.raises(ValueError, match=problem):
        run(tmp_path / "electra")


BGE_M3 = {"hf_overrides": {"architectures": ["BgeM3EmbeddingModel"]}}


def save_m3(folder: Path) -> Any:
    """An XLM-RoBERTa whose tokens have two layers: the model, and those."""
    torch.manual_seed(0)
    ends = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "max_position_embeddings": 66}
    model = transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**SIZES, **ends)).eval()
    for values in model.parameters():
        values.data += 0.05 * torch.randn_like(values)
    model.save_pretrained(folder)
    heads = [torch.nn.Linear(SIZES["hidden_size"], width) for width in (1, 24)]
    for name, head in zip(("sparse_linear.pt", "colbert_linear.pt"), heads, strict=True):
        torch.save(head.state_dict(), folder / name)
    return model, *heads


# With and without the tokens that begin and end texts.
M3_PROMPTS = [[2, 7, 9, 3], [2, *range(20, 50), 3], [7, 9, 11], [2, 9], [2, 3]]


@torch.no_grad()
def test_weights_and_vectors_of_tokens(serve: Serve, tmp_path: Path) -> None:
    model, sparse, colbert = save_m3(tmp_path)
    llm = run(tmp_path, **BGE_M3)
    assert llm.model_config.pooling_tasks == ("embed", "token_embed", "token_classify")
    hidden = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in M3_PROMPTS]
    normalize = torch.nn.functional.normalize
    starts = [int(prompt[0] == 2) for prompt in M3_PROMPTS]
    ends = [len(prompt) - (prompt[-1] == 3) for prompt in M3_PROMPTS]
    places = [slice(*pair) for pair in zip(starts, ends, strict=True)]
    want: dict[Any, list[torch.Tensor]] = {
        "embed": [normalize(each[0], dim=-1) for each in hidden],
        "token_embed": [normalize(colbert(each[start:]), dim=-1) for each, start in zip(hidden, starts, strict=True)],
        "token_classify": [sparse(each[place])[:, 0].relu() for each, place in zip(hidden, places, strict=True)],
    }
    assert any((each > 0).any() for each in want["token_classify"])
    for task, expected_of_task in want.items():
        assert_close(tensors(llm.encode(M3_PROMPTS, pooling_task=task, use_tqdm=False)), expected_of_task)
        for prompt, theirs in zip(M3_PROMPTS, expected_of_task, strict=True):
            assert_close(tensors(llm.encode([prompt], pooling_task=task, use_tqdm=False)), [theirs])
    plain = llm.encode(
        M3_PROMPTS[0], PoolingParams(use_activation=False), pooling_task="token_classify", use_tqdm=False
    )
    assert_close(tensors(plain), [sparse(hidden[0][places[0]])[:, 0]])
    for task, extra, theirs in (
        ("token_embed", {"attended_tokens": 50}, want["token_embed"][0]),
        ("token_embed", {"skipped_token_ids": [7]}, want["token_embed"][0][1:]),
        ("embed", {"compressed_token_type_ids": 4}, want["embed"][0]),
    ):
        params = PoolingParams(extra_kwargs=extra)
        assert_close(tensors(llm.encode(M3_PROMPTS[0], params, pooling_task=task, use_tqdm=False)), [theirs])
    columns = {"returned_token_ids": [1]}
    with pytest.raises(VLLMValidationError, match="returned_token_ids chooses among classes"):
        llm.encode(M3_PROMPTS, PoolingParams(**columns), pooling_task="token_classify", use_tqdm=False)
    with pytest.raises(ValueError, match="pooler_config: returned_token_ids chooses among classes"):
        run(tmp_path, **BGE_M3, pooler_config=columns)
    server = serve({"max_model_len": 64, "skip_tokenizer_init": True, **BGE_M3}, tmp_path)
    answer = server.post("/pooling", input=M3_PROMPTS[:2], task="token_classify")
    for each, theirs in zip(answer["data"], want["token_classify"], strict=False):
        assert each["data"] == pytest.approx(theirs.tolist(), abs=1e-5)


def test_layers_of_tokens_that_are_missing_or_odd(tmp_path: Path) -> None:
    save_m3(tmp_path)
    torch.save({"weight": torch.zeros(2, 32), "bias": torch.zeros(2)}, tmp_path / "sparse_linear.pt")
    with pytest.raises(ValueError, match=r"sparse_linear.pt has weights .*\(2, 32\).*, expected .*\(1, 32\)"):
        run(tmp_path, **BGE_M3)
    (tmp_path / "sparse_linear.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"sparse_linear.pt is not a usable file of tensors"):
        run(tmp_path, **BGE_M3)
    (tmp_path / "sparse_linear.pt").unlink()
    with pytest.raises(ValueError, match=r"lacks sparse_linear.pt, a layer of BgeM3EmbeddingModel"):
        run(tmp_path, **BGE_M3)
    made_up = [run(tmp_path, **BGE_M3, load_format="dummy", seed=seed) for seed in (1, 1, 2)]
    first, same, other = (tensors(llm.encode(M3_PROMPTS[:1], pooling_task="token_embed"))[0] for llm in made_up)
    assert torch.equal(first, same) and not torch.equal(first, other)
