"""The process that reads a server's traffic once more, by another model. It yields to all others: nice 19, one thread.

It is told what to do in lines of JSON: first `{"engine": {...}}`, fields of EngineArgs, and then, one a reading,
`{"token_ids": [...], "start": s, "read": [[...], ...]}`: the ids that are read of the distribution of each token from
the s-th on. Each is answered by a line `{"logprobs": [[...], ...]}`, or `{"error": "..."}`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> int:
    """Run until standard input ends."""
    # Output of other code must not be among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    jobs = (json.loads(line) for line in sys.stdin)

    import torch

    from vllm import LLM

    torch.set_num_threads(1)
    try:
        llm = LLM(**next(jobs)["engine"])
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        print(json.dumps({"failure": f"{error}"}), file=answers)
        return 1
    print(json.dumps({"ready": True}), file=answers)
    for job in jobs:
        try:
            answer: dict[str, Any] = {"logprobs": _read(llm, **job)}
        except ValueError as error:
            answer = {"error": f"{error}"}
        print(json.dumps(answer), file=answers)
    return 0


def _read(llm: Any, token_ids: list[int], start: int, read: list[list[int]]) -> list[list[float]]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=0, prompt_logprob_token_ids=read, prompt_logprob_start=start - 1)
    (output,) = llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    positions = output.prompt_logprobs[start:]
    return [[position[token].logprob for token in ids] for position, ids in zip(positions, read, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
