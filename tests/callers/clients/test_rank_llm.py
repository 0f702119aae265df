"""rank-llm: listwise with the engine in its process and over HTTP, where it reads `reasoning`, and pointwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from live_server import LiveServer
from models_util import make_random_model

pytest.importorskip("rank_llm")
SIZE = 4
DOCUMENTS = ["the cat", "a dog", "stop", "red"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has "yes" and "no" as one token each."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("ranker")
    make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE + 2, max_position_embeddings=2048)
    make_byte_tokenizer(folder)
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, server_environment: dict[str, str]) -> Iterator[LiveServer]:
    # It loads the tokenizer by the model's name.
    flags = ("--served-model-name", str(folder), "--logprobs-mode", "processed_logprobs")
    with LiveServer(folder, *flags, env=server_environment) as server:
        yield server


def asked() -> list[Any]:
    from rank_llm.data import Candidate, Query, Request

    candidates = [Candidate(docid=str(i), score=1.0, doc={"contents": text}) for i, text in enumerate(DOCUMENTS)]
    return [Request(query=Query(text="Where is the cat?", qid="1"), candidates=candidates)]


def ranked(model: Any) -> tuple[list[str], str]:
    """The documents' ids in order, and the answer that said so."""
    from rank_llm.rerank import Reranker

    options = {"rank_start": 0, "rank_end": SIZE, "top_k_retrieve": SIZE, "populate_invocations_history": True}
    (result,) = Reranker(model).rerank_batch(asked(), **options)
    return [each.docid for each in result.candidates], result.invocations_history[0].response


def listwise(folder: Path, **fields: Any) -> Any:
    from rank_llm.rerank.listwise import RankListwiseOSLLM

    sizes = {"context_size": 2048, "window_size": SIZE, "stride": 2}
    return RankListwiseOSLLM(model=str(folder), device="cpu", num_gpus=1, **sizes, **fields)


def test_listwise_in_process_and_over_http(folder: Path, server: LiveServer) -> None:
    """An engine of one process serves several event loops, one after another."""
    model = listwise(folder)
    order, text = ranked(model)
    assert sorted(order) == [str(index) for index in range(SIZE)] and text
    assert ranked(model) == (order, text)
    remote_order, remote_text = ranked(listwise(folder, base_url=f"{server.url}/v1"))
    assert sorted(remote_order) == sorted(order)
    assert remote_text and "object has no attribute" not in remote_text and "Error code" not in remote_text


def test_pointwise_scores_are_the_readings(folder: Path, server: LiveServer) -> None:
    from rank_llm.rerank.pointwise.pointwise_vllm import PointwiseVLLM

    model = PointwiseVLLM(model=str(folder), base_url=f"{server.url}/v1", context_size=2048)
    (result,) = model.rerank_batch(asked(), rank_end=SIZE, populate_invocations_history=True)
    scores = {each.docid: each.score for each in result.candidates}
    assert list(scores.values()) == sorted(scores.values(), reverse=True) and 0 < min(scores.values()) < 1
    for index, invocation in enumerate(result.invocations_history):
        body = {
            "messages": invocation.prompt, "max_tokens": 1, "logprob_token_ids": [VOCAB_SIZE, VOCAB_SIZE + 1],
            "logprobs_mode": "raw_logits",
        }  # fmt: skip
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        logits = {
            each["token"]: each["logit"] for each in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        }
        odds = 2.718281828459045 ** (logits["no"] - logits["yes"])
        assert scores[str(index)] == pytest.approx(1 / (1 + odds), abs=1e-4)
