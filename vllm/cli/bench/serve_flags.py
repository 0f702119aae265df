"""The flags of `vllm bench serve`, ours and upstream's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vllm.cli.bench.dataset import add_dataset_arguments, check_dataset
from vllm.cli.bench.run import check_json_path
from vllm.cli.generation import add_server_arguments
from vllm.cli.other_flags import add_refused, add_unused
from vllm.exceptions import CliError
from vllm.utils.flag_types import at_least, json_object, positive

METRICS = ("ttft", "tpot", "itl", "e2el")
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "score": "/generative_scoring"}
_BACKENDS = {
    "vllm": "completions", "openai": "completions", "openai-chat": "chat", "sglang": "completions",
    "lmdeploy": "completions", "scalellm": "completions",
}  # fmt: skip
_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 8000
_DEFAULT_CONCURRENCY = 16
_SAMPLING = {
    "top_p": float, "top_k": int, "min_p": float, "temperature": float, "frequency_penalty": float,
    "presence_penalty": float, "repetition_penalty": float,
}  # fmt: skip
_RAMPS = "the rate is the same all the time; run the benchmark once a rate"
_PLOTS = "--json writes what can be plotted"
_REFUSED = {
    "--use-beam-search": "one sequence is generated a request",
    "--ramp-up-strategy": _RAMPS, "--ramp-up-start-rps": _RAMPS, "--ramp-up-end-rps": _RAMPS,
    "--insecure": "name the certificate's authority by SSL_CERT_FILE",
    "--plot-timeline": _PLOTS, "--timeline-itl-thresholds": _PLOTS, "--plot-dataset-stats": _PLOTS,
    "--random-batch-size": "a request has one prompt",
    "--probe-request-rate": "run a second `vllm bench serve` beside this one",
    "--self-timed": "requests come at --request-rate",
}  # fmt: skip
_NO_TOKENIZER = "the server's tokenizer counts tokens"
_UNUSED_SWITCHES = {
    "--trust-remote-code": _NO_TOKENIZER,
    "--skip-tokenizer-init": _NO_TOKENIZER,
    "--no-self-timed": "requests come at --request-rate in any case",
}
_UNUSED_VALUES = {
    "--tokenizer-mode": _NO_TOKENIZER,
    "--request-id-prefix": "the server numbers requests",
}


def _backend(text: str) -> str:
    if text not in _BACKENDS:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(_BACKENDS)}, got {text!r}; others are not measured"
        )
    return text


def _endpoint(text: str) -> str:
    """Our name of a path."""
    return next((name for name, path in ENDPOINTS.items() if path.strip("/") == text.strip("/")), text)


def _rate(text: str) -> float:
    return float("inf") if text == "inf" else positive(text)


def _names(text: str) -> list[str]:
    found = [each.strip() for each in text.split(",") if each.strip()]
    if wrong := [each for each in found if each not in METRICS]:
        raise argparse.ArgumentTypeError(f"must be some of {','.join(METRICS)}, got {wrong[0]!r}")
    return found


def _percents(text: str) -> list[float]:
    found = [float(each) for each in text.split(",")]
    if not all(0 <= each <= 100 for each in found):
        raise argparse.ArgumentTypeError(f"must be in 0..100, got {text}")
    return found


def _pair(text: str) -> tuple[str, str]:
    name, has_value, value = text.partition("=")
    if not (name and has_value):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    return name, value


def _goal(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in METRICS or name == "itl":
        raise argparse.ArgumentTypeError(f"must be ttft:MS, tpot:MS or e2el:MS, got {text!r}")
    return name, positive(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all flags."""
    server = add_server_arguments(parser, ("--url", "--base-url"), only=True)
    server.add_argument("--host", metavar="HOST", help=f"its host, in place of --url (default: {_DEFAULT_HOST})")
    server.add_argument("--port", metavar="PORT", type=int, help=f"its port (default: {_DEFAULT_PORT})")
    server.add_argument("--model", metavar="NAME", help="one of the server's models; left out: its first")
    named = "its name at the server, where --model is another"
    server.add_argument("--served-model-name", metavar="NAME", help=named)
    server.add_argument("--header", metavar="KEY=VALUE", type=_pair, nargs="+", help="further headers of requests")
    wait = "how long to wait for a server that is starting (default: 0)"
    server.add_argument("--ready-check-timeout-sec", metavar="SECONDS", type=at_least(0), default=0, help=wait)
    _add_workload(parser)
    add_dataset_arguments(parser, input_len=128, output_len=32)
    _add_sampling(parser)
    _add_results(parser)
    add_refused(parser, _REFUSED)
    add_unused(parser, _UNUSED_SWITCHES, 0)
    add_unused(parser, _UNUSED_VALUES, 1)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    backend = "the API that is asked: vllm and openai have completions, openai-chat has chat"
    group.add_argument("--backend", "--endpoint-type", metavar="NAME", type=_backend, help=backend)
    what = "what to ask for, or its path (default: by --backend, else completions)"
    group.add_argument("--endpoint", type=_endpoint, choices=tuple(ENDPOINTS), help=what)
    for flags, least, default, text in (
        (["--num-prompts"], 1, 64, "requests that count, of one prompt each"),
        (["--num-ids"], 0, 0, "logprob_token_ids to read at each of them; at least 1 for score"),
        (["--vocab-size"], 1, 8192, "ids are drawn below this; at most the model's"),
        (["--warmup", "--num-warmups"], 0, 4, "requests before those that count"),
        (["--seed"], 0, 0, "of prompts and intervals"),
    ):
        group.add_argument(*flags, metavar="N", type=at_least(least), default=default, help=text)
    in_flight = f"requests in flight (default: {_DEFAULT_CONCURRENCY}, or without limit at a --request-rate)"
    group.add_argument("--concurrency", "--max-concurrency", metavar="N", type=at_least(1), help=in_flight)
    rate = "requests a second; inf: all at once"
    group.add_argument("--request-rate", metavar="R", type=_rate, help=rate)
    bursts = "1: intervals of a Poisson process; below 1 they come in bursts, above it more evenly"
    group.add_argument("--burstiness", metavar="B", type=positive, default=1.0, help=bursts)
    group.add_argument("--lora-modules", metavar="NAME", nargs="+", help="adapters of the server, one a request")
    order = "how they are chosen"
    group.add_argument("--lora-assignment", choices=("random", "round-robin"), default="random", help=order)
    group.add_argument("--no-stream", action="store_true", help="whole answers, whose tokens have no times")
    group.add_argument("--profile", action="store_true", help="let the server profile the requests that count")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    for name, kind in _SAMPLING.items():
        default = " (default: 0)" if name == "temperature" else ""
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, metavar=kind.__name__.upper(), type=kind, help=f"of sampling{default}")
    group.add_argument("--logprobs", metavar="N", type=at_least(0), help="logprobs of so many tokens a position")
    ignore = "generate all tokens, whatever they are; requests of random tokens do in any case"
    group.add_argument("--ignore-eos", action="store_true", help=ignore)
    template = "custom texts as they are; else completions render them as a chat with one message"
    group.add_argument("--skip-chat-template", "--custom-skip-chat-template", action="store_true", help=template)
    kwargs = "variables of the chat template"
    group.add_argument("--chat-template-kwargs", metavar="JSON", type=json_object, help=kwargs)
    group.add_argument("--extra-body", metavar="JSON", type=json_object, help="further fields of requests")
    group.add_argument("--tokenizer", metavar="NAME", help="named in results; the server's counts tokens")


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    add("--json", metavar="FILE", type=Path, help="write the result, single requests included, as JSON")
    add("--save-result", action="store_true", help="write it as upstream's tools read it")
    add("--save-detailed", action="store_true", help="that with single requests")
    add("--append-result", action="store_true", help="add a line to the file")
    add("--result-dir", metavar="FOLDER", help="where (default: here)")
    add("--result-filename", metavar="NAME", help="how it is called (default: by what was run, and when)")
    add("--label", metavar="TEXT", help="named in it")
    add("--metadata", metavar="KEY=VALUE", type=_pair, nargs="+", help="further fields of it")
    metrics = f"times that are shown and saved, of {','.join(METRICS)} (default: all)"
    add("--percentile-metrics", metavar="NAMES", type=_names, default=list(METRICS), help=metrics)
    add("--metric-percentiles", metavar="P,P", type=_percents, default=[50, 90, 99], help="of them (default: 50,90,99)")
    goal = "count the requests whose times are below these, as ttft:200 tpot:50 e2el:2000, in ms"
    add("--goodput", metavar="NAME:MS", type=_goal, nargs="+", help=goal)
    add("--disable-tqdm", action="store_true", help="changes nothing: there is no progress bar")


def complete(args: argparse.Namespace) -> None:
    """Fill in what follows from other flags. A CliError: flags that exclude each other, or a file that is not there."""
    check_json_path(args.json)
    if args.url is None:
        host = args.host or _DEFAULT_HOST
        args.url = f"http://{f'[{host}]' if ':' in host else host}:{args.port or _DEFAULT_PORT}"
    args.model = args.served_model_name or args.model
    own = _BACKENDS.get(args.backend)
    if args.backend is not None and args.endpoint not in (None, own):
        raise CliError(
            f"--backend {args.backend} asks {ENDPOINTS[own or '']}, not --endpoint {ENDPOINTS[args.endpoint]}"
        )
    args.endpoint = args.endpoint or own or "completions"
    args.backend = args.backend or ("openai-chat" if args.endpoint == "chat" else "vllm")
    if args.concurrency is None and args.request_rate is None:
        args.concurrency = _DEFAULT_CONCURRENCY
    if args.request_rate == float("inf"):
        args.request_rate = None
    args.goodput = dict(args.goodput or ())
    check_dataset(args)
    least = int(args.endpoint == "score")
    if not least <= args.num_ids <= args.vocab_size:
        raise CliError(f"--num-ids must be from {least} to --vocab-size={args.vocab_size}, got {args.num_ids}")
    if args.endpoint == "score" and args.dataset_name not in ("random", "prefix_repetition"):
        raise CliError(f"--dataset-name {args.dataset_name} is not for --endpoint score, whose items are token ids")
    if not args.save_result:
        for name in ("save_detailed", "append_result", "result_dir", "result_filename"):
            if getattr(args, name):
                args.save_result = True


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Requests' fields of sampling."""
    given = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    return {"temperature": 0.0, **given}
