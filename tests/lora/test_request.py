"""A LoRARequest is a value with a name; it is refused where adapters are not enabled."""

from __future__ import annotations

import pickle

import pytest

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest, check_lora_request


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


def test_what_is_no_adapter_or_not_enabled_is_refused():
    request = LoRARequest("sql", 1, "/a")
    assert check_lora_request(None, False) is None and check_lora_request(request, True) is request
    with pytest.raises(VLLMValidationError, match="enable_lora=True") as caught:
        check_lora_request(request, False)
    assert caught.value.parameter == "lora_request"
    with pytest.raises(VLLMValidationError, match="must be a LoRARequest, got str"):
        check_lora_request("sql", True)
