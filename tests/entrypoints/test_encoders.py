"""Encoders: embeddings, classes and scores are those of transformers, whatever shares the batch."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from minilm import extract_minilm
from safetensors.torch import load_file, save_file
from tiny_encoders import PROMPTS, SIZES, TOLERANCE, add_modules, save, tensors
from tiny_late_models import WORDS, add_tokenizer
from tokenizers.processors import TemplateProcessing

from vllm import LLM, PoolingParams, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.async_llm import AsyncLLM
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import LateChunkingParams


@pytest.fixture(scope="module")
def minilm(tmp_path_factory):
    return extract_minilm(tmp_path_factory.mktemp("minilm"))


TEXTS = ["The cat sits on the mat.", "A kitten is on a rug.", "Stocks fell.", "hello " * 60]


def reference_embeddings(folder: Path, texts: list[str]) -> torch.Tensor:
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(means), dim=-1)


def test_minilm_embeds_as_transformers(minilm):
    llm = LLM(str(minilm))
    assert llm.model_config.max_model_len == 256  # of sentence_bert_config.json
    assert not llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    expected = reference_embeddings(minilm, TEXTS)
    together = torch.tensor([each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)])
    torch.testing.assert_close(together, expected, **TOLERANCE)
    alone = torch.tensor(llm.embed(TEXTS[1], use_tqdm=False)[0].outputs.embedding)
    torch.testing.assert_close(alone, together[1], rtol=1e-5, atol=1e-6)
    scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    torch.testing.assert_close(torch.tensor(scores), expected[0] @ expected[1:].T, **TOLERANCE)
    with pytest.raises(VLLMValidationError, match="256"):
        llm.embed("word " * 300, use_tqdm=False)
    cut = llm.embed("word " * 300, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)[0]
    assert len(cut.prompt_token_ids) == 256 and cut.prompt_token_ids[-1] == 102  # [SEP]
    with pytest.raises(VLLMValidationError, match="does not generate"):
        llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(VLLMValidationError, match="embed, token_embed"):
        llm.classify("a", use_tqdm=False)


def test_async_encode_gives_the_same(minilm):
    async def encode():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(minilm), hf_overrides={"is_matryoshka": True}))
        try:
            params = PoolingParams(task="embed", dimensions=64)
            names = range(len(TEXTS))

            async def one(index):
                (output,) = [each async for each in engine.encode(TEXTS[index], params, str(index))]
                return output

            outputs = await asyncio.gather(*(one(index) for index in names))
            counts = engine.replicas[0].metrics.registry
            assert counts.get_sample_value("vllm:request_success_total", {"finished_reason": "stop"}) == len(TEXTS)
            num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
            assert counts.get_sample_value("vllm:prompt_tokens_total") == num_tokens
            return outputs
        finally:
            engine.shutdown()

    outputs = asyncio.run(encode())
    expected = torch.nn.functional.normalize(reference_embeddings(minilm, TEXTS)[:, :64], dim=-1)
    torch.testing.assert_close(torch.stack(tensors(outputs)), expected, **TOLERANCE)


def test_parts_of_a_text_are_means_of_its_tokens(minilm):
    llm = LLM(str(minilm), pooler_config={"task": "token_embed"})
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    params = [PoolingParams(late_chunking_params=LateChunkingParams(size)) for size in (3, 2**63 - 1, 1)]
    outputs = llm.embed(TEXTS[:3], pooling_params=params, use_tqdm=False)
    for text, output, size in zip(TEXTS, outputs, (3, 99, 1), strict=False):
        encoded = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
        (offsets,) = encoded.pop("offset_mapping").tolist()
        with torch.no_grad():
            (hidden,) = model(**encoded).last_hidden_state
        parts = torch.stack([part.mean(0) for part in hidden.split(size)])
        torch.testing.assert_close(output.outputs.data, torch.nn.functional.normalize(parts, dim=-1), **TOLERANCE)
        chunks = output.late_chunking.chunks
        assert [chunk.token_range[0] for chunk in chunks] == list(range(0, len(hidden), size))
        assert chunks[-1].token_range[1] == output.late_chunking.input_tokens == len(hidden)
        places = [chunk.char_range for chunk in chunks]
        if size == 1:
            assert places == [None, *map(tuple, offsets[1:-1]), None]
        else:
            assert (places[0][0], max(end for _, end in filter(None, places))) == (0, len(text))
    (plain,) = llm.embed(TEXTS[0], use_tqdm=False)
    assert plain.late_chunking is None and len(plain.outputs.data) == len(plain.prompt_token_ids)
    bad = [
        ([5, 6], {}, "plain-text"),
        ({"prompt": "a", "prompt_token_ids": [5]}, {}, "plain-text"),
        ("a", {"truncate_prompt_tokens": 2}, "does not support truncate"),
    ]
    for prompt, fields, problem in bad:
        own = PoolingParams(late_chunking_params=LateChunkingParams(2), **fields)
        with pytest.raises(VLLMValidationError, match=problem):
            llm.embed([prompt], pooling_params=own, use_tqdm=False)


@pytest.mark.parametrize("mode", ["cls_token", "max_tokens", "mean_tokens", "weightedmean_tokens", "lasttoken"])
@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_random_encoders_pool_as_transformers(tmp_path, family, mode):
    kind = {"bert": transformers.BertConfig, "xlm-roberta": transformers.XLMRobertaConfig}[family]
    folder = save(tmp_path, kind(**SIZES, max_position_embeddings=64))
    add_modules(folder, mode, normalize=False)
    llm = LLM(str(folder), skip_tokenizer_init=True, max_num_batched_tokens=16)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = [model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]
    pool = {
        "cls_token": lambda h: h[0],
        "lasttoken": lambda h: h[-1],
        "max_tokens": lambda h: h.amax(0),
        "mean_tokens": lambda h: h.mean(0),
        "weightedmean_tokens": lambda h: torch.arange(1.0, len(h) + 1) @ h / (len(h) * (len(h) + 1) / 2),
    }[mode]
    for got, expected in zip(tensors(llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False)), hidden, strict=True):
        torch.testing.assert_close(got, pool(expected), **TOLERANCE)
    got_tokens = tensors(llm.encode(PROMPTS, pooling_task="token_embed", use_tqdm=False))
    for got, expected in zip(got_tokens, hidden, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE)


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes_are_those_of_transformers(tmp_path, family, num_labels):
    kind = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}[family]
    config = kind(**SIZES, max_position_embeddings=64, num_labels=num_labels)
    folder = save(tmp_path, config, transformers.AutoModelForSequenceClassification)
    llm = LLM(str(folder), skip_tokenizer_init=True)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
    outputs = llm.classify(PROMPTS, use_tqdm=False)
    for output, expected in zip(outputs, logits, strict=True):
        probs = expected.sigmoid() if num_labels == 1 else expected.softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), probs, **TOLERANCE)
    params = PoolingParams(use_activation=False)
    plain = tensors(llm.encode(PROMPTS, params, pooling_task="classify", use_tqdm=False))
    torch.testing.assert_close(torch.stack(plain), torch.stack(logits), **TOLERANCE)


def test_types_of_a_pair_are_read(tmp_path, minilm):
    config = transformers.BertConfig(**(SIZES | {"vocab_size": 30522}), max_position_embeddings=64, num_labels=1)
    folder = save(tmp_path, config, transformers.AutoModelForSequenceClassification)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    pairs = [("a query", "a document"), ("a query", "another one, longer")]
    with torch.no_grad():
        expected = [model(**tokenizer(*pair, return_tensors="pt")).logits.sigmoid().item() for pair in pairs]
    llm = LLM(str(folder))
    scores = llm.score("a query", [pair[1] for pair in pairs], use_tqdm=False)
    assert [each.outputs.score for each in scores] == pytest.approx(expected, abs=1e-5)
    # Ranks in processes, joined by gloo.
    llm = LLM(str(folder), tensor_parallel_size=2, disable_custom_all_reduce=True)
    scores = llm.score("a query", [pair[1] for pair in pairs], use_tqdm=False)
    assert [each.outputs.score for each in scores] == pytest.approx(expected, abs=1e-5)
    # Its weights sleep and change as those of other models do.
    weights = {name: each.clone() for name, each in model.state_dict().items() if name.startswith("classifier.")}
    llm.sleep(level=2)
    llm.wake_up()
    llm.collective_rpc("load_weights", args=([(name, -each) for name, each in weights.items()],))
    scores = llm.score("a query", [pair[1] for pair in pairs], use_tqdm=False)
    assert [1 - each.outputs.score for each in scores] == pytest.approx(expected, abs=1e-5)
    llm.llm_engine.engine_core.shutdown()


def test_a_pair_whose_last_token_has_the_first_type(tmp_path):
    config = transformers.BertConfig(**SIZES | {"vocab_size": len(WORDS)}, num_labels=1)
    folder = save(tmp_path, config, transformers.AutoModelForSequenceClassification)
    ends = [("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))]
    template = "[CLS] $A [SEP] $B:1 [SEP]"
    add_tokenizer(folder, TemplateProcessing(single="[CLS] $A [SEP]", pair=template, special_tokens=ends))
    path = folder / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer("the cat", "the mat", return_tensors="pt")
    assert encoded["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0]]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(**encoded).logits.sigmoid().item()
    llm = LLM(str(folder))
    assert llm.score("the cat", "the mat", use_tqdm=False)[0].outputs.score == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("runner", "generate", "needs a model that generates"),
        ("convert", "classify", "needs an encoder with a classifier"),
        ("pooler_config", {"step_tag_id": 5}, "step_tag_id is for token_classify"),
        ("tensor_parallel_size", 3, "num_attention_heads=4: it must divide them"),
    ],
)
def test_what_an_encoder_cannot_be_is_refused(tmp_path, argument, value, message):
    folder = save(tmp_path, transformers.BertConfig(**SIZES, max_position_embeddings=64))
    with pytest.raises(ValueError, match=message):
        EngineArgs(model=str(folder), **{argument: value}).create_engine_config()


@pytest.mark.parametrize(
    ("entry", "activation"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda logits: logits),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, torch.sigmoid),
        # sentence-transformers 6 writes these, in a file of its own.
        ({"activation_fn": "torch.nn.modules.activation.Tanh"}, torch.tanh),
    ],
    ids=["identity", "sigmoid", "tanh"],
)
def test_a_cross_encoders_own_activation(tmp_path, entry, activation):
    config = transformers.BertConfig(**SIZES, num_labels=3)
    folder = save(tmp_path / "m", config, transformers.AutoModelForSequenceClassification)
    raw = json.loads((folder / "config.json").read_text())
    if "activation_fn" in entry:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "CrossEncoder", **entry}))
        modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.Transformer"}]
        (folder / "modules.json").write_text(json.dumps(modules))
    else:
        (folder / "config.json").write_text(json.dumps({**raw, **entry}))
    llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = [activation(model(torch.tensor([prompt])).logits[0]) for prompt in PROMPTS]
    outputs = llm.classify([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    for output, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(torch.tensor(output.outputs.probs), want, **TOLERANCE)


def test_settings_that_are_not_read_are_said(tmp_path, caplog):
    folder = save(tmp_path / "m", transformers.BertConfig(**SIZES))
    add_modules(folder, "mean_tokens", normalize=True)
    settings = {"prompts": {"query": "query: "}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    LLM(str(folder), dtype="float32", skip_tokenizer_init=True)
    assert "similarity_fn_name=dot" in caplog.text
    pooling = {"pooling_mode": "mean", "include_prompt": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    with pytest.raises(ValueError, match="include_prompt=false is not supported"):
        LLM(str(folder), dtype="float32", skip_tokenizer_init=True)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    with pytest.raises(ValueError, match="do_lower_case is not supported"):
        LLM(str(folder), dtype="float32", skip_tokenizer_init=True)


def test_prompts_by_name_and_by_default(tmp_path, minilm):
    folder = tmp_path / "m"
    shutil.copytree(minilm, folder)
    plain = LLM(str(minilm))
    prompts = {"query": "find: ", "title": "title | "}
    settings = {"prompts": prompts, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    llm = LLM(str(folder))

    def ids(outputs):
        return [output.prompt_token_ids for output in outputs]

    texts = ["a cat", "find: a dog"]
    begun = ids(plain.embed(["find: a cat", "find: a dog"], use_tqdm=False))
    assert ids(llm.embed(texts, use_tqdm=False)) == begun
    assert ids(llm.encode([{"prompt": each} for each in texts], pooling_task="token_embed", use_tqdm=False)) == begun
    assert ids(llm.embed("a cat", prompt_name="title", use_tqdm=False)) == ids(
        plain.embed("title | a cat", use_tqdm=False)
    )
    assert ids(llm.embed([[101, 102]], use_tqdm=False)) == [[101, 102]]
    (one, other) = (
        each.score(first, second, use_tqdm=False)[0].outputs.score
        for each, first, second in ((llm, "a cat", "a dog"), (plain, "find: a cat", "find: a dog"))
    )
    assert one == other
    with pytest.raises(VLLMValidationError, match="prompt_name must be one of the model's prompts: query, title"):
        llm.embed("a", prompt_name="passage", use_tqdm=False)


def test_long_texts_are_cut_by_tokenization_kwargs(minilm):
    """As benchmarks of others ask for it."""
    llm = LLM(str(minilm), max_model_len=32)
    long = "hello " * 60
    with pytest.raises(VLLMValidationError, match="maximum context length"):
        llm.embed(long, use_tqdm=False)
    for options, length in (
        ({"truncate_prompt_tokens": -1}, 32),
        ({"truncate_prompt_tokens": 9}, 9),
        ({"truncation": True}, 32),
        ({"truncation": True, "max_length": 9}, 9),
    ):
        (output,) = llm.encode(long, pooling_task="embed", tokenization_kwargs=options, use_tqdm=False)
        assert len(output.prompt_token_ids) == length
        assert len(llm.score("hello", long, tokenization_kwargs=options, use_tqdm=False)) == 1
    short, same = (
        llm.score("hello", text, pooling_params=PoolingParams(extra_kwargs=extra), use_tqdm=False)[0].outputs.score
        for text, extra in ((long, {"max_tokens_per_doc": 3}), ("hello hello hello", None))
    )
    assert short == pytest.approx(same, abs=1e-6)
    with pytest.raises(VLLMValidationError, match="it takes max_tokens_per_doc"):
        llm.score("hello", "a", pooling_params=PoolingParams(extra_kwargs={"top_n": 3}), use_tqdm=False)
    with pytest.raises(VLLMValidationError, match="truncation must be"):
        llm.embed(long, tokenization_kwargs={"truncation": "only_second"}, use_tqdm=False)


def test_late_interaction_is_the_sum_of_best_products(minilm):
    llm = LLM(str(minilm), pooler_config='{"task": "token_embed"}')  # JSON, as flags are
    tokenizer, model = (
        transformers.AutoTokenizer.from_pretrained(minilm),
        transformers.AutoModel.from_pretrained(minilm),
    )
    query, documents = TEXTS[0], TEXTS[1:3]

    @torch.no_grad()
    def vectors(text):
        return torch.nn.functional.normalize(model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0], dim=-1)

    expected = [(vectors(query) @ vectors(document).T).amax(-1).sum().item() for document in documents]
    scores = llm.score(query, documents, use_tqdm=False)
    assert [each.outputs.score for each in scores] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "taken", "refused"),
    [
        ({}, [384], {64: "hf_overrides=", 385: "hf_overrides="}),
        ({"is_matryoshka": True}, [1, 383, 384], {0: "in range 1 to 384", 385: "in range 1 to 384"}),
        ({"matryoshka_dimensions": [64, 128]}, [64, 384], {32: "dimensions 64, 128"}),
        ({"matryoshka_dimensions": [64, 999]}, [64], {999: "in range 1 to 384"}),
    ],
)
def test_lengths_that_a_model_was_trained_for(minilm, overrides, taken, refused):
    config = EngineArgs(str(minilm), hf_overrides=overrides).create_engine_config().model_config
    for size in taken:
        assert PoolingParams(dimensions=size).verified(config).dimensions == size
    no_integers = [(each, "integer") for each in (True, 64.5, float("nan"), "64")]
    for size, problem in [*refused.items(), *no_integers]:
        with pytest.raises(VLLMValidationError, match=problem):
            PoolingParams(dimensions=size).verified(config)
    with pytest.raises(ValueError, match="dimensions=32: the model"):
        EngineArgs(str(minilm), pooler_config={"dimensions": 32}).create_engine_config()


@pytest.mark.parametrize("layout", ["HF_ColBERT", "modules", "MultiVectorEncoder"])
def test_embeddings_of_tokens(tmp_path, layout):
    folder = save(tmp_path, transformers.BertConfig(**SIZES, max_position_embeddings=64))
    model = transformers.AutoModel.from_pretrained(folder).eval()
    weight = torch.randn(24, 32)
    if layout != "HF_ColBERT":
        kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
        if layout == "MultiVectorEncoder":
            kinds |= {"2_Mask": "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", "3": "x.Normalize"}
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds.items())
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Dense").mkdir()
        dense = {"in_features": 32, "out_features": 24, "bias": False, "activation_function": "torch.nn.Identity"}
        (folder / "1_Dense/config.json").write_text(json.dumps(dense))
        save_file({"linear.weight": weight}, folder / "1_Dense/model.safetensors")
    else:
        weights = {f"bert.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
        save_file({**weights, "linear.weight": weight}, folder / "model.safetensors")
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["HF_ColBERT"], "dim": 24}))
    llm = LLM(str(folder), skip_tokenizer_init=True, hf_overrides={"is_matryoshka": True})
    assert llm.model_config.pooling_tasks == ("token_embed",)
    with torch.no_grad():
        hidden = [model(torch.tensor([ids])).last_hidden_state[0] @ weight.T for ids in PROMPTS]
    got = tensors(llm.encode(PROMPTS, PoolingParams(dimensions=20), pooling_task="token_embed", use_tqdm=False))
    for each, want in zip(got, hidden, strict=True):
        torch.testing.assert_close(each, torch.nn.functional.normalize(want[:, :20], dim=-1), **TOLERANCE)
    with pytest.raises(VLLMValidationError, match="dimensions"):
        llm.encode(PROMPTS, PoolingParams(dimensions=25), use_tqdm=False)
