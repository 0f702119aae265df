"""Every route that takes a model answers with an adapter's numbers: those of a server of the merged model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from asgi import Serve
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model
from tiny_adapters import make_adapter, merged

# The tolerance of logprobs; probabilities and vectors differ by less.
TOLERANCE = 2e-4
# They differ from answer to answer.
OWN = {"id", "created", "created_at", "completed_at", "model", "item_id", "request_id", "system_fingerprint"}
TEXT = "the cat sat on the mat"
TEMPLATE = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
MESSAGES = [{"role": "user", "content": TEXT}]
GREEDY = {"temperature": 0, "max_tokens": 5}
QUESTION = {"type": "predicate", "name": "fits", "instructions": "Is it so?"}
STATE = {"state": {"a": TEXT}, "questions": {"fits": {"type": "noul", "instructions": "Is it so?"}}}

GENERATION: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (
        "/v1/completions",
        {"prompt": TEXT, "logprobs": 2, "prompt_logprobs": 1, "logprob_token_ids": [7, 9], **GREEDY},
    ),
    "completions of beams": ("/v1/completions", {"prompt": TEXT, "use_beam_search": True, "n": 2, **GREEDY}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **GREEDY, **TEMPLATE}),
    "batch of chats": (
        "/v1/chat/completions/batch",
        {"messages": [MESSAGES, MESSAGES], "logprobs": True, **GREEDY, **TEMPLATE},
    ),
    "responses": (
        "/v1/responses",
        {
            "input": TEXT,
            "temperature": 0,
            "max_output_tokens": 5,
            "top_logprobs": 2,
            "include": ["message.output_text.logprobs"],
        },
    ),
    "messages": ("/v1/messages", {"messages": MESSAGES, **GREEDY}),
    "generative scoring": ("/generative_scoring", {"query": TEXT, "items": [" a", " b"], "label_token_ids": [7, 9]}),
    "score": ("/score", {"text_1": TEXT, "text_2": ["a", "b"]}),
    "rerank": ("/rerank", {"query": TEXT, "documents": ["a", "b"]}),
    "decisions": ("/v1/decisions", {"input": TEXT, "questions": [QUESTION], "diagnostics": True}),
    "systemone": ("/v1/systemone", STATE),
    "invocations": ("/invocations", {"prompt": TEXT, "logprobs": 2, **GREEDY}),
}
CLASSES = {
    "classify": ("/classify", {"input": [TEXT, "a"]}),
    "score": ("/score", {"text_1": TEXT, "text_2": ["a", "b"]}),
    "rerank": ("/rerank", {"query": TEXT, "documents": ["a", "b"]}),
    "pooling": ("/pooling", {"input": [TEXT, "a"]}),
}
VECTORS = {
    "embeddings": ("/v1/embeddings", {"input": [TEXT, "a"]}),
    "embed": ("/v2/embed", {"texts": [TEXT], "input_type": "classification", "embedding_types": ["float"]}),
    "pooling": ("/pooling", {"input": [TEXT, "a"]}),
    "score": ("/score", {"text_1": TEXT, "text_2": ["a", "b"]}),
}


def generator(folder: Path) -> Any:
    return make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE, max_position_embeddings=512)[1]


def encoder(folder: Path, kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=512,
        initializer_range=0.3,
        num_labels=1,
        pad_token_id=0,
    )
    model = getattr(transformers, kind)(config).eval()
    model.save_pretrained(folder)
    return model


KINDS: dict[str, tuple[Any, dict[str, tuple[str, dict[str, Any]]]]] = {
    "a generating model": (generator, GENERATION),
    "classes": (lambda folder: encoder(folder, "BertForSequenceClassification"), CLASSES),
    "vectors": (lambda folder: encoder(folder, "BertModel"), VECTORS),
}


def differences(found: Any, wanted: Any, path: str = "") -> list[str]:
    """Where two answers differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        if found.keys() != wanted.keys():
            return [f"{path}: {sorted(found)} and {sorted(wanted)}"]
        return [
            line for key in found if key not in OWN for line in differences(found[key], wanted[key], f"{path}.{key}")
        ]
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{path}[{index}]")]
    if isinstance(found, float) and isinstance(wanted, int | float):
        is_equal = math.isclose(found, wanted, rel_tol=1e-4, abs_tol=TOLERANCE)
    else:
        is_equal = found == wanted
    return [] if is_equal else [f"{path}: {found} and {wanted}"]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_the_merged_model(serve: Serve, kind: str, tmp_path: Path) -> None:
    make, doors = KINDS[kind]
    model = make(tmp_path / "model")
    folder = make_adapter(tmp_path / "adapter", model)
    merged(model, folder).save_pretrained(tmp_path / "merged")
    options: dict[str, Any] = {"max_model_len": 500}
    if kind == "a generating model":
        options |= {"max_num_seqs": 8}
    labels = {"score_template": "[{{ query }}|{{ document }}]:", "score_labels": ["y", "n"]}
    fields = labels if kind == "a generating model" else {}
    for name in ("model", "merged"):
        make_byte_tokenizer(tmp_path / name)
    template = TEMPLATE["chat_template"]
    with_adapters = {"enable_lora": True, **options}
    adapted = serve(with_adapters, tmp_path / "model", template, lora_modules=[f"one={folder}"], **fields)
    plain = serve(options, tmp_path / "merged", template, **fields)
    adapted.run(adapted.state.load_adapters())
    for door, (path, body) in doors.items():
        found, base = adapted.post(path, **body | {"model": "one"}), adapted.post(path, **body)
        wanted = plain.post(path, **body)
        assert not differences(found, wanted), door
        assert differences(base, wanted), door
        assert found.get("model", "one") == "one", door
