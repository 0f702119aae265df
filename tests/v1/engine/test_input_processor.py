"""Truncated prompts, wherever a caller of the engine asks for them: texts are cut as transformers cuts them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import BOS, EOS, VOCAB_SIZE, make_template_tokenizer
from models_util import make_random_model
from tiny_llm import make_tiny_llm
from transformers import AutoTokenizer

from vllm import LLM, AsyncEngineArgs, AsyncLLM, PoolingParams, SamplingParams
from vllm.exceptions import VLLMValidationError

TEXT, LONG = "a b c d e f", "0123456789" * 20
TEMPLATES = {"bos": "<s> $A", "both": "<s> $A </s>", "eos": "$A </s>", "none": "$A"}
CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"
KWARGS: list[dict[str, Any]] = [{"truncate_prompt_tokens": 3}, {"truncation": True, "max_length": 3}]


def make_model(folder, template):
    make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE, max_position_embeddings=2048)
    make_template_tokenizer(folder, template)
    return folder


@pytest.fixture(scope="module", params=TEMPLATES)
def folder(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp(request.param), TEMPLATES[request.param])


@pytest.fixture(scope="module")
def llm(folder):
    return make_tiny_llm(folder)


@pytest.fixture(scope="module")
def pooling(folder):
    return make_tiny_llm(folder, runner="pooling")


@pytest.fixture(scope="module")
def cut(folder):
    """A text's ids by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(text: str, limit: int, side: str = "left", **options: Any) -> list[int]:
        tokenizer.truncation_side = side
        return tokenizer(text, truncation=True, max_length=limit, **options)["input_ids"]

    return ids


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, "temperature": 0, **fields})


def ids_of(outputs: list[Any]) -> list[list[int]]:
    return [output.prompt_token_ids for output in outputs]


def test_generate(llm, cut):
    limits = range(2, 13)
    each = [params(truncate_prompt_tokens=limit) for limit in limits]
    outputs = llm.generate([TEXT] * len(each), each, use_tqdm=False)
    assert ids_of(outputs) == [cut(TEXT, limit) for limit in limits]
    assert {output.prompt for output in outputs} == {TEXT}


def test_the_readings_are_those_of_the_cut_ids(llm, cut):
    one, same = (
        llm.generate(prompt, params(prompt_logprobs=1, **options), use_tqdm=False)[0]
        for prompt, options in (
            (TEXT, {"truncate_prompt_tokens": 3}),
            ({"prompt_token_ids": cut(TEXT, 3)}, {}),
        )
    )
    assert one.prompt_logprobs == same.prompt_logprobs


def test_minus_one_leaves_room_for_the_output(llm, cut):
    for max_tokens, kept in ((0, 128), (1, 127), (28, 100), (None, 127)):
        each = params(max_tokens=max_tokens, truncate_prompt_tokens=-1)
        assert ids_of(llm.generate(LONG, each, use_tqdm=False)) == [cut(LONG, kept)]


def test_ids_are_cut_at_their_beginning(llm):
    """Nobody knows what a tokenizer put there; a text beside them changes nothing."""
    ids = [BOS, *range(5, 15), EOS]
    for prompt in (ids, {"prompt_token_ids": ids, "prompt": TEXT}):
        assert ids_of(llm.generate(prompt, params(truncate_prompt_tokens=3), use_tqdm=False)) == [ids[-3:]]


def test_chat(llm, cut):
    """Special tokens that a template does not write are there only where they are asked for."""
    messages = [{"role": "user", "content": TEXT}]
    for special in (False, True):
        for kwargs in ({}, *KWARGS):
            (output,) = llm.chat(
                messages,
                params(truncate_prompt_tokens=None if kwargs else 3),
                chat_template=CHAT,
                tokenization_kwargs={**kwargs, "add_special_tokens": special},
                use_tqdm=False,
            )
            assert output.prompt_token_ids == cut(TEXT, 3, add_special_tokens=special)
    (output,) = llm.chat(messages, params(), chat_template=CHAT, tokenization_kwargs=KWARGS[0], use_tqdm=False)
    assert output.prompt_token_ids == cut(TEXT, 3, add_special_tokens=False)


@pytest.mark.parametrize("kwargs", KWARGS)
def test_tokenization_kwargs(llm, cut, kwargs):
    """They hold in place of the parameters'."""
    own = params(truncate_prompt_tokens=5)
    assert ids_of(llm.generate([TEXT] * 2, own, tokenization_kwargs=kwargs, use_tqdm=False)) == [cut(TEXT, 3)] * 2
    plain = {**kwargs, "add_special_tokens": False}
    assert ids_of(llm.generate(TEXT, own, tokenization_kwargs=plain, use_tqdm=False)) == [
        cut(TEXT, 3, add_special_tokens=False)
    ]
    right = {**kwargs, "truncation_side": "right"}
    assert ids_of(llm.generate(TEXT, own, tokenization_kwargs=right, use_tqdm=False)) == [cut(TEXT, 3, "right")]
    llm.enqueue(TEXT, own, tokenization_kwargs=kwargs)
    assert ids_of(llm.wait_for_completion(use_tqdm=False)) == [cut(TEXT, 3)]
    llm.llm_engine.add_request("r", TEXT, own, tokenization_kwargs=kwargs)
    (output,) = llm.llm_engine.step()
    assert output.prompt_token_ids == cut(TEXT, 3)
    assert own.truncate_prompt_tokens == 5


def test_tokenization_kwargs_that_cut_nothing(llm, cut):
    whole = [cut(TEXT, 100)]
    for kwargs in ({"truncation": False, "max_length": 3}, {"truncation": False}):
        own = params(truncate_prompt_tokens=5)
        assert ids_of(llm.generate(TEXT, own, tokenization_kwargs=kwargs, use_tqdm=False)) == whole
    assert ids_of(llm.generate(LONG, params(), tokenization_kwargs={"truncation": True}, use_tqdm=False)) == [
        cut(LONG, 127)
    ]
    for kwargs, problem in (
        ({"nosuch": 1}, "nosuch"),
        ({"max_length": 3}, "max_length needs"),
        ({"stride": 2}, "stride"),
    ):
        for call in (llm.generate, llm.enqueue):
            with pytest.raises(VLLMValidationError, match=problem):
                call(TEXT, params(), tokenization_kwargs=kwargs, use_tqdm=False)


def test_embed(pooling, cut):
    """Texts to embed lose their ends."""
    limits = range(2, 13)
    each = [PoolingParams(truncate_prompt_tokens=limit) for limit in limits]
    outputs = pooling.embed([TEXT] * len(each), pooling_params=each, use_tqdm=False)
    assert ids_of(outputs) == [cut(TEXT, limit, "right") for limit in limits]
    same = pooling.embed([{"prompt_token_ids": ids} for ids in ids_of(outputs)], use_tqdm=False)
    for one, other in zip(outputs, same, strict=True):
        np.testing.assert_allclose(one.outputs.embedding, other.outputs.embedding, atol=1e-6)
    (output,) = pooling.embed(LONG, pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert output.prompt_token_ids == cut(LONG, 128, "right")


@pytest.mark.parametrize("kwargs", KWARGS)
def test_embed_with_tokenization_kwargs(pooling, cut, kwargs):
    own = PoolingParams(truncate_prompt_tokens=5)
    for side in ("right", "left"):
        options = {**kwargs, "truncation_side": side}
        outputs = pooling.embed([TEXT], pooling_params=own, tokenization_kwargs=options, use_tqdm=False)
        assert ids_of(outputs) == [cut(TEXT, 3, side)]
    with pytest.raises(VLLMValidationError, match="nosuch"):
        pooling.embed([TEXT], tokenization_kwargs={"nosuch": 1}, use_tqdm=False)


@pytest.mark.parametrize("kwargs", KWARGS)
def test_score_of_embeddings(pooling, cut, kwargs):
    (output,) = pooling.score("a b c", TEXT, tokenization_kwargs=kwargs, use_tqdm=False)
    first, second = cut("a b c", 3, "right"), cut(TEXT, 3, "right")
    assert output.prompt_token_ids == first + second
    one, other = (
        np.array(each.outputs.embedding)
        for each in pooling.embed([{"prompt_token_ids": ids} for ids in (first, second)], use_tqdm=False)
    )
    assert output.outputs.score == pytest.approx(float(one @ other), abs=1e-5)


def test_score_of_a_model_that_generates(llm, cut):
    """The document loses its end; special tokens, the query and the cue stay."""
    whole = llm.score("q", "0123456789", use_tqdm=False)[0].prompt_token_ids
    options = {"truncation": True, "max_length": len(whole) - 4}
    short = llm.score("q", "0123456789", tokenization_kwargs=options, use_tqdm=False)
    assert ids_of(short) == ids_of(llm.score("q", "012345", use_tqdm=False))
    assert len(short[0].prompt_token_ids) == len(whole) - 4
    for kwargs in ({"truncation_side": "left"}, {"truncation": "only_first"}, {"nosuch": 1}):
        with pytest.raises(VLLMValidationError, match=next(iter(kwargs))):
            llm.score("q", "0", tokenization_kwargs=kwargs, use_tqdm=False)


def test_decisions(folder):
    """The input loses its beginning behind the special tokens before it."""
    llm = make_tiny_llm(folder, max_model_len=2048)
    question = {"type": "predicate", "instructions": "Is it late?"}
    for limit in (-1, 300):
        (decision,) = llm.decide("first " + "word " * 600, question, truncate_prompt_tokens=limit, use_tqdm=False)
        ids = decision.answers[0].diagnostics.orders[0].prompt_token_ids
        first = llm.llm_engine.tokenizer.encode("a")[:1] == [BOS]
        assert (ids[0] == BOS) == first and BOS not in ids[1:] and len(ids) <= (300 if limit > 0 else 2048)


def test_too_few_tokens_for_the_special_ones(tmp_path):
    llm = make_tiny_llm(make_model(tmp_path, TEMPLATES["both"]))
    with pytest.raises(VLLMValidationError, match=r"prompts\[1\]: truncate_prompt_tokens: 1 tokens") as caught:
        llm.generate(["", TEXT], [params(), params(truncate_prompt_tokens=1)], use_tqdm=False)
    assert caught.value.parameter == "truncate_prompt_tokens"
    assert not llm.llm_engine.has_unfinished_requests()


def test_async_engine(tmp_path):
    folder = make_model(tmp_path, TEMPLATES["both"])
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    wanted = tokenizer(TEXT, truncation=True, max_length=3)["input_ids"]

    async def work():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), dtype="float32", max_model_len=128))
        try:
            for index, kwargs in enumerate(KWARGS):
                stream = engine.generate(TEXT, params(), f"r{index}", tokenization_kwargs=kwargs)
                assert [output.prompt_token_ids async for output in stream][-1] == wanted
            with pytest.raises(VLLMValidationError, match="nosuch"):
                await engine.add_request("x", TEXT, params(), tokenization_kwargs={"nosuch": 1})
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_beam_search_of_a_cut_text(tmp_path):
    llm: LLM = make_tiny_llm(make_model(tmp_path, TEMPLATES["bos"]))
    own = params(max_tokens=2, use_beam_search=True, best_of=2, n=1, truncate_prompt_tokens=3)
    (output,) = llm.generate(TEXT, own, use_tqdm=False)
    assert output.prompt_token_ids == [BOS, *llm.llm_engine.tokenizer.encode(TEXT)[-2:]]
