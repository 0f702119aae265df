"""langchain-community's VLLM, which makes an LLM of its own from its fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm import LLM, SamplingParams

vllm_of_langchain = pytest.importorskip("langchain_community.llms.vllm")

PROMPTS = ["the stop", "Hello there"]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return vllm_of_langchain.VLLM(
        model=str(tiny_model),
        trust_remote_code=True,
        max_new_tokens=8,
        temperature=0,
        vllm_kwargs={"max_model_len": 128, "enforce_eager": True},
    )


def texts(llm: LLM, **params: Any) -> list[str]:
    outputs = llm.generate(PROMPTS, SamplingParams(**{"temperature": 0, "max_tokens": 8, **params}), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_its_answers(model: Any, llm: LLM) -> None:
    expected = texts(llm)
    assert model.invoke(PROMPTS[0]) == expected[0]
    assert model.batch(PROMPTS) == expected
    assert [row[0].text for row in model.generate(PROMPTS).generations] == expected


def test_parameters_of_a_call(model: Any, llm: LLM) -> None:
    own = {"temperature": 0.7, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.2}
    assert [row[0].text for row in model.generate(PROMPTS, **own).generations] == texts(llm, **own)
    whole = texts(llm)[0]
    assert model.invoke(PROMPTS[0], stop=[whole[2]]) == whole[: whole.index(whole[2])]


def test_in_a_chain(model: Any, llm: LLM) -> None:
    from langchain_core.prompts import PromptTemplate

    chain = PromptTemplate.from_template("the {word}") | model
    assert chain.invoke({"word": "stop"}) == texts(llm)[0]
