"""The flags of `vllm serve`, for parsers of callers; upstream's older path."""

from vllm.cli.serve import make_arg_parser, validate_parsed_serve_args
from vllm.server.server_args import ServerArgs as FrontendArgs

__all__ = ["FrontendArgs", "make_arg_parser", "validate_parsed_serve_args"]
