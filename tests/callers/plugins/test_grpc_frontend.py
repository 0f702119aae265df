"""vllm-grpc-frontend over an AsyncLLM: texts, conversations, and prompts that are embeddings."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llm import make_tiny_model

from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

grpc = pytest.importorskip("grpc")
frontend = pytest.importorskip("vllm_grpc_frontend.main")
from vllm_grpc.v1 import chat_pb2, chat_pb2_grpc, completions_pb2, completions_pb2_grpc  # noqa: E402

GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    file = folder / "tokenizer_config.json"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return folder


def saved(rows: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(rows, file)
    return file.getvalue()


async def answers(folder: Path, rows: torch.Tensor) -> list[Any]:
    args = AsyncEngineArgs(model=str(folder), dtype="float32", max_model_len=128, enable_prompt_embeds=True)
    engine = AsyncLLM.from_engine_args(args)
    try:
        server = frontend.build_server(engine, engine.tokenizer)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            complete = completions_pb2_grpc.CompletionsServiceStub(channel).Complete
            request = completions_pb2.CompletionRequest
            found = [
                await complete(request(prompt="the cat", **GREEDY)),
                await complete(request(prompt_embeds=saved(rows), **GREEDY)),
            ]
            message = chat_pb2.ChatMessage(role="user", content="the cat")
            chat = chat_pb2_grpc.ChatServiceStub(channel).Complete
            found.append(await chat(chat_pb2.ChatCompleteRequest(messages=[message], **GREEDY)))
        await server.stop(None)
        return found
    finally:
        engine.shutdown()


def test_texts_embeddings_and_conversations(folder: Path) -> None:
    llm = LLM(str(folder), dtype="float32", max_model_len=128, enable_prompt_embeds=True)
    width = llm.llm_engine.model_config.get_hidden_size()
    rows = torch.randn(6, width, generator=torch.Generator().manual_seed(0)) * 0.3
    outputs = llm.generate(["the cat", {"prompt_embeds": rows}], SamplingParams(**GREEDY), use_tqdm=False)
    text, embeds, chat = asyncio.run(answers(folder, rows))
    for found, output in ((text, outputs[0]), (embeds, outputs[1])):
        assert found.generated_text == output.outputs[0].text
        assert found.prompt_tokens == len(output.prompt_token_ids)
        assert found.completion_tokens == 4
    assert chat.message.content == outputs[0].outputs[0].text
