"""Flags of the commands that make a row of each text of a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm.cli.generation import add_server_arguments, check_server_arguments
from vllm.exceptions import CliError
from vllm.utils.flag_types import at_least
from vllm.utils.ray_utils import import_ray_for


def add_file_arguments(parser: argparse.ArgumentParser, output: str, picture: str | None = None) -> None:
    """Add FILE, the flags of input and output, of a server and of Ray; `output` and `picture` are helps, None: there is
    none."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the texts: .csv, .parquet, or else JSONL")
    field = "field that holds the text (default: text)"
    parser.add_argument("--text-field", default="text", metavar="NAME", help=field)
    image = (
        "field with the text's picture, or a list of them: a path below FILE's folder (or below\n"
        "--allowed-local-media-path), relative to that folder; a data URL; base64; an address, with\n"
        "--allowed-media-domains. The field of the text may be missing then"
    )
    parser.add_argument("--image-field", metavar="NAME", help=image)
    parser.add_argument("--video-field", metavar="NAME", help="the same of the text's video, or a list of them")
    parser.add_argument("--output", metavar="FILE", type=Path, help=output)
    existing = parser.add_mutually_exclusive_group()
    resume = "keep the rows that --output has and score the other texts"
    existing.add_argument("--resume", action="store_true", help=resume)
    existing.add_argument("--overwrite", action="store_true", help="replace an --output that exists")
    if picture is None:
        parser.set_defaults(picture=None, no_picture=True)
    else:
        drawing = parser.add_mutually_exclusive_group()
        drawing.add_argument("--picture", metavar="FILE", type=Path, help=picture)
        drawing.add_argument("--no-picture", action="store_true", help="draw none")
    parser.add_argument("--limit", metavar="N", type=int, help="score the first N texts only")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors and warnings")
    server = add_server_arguments(parser)
    server.add_argument("--concurrency", metavar="N", type=at_least(1), help="texts at once (default: 16)")
    cluster = parser.add_argument_group("ray")
    backend = "ray: engines on a Ray cluster instead of one in this process"
    cluster.add_argument("--backend", choices=("ray",), help=backend)
    cluster.add_argument("--replicas", metavar="R", type=at_least(1), help="engines (default: 1)")
    cpus = "CPUs of each engine (default: all there is room for)"
    cluster.add_argument("--replica-cpus", metavar="N", type=at_least(1), help=cpus)
    address = "the cluster, as HOST:PORT or auto (default: RAY_ADDRESS if it is set, or else one on this machine alone)"
    cluster.add_argument("--ray-address", metavar="ADDRESS", help=address)
    form = "of the parts in --output (default: jsonl)"
    cluster.add_argument("--output-format", choices=("jsonl", "csv", "parquet"), help=form)


def check_file_arguments(args: argparse.Namespace) -> None:
    """Refuse flags of a server or of Ray that would have no effect."""
    check_server_arguments(args, "concurrency")
    if args.backend is None:
        for name in ("replicas", "replica_cpus", "ray_address", "output_format"):
            if getattr(args, name) is not None:
                raise CliError(f"--{name.replace('_', '-')} needs --backend ray")
    else:
        for name, reason in (("url", "a server scores by itself"), ("picture", "there is no picture of parts")):
            if getattr(args, name) is not None:
                raise CliError(f"--{name} and --backend ray exclude each other: {reason}")
    if args.limit is not None and args.limit < 1:
        raise CliError(f"--limit must be at least 1, got {args.limit}")


def needs_ray(args: argparse.Namespace) -> None:
    """A CliError if --backend asks for Ray and it, or what it needs, is not installed."""
    if args.backend is None:
        return
    try:
        import_ray_for(args.ray_address)
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise CliError(f"--backend ray: {error}") from None
