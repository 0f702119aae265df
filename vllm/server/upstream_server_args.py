"""Upstream's arguments of the server that have one value here, and what becomes of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.engine.arguments import check_neutral, refused, unused

_TOOLS = "arguments fit their schemas where a tool says strict"
_REASONING = "efforts reach the template under their own names"
_HTTP_ONLY = "the server speaks HTTP; clients of gRPC need one in front of it"
_ONE_SERVER = "one process serves all replicas; start one server a machine (data_parallel_size)"
_NO_SUPERVISOR = "replicas are started by the server itself"
_LOG = "what was generated is logged when it is complete, also of streams"
_OTHER_API = "there is no route for chats of that API"
_HTTPTOOLS = "requests are parsed by httptools, whose limits are its own"


@dataclass(frozen=True, kw_only=True)
class UpstreamServerArgs:
    """The arguments, with upstream's names and defaults; see UpstreamArgs."""

    tool_strict_level: str | None = refused(None, _TOOLS)
    tool_server: str | None = refused(None, "this server calls no tools")

    reasoning_effort_map: dict[str, str] | None = refused(None, _REASONING)

    sse_keep_alive_interval: int = refused(0, "streams hold answers only; let the proxy wait longer")
    enable_offline_docs: bool = refused(False, "the pages of /docs load their scripts; /openapi.json needs none")

    grpc_port: int | None = refused(None, _HTTP_ONLY)
    grpc: bool = refused(False, _HTTP_ONLY)

    headless: bool = refused(False, _ONE_SERVER)
    api_server_count: int | None = refused(1, _ONE_SERVER, "-asc")
    disable_frontend_multiprocessing: bool = unused(False, "the engine has a process of its own in any case")
    data_parallel_supervisor_port: int = unused(9256, _NO_SUPERVISOR)
    dp_supervisor_probe_interval_s: float = unused(5.0, _NO_SUPERVISOR)
    dp_supervisor_probe_timeout_s: float = unused(5.0, _NO_SUPERVISOR)
    dp_supervisor_probe_failure_threshold: int = unused(3, _NO_SUPERVISOR)

    enable_log_deltas: bool = unused(True, _LOG)
    cohere_is_reasoning_model: bool = unused(True, _OTHER_API)
    cohere_format: str = unused("cmd4", _OTHER_API)
    anthropic_disabled_thinking_effort: str = unused(
        "auto", "disabled thinking is the chat template's enable_thinking=false"
    )
    enable_flash_late_interaction: bool = unused(True, "MaxSim is computed from all vectors of both texts")
    h11_max_incomplete_event_size: int = unused(4194304, _HTTPTOOLS)
    h11_max_header_count: int = unused(256, _HTTPTOOLS)

    def check_neutral(self) -> None:
        """
        Raises:
            ValueError: an argument asks for what is not done; names it, its value and what to do instead.
        """
        check_neutral(self, UpstreamServerArgs)


def plain(value: Any) -> Any:
    """A list that the command line has as one text of JSON."""
    import json

    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) and value[0].startswith("["):
        try:
            return [str(each) for each in json.loads(value[0])]
        except ValueError:
            return value
    return value
