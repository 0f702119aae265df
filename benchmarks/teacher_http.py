"""A teacher over HTTP beside the same work offline: tokens/s of prompts whose positions are read, in turns.

    python benchmarks/teacher_http.py --dtype bfloat16           # the embedded model, 8 prompts of 1,024 tokens

Prints one JSON line a form of the answer: tokens/s of all prompts and its share of offline's, medians of the repeats;
`cpu_share`, the same of CPU time, which other programs change less; `server_cpu_seconds`, of the HTTP process alone.
Offline is one call of LLM.generate; over HTTP, --clients at once. Ids come as .npy files; nothing is cached.

arrow, safetensors   the body is all arrays
base64               JSON with .npy files
kl                   JSON with the two divergences alone
"""

from __future__ import annotations

import base64
import io
import json
import os
import statistics
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import add_counts, make_parser, print_result, say, seconds_of
from servers import serve_for_probes

FORMS = ("arrow", "safetensors", "base64", "kl")
_ACCEPT = {"arrow": "application/vnd.apache.arrow.stream", "safetensors": "application/vnd.safetensors"}
_FIELDS: dict[str, dict[str, Any]] = {
    "base64": {"encoding_format": "base64"},
    "kl": {"prompt_tables": ["reverse_kl", "forward_kl"]},
}


def main() -> None:
    """Measure offline and all forms in turns."""
    from vllm import LLM, SamplingParams

    parser = make_parser("Readings of prompts over HTTP and offline.", dtype=True)
    counts = {"prompts": (8, ""), "tokens": (1024, "tokens a prompt"), "ids": (256, "ids a position")}
    add_counts(parser, **counts, clients=(4, "requests at once"), repeats=(3, "measured rounds"))
    parser.add_argument("--no-ranks", action="store_true", help="leave the ranks out")
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, enable_prefix_caching=False, max_logprob_token_ids=-1)
    prompts, ids, student = make_work(llm.llm_engine.model_config.vocab_size, args.prompts, args.tokens, args.ids)
    has_ranks = not args.no_ranks
    params = [SamplingParams(max_tokens=0, prompt_logprob_token_ids=own, logprob_ranks=has_ranks) for own in ids]

    def offline() -> None:
        for output in llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False):
            assert output.prompt_tables.logprobs.shape == (args.tokens - 1, args.ids)

    flags = ("--no-enable-prefix-caching", "--max-logprob-token-ids", "-1", "--max-body-mib", "256")
    seconds: dict[str, list[float]] = {name: [] for name in ("offline", *FORMS)}
    cpu: dict[str, list[list[float]]] = {name: [] for name in seconds}
    with (
        serve_for_probes(args.model, "--dtype", args.dtype, *flags) as server,
        ThreadPoolExecutor(args.clients) as pool,
    ):
        requests = {
            form: [make_request(server.url, form, *each, has_ranks) for each in zip(prompts, ids, student, strict=True)]
            for form in FORMS
        }
        (core,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        for repeat in range(args.repeats + 1):
            for name, measured in seconds.items():
                run = offline if name == "offline" else lambda name=name: list(pool.map(answer_of, requests[name]))
                pids = [os.getpid()] if name == "offline" else [server.pid, int(core)]
                before = list(map(cpu_seconds, pids))
                spent = seconds_of(run)
                used = [after - first for after, first in zip(map(cpu_seconds, pids), before, strict=True)]
                say(f"{name}: {spent:.2f} s, CPU {used}")
                if repeat:  # the first round is a warm-up
                    measured.append(spent)
                    cpu[name].append(used)
    total = args.prompts * args.tokens
    for form in FORMS:
        shares = [there / here for there, here in zip(seconds["offline"], seconds[form], strict=True)]
        print_result(
            form=form,
            tokens_per_second=round(total / statistics.median(seconds[form])),
            offline_tokens_per_second=round(total / statistics.median(seconds["offline"])),
            share=round(statistics.median(shares), 3),
            cpu_share=round(statistics.median(map(sum, cpu["offline"])) / statistics.median(map(sum, cpu[form])), 3),
            server_cpu_seconds=round(statistics.median(used[0] for used in cpu[form]), 3),
            ids=args.ids,
            ranks=has_ranks,
            clients=args.clients,
            dtype=args.dtype,
        )


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, its threads' included. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_work(vocab_size: int, num_prompts: int, length: int, num_ids: int) -> tuple[Any, Any, Any]:
    """Prompts, distinct ids for each position but the last, and a student's logprobs of them."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, vocab_size, (num_prompts, length)).tolist()
    first = rng.integers(0, vocab_size, (num_prompts, length - 1, 1))
    ids = (first + 97 * np.arange(num_ids)) % vocab_size
    student = np.log(rng.dirichlet(np.full(num_ids + 1, 0.1), (num_prompts, length - 1))[..., :-1] + 1e-30)
    return prompts, ids.astype(np.int32), student.astype(np.float32)


def make_request(
    url: str, form: str, prompt: list[int], ids: np.ndarray, student: np.ndarray, has_ranks: bool
) -> urllib.request.Request:
    """A prompt's request for one form of the answer."""
    params = {"max_tokens": 0, "prompt_logprob_token_ids": npy(ids), "logprob_ranks": has_ranks}
    body = {"token_ids": prompt, "sampling_params": params, **_FIELDS.get(form, {})}
    if form == "kl":
        body["prompt_student_logprobs"] = npy(student)
    headers = {"Content-Type": "application/json", "Accept": _ACCEPT.get(form, "application/json")}
    return urllib.request.Request(f"{url}/inference/v1/generate", json.dumps(body).encode(), headers)


def answer_of(request: urllib.request.Request) -> int:
    """The length of the answer."""
    with urllib.request.urlopen(request) as answer:
        return len(answer.read())


def npy(array: np.ndarray) -> str:
    """The array as a .npy file, in base64."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    main()
