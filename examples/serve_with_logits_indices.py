"""Ask a server for the logits of chosen token ids, by the REST field `logits_indices`.

    python examples/serve_with_logits_indices.py --prompts "The sky is" "2 + 2 =" --indices 216 1183

Starts `vllm serve` for the time of one request; `--url http://127.0.0.1:8000` asks one that runs already. `--model`
takes a folder, .gguf file or hub name (left out: the embedded small model).
"""

from __future__ import annotations

import argparse
import contextlib
import json
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
    parser.add_argument("--prompts", nargs="+", default=["The capital of France is"], metavar="TEXT")
    parser.add_argument("--indices", nargs="+", type=int, default=[1, 2, 3], metavar="ID", help="token ids to read")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=1, help="tokens to generate, each with its logits")
    parser.add_argument("--url", help="a server that runs already, such as http://127.0.0.1:8000")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    server = contextlib.nullcontext(arguments.url) if arguments.url else started_server(arguments)
    with server as url:
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


@contextlib.contextmanager
def started_server(arguments: argparse.Namespace) -> Iterator[str]:
    """The URL of a server that runs until the context is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = [] if arguments.model is None else [arguments.model]
    command = [sys.executable, "-m", "vllm.cli.main", "serve", *model, "--port", str(port)]
    command += ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while not is_healthy(url):
            if process.poll() is not None:
                sys.exit("the server did not start")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


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
