"""Embeddings as Qwen3-Embedding's model card gets them: the last token's hidden state, normalised, by task="embed"."""

from __future__ import annotations

from pathlib import Path

import torch
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model

from vllm import LLM

TASK = "Given a web search query, retrieve relevant passages that answer the query"
QUERIES = ["What is the capital of China?", "Explain gravity"]
DOCUMENTS = ["The capital of China is Beijing.", "Gravity is a force that attracts two bodies towards each other."]


def test_scores(tmp_path: Path) -> None:
    folder, model = make_random_model("qwen3", "small", tmp_path, vocab_size=VOCAB_SIZE)
    tokenizer = make_byte_tokenizer(folder)
    texts = [f"Instruct: {TASK}\nQuery:{query}" for query in QUERIES] + DOCUMENTS
    llm = LLM(model=str(folder), task="embed", max_model_len=256)
    outputs = llm.embed(texts, use_tqdm=False)
    embeddings = torch.tensor([output.outputs.embedding for output in outputs])
    with torch.no_grad():
        last = [model.model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0, -1] for text in texts]
    expected = torch.nn.functional.normalize(torch.stack(last), dim=-1)
    torch.testing.assert_close(embeddings[:2] @ embeddings[2:].T, expected[:2] @ expected[2:].T, atol=1e-5, rtol=0)
