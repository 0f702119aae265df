"""Queries and documents of late interaction are read as pylate, sentence-transformers and Stanford's ColBERT do:
prefixes, lengths, expansion, and the tokens that are not compared. The reference is written here from their
definitions."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_encoders import SIZES, TOLERANCE, save, tensors
from tiny_late_models import CLS, MASK, PAD, SEP, UNK, WORDS, add_tokenizer, dense, write_modules

from vllm import LLM, PoolingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

QUERIES = ["Where is the cat?", "stop", "the cat sits on the mat, the mat, the mat"]
DOCUMENTS = ["The cat sits on the mat.", "stop, where?! \u00e9", "a, b. c, d. e. f, g", "mat"]


def config_of(kind):
    sizes = SIZES | {"vocab_size": len(WORDS), "max_position_embeddings": 96, "pad_token_id": PAD}
    if kind == "modernbert":
        return transformers.ModernBertConfig(**sizes, local_attention=8, bos_token_id=CLS, eos_token_id=SEP)
    if kind == "lfm2":
        return transformers.Lfm2Config(**sizes, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    return {"bert": transformers.BertConfig, "electra": transformers.ElectraConfig}[kind](**sizes)


class Reference:
    """Vectors of a text, by the definitions."""

    def __init__(self, folder, project):
        self.model = transformers.AutoModel.from_pretrained(folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.project = project

    @torch.no_grad()
    def vectors(self, text, prefix, length, expand_to=0, filler=MASK, attends=False, skipped=()):
        ids = self.tokenizer(text, truncation=True, max_length=length - (prefix is not None)).input_ids
        if prefix is not None:
            ids = [ids[0], prefix, *ids[1:]]
        mask = [1] * len(ids)
        missing = max(expand_to - len(ids), 0)
        ids, mask = ids + [filler] * missing, mask + [int(attends)] * missing
        hidden = self.model(torch.tensor([ids]), attention_mask=torch.tensor([mask])).last_hidden_state[0]
        kept = [index for index, token_id in enumerate(ids) if token_id not in skipped]
        return torch.nn.functional.normalize(self.project(hidden)[kept], dim=-1)


def check(llm, want):
    """`want`: of queries and of documents their vectors."""
    assert llm.model_config.pooling_tasks == ("token_embed",)
    for side, texts, vectors in zip(("query", "document"), (QUERIES, DOCUMENTS), want, strict=True):
        got = tensors(llm.encode(texts, prompt_name=side, pooling_task="token_embed", use_tqdm=False))
        for each, other in zip(got, vectors, strict=True):
            torch.testing.assert_close(each, other, **TOLERANCE)
    for query, vectors in zip(QUERIES, want[0], strict=True):
        expected = [(vectors @ other.T).amax(-1).sum().item() for other in want[1]]
        scores = [each.outputs.score for each in llm.score(query, DOCUMENTS, use_tqdm=False)]
        assert scores == pytest.approx(expected, rel=1e-5)


def words_ids(words):
    return [WORDS.index(word) if word in WORDS else UNK for word in words]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bert", {}),
        ("electra", {"skiplist_words": ["."], "query_length": 8, "document_length": 7}),
        ("modernbert", {"query_length": 24, "query_prefix": "[unused0]", "document_prefix": "[unused1]"}),
        # A decoder with convolutions, under the name that upstream's users override its own with.
        ("lfm2", {"query_length": 12}),
        ("bert", {"attend_to_expansion_tokens": True, "query_length": 12, "skiplist_words": []}),
        ("bert", {"do_query_expansion": False, "query_prefix": "", "document_prefix": ""}),
    ],
)
def test_folders_of_pylate(tmp_path, kind, settings):
    folder = save(tmp_path, config_of(kind))
    add_tokenizer(folder)
    weight = torch.randn(16, 32)
    save_file({"linear.weight": weight}, write_modules(folder, dense()))
    own = {"model_type": "ColBERT", "similarity_fn_name": "MaxSim", "document_length": 40, **settings}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    # pylate leaves here what it read last.
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 5}))
    prefixes = {"query_prefix": "[Q] ", "document_prefix": "[D] "} | settings
    query, document = (
        WORDS.index(prefixes[f"{side}_prefix"]) if prefixes[f"{side}_prefix"] else None
        for side in ("query", "document")
    )
    length = settings.get("query_length", 32)
    expansion = {
        "expand_to": length if settings.get("do_query_expansion", True) else 0,
        "attends": settings.get("attend_to_expansion_tokens", False),
    }
    # Punctuation that the vocabulary does not have stands for [UNK].
    skipped = words_ids(settings.get("skiplist_words", "!,.?#"))
    reference = Reference(folder, lambda hidden: hidden @ weight.T)
    queries = [reference.vectors(text, query, length, **expansion) for text in QUERIES]
    documents = [reference.vectors(text, document, own["document_length"], skipped=skipped) for text in DOCUMENTS]
    overrides = {"architectures": ["ColBERTLfm2Model"]} if kind == "lfm2" else {}
    check(LLM(str(folder), hf_overrides=overrides), (queries, documents))


def test_stanfords_folder(tmp_path):
    folder = save(tmp_path, config_of("bert"))
    add_tokenizer(folder)
    reference = Reference(folder, lambda hidden: hidden @ weight.T)
    weight = torch.randn(16, 32)
    weights = {f"bert.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
    save_file({**weights, "linear.weight": weight}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "architectures": ["HF_ColBERT"], "dim": 16}))
    metadata = {"query_maxlen": 10, "doc_maxlen": 9, "mask_punctuation": False, "attend_to_mask_tokens": False}
    (folder / "artifact.metadata").write_text(json.dumps({**metadata, "query_token_id": "[unused0]"}))
    first, second = WORDS.index("[unused0]"), WORDS.index("[unused1]")
    queries = [reference.vectors(text, first, 10, 10) for text in QUERIES]
    check(LLM(str(folder)), (queries, [reference.vectors(text, second, 9) for text in DOCUMENTS]))
    (folder / "artifact.metadata").unlink()
    plain = LLM(str(folder))
    with pytest.raises(VLLMValidationError, match="there are none"):
        plain.encode("a", prompt_name="query", use_tqdm=False)
    expected = [reference.vectors(text, None, 90) for text in ("a", "b")]
    score = plain.score("a", "b", use_tqdm=False)[0].outputs.score
    assert score == pytest.approx((expected[0] @ expected[1].T).amax(-1).sum().item(), rel=1e-5)


@pytest.mark.parametrize("strategy", ["fixed", "min"])
def test_folders_of_a_multi_vector_encoder(tmp_path, strategy):
    folder = save(tmp_path, config_of("bert"))
    add_tokenizer(folder)
    linear, other = torch.randn(16, 32), torch.randn(16, 32)
    mask = {"skiplist_words": [".", "#"], "skiplist_tasks": ["query", "document"]}
    place = write_modules(folder, dense(use_residual=True), ("MultiVectorMask", mask), ("models.Normalize", {}))
    save_file({"linear.weight": linear, "residual.weight": other}, place)
    own = {"model_type": "MultiVectorEncoder", "prompts": {"query": "where ", "document": "on "}}
    own["similarity_fn_name"] = "meanmaxsim"
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    expansion = {"strategy": strategy, "length": 8, "attend": True, "token": "[unused0]"}
    settings = {"document_length": 11, "query_expansion": expansion}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    reference = Reference(folder, lambda hidden: hidden @ (linear + other).T)
    length, skipped = 8 if strategy == "fixed" else 90, words_ids(".")
    filler = WORDS.index("[unused0]")
    queries = [reference.vectors(f"where {text}", None, length, 8, filler, True, skipped) for text in QUERIES]
    documents = [reference.vectors(f"on {text}", None, 11, skipped=skipped) for text in DOCUMENTS]
    llm = LLM(str(folder))
    got = tensors(llm.encode(DOCUMENTS, prompt_name="document", pooling_task="token_embed", use_tqdm=False))
    for each, want in zip(got, documents, strict=True):
        torch.testing.assert_close(each, want, **TOLERANCE)
    for query, vectors in zip(QUERIES, queries, strict=True):
        expected = [(vectors @ other.T).amax(-1).mean().item() for other in documents]
        scores = [each.outputs.score for each in llm.score(query, DOCUMENTS, use_tqdm=False)]
        assert scores == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("colbert"), config_of("bert"))
    add_tokenizer(folder)
    save_file({"linear.weight": torch.randn(16, 32)}, write_modules(folder, dense()))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "ColBERT", "query_length": 8}))
    return folder


def test_what_is_no_query(folder):
    llm = LLM(str(folder), max_model_len=40)
    for problem, call in {
        "is for texts that are not empty": lambda: llm.encode([[5, 6]], prompt_name="query", use_tqdm=False),
        "40 tokens": lambda: llm.encode("a " * 90, prompt_name="document", use_tqdm=False),
        "add_special_tokens": lambda: llm.encode(
            "a", prompt_name="query", tokenization_kwargs={"add_special_tokens": False}, use_tqdm=False
        ),
        "truncate_prompt_tokens": lambda: llm.encode(
            "a", PoolingParams(truncate_prompt_tokens=41), prompt_name="query", use_tqdm=False
        ),
        "prompt_name must be": lambda: llm.encode("a", prompt_name="other", use_tqdm=False),
    }.items():
        with pytest.raises((VLLMValidationError, ValueError), match=problem):
            call()
    each = [PoolingParams(truncate_prompt_tokens=length) for length in (5, -1)]
    given = ["a b c d e f", {"prompt": "a " * 90}]
    outputs = llm.encode(given, each, prompt_name="document", pooling_task="token_embed", use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in outputs] == [5, 40]
    with pytest.raises(VLLMValidationError, match="max_model_len must be at least that"):
        LLM(str(folder), max_model_len=7).score("a", "b", use_tqdm=False)


@pytest.mark.parametrize(
    ("file", "settings", "problem"),
    [
        ("config_sentence_transformers.json", {"similarity_fn_name": "xtr"}, "similarity_fn_name='xtr'"),
        ("config_sentence_transformers.json", {"query_length": "x"}, "query_length must be"),
        ("tokenizer_config.json", {"padding_side": "left"}, "padding_side='left' is not supported"),
    ],
)
def test_settings_that_are_refused(folder, file, settings, problem):
    path = folder / file
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | settings))
    with pytest.raises(ValueError, match=problem):
        EngineArgs(str(folder)).create_engine_config()
    path.write_text(before)


def test_decoders_see_all_or_nothing(tmp_path):
    sizes = SIZES | {"vocab_size": len(WORDS), "num_key_value_heads": 2, "max_position_embeddings": 96}
    folder = save(tmp_path, transformers.Qwen3Config(**sizes))
    add_tokenizer(folder)
    weight = torch.randn(16, 32)
    save_file({"linear.weight": weight}, write_modules(folder, dense()))
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps({"model_type": "ColBERT"}))
    with pytest.raises(ValueError, match="attend_to_expansion_tokens=false is not supported"):
        LLM(str(folder))
    path.write_text(json.dumps({"attend_to_expansion_tokens": True, "query_length": 14, "skiplist_words": ["."]}))
    reference = Reference(folder, lambda hidden: hidden @ weight.T)
    query, document = WORDS.index("[Q] "), WORDS.index("[D] ")
    queries = [reference.vectors(text, query, 14, 14, attends=True) for text in QUERIES]
    check(
        LLM(str(folder)),
        (queries, [reference.vectors(text, document, 90, skipped=words_ids(".")) for text in DOCUMENTS]),
    )
