"""An audit's cost beside that of its models' scores, its memory by rows, and what a share costs the server that has it.

    python benchmarks/audits.py cost                       # vllm audit, against vllm score of each of its models
    python benchmarks/audits.py memory --rows 1000000      # rows of a pretended reader: no model runs
    python benchmarks/audits.py share                      # requests and /health, with --audit-share and without

Seconds are those of the clock and of the CPU, loading included: on a machine with other work, compare the CPU's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, add_counts, make_parser, print_result, status_kib

_LABELS = [" positive", " negative"]
_CANDIDATES = ["float16", "int8"]
_SETTLING_SECONDS = 5.0
_HEALTH_SECONDS = 0.05


def main() -> None:
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("cost", "memory", "share"))
    add_counts(parser, rows=(2000, "rows of cost and memory"), seconds=(5, "of each run of share"))
    add_counts(parser, repeats=(3, "runs of each kind"), clients=(4, "of share, each with a request at a time"))
    parser.add_argument("--share", metavar="SHARE", default="0.01", help="of the requests, read again (default: 0.01)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_memory_of(args.rows, Path(args.child))))
        return
    print_result(what=args.what, **{"cost": _cost, "memory": _memory, "share": _share}[args.what](args))


def _texts(count: int) -> list[str]:
    """Texts of 5 to 40 words."""
    generator = random.Random(0)
    words = "the a pen kettle was is broke works fine never again I love it hate this shop boots warm cold late".split()
    return [" ".join(generator.choices(words, k=generator.randint(5, 40))) for _ in range(count)]


def _cost(args: argparse.Namespace) -> dict[str, Any]:
    model = args.model or "embedded"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(f"{json.dumps({'text': text})}\n" for text in _texts(args.rows)))
        common = [str(rows), "--labels", *_LABELS, "--quiet"]
        ratios: list[tuple[float, float]] = []
        for repeat in range(args.repeats):
            scores = []
            for index, each in enumerate(("float32", *_CANDIDATES)):
                own = ["--quantization", each] if each == "int8" else ["--dtype", each]
                named = [] if args.model is None else ["--model", args.model]
                output = ["--output", str(folder / f"{repeat}-{index}.jsonl"), "--no-picture"]
                dtype = ["--dtype", "float32"] if each == "int8" else []
                scores.append(_run("score", *common, *named, *own, *dtype, *output))
            audit = ["--reference", f"{model}:float32", "--readings", str(folder / f"readings{repeat}")]
            audit += [part for each in _CANDIDATES for part in ("--candidate", each)]
            whole = _run("audit", *common, *audit, "--output", str(folder / f"{repeat}.json"))
            ratios.append((whole[0] / sum(each[0] for each in scores), whole[1] / sum(each[1] for each in scores)))
    return {
        "rows": args.rows, "models": 1 + len(_CANDIDATES),
        "audit_to_scores_seconds": [round(wall, 3) for wall, _ in ratios],
        "audit_to_scores_cpu_seconds": [round(cpu, 3) for _, cpu in ratios],
    }  # fmt: skip


def _run(*arguments: str) -> tuple[float, float]:
    """Seconds of a command by the clock, and of the CPU in it and its children."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "vllm.cli.main", *arguments], check=True, env=environment, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def _memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peaks of audits in processes of their own."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for rows in (args.rows // 100, args.rows):
            command = [sys.executable, __file__, "memory", "--rows", str(rows), "--child", folder]
            ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(ran.stdout.splitlines()[-1]))
    return {"audits": found}


def _memory_of(count: int, folder: Path) -> dict[str, Any]:
    """The peak of an audit in this process, above that of an audit of ten rows. The readings are written here, as two
    models of random logprobs would."""
    import pickle

    from vllm import audit
    from vllm.auditing import readings

    def pretended(command: list[str], input: bytes, **_: Any) -> subprocess.CompletedProcess[bytes]:
        job = pickle.loads(input)
        generator = random.Random(str(job.spec))
        with job.output.open("w") as rows, job.file.open() as texts:
            for index, line in enumerate(texts):
                values = {label: -generator.expovariate(1) for label in _LABELS}
                ranks = dict.fromkeys(_LABELS, 1)
                own = {"index": index, **json.loads(line), "logprobs": values, "ranks": ranks, "label_mass": 0.5}
                rows.write(f"{json.dumps({**own, 'num_prompt_tokens': index % 50})}\n")
        cost = {"num_rows": index + 1, "num_failed": 0, "failure": None, "seconds": 1.0, "loading_seconds": 1.0}
        Path(f"{job.output}.cost.json").write_text(json.dumps({**cost, "peak_mib": 1.0}))
        return subprocess.CompletedProcess(command, 0, b"")

    readings.subprocess.run = pretended  # type: ignore[assignment]
    peaks, seconds = [], 0.0
    for rows in (10, count):
        file = folder / f"{rows}.jsonl"
        with file.open("w") as lines:
            lines.writelines(f'{{"text": "row {row}", "label": "positive"}}\n' for row in range(rows))
        began = time.perf_counter()
        audit(
            file, labels=_LABELS, reference="embedded:float32", candidates="bfloat16", readings=folder / f"{rows}.audit"
        )
        seconds = time.perf_counter() - began
        peaks.append(status_kib(os.getpid())["VmHWM"] / 1024)
    return {
        "rows": count,
        "peak_mib": round(peaks[1]),
        "above_ten_rows_mib": round(peaks[1] - peaks[0]),
        "seconds": round(seconds, 1),
    }


def _share(args: argparse.Namespace) -> dict[str, Any]:
    """Latencies of one server while its reference may read, and while that is stopped, in turn. What waits meanwhile is
    read later, so that twice the share is read while it may."""
    from servers import serve_for_probes

    found: dict[str, list[dict[str, list[float]]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        share = ["--audit-share", args.share, "--audit-reference", f"{args.model or 'embedded'}:float32"]
        with serve_for_probes(args.model, *share, "--audit-log", f"{folder}/log") as server:
            time.sleep(_SETTLING_SECONDS)
            reader = _reader_of(server.pid)
            try:
                for repeat in range(args.repeats):
                    # Each is the first of every other pair.
                    for name in sorted(found, reverse=bool(repeat % 2)):
                        os.kill(reader, signal.SIGSTOP if name == "without" else signal.SIGCONT)
                        found[name].append(asyncio.run(_load(server.url, args.clients, args.seconds)))
            finally:
                # One that is stopped would not end with the server.
                os.kill(reader, signal.SIGCONT)
            read = len(Path(folder, "log").read_text().splitlines())
    whole = {
        name: {key: [each for run in runs for each in run[key]] for key in runs[0]} for name, runs in found.items()
    }
    return {
        "share": float(args.share), "read_again": read,
        **{name: _figures(values) for name, values in whole.items()},
        "p99_ratios": [
            round(_at(own["requests"], 0.99) / _at(other["requests"], 0.99), 3)
            for own, other in zip(found["with"], found["without"], strict=True)
        ],
        "rate_ratio": round(len(whole["with"]["requests"]) / len(whole["without"]["requests"]), 3),
    }  # fmt: skip


def _reader_of(server: int) -> int:
    """The process of a server's reference. Linux only."""
    children = [each for path in Path(f"/proc/{server}/task").glob("*/children") for each in path.read_text().split()]
    return next(int(pid) for pid in children if "second_reader" in Path(f"/proc/{pid}/cmdline").read_text())


def _at(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def _figures(values: dict[str, list[float]]) -> dict[str, float]:
    at = {"p50_ms": ("requests", 0.5), "p99_ms": ("requests", 0.99), "health_p99_ms": ("health", 0.99)}
    own = {name: round(_at(values[of], share) * 1000, 1) for name, (of, share) in at.items()}
    return {"requests": len(values["requests"]), **own}


async def _load(url: str, clients: int, seconds: int) -> dict[str, list[float]]:
    """Seconds of requests by clients that score short texts, one after the other, and of probes of /health at fixed
    times."""
    from vllm.utils.server_client import ServerClient

    client, texts = ServerClient(url), _texts(1000)
    ends = time.perf_counter() + seconds
    requests: list[float] = []
    health: list[float] = []

    async def ask(number: int) -> None:
        generator = random.Random(number)
        while (began := time.perf_counter()) < ends:
            body = {"model": "model", "prompt": generator.choice(texts), "max_tokens": 1, "temperature": 0}
            await client.post("/v1/completions", {**body, "logprobs": 1, "logprob_token_ids": [300, 400]})
            requests.append(time.perf_counter() - began)

    async def probe() -> None:
        due = time.perf_counter()
        while due < ends:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await client.get("/health")
            health.append(time.perf_counter() - due)
            due += _HEALTH_SECONDS

    await asyncio.gather(probe(), *(ask(number) for number in range(clients)))
    await client.close()
    return {"requests": requests, "health": health}


if __name__ == "__main__":
    main()
