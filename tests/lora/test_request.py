"""A LoRARequest is a value with a name; it is refused with what to do instead."""

from __future__ import annotations

import pickle

import pytest

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest, refuse_lora


def test_positional_fields_and_older_names():
    request = LoRARequest("sql", 3, "/adapters/sql")
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "/adapters/sql")
    assert pickle.loads(pickle.dumps(request)) == request


def test_two_of_one_name_are_equal():
    first, second = LoRARequest("sql", 1, "/a"), LoRARequest("sql", 2, "/b")
    assert first == second
    assert len({first, second, LoRARequest("chat", 1, "/a")}) == 2
    assert first != "sql"


@pytest.mark.parametrize(("fields", "parameter"), [(("sql", 0, "/a"), "lora_int_id"), (("sql", 1), "lora_path")])
def test_bad_values_are_named(fields, parameter):
    with pytest.raises(VLLMValidationError) as caught:
        LoRARequest(*fields)
    assert caught.value.parameter == parameter


def test_the_refusal_says_what_to_do_instead():
    with pytest.raises(VLLMValidationError, match="merge") as caught:
        refuse_lora("lora_request", LoRARequest("sql", 1, "/a"))
    assert caught.value.parameter == "lora_request"
