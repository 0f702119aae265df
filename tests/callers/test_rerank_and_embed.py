"""Clients of rerankers and embeddings against our server: cohere's SDK, langchain's and llama-index's wrappers.

Values are those of the same models offline.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from live_server import LiveServer
from minilm import extract_minilm

from vllm import LLM

QUERY = "Where does the cat sit?"
DOCUMENTS = ["Stocks fell.", "The cat sits on the mat.", "A kitten is on a rug."]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract_minilm(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def server(minilm: Path, server_environment: dict[str, str]) -> Iterator[LiveServer]:
    # MiniLM is not of the kind; so that clients can ask for short embeddings.
    with LiveServer(minilm, "--hf-overrides", '{"is_matryoshka": true}', env=server_environment) as server:
        yield server


@pytest.fixture(scope="module")
def vectors(minilm: Path) -> torch.Tensor:
    """The vectors of the query and the documents."""
    outputs = LLM(str(minilm)).embed([QUERY, *DOCUMENTS], use_tqdm=False)
    return torch.tensor([output.outputs.embedding for output in outputs])


@pytest.fixture(scope="module")
def scores(vectors: torch.Tensor) -> list[float]:
    return (vectors[1:] @ vectors[0]).tolist()


def check(found: list[tuple[int, float]], scores: list[float], count: int = 3) -> None:
    order = sorted(range(3), key=scores.__getitem__, reverse=True)[:count]
    assert [index for index, _ in found] == order
    assert [score for _, score in found] == pytest.approx([scores[index] for index in order], abs=1e-5)


@pytest.mark.parametrize("version", [1, 2])
def test_cohere_reranks(server: LiveServer, scores: list[float], version: int) -> None:
    cohere = pytest.importorskip("cohere")
    client = {1: cohere.Client, 2: cohere.ClientV2}[version](api_key="unused", base_url=server.url)
    answer = client.rerank(model="tiny", query=QUERY, documents=DOCUMENTS)
    check([(each.index, each.relevance_score) for each in answer.results], scores)
    answer = client.rerank(model="tiny", query=QUERY, documents=DOCUMENTS, top_n=2)
    check([(each.index, each.relevance_score) for each in answer.results], scores, 2)
    with pytest.raises(cohere.errors.BadRequestError):
        client.rerank(model="tiny", query=QUERY, documents=[])


@pytest.mark.parametrize("version", [1, 2])
def test_cohere_embeds(server: LiveServer, vectors: torch.Tensor, version: int) -> None:
    cohere = pytest.importorskip("cohere")
    client = {1: cohere.Client, 2: cohere.ClientV2}[version](api_key="unused", base_url=server.url)
    options = {"model": "tiny", "texts": DOCUMENTS, "input_type": "search_document"}
    answer = client.embed(**options, embedding_types=["float", "ubinary"])
    torch.testing.assert_close(torch.tensor(answer.embeddings.float_), vectors[1:], atol=1e-5, rtol=0)
    assert len(answer.embeddings.ubinary[0]) == vectors.shape[1] // 8
    assert answer.meta.billed_units.input_tokens > 0
    if version == 1:
        plain = client.embed(**options).embeddings
        torch.testing.assert_close(torch.tensor(plain), vectors[1:], atol=1e-5, rtol=0)


def test_langchains_rerankers(server: LiveServer, scores: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    langchain_cohere = pytest.importorskip("langchain_cohere")
    jina = pytest.importorskip("langchain_community.document_compressors.jina_rerank")
    monkeypatch.setattr(jina, "JINA_API_URL", f"{server.url}/v1/rerank")
    compressors = [
        langchain_cohere.CohereRerank(cohere_api_key="unused", base_url=server.url, model="tiny"),
        jina.JinaRerank(jina_api_key="unused", model="tiny"),
    ]
    for compressor in compressors:
        found = compressor.rerank(DOCUMENTS, QUERY, top_n=2)
        check([(each["index"], each["relevance_score"]) for each in found], scores, 2)
    from langchain_core.documents import Document

    kept = compressors[1].compress_documents([Document(text) for text in DOCUMENTS], QUERY)
    best = max(range(3), key=scores.__getitem__)
    assert kept[0].page_content == DOCUMENTS[best]


def test_langchains_embeddings(server: LiveServer, vectors: torch.Tensor) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    # Its own check of lengths would download OpenAI's tokenizer.
    options: dict[str, Any] = {"model": "tiny", "api_key": "unused", "check_embedding_ctx_length": False}
    embeddings = langchain_openai.OpenAIEmbeddings(base_url=f"{server.url}/v1", **options)
    torch.testing.assert_close(torch.tensor(embeddings.embed_query(QUERY)), vectors[0], atol=1e-5, rtol=0)
    found = torch.tensor(embeddings.embed_documents(DOCUMENTS))
    torch.testing.assert_close(found, vectors[1:], atol=1e-5, rtol=0)
    short = langchain_openai.OpenAIEmbeddings(base_url=f"{server.url}/v1", dimensions=8, **options)
    assert len(short.embed_query(QUERY)) == 8


def test_llama_indexs_reranker(server: LiveServer, scores: list[float]) -> None:
    wrapper = pytest.importorskip("llama_index.postprocessor.jinaai_rerank")
    from llama_index.core.schema import NodeWithScore, TextNode

    nodes = [NodeWithScore(node=TextNode(text=text, id_=str(index))) for index, text in enumerate(DOCUMENTS)]
    reranker = wrapper.JinaRerank(base_url=f"{server.url}/v1", api_key="unused", model="tiny", top_n=2)
    found = reranker.postprocess_nodes(nodes, query_str=QUERY)
    check([(int(each.node.id_), each.score) for each in found], scores, 2)
