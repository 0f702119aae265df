"""Quantised experts on a CUDA device, which is pretended: their decode steps are graphs."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from pretend_cuda import pretending
from quantized_models import PROMPTS, errors, generate, make_llm
from test_quantized_experts import make_gpt_oss

from vllm.layers.experts import asks_for_counts
from vllm.v1.worker.gpu.replay.make import Replay


def test_decode_steps_are_graphs(tmp_path: Path) -> None:
    quantized = make_gpt_oss(tmp_path)

    def error(outputs: list[Any]) -> float:
        pairs = zip(outputs, PROMPTS, strict=True)
        return median(each for output, prompt in pairs for each in errors(output, quantized.model, prompt))

    on_cpu = error(generate(make_llm(tmp_path, dtype="bfloat16")))
    with pretending():
        llm = make_llm(tmp_path, device="cuda", dtype="bfloat16", max_num_seqs=4)
        runner = llm.llm_engine.model_executor.driver_worker.model_runner
        assert not asks_for_counts(runner.model) and type(runner.replay) is not Replay
        # Roundings of bfloat16 in another order.
        assert error(generate(llm)) < 1.5 * on_cpu
