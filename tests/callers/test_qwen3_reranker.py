"""A reranker as Qwen3-Reranker's model card runs it: the logprobs of yes and no as the answer's first token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, byte_id, make_byte_tokenizer
from models_util import make_random_model
from transformers import AutoTokenizer

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.inputs.data import TokensPrompt

TASK = "Given a query, find passages that answer it"
QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris.", "Gravity pulls things down.", "the stop of the line"]
SUFFIX = "\nassistant: "
UNLISTED = -10.0
"""A label that is not among the twenty likeliest tokens counts as this."""

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model of that architecture: its folder, and transformers' model."""
    folder, model = make_random_model("qwen3", "small", tmp_path_factory.mktemp("qwen3"), vocab_size=VOCAB_SIZE)
    make_byte_tokenizer(folder)
    return folder, model


@pytest.fixture(scope="module")
def prompts(qwen: tuple[Path, Any]) -> list[TokensPrompt]:
    tokenizer = AutoTokenizer.from_pretrained(qwen[0], padding_side="left")
    suffix = tokenizer.encode(SUFFIX, add_special_tokens=False)
    conversations = [
        [
            {"role": "system", "content": 'Judge the document. Answer only "yes" or "no".'},
            {"role": "user", "content": f"<Instruct>: {TASK}\n<Query>: {QUERY}\n<Document>: {document}"},
        ]
        for document in DOCUMENTS
    ]
    encoded = tokenizer.apply_chat_template(
        conversations,
        tokenize=True,
        add_generation_prompt=False,
        enable_thinking=False,
        chat_template=TEMPLATE,
        return_dict=False,
    )
    return [TokensPrompt(prompt_token_ids=ids + suffix) for ids in encoded]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_scores(qwen: tuple[Path, Any], prompts: list[TokensPrompt], mode: str) -> None:
    folder, model = qwen
    yes, no = byte_id(ord("y")), byte_id(ord("n"))
    llm = LLM(
        model=str(folder),
        tensor_parallel_size=torch.cuda.device_count() or 1,
        max_model_len=256,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.3,
        logprobs_mode=mode,
    )
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20, allowed_token_ids=[yes, no])
    outputs = llm.generate(prompts, params, use_tqdm=False)
    scores = []
    for output in outputs:
        (token_id,), last = output.outputs[0].token_ids, output.outputs[0].logprobs[-1]
        assert token_id in (yes, no)
        odds = [math.exp(last[label].logprob if label in last else UNLISTED) for label in (yes, no)]
        scores.append(odds[0] / sum(odds))
    destroy_model_parallel()
    expected = [_expected(model, prompt["prompt_token_ids"], yes, no, mode) for prompt in prompts]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in expected}) > 1, "the model tells nothing apart"


@torch.no_grad()
def _expected(model: Any, ids: list[int], yes: int, no: int, mode: str) -> float:
    """By transformers, with what the request's readings leave out left out."""
    logits = model(torch.tensor([ids])).logits[0, -1].double()
    labels = torch.tensor([yes, no])
    if mode == "processed_logprobs":
        return float(logits[labels].softmax(-1)[0])
    logprobs = logits.log_softmax(-1)
    sampled = yes if logits[yes] > logits[no] else no
    listed = {sampled, *logprobs.topk(20).indices.tolist()}
    odds = [math.exp(float(logprobs[label]) if label in listed else UNLISTED) for label in (yes, no)]
    return odds[0] / sum(odds)
