"""GGUF files of encoders, embedders and rerankers against the models they were made from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from minilm import extract_minilm
from safetensors.torch import load_file, save_file
from test_gguf_experts import round_to
from tiny_encoders import PROMPTS, SIZES, TOLERANCE, tensors
from torch import Tensor
from torch.nn.functional import normalize

from vllm import LLM

MEAN, CLS, LAST, RANK = 1, 2, 3, 4
TINY = SIZES | {"intermediate_size": 64, "pad_token_id": 1}
HEADER = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.causal": False,
}
ROBERTA = {"type_vocab_size": 1, "max_position_embeddings": 130, "layer_norm_eps": 1e-5}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DECODER = TINY | {"head_dim": 8, "num_key_value_heads": 2, "rope_parameters": ROPE}
DECODER_HEADER = HEADER | {"attention.head_count_kv": 2, "attention.key_length": 8, "rope.freq_base": 10000.0}
DECODER_HEADER |= {"attention.layer_norm_rms_epsilon": 1e-6}
GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 8, "use_bidirectional_attention": True}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA_HEADER = {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2, "rope.freq_base": 1e6}


def config(kind: str, **options: Any) -> Any:
    return transformers.AutoConfig.for_model(kind, **options)


# GGUF's architecture, transformers' configuration, the header's way to pool, and what it has beside the usual.
CASES: dict[str, tuple[str, Any, int, dict[str, Any]]] = {
    "bert": ("bert", config("bert", **TINY, layer_norm_eps=1e-5, max_position_embeddings=128), CLS, HEADER),
    "xlm-roberta": ("bert", config("xlm-roberta", **TINY, **ROBERTA), MEAN, HEADER),
    "nomic-bert": (
        "nomic-bert",
        config(
            "nomic_bert", **TINY, rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, layer_norm_eps=1e-5
        ),
        MEAN,
        HEADER | {"rope.freq_base": 1000.0},
    ),
    "jina-bert-v3": (
        "jina-bert-v3",
        config("jina_embeddings_v3", **TINY, layer_norm_eps=1e-5, type_vocab_size=1),
        MEAN,
        HEADER | {"rope.freq_base": 20000.0},
    ),
    "modern-bert": (
        "modern-bert",
        config("modernbert", **TINY, local_attention=16, global_attn_every_n_layers=2),
        MEAN,
        HEADER | {"attention.sliding_window": 16, "attention.sliding_window_pattern": 2, "rope.freq_base": 160000.0},
    ),
    "eurobert": (
        "eurobert",
        config("eurobert", **DECODER, bos_token_id=2, eos_token_id=3, mask_token_id=4, rms_norm_eps=1e-6),
        MEAN,
        DECODER_HEADER,
    ),
    "gemma-embedding": (
        "gemma-embedding",
        config("gemma3_text", **DECODER | GEMMA | {"rope_parameters": None}),
        MEAN,
        DECODER_HEADER | GEMMA_HEADER,
    ),
    "llama-embed": ("llama-embed", config("llama", **DECODER, is_causal=False), MEAN, DECODER_HEADER),
    "qwen3": ("qwen3", config("qwen3", **DECODER), LAST, DECODER_HEADER | {"attention.causal": True}),
    "qwen3-both-ways": ("qwen3", config("qwen3", **DECODER, is_causal=False), LAST, DECODER_HEADER),
}


def make(settings: Any, auto: Any = transformers.AutoModel) -> Any:
    torch.manual_seed(0)
    model = auto.from_config(settings).eval()
    with torch.no_grad():
        for values in model.parameters():
            values += 0.05 * torch.randn_like(values)
    return model


def write(path: Path, arch: str, model: Any, header: dict[str, Any], kind: Any = None, add: Any = None) -> None:
    """`kind`: the type of blocks of matrices; `add`: what adds more to the writer, by default a tokenizer."""
    model.save_pretrained(path.parent / "saved")
    state = load_file(path.parent / "saved/model.safetensors")
    names = gguf.get_tensor_name_map(next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), 2)
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in header.items():
        kinds: dict[type, Any] = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        kinds[type(value)](f"{arch}.{key}", value)
    (add or add_words)(writer)
    writer.add_token_type_count(getattr(model.config, "type_vocab_size", 1))
    for name, value in _in_file(state, model.config).items():
        found = names.get_name(name, (".weight", ".bias")) or names.get_name(f"model.{name}", (".weight", ".bias"))
        assert found is not None, name
        array = np.ascontiguousarray(value.numpy())
        is_added = found.startswith(("position_embd", "token_types"))
        if kind is not None and array.ndim > 1 and not is_added:
            writer.add_tensor(found, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(found, array)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


def add_words(writer: Any) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"\u2581w{index}" for index in range(4, 200))]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 1, 3, 3, *[1] * 196])
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)


def _in_file(state: dict[str, Tensor], settings: Any) -> dict[str, Tensor]:
    """Names and values as llama.cpp's converter writes them."""
    result = {}
    is_roberta, is_gemma = settings.model_type == "xlm-roberta", settings.model_type == "gemma3_text"
    for name, value in state.items():
        name = name.removeprefix("bert.").removeprefix("roberta.").removeprefix("model.")
        if name.startswith("pooler.") or name.endswith("position_ids"):
            continue
        if is_roberta and name.endswith("position_embeddings.weight"):
            value = value[settings.pad_token_id + 1 :]
        if settings.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            value = value.reshape(-1, 2, 4, 32).transpose(1, 2).reshape(value.shape)
        if is_gemma and name.endswith("norm.weight"):
            value = value + 1
        result[name] = value
    return result


def load(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> LLM:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(path.parent / "cache"))
    return LLM(str(path), dtype="float32", skip_tokenizer_init=True, **options)


@torch.no_grad()
def pooled(model: Any, mode: int) -> list[Tensor]:
    states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]
    return [each.mean(0) if mode == MEAN else each[0 if mode == CLS else -1] for each in states]


@pytest.mark.parametrize("kind", [None, gguf.GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("case", CASES)
def test_embeddings_equal_the_original(case, kind, tmp_path, monkeypatch):
    arch, settings, mode, header = CASES[case]
    model = make(settings)
    if kind is not None:
        sizes = {"position_embeddings", "token_type_embeddings"}
        kept = {n: p.detach().clone() for n, p in model.named_parameters() if sizes & set(n.split("."))}
        round_to(kind, model)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(kept.get(name, parameter))
    write(tmp_path / "m.gguf", arch, model, header | {"pooling_type": mode}, kind)
    llm = load(tmp_path / "m.gguf", monkeypatch)
    got = torch.stack(tensors(llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False)))
    torch.testing.assert_close(got, normalize(torch.stack(pooled(model, mode)), dim=-1), **TOLERANCE)


@pytest.mark.parametrize("parts", [1, 2])
def test_jina_bert(parts, tmp_path, monkeypatch):
    """The gate of the MLP is a tensor of its own, or is not; against the same weights in a folder."""
    settings = config("bert", **TINY, layer_norm_eps=1e-5, max_position_embeddings=128)
    model, gates = make(settings), [torch.randn(128, 32) / 6 for _ in range(2)]
    state = {name: value for name, value in model.state_dict().items() if "position" not in name}
    state = {name: value for name, value in state.items() if "pooler" not in name and "intermediate" not in name}
    for own, theirs in (("dense", "wo"), ("LayerNorm", "layernorm")):
        own = rf"(layer\.\d+)\.output\.{own}\."
        state = {re.sub(own, rf"\1.mlp.{theirs}.", name): value for name, value in state.items()}
    fused = {f"encoder.layer.{layer}.mlp.gated_layers.weight": gate for layer, gate in enumerate(gates)}
    in_file = fused if parts == 1 else {}
    for layer, gate in enumerate(gates if parts == 2 else ()):
        stem = f"encoder.layer.{layer}.mlp.gated_layers_"
        in_file |= {f"{stem}w.weight": gate[:64], f"{stem}v.weight": gate[64:]}
    folder = tmp_path / "folder"

    write_state(folder, state | fused)
    raw = settings.to_dict() | {"architectures": ["JinaBertModel"], "position_embedding_type": "alibi"}
    raw |= {"feed_forward_type": "geglu", "emb_pooler": "mean"}
    (folder / "config.json").write_text(json.dumps(raw))
    saved = SimpleNamespace(config=settings, save_pretrained=lambda place: write_state(place, state | in_file))
    write(tmp_path / "m.gguf", "jina-bert-v2", saved, HEADER | {"pooling_type": MEAN})
    got, want = (
        torch.stack(tensors(each.encode(PROMPTS, pooling_task="embed", use_tqdm=False)))
        for each in (load(tmp_path / "m.gguf", monkeypatch), LLM(str(folder), skip_tokenizer_init=True))
    )
    torch.testing.assert_close(got, want, **TOLERANCE)


def write_state(place: Path, state: dict[str, Tensor]) -> None:
    place.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in state.items()}, place / "model.safetensors")


def test_dense_layers_follow_the_pooling(tmp_path, monkeypatch):
    arch, settings, mode, header = CASES["gemma-embedding"]
    model = make(settings)
    wide, narrow = torch.randn(48, 32), torch.randn(16, 48)

    def add(writer: Any) -> None:
        add_words(writer)
        writer.add_tensor("dense_2.weight", wide.numpy())
        writer.add_tensor("dense_3.weight", narrow.numpy())

    write(tmp_path / "m.gguf", arch, model, header | {"pooling_type": mode}, add=add)
    llm = load(tmp_path / "m.gguf", monkeypatch)
    assert llm.model_config.embedding_size == 16
    got = torch.stack(tensors(llm.encode(PROMPTS, pooling_task="embed", use_tqdm=False)))
    want = torch.stack(pooled(model, mode)) @ wide.T @ narrow.T
    torch.testing.assert_close(got, normalize(want, dim=-1), **TOLERANCE)


def test_an_encoder_that_scores_pairs(tmp_path, monkeypatch):
    settings = config("xlm-roberta", **TINY, **ROBERTA, num_labels=1)
    model = make(settings, transformers.AutoModelForSequenceClassification)
    write(tmp_path / "m.gguf", "bert", model, HEADER | {"pooling_type": RANK})
    llm = load(tmp_path / "m.gguf", monkeypatch)
    got = torch.stack(tensors(llm.encode(PROMPTS, pooling_task="classify", use_tqdm=False)))
    with torch.no_grad():
        want = torch.cat([model(torch.tensor([ids])).logits for ids in PROMPTS]).sigmoid()
    torch.testing.assert_close(got, want, **TOLERANCE)
    # llama.cpp's converter leaves a layer of BERT's own classifiers out.
    names = "cls.weight", "cls.bias"
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    writer = gguf.GGUFWriter(tmp_path / "cut.gguf", "bert")
    copy(reader, writer, lambda name: name not in names)
    with pytest.raises(ValueError, match="cut.gguf has cls.output.weight, but no cls.weight: .* is left out"):
        load(tmp_path / "cut.gguf", monkeypatch)


def copy(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, keeps: Any) -> None:
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            element = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        if keeps(tensor.name):
            writer.add_tensor(tensor.name, tensor.data)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


RERANK = 'system "{" \U0001f600\n<Query>: {query}\n<Document>: {document}\n\n'


def test_a_decoder_that_scores_pairs(tmp_path, monkeypatch):
    """Qwen3's rows of yes and no, and the header's template."""
    arch, settings, _, header = CASES["qwen3"]
    model = make(settings)
    rows = torch.randn(2, 32)

    def add(writer: Any) -> None:
        letters = [chr(33 + index) for index in range(94)]
        tokens = ["<end>", *letters, "\u0120", "\u010a", "ab", *(f"w{index}" for index in range(98, 200))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, *[1] * 199])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(0)
        writer.add_chat_template([{"name": "rerank", "template": RERANK}])
        writer.add_tensor("cls.output.weight", rows.numpy())

    write(tmp_path / "m.gguf", arch, model, header | {"pooling_type": RANK}, add=add)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    llm = LLM(str(tmp_path / "m.gguf"), dtype="float32")
    documents = ["Paris", "Rome {{ x }}"]
    scores = [each.outputs.score for each in llm.score("capital?", documents, use_tqdm=False)]
    for score, document in zip(scores, documents, strict=True):
        text = RERANK.replace("{query}", "capital?").replace("{document}", document)
        ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
        with torch.no_grad():
            yes, no = model(torch.tensor([ids])).last_hidden_state[0, -1] @ rows.T
        assert score == pytest.approx(torch.sigmoid(yes - no).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"pooling_type": 9}, "qwen3.pooling_type must be one of 0, 1, 2, 3, 4, got 9"),
        *(
            ({"pooling_type": RANK, "template": text}, "tokenizer.chat_template.rerank must be a text")
            for text in ("{query} {query}", "{document} {query}", "{query} {document} {query}", "{query}", 7)
        ),
        ({}, "m.gguf: cls.output.weight of qwen3 with 3 labels is not supported"),
    ],
)
def test_what_is_not_known_of_pooling(header, message, tmp_path, monkeypatch):
    template = header.get("template")

    def add(writer: Any) -> None:
        add_words(writer)
        if template is not None:
            kind = gguf.GGUFValueType.STRING if isinstance(template, str) else gguf.GGUFValueType.UINT32
            writer.add_key_value("tokenizer.chat_template.rerank", template, kind)
        if not header:
            writer.add_tensor("cls.output.weight", np.zeros((3, 32), np.float32))

    arch, settings, _, usual = CASES["qwen3"]
    own = {key: value for key, value in header.items() if key != "template"}
    write(tmp_path / "m.gguf", arch, make(settings), usual | own, add=add)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "m.gguf", monkeypatch)


def test_a_real_vocabulary_of_word_pieces(tmp_path, monkeypatch):
    """MiniLM's, as llama.cpp's converter writes it."""
    folder = extract_minilm(tmp_path / "minilm")
    own = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [
        "The caf\u00e9 na\u00efve \u00c0\u00c9",
        "  two  spaces\n",
        "\u65e5\u672c\u8a9e \u4e2d\u6587",
        "don't [MASK]",
        "\u0440\u0443\u0441\u0441\u043a\u0438\u0439",
        "x" * 150,
    ]

    def add(writer: Any) -> None:
        vocab = sorted(own.get_vocab(), key=own.get_vocab().get)
        special = own.all_special_tokens
        marked = [each if each in special else each[2:] if each[:2] == "##" else f"\u2581{each}" for each in vocab]
        writer.add_tokenizer_model("bert")
        writer.add_token_list(marked)
        writer.add_token_types([3 if each in special else 1 for each in vocab])
        writer.add_unk_token_id(own.unk_token_id)
        writer.add_bos_token_id(own.cls_token_id)
        writer.add_sep_token_id(own.sep_token_id)

    settings = config("bert", **TINY | {"vocab_size": len(own)}, max_position_embeddings=256)
    header = HEADER | {"pooling_type": CLS, "attention.layer_norm_epsilon": 1e-12}
    write(tmp_path / "m.gguf", "bert", make(settings), header, add=add)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    tokenizer = LLM(str(tmp_path / "m.gguf"), dtype="float32").get_tokenizer()
    for text in texts:
        assert list(tokenizer.encode(text)) == own.encode(text), text
