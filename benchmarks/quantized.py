"""Quantised weights: ours as the file has them, with and without 8-bit activations, against llama.cpp on the same GGUF
files, against upstream on the same GPTQ and AWQ checkpoints, and against our own bfloat16, in turns.

    python benchmarks/quantized.py --gguf A.gguf B.gguf --llama-cpp ENVIRONMENT
    python benchmarks/quantized.py --model FOLDER --formats gptq-4,awq-64 --upstream ENVIRONMENT
    python benchmarks/quantized.py --quick          # the embedded model, without llama.cpp
    python benchmarks/quantized.py --rows decode1   # a row alone
    python benchmarks/quantized.py --processor-time # for a busy machine: one thread, and its processor time

Rows: decode1, decode16, decode64 (sequences at once), score (distinct prompts), load (from the import's end to a
model that can take a request of its full length; file and conversion are in the caches) and memory (of the weights,
against the file's tensors).
A round does a row's work once with each engine; the work is as much as the slowest does in --seconds. Each row is
printed as soon as it is measured: each engine's best round, and the medians of the rounds' ratios. An engine that does
not start, fails or takes ten times --seconds is left out of what follows. The last line is all of it as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import make_parser, print_result, say, some_of, usable_cores, utc_now
from engines import Engine, EngineError, EngineProcess, find_python
from rounded_checkpoints import FORMATS, make_checkpoint
from workloads import EngineOptions

RATES = ("decode1", "decode16", "decode64", "score")
ROWS = (*RATES, "load", "memory")
OURS, INT8, PLAIN = "ours", "ours, int8 activations", "ours, bfloat16"
LLAMA, UPSTREAM = "llama.cpp", "upstream"
# Its model loaded, but not ready for a request.
FILE = "llama.cpp, the file alone"
PAIRS = tuple((one, other) for other in (LLAMA, FILE, UPSTREAM, PLAIN) for one in (OURS, INT8))

_MIB = 2**20
# A part of a row's work, to learn how long it takes.
_FIRST_SHARE = 0.05

Found = dict[str, list[float]]


def main() -> None:
    """Each model by itself."""
    args = _parse_args()
    # An exception, so that the engines' processes are ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, engines, size in _models(args, Path(folder)):
            say(f"{name}: weights of {size / _MIB:.1f} MiB in the file")
            results[name] = _measure(engines, size, args, Path(folder))
    print_result(date=utc_now(), results=results)


def _parse_args() -> argparse.Namespace:
    parser = make_parser("Quantised weights, against llama.cpp, upstream and our own bfloat16.", model=False)
    parser.add_argument("--gguf", nargs="+", default=[], help="files; default: the embedded model's")
    parser.add_argument("--llama-cpp", help="the environment with llama_cpp")
    parser.add_argument("--model", type=Path, help="a folder with unquantised weights for --formats")
    parser.add_argument("--formats", type=some_of(FORMATS, "format"), default=[], help="to round --model to")
    parser.add_argument("--upstream", help="the environment with upstream's vllm, for --formats")
    parser.add_argument("--rows", type=some_of(ROWS, "row"), default=list(ROWS), help=",".join(ROWS))
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--scale", type=float, default=1.0, help="of the work, at most; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=15.0, help="of a measurement, at most; default: %(default)s")
    parser.add_argument("--start-seconds", type=float, default=300.0, help="an engine's start; default: %(default)s")
    parser.add_argument("--processor-time", action="store_true", help="one thread each, measured by processor time")
    parser.add_argument("--quick", action="store_true", help="one small round")
    args = parser.parse_args()
    if args.formats and args.model is None:
        parser.error("--formats needs --model")
    if args.quick:
        args.rounds, args.scale = 1, min(args.scale, 0.1)
    return args


def _models(args: argparse.Namespace, folder: Path) -> Any:
    """Name, engines, and bytes of the tensors in the file."""
    for file in args.gguf or ([] if args.formats else [_embedded()]):
        peers = [(LLAMA, args.llama_cpp)] if args.llama_cpp else []
        plain = {"environment": {"VLLM_GGUF_DEQUANTIZE": "1"}}
        yield Path(file).name, _engines(args, file, peers, file, plain), _gguf_bytes(Path(file))
    for name in args.formats:
        make_checkpoint(args.model, name, folder / name)
        peers = [(UPSTREAM, args.upstream)] if args.upstream else []
        size = (folder / name / "model.safetensors").stat().st_size
        yield f"{args.model.name} {name}", _engines(args, str(folder / name), peers, str(args.model), {}), size


def _engines(
    args: argparse.Namespace, model: str, peers: list[tuple[str, str]], plain: str, plain_options: dict[str, Any]
) -> list[Engine]:
    cores = list(range(usable_cores()))[: 1 if args.processor_time else 2]

    def ours(name: str, model: str, **more: Any) -> Engine:
        return Engine(name, sys.executable, EngineOptions("ours", model, "bfloat16", cores, **more))

    int8 = ours(INT8, model, environment={"VLLM_CPU_INT8_ACTIVATIONS": "1"})
    engines = [ours(OURS, model), int8, ours(PLAIN, plain, **plain_options)]
    for name, environment in peers:
        engines.append(Engine(name, find_python(environment), EngineOptions(name, model, "bfloat16", cores)))
    return engines


def _embedded() -> str:
    from vllm.loader import embedded_model_path

    return str(embedded_model_path())


def _gguf_bytes(path: Path) -> int:
    from vllm.loader.gguf.file import GGUFFile

    return sum(tensor.num_bytes for tensor in GGUFFile(path).tensors.values())


def _measure(engines: list[Engine], size: int, args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    found: dict[str, Found] = {}
    with contextlib.ExitStack() as stack:
        processes: dict[str, EngineProcess] = {}
        for engine in engines:
            say(f"starting {engine.name}")
            with _reported():
                # The first start converts the file.
                EngineProcess(engine, logs, args.start_seconds).close()
                processes[engine.name] = stack.enter_context(EngineProcess(engine, logs, args.start_seconds))
        print(f"| | {' | '.join(processes)} | ratios |\n|---|{'---|' * (len(processes) + 1)}", flush=True)
        for row in args.rows:
            if row == "memory":
                mib = {name: each.hello.get("weight_mib") for name, each in processes.items()}
                found[row] = {name: [value * _MIB / size] for name, value in mib.items() if value}
            elif row == "load":
                found[row] = _load(processes, args, logs)
            else:
                found[row] = _rates(row, processes, args)
            _print_row(row, found[row], list(processes))
    return {"file_mib": size / _MIB, "found": found, "ratios": {row: _ratios(each) for row, each in found.items()}}


@contextlib.contextmanager
def _reported() -> Any:
    """An engine's error is printed, and the rest goes on."""
    try:
        yield
    except EngineError as error:
        say(str(error))


def _rates(row: str, processes: dict[str, EngineProcess], args: argparse.Namespace) -> Found:
    seconds = _one_round(row, -1, max(args.scale * _FIRST_SHARE, 1e-3), processes, args, "seconds")
    slowest = max((value[1] for value in seconds.values()), default=1.0)
    scale = args.scale * min(1.0, _FIRST_SHARE * args.seconds / slowest)
    found: Found = {}
    for repeat in range(-1, args.rounds):
        spent = "cpu_seconds" if args.processor_time else "seconds"
        for name, (amount, value) in _one_round(row, repeat, scale, processes, args, spent).items():
            if repeat >= 0:
                found.setdefault(name, []).append(amount / value)
    return found


def _one_round(
    row: str, repeat: int, scale: float, processes: dict[str, EngineProcess], args: argparse.Namespace, spent: str
) -> dict[str, tuple[float, float]]:
    """By engine that lives, the amount of work and the seconds that it took."""
    found = {}
    for name, process in processes.items():
        if process.alive:
            with _reported():
                answer = process.measure(row, repeat, scale, 10 * args.seconds)
                found[name] = answer["amount"], max(answer[spent], 1e-9)
    return found


def _load(processes: dict[str, EngineProcess], args: argparse.Namespace, logs: Path) -> Found:
    """Seconds of fresh starts, in turns."""
    found: Found = {}
    for _ in range(args.rounds):
        for name, process in processes.items():
            with _reported(), EngineProcess(process.engine, logs, args.start_seconds) as again:
                found.setdefault(name, []).append(again.hello["load_seconds"])
                if again.hello["file_seconds"] is not None:
                    found.setdefault(FILE, []).append(again.hello["file_seconds"])
    return found


def _ratios(found: Found) -> dict[str, float]:
    """Medians over the rounds, by "one / other"."""
    return {
        f"{one} / {other}": round(statistics.median(a / b for a, b in zip(found[one], found[other], strict=False)), 3)
        for one, other in PAIRS
        if one in found and other in found
    }


def _print_row(row: str, found: Found, names: list[str]) -> None:
    best = max if row in RATES else min
    unit = {"load": ", s", "memory": " of the file's tensors"}.get(row, "")
    cells = [f"{best(found[name]):.4g}" if name in found else "" for name in names]
    ratios = ", ".join(f"{pair} {ratio:.2f}" for pair, ratio in _ratios(found).items())
    print(f"| {row}{unit} | {' | '.join(cells)} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
