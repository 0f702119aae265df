"""A query and an item are put together to a prompt, of which truncate_prompt_tokens cuts parts."""

from __future__ import annotations

import pytest
from byte_tokenizer import BOS, VOCAB_SIZE, byte_ids, make_byte_tokenizer, make_template_tokenizer
from models_util import make_random_model
from scoring_reference import assert_item

from vllm.server.errors import ApiError
from vllm.server.serving.labels.scoring_prompts import PromptBuilder
from vllm.tokenizers.tokenizer import Tokenizer

QUERY, ITEM = "0123456789", "abc"
Q, D = byte_ids(QUERY), byte_ids(ITEM)
LABELS = [[5], [6]]


@pytest.fixture(scope="module")
def model_and_server(serve, tmp_path_factory):
    """A model whose tokenizer begins every text with <s>; 32 tokens of context."""
    folder = tmp_path_factory.mktemp("bos")
    _, model = make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE)
    make_template_tokenizer(folder, "<s> $A")
    return model, serve({"max_model_len": 32}, folder)


def prompts_of(server, **body):
    fields = {"query": QUERY, "items": [ITEM], "label_token_ids": [5, 6], "return_token_ids": True}
    return server.post("/generative_scoring", **{**fields, **body})["data"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, [BOS, *Q, *D]),
        ({"item_first": True}, [BOS, *D, *Q]),
        ({"add_special_tokens": False}, [*Q, *D]),
        ({"add_special_tokens": False, "item_first": True}, [*D, *Q]),
        # Ids are taken as they are.
        ({"query": Q}, [*Q, *D]),
        ({"query": Q, "item_first": True}, [BOS, *D, *Q]),
        ({"items": [D], "item_first": True}, [*D, *Q]),
        ({"items": [D]}, [BOS, *Q, *D]),
        ({"query": Q, "items": [D]}, [*Q, *D]),
        # Each is tokenised by itself: " the" is one token, and so is "the".
        ({"query": "x ", "items": ["the"]}, [BOS, *byte_ids("x "), 260]),
        ({"query": "x", "items": [" the"]}, [BOS, *byte_ids("x"), 261]),
        ({"query": "", "items": [ITEM]}, [BOS, *D]),
        ({"query": QUERY, "items": [""]}, [BOS, *Q]),
        ({"query": [], "items": [D]}, D),
        # The special token alone is a prompt.
        ({"query": "", "items": [""]}, [BOS]),
    ],
)
def test_what_is_joined(model_and_server, body, expected):
    (item,) = prompts_of(model_and_server[1], **body)
    assert item["prompt_token_ids"] == expected
    assert item["num_truncated_tokens"] == 0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # The query's beginning goes; <s>, the item and the query's end stay.
        ({"truncate_prompt_tokens": 9}, [BOS, *Q[5:], *D]),
        ({"truncate_prompt_tokens": 9, "item_first": True}, [BOS, *D, *Q[5:]]),
        ({"truncate_prompt_tokens": 9, "query": Q, "items": [D]}, [*Q[4:], *D]),
        ({"truncate_prompt_tokens": 5}, [BOS, Q[-1], *D]),
        ({"truncate_prompt_tokens": 14}, [BOS, *Q, *D]),
        ({"truncate_prompt_tokens": 13}, [BOS, *Q[1:], *D]),
        ({"truncate_prompt_tokens": 32}, [BOS, *Q, *D]),
        ({"truncate_prompt_tokens": -1, "query": QUERY * 4}, [BOS, *(Q * 4)[12:], *D]),
        ({"truncate_prompt_tokens": -1, "query": QUERY * 4, "item_first": True}, [BOS, *D, *(Q * 4)[12:]]),
        # All but the last of the longest label's tokens have to fit, too.
        ({"truncate_prompt_tokens": -1, "query": Q * 4, "label_token_ids": [5, [6, 7, 8]]}, [*(Q * 4)[13:], *D]),
        ({"truncate_prompt_tokens": 32, "query": Q * 4, "label_token_ids": [5, [6, 7, 8]]}, [*(Q * 4)[13:], *D]),
    ],
)
def test_what_is_cut(model_and_server, body, expected):
    model, server = model_and_server
    (item,) = prompts_of(server, **body)
    assert item["prompt_token_ids"] == expected
    whole = len(body.get("query", QUERY)) + len(D) + (expected[0] == BOS)
    assert item["num_truncated_tokens"] == whole - len(expected)
    if "label_token_ids" not in body:
        assert_item(model, item, expected, LABELS, softmax=True)


def test_every_item_is_cut_for_itself(model_and_server):
    short, long = prompts_of(model_and_server[1], items=["a", "abcdef"], truncate_prompt_tokens=12)
    assert short["prompt_token_ids"] == [BOS, *Q, byte_ids("a")[0]]
    assert long["prompt_token_ids"] == [BOS, *Q[5:], *byte_ids("abcdef")]
    rows = model_and_server[1].post(
        "/v1/score", query=QUERY, items=["a", "abcdef"], truncate_prompt_tokens=12, label_token_ids=[5]
    )
    assert rows["num_truncated_tokens"] == [0, 5]


def test_a_prompt_of_the_whole_context(model_and_server):
    model, server = model_and_server
    (item,) = prompts_of(server, query=Q * 2, items=[byte_ids("x" * 12)])
    assert item["num_prompt_tokens"] == 32
    assert_item(model, item, Q * 2 + byte_ids("x" * 12), LABELS, softmax=True)


@pytest.mark.parametrize("path", ["/generative_scoring", "/v1/score"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": Q * 3}, r"items[1] makes a prompt of 33 tokens, and the context holds 32"),
        ({"query": Q * 3, "label_token_ids": [[5, 6, 7]]}, "holds 30"),
        ({"items": ["ab", "abcd"], "truncate_prompt_tokens": 5}, "items[1] has 4 tokens, which leaves no room"),
        ({"items": ["x" * 40], "truncate_prompt_tokens": -1}, "items[0] has 40 tokens, which leaves no room"),
        ({"items": ["x" * 40], "truncate_prompt_tokens": -1, "item_first": True}, "items are never cut"),
    ],
)
def test_too_long_is_an_error(model_and_server, path, body, message):
    fields = {"query": QUERY, "items": ["ab", ITEM], "label_token_ids": [5, 6], **body}
    response = model_and_server[1].request("POST", path, json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "items", "context_length_exceeded")
    assert message in error["message"]


def make_builder(tokenizer: Tokenizer, item_first: bool = False) -> PromptBuilder:
    return PromptBuilder(
        tokenizer, VOCAB_SIZE, item_first, add_special_tokens=True, max_len=32, max_total=64, truncate_to=None
    )


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("template", ["$A", "<s> $A", "$A </s>", "<s> $A </s>", "<s> <s> $A </s>"])
def test_special_tokens_stand_around_the_whole_prompt(tmp_path, template, item_first):
    tokenizer = make_template_tokenizer(tmp_path, template)
    (prompt,) = make_builder(tokenizer, item_first).build(QUERY, [ITEM])
    # No token joins these two texts, so that the whole is tokenised as its parts are.
    assert prompt.token_ids == tokenizer.encode(ITEM + QUERY if item_first else QUERY + ITEM)


def test_an_empty_prompt(tmp_path):
    with pytest.raises(ApiError, match=r"items\[1\]: the prompt is empty"):
        make_builder(make_byte_tokenizer(tmp_path)).build("", ["a", ""])


def test_all_prompts_together_are_bounded(tmp_path):
    builder = make_builder(make_byte_tokenizer(tmp_path))
    assert len(builder.build([5] * 15, [[6]] * 4)) == 4
    with pytest.raises(ApiError, match="5 items make more than 64 tokens together"):
        builder.build([5] * 15, [[6]] * 5)
