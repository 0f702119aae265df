"""Arguments of the server itself, and the flags made from them."""

from __future__ import annotations

import argparse
import typing
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from vllm.engine.arg_utils import flag_options


def _arg(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ServerArgs:
    """Listening, access, limits, logs and defaults of the server; the engine has arguments of its own."""

    host: str = _arg("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = _arg(8000, "port to listen on; 0 = any free one, which the log names")
    served_model_name: list[str] | None = _arg(
        None, "names that requests may give as `model`; the first one stands in answers (default: MODEL)"
    )
    api_key: list[str] | None = _arg(None, "keys that clients must show one of; also VLLM_API_KEY")
    root_path: str = _arg("", "path that a proxy in front takes away")
    ssl_keyfile: str | None = _arg(None, "TLS key, PEM")
    ssl_certfile: str | None = _arg(None, "TLS certificate chain, PEM")
    ssl_ca_certs: str | None = _arg(None, "certificates that clients must be signed by, PEM")
    allowed_origins: list[str] | None = _arg(None, "origins that browsers may call from (CORS); any when left out")
    allow_credentials: bool = _arg(False, "let browsers send credentials (CORS)")
    max_body_mib: float = _arg(16.0, "longest request body, in MiB")
    max_prompts_per_request: int = _arg(2048, "prompts, items or conversations in one request")
    max_num_queued_reqs: int = _arg(
        4096, "sequences that may wait for the engine beyond --max-num-seqs; more are answered 429"
    )
    shutdown_timeout: float = _arg(30.0, "seconds that running requests have left after SIGTERM")
    ignore_unknown_fields: bool = _arg(False, "ignore request fields that are not known, instead of refusing them")
    chat_template: str | None = _arg(None, "file with a Jinja template in place of the model's own")
    trust_request_chat_template: bool = _arg(
        False, "take templates from requests, too: programs, which may run for as long as they like"
    )
    return_tokens_as_token_ids: bool = _arg(False, "show tokens as token_id:N in every answer's logprobs")
    access_log: bool = _arg(True, "log each request")
    access_log_format: Literal["text", "json"] = _arg("text", "how: a line to read, or one JSON object")
    page: bool = _arg(True, "serve the page at /")
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = _arg(
        "info", "warning and what is above it leave the access log out"
    )
    enable_scale_out: bool = _arg(
        False, "changes nothing here: upstream then serves /inference/v1/generate and the render routes, too"
    )

    @property
    def logs_requests(self) -> bool:
        """Whether there is an access log."""
        return self.access_log and self.uvicorn_log_level in ("info", "debug", "trace")

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add one flag per field to `parser`."""
        group = parser.add_argument_group("server")
        hints = typing.get_type_hints(ServerArgs)
        for item in fields(ServerArgs):
            flag = "--" + item.name.replace("_", "-")
            group.add_argument(
                flag, dest=item.name, default=item.default, help=item.metadata["help"], **flag_options(hints[item.name])
            )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """Read the flags back from a parsed command line."""
        return cls(**{item.name: getattr(args, item.name) for item in fields(cls)})
