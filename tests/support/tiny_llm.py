"""An engine over a random model that is as small as it gets, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer
from models_util import make_random_model

from vllm import LLM


def make_tiny_model(folder: Path, **overrides: Any) -> Path:
    """A Llama of two layers with its tokenizer; eos_token_id is 2."""
    make_random_model("llama", "small", folder, vocab_size=VOCAB_SIZE, **overrides)
    make_byte_tokenizer(folder)
    return folder


def make_tiny_llm(folder: Path, **fields: Any) -> LLM:
    """LLM on a folder of make_tiny_model, float32, 128 tokens of context."""
    # A GPU is shared with other tests.
    usual = {"dtype": "float32", "max_model_len": 128, "max_logprobs": -1, "gpu_memory_utilization": 0.3}
    return LLM(str(folder), **{**usual, **fields})


def is_empty(llm: LLM) -> bool:
    """Whether the engine holds nothing: no request at any level, no slot once the next step has told the
    runner, no block that is not free."""
    engine = llm.llm_engine
    core, output = engine.engine_core, engine.output_processor
    core.step()
    runner = core.executor.worker.model_runner
    pool = core.scheduler.kv.pool
    return (
        not engine.has_unfinished_requests()
        and not output._by_core_id
        and not core.scheduler.requests
        and not core.scheduler.running
        and not len(core.scheduler.waiting)
        and not runner.states.req_id_to_slot
        and len(runner.states._free_slots) == runner.states.max_num_reqs
        and pool.num_free == pool.num_blocks
    )
