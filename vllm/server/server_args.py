"""Arguments of the server itself, and the flags made from them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any, Literal

from vllm.engine.arguments import add_flags, arg
from vllm.server.upstream_server_args import UpstreamServerArgs, plain


@dataclass(frozen=True)
class ServerArgs(UpstreamServerArgs):
    """Listening, access, limits, logs and defaults of the server; the engine has arguments of its own. What upstream's
    server has and this one has not is UpstreamServerArgs."""

    host: str | None = arg("127.0.0.1", "address to listen on (None: the default); 0.0.0.0 for every interface")
    port: int = arg(8000, "port to listen on; 0 = any free one, which the log names")
    uds: str | None = arg(None, "path of a Unix socket to listen on, instead of --host and --port")
    served_model_name: list[str] | None = arg(
        None, "names that requests may give as `model`; the first one stands in answers (default: MODEL)"
    )
    lora_modules: list[str] | None = arg(
        None,
        'LoRA adapters, which requests name as their model: NAME=PATH, or {"name": ..., "path": ...}',
        action="extend",
    )
    api_key: list[str] | None = arg(None, "keys that clients must show one of; also VLLM_API_KEY")
    root_path: str = arg("", "path that a proxy in front takes away")
    ssl_keyfile: str | None = arg(None, "TLS key, PEM")
    ssl_certfile: str | None = arg(None, "TLS certificate chain, PEM")
    ssl_ca_certs: str | None = arg(None, "certificates that clients must be signed by, PEM")
    ssl_cert_reqs: int = arg(0, "0: clients need no certificate, 1: one that they show is checked, 2: they need one")
    enable_ssl_refresh: bool = arg(
        False, "read key and certificates anew when their files change; of --ssl-ca-certs none is forgotten"
    )
    ssl_ciphers: str | None = arg(None, "ciphers of TLS 1.2, as OpenSSL writes them")
    allowed_origins: list[str] | None = arg(None, "origins that browsers may call from (CORS); any when left out")
    allow_credentials: bool = arg(False, "let browsers send credentials (CORS)")
    allowed_methods: list[str] | None = arg(None, "methods that browsers may use (CORS); any when left out")
    allowed_headers: list[str] | None = arg(None, "headers that browsers may send (CORS); any when left out")
    middleware: list[str] | None = arg(
        None,
        "ASGI middleware around the endpoints, as module.Name: a class, or an async function(request, call_next)",
        action="extend",
    )
    disable_fastapi_docs: bool = arg(False, "no /docs, /redoc and /openapi.json")
    max_body_mib: float = arg(16.0, "longest request body, in MiB")
    max_prompts_per_request: int = arg(2048, "prompts, items or conversations in one request")
    max_num_queued_reqs: int = arg(
        4096, "sequences that may wait for the engine beyond --max-num-seqs; more are answered 429"
    )
    response_store_mib: float = arg(
        64.0, "memory for responses and conversations that later requests may name, in MiB; 0 keeps none"
    )
    audit_share: float = arg(0.0, "share of the requests with readings that a reference reads once more: 0.01")
    audit_reference: str | None = arg(
        None, "the audit's reference, as of `vllm audit --reference`: a model, with :dtype and ,NAME=VALUE"
    )
    audit_log: str | None = arg(
        None,
        "the audit's log: a line of JSON for each request that was read once more; without it they are counted alone",
    )
    audit_texts: bool = arg(False, "keep prompts and answers in the audit's log")
    shutdown_timeout: float = arg(30.0, "seconds that running requests have left after SIGTERM or Ctrl-C")
    ignore_unknown_fields: bool = arg(False, "ignore request fields that are not known, instead of refusing them")
    chat_template: str | None = arg(None, "Jinja template in place of the model's own: a file, or the text itself")
    chat_template_content_format: Literal["auto", "string", "openai"] = arg(
        "auto", "a message's content for templates: string = one text, openai = a list of parts, auto = as the template"
    )
    default_chat_template_kwargs: dict[str, Any] | None = arg(
        None, "variables of the template that requests may override"
    )
    calibration: str | None = arg(
        None, "JSON file of `vllm decide --fit-calibration`, for decisions whose requests have no `calibration`"
    )
    score_template: str | None = arg(
        None,
        "how /rerank and /score ask the model: plain, qwen3-reranker, bge-reranker-v2-gemma, mxbai-rerank-v2, none "
        "(query and document are the whole prompt), or a file of Jinja with query, document and instruction",
    )
    score_labels: list[str] | None = arg(None, "the answers to it that are read, the positive one first")
    response_role: str = arg("assistant", "role of answers in chat")
    enable_auto_tool_choice: bool = arg(False, "changes nothing: requests with tools may call them in any case")
    tool_call_parser: str | None = arg(
        None, "how the model writes calls of tools; auto, the default: the format whose marks its chat template has"
    )
    tool_prompt: Literal["template", "generic"] = arg(
        "template",
        "what tells a model of tools: template = its chat template alone, generic = the prompt's own words where that "
        "ignores them, with calls as --tool-call-parser reads them (hermes, if the template shows none)",
    )
    tool_parser_plugin: str = arg("", "Python file that registers further tool parsers")
    reasoning_parser: str | None = arg(
        None, "how the model marks its reasoning, which answers then have apart; auto: as its chat template does"
    )
    reasoning_parser_plugin: str | None = arg(None, "Python file that registers further reasoning parsers")
    exclude_tools_when_tool_choice_none: bool = arg(
        False, 'keep the tools of requests with tool_choice "none" from the template'
    )
    trust_request_chat_template: bool = arg(
        False, "take templates from requests, too: programs, which may run for as long as they like"
    )
    trust_request_mm_kwargs: bool = arg(
        False, "take mm_processor_kwargs from requests, too, which may make pictures as large as they like"
    )
    return_tokens_as_token_ids: bool = arg(False, "show tokens as token_id:N in every answer's logprobs")
    fingerprint_mode: Literal["full", "hash", "custom", "none"] = arg(
        "full", "system_fingerprint of answers: full = version, devices and configuration, hash = without devices"
    )
    fingerprint_value: str | None = arg(None, "system_fingerprint of answers, with --fingerprint-mode custom")
    enable_force_include_usage: bool = arg(False, "end every stream with its usage")
    enable_per_request_metrics: bool = arg(False, "add the request's times to answers, as `metrics`")
    enable_prompt_tokens_details: bool = arg(False, "changes nothing: usage names cached tokens in any case")
    enable_server_load_tracking: bool = arg(False, "changes nothing: GET /load answers in any case")
    enable_tokenizer_info_endpoint: bool = arg(False, "changes nothing: GET /tokenizer_info answers in any case")
    enable_request_id_headers: bool = arg(False, "changes nothing: answers have X-Request-Id in any case")
    log_error_stack: bool = arg(False, "changes nothing: unexpected errors are logged with their traceback")
    enable_log_requests: bool = arg(False, "log the prompt and the parameters of each request")
    enable_log_outputs: bool = arg(False, "log what was generated for each request")
    max_log_len: int | None = arg(None, "longest prompt or output in these logs, in characters or ids")
    access_log: bool = arg(True, "log each request")
    disable_uvicorn_access_log: bool = arg(False, "the same as --no-access-log")
    disable_access_log_for_endpoints: str | None = arg(None, "paths that the access log leaves out, with commas")
    access_log_format: Literal["text", "json"] = arg("text", "how: a line to read, or one JSON object")
    page: bool = arg(True, "serve the page at /")
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = arg(
        "info", "warning and what is above it leave the access log out"
    )
    enable_scale_out: bool = arg(
        False, "changes nothing: /inference/v1/generate and the render routes answer in any case"
    )

    @property
    def logs_requests(self) -> bool:
        """Whether there is an access log."""
        is_wanted = self.access_log and not self.disable_uvicorn_access_log
        return is_wanted and self.uvicorn_log_level in ("info", "debug", "trace")

    def check_parsers(self) -> None:
        """Load the parsers of plugins.

        Raises:
            ValueError: a plugin that cannot be loaded, or a parser that is not known.
        """
        from vllm.answers.answer import AnswerFormat
        from vllm.answers.reasoning import ReasoningParserManager
        from vllm.answers.tool_parsers import ToolParserManager

        if self.tool_parser_plugin:
            ToolParserManager.import_tool_parser(self.tool_parser_plugin)
        if self.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(self.reasoning_parser_plugin)
        form = AnswerFormat.of(None, self.tool_call_parser or None, self.reasoning_parser or None)
        if self.tool_prompt == "generic" and form.tools is not None and form.tools.call_text is None:
            raise ValueError(
                f"--tool-prompt generic cannot tell how --tool-call-parser {self.tool_call_parser} has calls"
            )

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add one flag per field to `parser`."""
        return add_flags(parser, "server", ServerArgs)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """Read the flags back from a parsed command line; what it lacks, or has as None, has its default."""
        given = ((item, getattr(args, item.name, None)) for item in fields(cls))
        values = {item.name: plain(item.default if value is None else value) for item, value in given}
        if values["host"] in (None, "", "None"):
            values["host"] = "127.0.0.1"
        return cls(**values)
