"""A logits processor that makes a random model an agent's: it calls a function, and answers when it has the result."""

from __future__ import annotations

import torch
from byte_tokenizer import EOS, byte_ids

from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, RequestLogitsProcessor

TEMPLATE = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = "It is cold."
RESULT = "-7 degrees"
"""What the function returns: prompts that hold it are answered."""


class ScriptedCalls(AdapterLogitsProcessor):
    """Forces CALL or ANSWER, as far as a grammar allows it."""

    def is_argmax_invariant(self) -> bool:
        """No."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """For every request."""
        result, call, answer = (bytes(text, "utf-8") for text in (RESULT, CALL, ANSWER))

        def force(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            script = byte_ids(answer if _holds(prompt_ids, result) else call)
            forced = [*script, EOS]
            if len(output_ids) < len(forced) and logits[forced[len(output_ids)]] > -torch.inf:
                logits[forced[len(output_ids)]] = 1e4
            return logits

        return force


def _holds(ids: list[int], text: bytes) -> bool:
    wanted = byte_ids(text)
    return any(ids[place : place + len(wanted)] == wanted for place in range(len(ids)))
