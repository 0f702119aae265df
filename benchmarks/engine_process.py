"""The process of one engine, started by `engines.py` in the engine's environment.

    python engine_process.py OPTIONS

It loads the engine, scores one text and prints a line of JSON. Then it answers each line of stdin, {"row": ...,
"repeat": ..., "scale": ...}, with a line {"seconds": ..., ...} or {"error": ...}, until stdin ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from typing import Any, TextIO


def main() -> None:
    """Load, score, answer."""
    parser = argparse.ArgumentParser(description="The process of one engine; compare.py starts it.")
    parser.add_argument("options", type=json.loads, help="the fields of EngineOptions, as JSON")
    fields = parser.parse_args().options
    # Imported here, as processes that the engine spawns import this file without this folder on their path.
    from adapters import make_adapter, prepare_process
    from workloads import EngineOptions, make_workload

    options = EngineOptions(**fields)
    answers = _take_stdout()
    prepare_process(options)
    adapter = make_adapter(options)
    hello: dict[str, Any] = {"score": adapter.score_text(), "version": adapter.version, "notes": adapter.notes}
    for name in ("load_seconds", "file_seconds"):
        hello[name] = getattr(adapter, name, None)
    if options.kind == "ours":
        hello |= {"shape": _model_shape(adapter), "weight_mib": _weight_mib(adapter)}
    _say(answers, hello)
    for line in sys.stdin:
        try:
            answer = _measure(adapter, make_workload(**json.loads(line)))
        except Exception:
            # Only this row: an engine without enough memory for it may do the others.
            answer = {"error": traceback.format_exc(limit=-4)[-1000:]}
        _say(answers, answer)


def _take_stdout() -> TextIO:
    """A stream to stdout, whose descriptor becomes stderr for the engine's own output."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    print(json.dumps(message), file=answers, flush=True)


def _measure(adapter: Any, work: Any) -> dict[str, Any]:
    idle = time.process_time()
    if hasattr(adapter, "prepare"):
        adapter.prepare(work)
    elif work.is_computed:
        raise ValueError("this engine keeps no prefix from one call to the next")
    gc.collect()
    cpu_before = time.process_time()
    began = time.perf_counter()
    readings = adapter.run(work)
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu_before
    check = None if readings is None else float(readings[:, 0].mean())
    did = {"amount": work.amount, "unit": work.unit, "check": check, "digest": work.digest}
    cost = {"seconds": seconds, "own_cpu_seconds": cpu, "setup_cpu_seconds": cpu_before - idle}
    return {**cost, **did, **getattr(adapter, "last", {})}


def _model_shape(adapter: Any) -> dict[str, int]:
    config = adapter.llm.llm_engine.model_config.hf_config
    names = (
        "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size"
    )
    return {name: int(getattr(config, name)) for name in names.split()}


def _weight_mib(adapter: Any) -> float:
    """The bytes of all tensors that the model's modules hold, each place in memory once."""
    (num_bytes,) = adapter.llm.apply_model(held_bytes)
    return round(num_bytes / 2**20, 1)


def held_bytes(model: Any) -> int:
    """Bytes of the model's tensors, packed ones too, each place in memory once."""
    from vllm.layers.weight_update import held_tensors

    return sum({each.data_ptr(): each.nbytes for each in held_tensors(model)}.values())


if __name__ == "__main__":
    main()
