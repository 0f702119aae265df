"""vllm-haystack's components against our server: a chat generator, an embedder, a ranker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer
from minilm import extract_minilm

from vllm import LLM

pytest.importorskip("haystack_integrations.components.rankers.vllm")

TEXTS = ["Stocks fell.", "The cat sits on the mat.", "A kitten is on a rug."]
QUERY = "Where does the cat sit?"


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract_minilm(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def embedder(minilm: Path, server_environment: dict[str, str]) -> Iterator[LiveServer]:
    with LiveServer(minilm, env=server_environment) as server:
        yield server


def test_vllm_haystack_chats(server: LiveServer) -> None:
    from haystack.dataclasses import ChatMessage
    from haystack_integrations.components.generators.vllm import VLLMChatGenerator

    options = {"max_tokens": 4, "temperature": 0, "extra_body": {"top_k": 1}}
    generator = VLLMChatGenerator(model="tiny", api_base_url=f"{server.url}/v1", generation_kwargs=options)
    messages = [ChatMessage.from_user("hi")]
    (reply,) = generator.run(messages)["replies"]
    assert reply.text and reply.meta["usage"]["completion_tokens"] == 4
    pieces: list[str] = []
    streamed = generator.run(messages, streaming_callback=lambda chunk: pieces.append(chunk.content))
    assert "".join(pieces) == streamed["replies"][0].text == reply.text


def test_embeddings_and_ranks(minilm: Path, embedder: LiveServer) -> None:
    from haystack import Document
    from haystack_integrations.components.embedders.vllm import VLLMDocumentEmbedder, VLLMTextEmbedder
    from haystack_integrations.components.rankers.vllm import VLLMRanker

    expected = [each.outputs.embedding for each in LLM(str(minilm)).embed([QUERY, *TEXTS], use_tqdm=False)]
    where = {"model": "tiny", "api_base_url": f"{embedder.url}/v1"}
    own = VLLMTextEmbedder(**where, extra_parameters={"truncate_prompt_tokens": 256, "truncation_side": "right"})
    assert own.run(QUERY)["embedding"] == pytest.approx(expected[0], abs=1e-5)
    documents = [Document(content=text) for text in TEXTS]
    found = VLLMDocumentEmbedder(**where).run(documents)["documents"]
    for each, vector in zip(found, expected[1:], strict=True):
        assert each.embedding == pytest.approx(vector, abs=1e-5)
    ranker = VLLMRanker(**where, top_k=2, extra_parameters={"truncate_prompt_tokens": 256})
    best = ranker.run(query=QUERY, documents=documents)["documents"]
    scores = [sum(a * b for a, b in zip(expected[0], vector, strict=True)) for vector in expected[1:]]
    order = sorted(range(3), key=scores.__getitem__, reverse=True)[:2]
    assert [each.content for each in best] == [TEXTS[index] for index in order]
    assert [each.score for each in best] == pytest.approx([scores[index] for index in order], abs=1e-5)
