"""Answer a file of requests in OpenAI's batch format, without a server.

A line of the input is an object of custom_id, method ("POST"), url (the path of an endpoint, such as
/v1/chat/completions) and body. A line of the output has its custom_id, the response (status_code, body) and, when the
request failed, the error; lines are in the input's order. All lines are read before the model loads. Input and output
may be http URLs: the input is downloaded, the output uploaded by PUT.

The exit code is 0 also when some requests failed; the last line on stderr counts them.

example: vllm run-batch -i requests.jsonl -o answers.jsonl --model Org/Model
"""

from __future__ import annotations

import argparse
import sys

from vllm.cli.generation import add_engine_arguments
from vllm.cli.other_flags import add_refused
from vllm.cli.serve import check_args, template_text
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.first_checks import check_first
from vllm.exceptions import CliError
from vllm.server.server_args import ServerArgs

NAME = "run-batch"
HELP = "answer a file of requests in OpenAI's batch format"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input-file", metavar="FILE", required=True, help="requests, JSONL; or an http URL")
    parser.add_argument("-o", "--output-file", metavar="FILE", required=True, help="answers, JSONL; or an http URL")
    folder = "folder of the answers until they are uploaded (default: the system's)"
    parser.add_argument("--output-tmp-dir", metavar="FOLDER", help=folder)
    metrics = "`vllm serve` has /metrics"
    parser.add_argument("--enable-metrics", action="store_true", help=f"not supported: {metrics}")
    add_refused(parser, {"--url": metrics})
    ServerArgs.add_cli_args(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.enable_metrics:
        raise CliError("--enable-metrics is not supported: `vllm serve` answers batches by HTTP and has /metrics")
    server_args = ServerArgs.from_cli_args(args)
    check_args(server_args)
    template = template_text(server_args.chat_template)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    try:
        check_first(engine_args)
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from error

    import uvloop

    from vllm.entrypoints.async_llm import AsyncLLM
    from vllm.server import run_batch as batch

    batch.check_places(args.input_file, args.output_file)
    with batch.opened_input(args.input_file) as source:
        total = batch.check_lines(source)
        with batch.opened_output(args.output_file, args.output_tmp_dir) as target:
            if not total:
                return 0
            try:
                engine = AsyncLLM.from_engine_args(engine_args)
            except ValueError as error:
                raise CliError(str(error)) from error
            try:
                num_failed = uvloop.run(batch.run_batch(engine, server_args, template, source, target, total))
            finally:
                engine.shutdown()
    print(f"{args.prog}: requests: {total}, failed: {num_failed}", file=sys.stderr)
    return 0
