"""Serve a model whose answers have the logits of chosen token ids, by the REST field `logits_indices`.

    python examples/serve_with_logits_indices.py --model ./my-model --tensor-parallel-size 2
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "The sky is", "max_tokens": 1, "temperature": 0, "logits_indices": [216, 1183]}'

It serves until it is stopped (Ctrl-C). `--model` takes a folder, .gguf file or hub name (left out: the embedded small
model). With `--prompts` it asks for itself, prints the logits and ends; `--url http://127.0.0.1:8000` asks a server
that runs already.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at (default: this machine alone)")
    parser.add_argument("--port", type=int, help="port to serve at (default: 8000; any free one with --prompts)")
    parser.add_argument("--prompts", nargs="+", metavar="TEXT", help="ask for these, and end")
    parser.add_argument("--indices", nargs="+", type=int, default=[1, 2, 3], metavar="ID", help="token ids to read")
    parser.add_argument("--max-tokens", type=int, default=1, help="tokens to generate, each with its logits")
    parser.add_argument("--url", help="ask a server that runs already, such as http://127.0.0.1:8000")
    arguments = parser.parse_args()
    if arguments.url and arguments.prompts is None:
        arguments.prompts = ["The capital of France is"]
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.prompts is None:
        command = command_of(arguments, 8000 if arguments.port is None else arguments.port)
        if os.name == "posix":
            # Signals and the exit code are the server's own.
            os.execv(command[0], command)
        sys.exit(subprocess.call(command))
    server = contextlib.nullcontext(arguments.url) if arguments.url else started_server(arguments)
    with server as url:
        ask(url, arguments)


def ask(url: str, arguments: argparse.Namespace) -> None:
    """Print the request as a command, and what the server answers."""
    body = {
        "model": fetch(f"{url}/v1/models")["data"][0]["id"],
        "prompt": arguments.prompts,
        "max_tokens": arguments.max_tokens,
        "temperature": 0,
        "logits_indices": arguments.indices,
    }
    print("curl", f"{url}/v1/completions", "-H 'Content-Type: application/json' -d", shlex.quote(json.dumps(body)))
    choices = fetch(f"{url}/v1/completions", body)["choices"]
    for prompt, choice in zip(arguments.prompts, choices, strict=True):
        print(f"\n{prompt!r} -> {choice['text']!r}")
        # `logits_values` is the first of them: all there is, unless several tokens are generated.
        for position, values in enumerate(choice["logits_values_per_token"]):
            for token_id, logit in values.items():
                print(f"  position {position}  id {token_id:>7}  logit {logit:10.4f}")


def command_of(arguments: argparse.Namespace, port: int) -> list[str]:
    """The command that serves the model."""
    model = [] if arguments.model is None else [arguments.model]
    place = ["--host", arguments.host, "--port", str(port)]
    ranks = ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]
    return [sys.executable, "-m", "vllm.cli.main", "serve", *model, *place, *ranks]


@contextlib.contextmanager
def started_server(arguments: argparse.Namespace) -> Iterator[str]:
    """The URL of a server that runs until the context is left."""
    port = free_port(arguments.host) if arguments.port is None else arguments.port
    process = subprocess.Popen(command_of(arguments, port), stdout=subprocess.DEVNULL)
    try:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(arguments.host, arguments.host)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        while not is_healthy(url):
            if process.poll() is not None:
                sys.exit("the server did not start")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as free:
        return free.getsockname()[1]


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health"):
            return True
    except urllib.error.URLError:
        return False


def fetch(url: str, body: dict | None = None) -> dict:
    """The JSON answer to a GET, or to a POST of `body`."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        sys.exit(json.load(error)["error"]["message"])


if __name__ == "__main__":
    main()
