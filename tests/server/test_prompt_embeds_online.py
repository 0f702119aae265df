"""prompt_embeds of /v1/completions: what offline gives, and files that are no tensor or more than one."""

from __future__ import annotations

import base64
import io
import os
import pickle
import zipfile
from typing import Any

import pytest
import torch
from asgi import AppThread, Serve
from tiny_llm import make_tiny_llm
from torch import Tensor

from vllm import SamplingParams
from vllm.utils.serial_utils import tensor2base64

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 5, "logprob_token_ids": [70, 80]}


@pytest.fixture(scope="module")
def server(serve: Serve) -> AppThread:
    return serve({"enable_prompt_embeds": True})


@pytest.fixture(scope="module")
def llm(folder):
    return make_tiny_llm(folder, enable_prompt_embeds=True)


@pytest.fixture(scope="module")
def width(llm):
    return llm.llm_engine.model_config.get_hidden_size()


def rows_of(count: int, width: int, seed: int = 0, **fields: Any) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(**fields) * 0.3


def complete(server, **body):
    return server.post("/v1/completions", **{**GREEDY, **body})


def refused(server, path, **body):
    response = server.request("POST", path, json={"model": "tiny", **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def offline(llm, *prompts):
    params = SamplingParams(**GREEDY)
    given = [{"prompt_embeds": each} if isinstance(each, Tensor) else each for each in prompts]
    return [output.outputs[0] for output in llm.generate(given, params, use_tqdm=False)]


def check(choice, expected):
    assert choice["text"] == expected.text
    assert choice["token_ids"] == list(expected.token_ids)
    for found, entries in zip(choice["logprobs"]["top_logprobs"], expected.logprobs, strict=True):
        wanted = {f"token_id:{token}": entry.logprob for token, entry in entries.items()}
        assert found == pytest.approx(wanted, abs=1e-5)


def reading(server, **body):
    return complete(server, return_token_ids=True, return_tokens_as_token_ids=True, **body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_alone(server, llm, width, dtype):
    rows = rows_of(7, width, dtype=dtype)
    (expected,) = offline(llm, rows)
    for left_out in ({}, {"prompt": None}, {"prompt": ""}, {"prompt": []}):
        answer = reading(server, prompt_embeds=tensor2base64(rows), **left_out)
        (choice,) = answer["choices"]
        check(choice, expected)
        assert choice["prompt_token_ids"] == [0] * 7
        assert answer["usage"]["prompt_tokens"] == 7


def test_several_come_before_the_prompts(server, llm, width):
    one, other = rows_of(4, width, 1), rows_of(1, width, 2)[None]
    expected = offline(llm, one, other, "the cat", "ab")
    body = {"prompt_embeds": [tensor2base64(one), tensor2base64(other)], "prompt": ["the cat", "ab"]}
    answer = reading(server, **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, own in zip(answer["choices"], expected, strict=True):
        check(choice, own)
    assert answer["usage"]["prompt_tokens"] == 4 + 1 + sum(
        map(len, llm.get_tokenizer()(["the cat", "ab"])["input_ids"])
    )
    texts = dict.fromkeys(range(4), "")
    for chunk in server.stream("/v1/completions", **{**GREEDY, **body}):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [own.text for own in expected]


def test_an_empty_field_asks_for_nothing(server, llm):
    (expected,) = offline(llm, "the cat")
    for value in (None, [], ""):
        (choice,) = reading(server, prompt="the cat", prompt_embeds=value)["choices"]
        check(choice, expected)


def test_other_doors(server, llm, width):
    rows = tensor2base64(rows_of(3, width))
    answer = server.post("/invocations", prompt_embeds=rows, **GREEDY)
    assert answer["choices"][0]["text"] == offline(llm, rows_of(3, width))[0].text
    message = [{"role": "user", "content": "a"}]
    error = refused(server, "/v1/chat/completions", messages=message, prompt_embeds=rows)
    assert error["param"] == "prompt_embeds"
    assert "/v1/completions takes" in error["message"]
    assert refused(server, "/v1/completions/render", prompt_embeds=rows)["param"] == "prompt_embeds"


def saved(value: Any, **fields: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **fields)
    return file.getvalue()


def changed(data: bytes, pickled: bytes | None = None, compression: int = zipfile.ZIP_STORED) -> bytes:
    """An archive with another pickle, or compressed."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(file, "w", compression) as target:
        for entry in source.infolist():
            is_pickle = pickled is not None and entry.filename.endswith("data.pkl")
            target.writestr(entry.filename, pickled if is_pickle else source.read(entry))
    return file.getvalue()


class Runs:
    def __reduce__(self) -> Any:
        # Libraries replace `print` in a running process; nobody replaces this one, and nothing here calls it.
        return os.system, ("true",)


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def bad_files(width: int) -> dict[str, tuple[str, str]]:
    rows = torch.ones(3, width)
    whole = saved(rows)
    return {
        "no base64": ("a*b", "not base64"),
        "cut base64": (encoded(whole)[:-3], "not base64"),
        "no archive": (encoded(b"PK\x03\x04" + bytes(40)), "no zip archive"),
        "cut": (encoded(whole[:-30]), "no zip archive"),
        "a pickle": (encoded(pickle.dumps([1.0])), "no zip archive"),
        "the older format": (encoded(saved(rows, _use_new_zipfile_serialization=False)), "no zip archive"),
        "compressed": (encoded(changed(whole, compression=zipfile.ZIP_DEFLATED)), "compressed"),
        "no tensor": (encoded(saved({"a": 1})), "must be a tensor"),
        "several": (encoded(saved([rows, rows])), "must be a tensor"),
        "integers": (encoded(saved(rows.long())), "LongStorage"),
        "doubles": (encoded(saved(rows.double())), "DoubleStorage"),
        "sparse": (encoded(saved(rows.to_sparse())), "refers to torch._utils._rebuild_sparse_tensor"),
        "code": (encoded(changed(whole, pickle.dumps(Runs(), protocol=2))), "refers to posix.system"),
        "newer code": (encoded(changed(whole, pickle.dumps(Runs(), protocol=4))), "of protocol 2"),
        "older code": (encoded(changed(whole, b"(S'run'\nibuiltins\nprint\n.")), "of protocol 2"),
        "damaged": (encoded(changed(whole, b"\x80\x02c")), "damaged"),
        "damaged within": (encoded(changed(whole, b"\x80\x02.")), "no tensor that torch.save"),
        "shape": (encoded(saved(torch.ones(width))), r"shape [T,"),
        "wide": (encoded(saved(torch.ones(3, width + 1))), r"shape [T,"),
        "empty": (encoded(saved(torch.ones(0, width))), "1 to 128 rows"),
        "long": (encoded(saved(torch.ones(129, width))), "1 to 128 rows"),
        "many of one": (encoded(saved(torch.ones(1, width).expand(100, width))), "in a file with fewer"),
        "not finite": (encoded(saved(rows * torch.nan)), "not finite"),
        "huge": ("A" * (3 << 20), "at most"),
    }


@pytest.mark.parametrize("name", bad_files(32))
def test_files_that_are_refused(server, width, name, capfd):
    text, message = bad_files(width)[name]
    for value in (text, [tensor2base64(torch.ones(2, width)), text]):
        error = refused(server, "/v1/completions", prompt="a", prompt_embeds=value)
        assert error["param"] == "prompt_embeds"
        assert message in error["message"]
    assert "run" not in capfd.readouterr().out.split()


@pytest.mark.parametrize("value", [7, {"a": 1}, [7], [""], ["", 7], [None], [[]]])
def test_values_that_are_no_files(server, value):
    assert refused(server, "/v1/completions", prompt="a", prompt_embeds=value)["param"] == "prompt_embeds"


def test_fields_that_need_the_prompts_tokens(server, width):
    rows = tensor2base64(rows_of(3, width))
    assert refused(server, "/v1/completions", prompt_embeds=rows, echo=True)["param"] == "echo"
    error = refused(server, "/v1/completions", prompt_embeds=rows, prompt_logprobs=1)
    assert (error["param"], "prompt_embeds has none" in error["message"]) == ("prompt_logprobs", True)
    error = refused(server, "/v1/completions", prompt_embeds=rows, max_tokens=126)
    assert error["param"] == "max_tokens"
