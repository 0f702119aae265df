"""Texts longer than the model reads are embedded in parts: the mean of the parts' embeddings by their tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from minilm import extract_minilm
from tiny_encoders import PROMPTS, SIZES, TOLERANCE, add_modules, save, tensors

from vllm import LLM, PoolingParams
from vllm.exceptions import VLLMValidationError
from vllm.server.state import ServerState

LONG = [*PROMPTS, [index % 190 + 5 for index in range(64)], [index % 190 + 5 for index in range(150)]]
PARTS = {"enable_chunked_processing": True, "max_embed_len": 150}
KINDS = {
    "cls_token": transformers.BertConfig(**SIZES, max_position_embeddings=64),
    "mean_tokens": transformers.BertConfig(**SIZES, max_position_embeddings=64),
    "lasttoken": transformers.Qwen3Config(
        **SIZES, max_position_embeddings=64, num_key_value_heads=2, head_dim=8, pad_token_id=0
    ),
}


@pytest.mark.parametrize("mode", KINDS)
def test_mean_of_the_parts(tmp_path, mode):
    folder = save(tmp_path, KINDS[mode])
    add_modules(folder, mode, normalize=True)
    model = transformers.AutoModel.from_pretrained(folder).eval()

    @torch.no_grad()
    def embedding(ids):
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
        pooled = {"cls_token": hidden[0], "mean_tokens": hidden.mean(0), "lasttoken": hidden[-1]}[mode]
        return torch.nn.functional.normalize(pooled, dim=-1)

    def expected(ids):
        parts = [ids[at : at + 64] for at in range(0, len(ids), 64)]
        return sum(len(part) * embedding(part) for part in parts) / len(ids)

    llm = LLM(str(folder), skip_tokenizer_init=True, pooler_config=PARTS)
    outputs = llm.embed(LONG, use_tqdm=False)
    for output, ids in zip(outputs, LONG, strict=True):
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected(ids), **TOLERANCE)
        assert output.prompt_token_ids == ids
    with pytest.raises(VLLMValidationError, match=r"prompts\[1\]: the prompt has 151 tokens.* max_embed_len=150"):
        llm.embed([[3], list(range(20, 171))], use_tqdm=False)
    cut = llm.embed([LONG[-1]], pooling_params=PoolingParams(truncate_prompt_tokens=70), use_tqdm=False)
    torch.testing.assert_close(torch.tensor(cut[0].outputs.embedding), expected(LONG[-1][:70]), **TOLERANCE)
    # Tokens are embedded in the light of a whole text.
    with pytest.raises(VLLMValidationError, match="max_model_len=64"):
        llm.encode(LONG, pooling_task="token_embed", use_tqdm=False)


def test_limits_without_parts(tmp_path):
    folder = save(tmp_path, KINDS["cls_token"])
    usual = {"skip_tokenizer_init": True}
    llm = LLM(str(folder), pooler_config={"max_embed_len": 16}, **usual)
    assert len(tensors(llm.encode([LONG[-1][:16]], use_tqdm=False))) == 1
    with pytest.raises(VLLMValidationError, match="the prompt has 17 tokens.* max_embed_len=16"):
        llm.embed([LONG[-1][:17]], use_tqdm=False)
    with pytest.raises(ValueError, match="max_embed_len=65 is more than max_model_len=64, and needs enable_chunked"):
        LLM(str(folder), pooler_config={"max_embed_len": 65}, **usual)
    # Without a limit of its own, any text.
    llm = LLM(str(folder), pooler_config={"enable_chunked_processing": True, "pooling_type": "auto"}, **usual)
    assert len(llm.embed([LONG[-1] * 20], use_tqdm=False)[0].prompt_token_ids) == 3000


def test_over_http(serve, tmp_path, monkeypatch):
    folder = extract_minilm(tmp_path)
    words, short = "word " * 60, "The cat sits on the mat."
    llm = LLM(str(folder), max_model_len=16, pooler_config={**PARTS, "max_embed_len": 100})
    expected = np.array([each.outputs.embedding for each in llm.embed([short, words], use_tqdm=False)])
    server = serve({"max_model_len": 16, "pooler_config": {**PARTS, "max_embed_len": 100}}, folder)
    answer = server.post("/v1/embeddings", input=[short, words])
    found = np.array([each["embedding"] for each in answer["data"]])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    ids = [server.engine.input_processor.tokenizer.encode(text) for text in (short, words)]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids)) > 70
    answer = server.post("/v2/embed", texts=[short, words], input_type="search_document")
    np.testing.assert_allclose(np.array(answer["embeddings"]["float"]), expected, atol=1e-5)
    answer = server.request("POST", "/v1/embeddings", json={"input": "word " * 120})
    assert answer.status_code == 400 and "is 100 tokens" in answer.json()["error"]["message"]
    answer = server.request("POST", "/pooling", json={"input": words, "task": "token_embed"})
    assert answer.status_code == 400 and "is 16 tokens" in answer.json()["error"]["message"]
    monkeypatch.setattr(ServerState, "max_sequences", 3)
    answer = server.request("POST", "/v1/embeddings", json={"input": words})
    assert answer.status_code == 400 and "part of a text" in answer.json()["error"]["message"]
    # Each text of a pair is read whole.
    assert server.request("POST", "/score", json={"text_1": short, "text_2": words}).status_code == 400


def test_limit_of_pairs(serve, tmp_path):
    folder, long = extract_minilm(tmp_path), "word " * 20
    pooler = {"max_embed_len": 8}
    with pytest.raises(VLLMValidationError, match=r"data_2\[0\] .* maximum context length is 8 tokens"):
        LLM(str(folder), pooler_config=pooler).score("a", [long], use_tqdm=False)
    server = serve({"pooler_config": pooler}, folder)
    answer = server.request("POST", "/score", json={"text_1": "a", "text_2": [long]})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    answer = server.post("/score", text_1="a", text_2=[long], truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 8 + 3
