"""A logits processor that makes a random model an agent's: it calls a function, and answers when it has the result."""

from __future__ import annotations

from typing import Any

import torch
from byte_tokenizer import EOS

from vllm import SamplingParams
from vllm.tokenizers.tokenizer import get_tokenizer
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = "It is cold."
RESULT = "-7 degrees"
"""The function's result: prompts that hold it are answered."""


class ScriptedCalls(AdapterLogitsProcessor):
    """Forces CALL or ANSWER, as far as a grammar allows it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        # As a grammar spells what it forces.
        self._tokenizer = get_tokenizer(vllm_config.model_config.tokenizer)
        self._scripts = [[*self._tokenizer.encode(text), EOS] for text in (CALL, ANSWER)]

    def is_argmax_invariant(self) -> bool:
        """No."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """For every request."""

        def force(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            forced = self._scripts[RESULT in self._tokenizer.decode(prompt_ids)]
            if len(output_ids) < len(forced) and logits[forced[len(output_ids)]] > -torch.inf:
                logits[forced[len(output_ids)]] = 1e4
            return logits

        return force
