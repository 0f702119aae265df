"""An engine in a process whose tensors are elsewhere by default."""

from __future__ import annotations

import pytest
import torch
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import SamplingParams

PARAMS = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprob_token_ids=[5, 9], prompt_logprobs=1)


@pytest.mark.parametrize("since", ["before", "after"])
def test_the_default_device_of_the_caller_is_not_the_engines(tmp_path, since):
    folder = make_tiny_model(tmp_path)
    (expected,) = make_tiny_llm(folder).generate("abcd", PARAMS, use_tqdm=False)
    llm = make_tiny_llm(folder) if since == "after" else None
    torch.set_default_device("meta")
    try:
        llm = llm or make_tiny_llm(folder)
        llm.sleep(1)
        llm.wake_up()
        (output,) = llm.generate("abcd", PARAMS, use_tqdm=False)
        assert torch.empty(0).is_meta
    finally:
        torch.set_default_device(None)
    assert output.outputs == expected.outputs and output.prompt_logprobs == expected.prompt_logprobs
