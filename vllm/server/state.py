"""The state that all endpoints of a server share."""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import Request
from prometheus_client.registry import Collector

from vllm import envs
from vllm.answers.answer import AUTO, AnswerFormat
from vllm.answers.prompts.content_forms import chosen_template
from vllm.answers.prompts.tool_prompts import shows_tools
from vllm.answers.tool_parsers import ToolParserManager
from vllm.decisions.calibration import Calibration
from vllm.entrypoints.async_llm import AsyncLLM
from vllm.exceptions import shown
from vllm.logger import init_logger, warn_once
from vllm.pooling.pairs import check_score_args, score_type
from vllm.pooling.score_templates import ScoreTemplate, default_template, score_template
from vllm.server.adapter_models import ServedAdapters, chosen
from vllm.server.errors import ApiError
from vllm.server.lora_modules import parse_modules
from vllm.server.prometheus import HttpMetrics
from vllm.server.response_store import ResponseStore
from vllm.server.server_args import ServerArgs
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.tracing import RequestTracer
from vllm.version import __version__

logger = init_logger(__name__)

TOOLS_IGNORED = (
    "the chat template ignores tools: the model does not see those of requests; --tool-prompt generic tells of them in "
    "the prompt, and --chat-template names another template"
)

# For each task, what a model that has it does, and one that has not does not.
_DOES = {
    "generate": "generates (/v1/completions, /v1/chat/completions), reads the probabilities of labels (/v1/score)",
    "embed": "embeds (/v1/embeddings)",
    "classify": "classifies (/classify)",
    "token_embed": "embeds tokens (/pooling, /v1/embeddings)",
    "token_classify": "classifies tokens (/pooling)",
    "score": "scores pairs of texts (/rerank, /score)",
}
_WANTED = {
    "generate": "does not generate",
    "embed": "does not embed",
    "vectors": "does not embed",
    "classify": "has no classes",
    "score": "does not score pairs of texts, for which it would need one label",
    "pool": "is no pooling model",
}


@dataclass
class ServerState:
    """A server.

    Attributes:
        engine_client: the engine; None: it is still to come, and requests for it are answered 503.
        chat_template: text of a template in place of the model's own.
        created: when it started, in Unix seconds.
        draining: it is stopping and accepts no new work.
        in_flight: tasks of the requests to the engine's endpoints that are being answered.
        calibration: of decisions, from the arguments' file; None = none.
        http_metrics: of its requests by endpoint.
        audit: metrics of the requests that are read once more; None: none are.
        responses: what /v1/responses keeps for later requests.
        adapters: LoRA adapters, which requests name as their model.

    Raises:
        VLLMValidationError: a file of a calibration that cannot be used.
        ValueError: see `check_engine`; or a parser that is not known or cannot be loaded.
    """

    engine_client: AsyncLLM | None
    args: ServerArgs = field(default_factory=ServerArgs)
    chat_template: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set)
    calibration: Calibration | None = field(init=False, default=None)
    http_metrics: HttpMetrics = field(default_factory=HttpMetrics)
    audit: Collector | None = None
    responses: ResponseStore = field(init=False)
    adapters: ServedAdapters = field(init=False)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(int(self.args.response_store_mib * 2**20))
        self.adapters = ServedAdapters(parse_modules(self.args.lora_modules))
        self._formats: dict[str, AnswerFormat] = {}
        args = self.args
        if args.tool_call_parser or args.tool_parser_plugin or args.reasoning_parser or args.reasoning_parser_plugin:
            args.check_parsers()
        if self.args.calibration is not None:
            self.calibration = Calibration.load(self.args.calibration)
        # A template that is not there is an error at start.
        score_template(self.args.score_template, self.args.score_labels)
        if self.engine_client is not None:
            self.check_engine(self.engine_client)

    def check_engine(self, engine: AsyncLLM) -> None:
        """ValueError: an argument that the engine's model has no use for."""
        self.adapters.check_engine(engine)
        if self.args.score_template is None and self.args.score_labels is None:
            return
        check_score_args(engine.model_config, self.args.score_template, self.args.score_labels)

    @property
    def engine(self) -> AsyncLLM:
        """Raises ApiError 503 while there is none."""
        if self.engine_client is None:
            raise ApiError(503, "the server is starting: it has no engine yet", code="starting", retry_after=1)
        return self.engine_client

    @property
    def tracer(self) -> RequestTracer | None:
        """The engine's; None: requests are not traced."""
        return None if self.engine_client is None else self.engine_client.tracer

    @property
    def model_names(self) -> list[str]:
        """The names that the server lists; the first stands in answers. Left out, the model as it was given."""
        if self.args.served_model_name:
            return self.args.served_model_name
        config = self.engine.model_config
        return list(config.served_model_name) or [config.model]

    @property
    def answer_name(self) -> str:
        """The model's name in answers: the adapter's that the request names, or else the first of `model_names`."""
        adapter = chosen.get()
        return self.model_names[0] if adapter is None else adapter.lora_name

    @property
    def listed_names(self) -> list[str] | None:
        """All that a request may name; None: further adapters may come."""
        if envs.allows_adapter_updates():
            return None
        return [*self.model_names, *self.adapters.by_name]

    async def load_adapters(self) -> None:
        """Load those of --lora-modules; VLLMValidationError: one that cannot be loaded."""
        await self.adapters.load_modules(self.engine, self.model_names)

    async def choose_model(self, name: str | None) -> None:
        """Have the HTTP request answered by the model of this name, or by an adapter. Raises ApiError 404 if there is
        no such model, VLLMValidationError for an adapter that a resolver knows and that cannot be loaded."""
        adapter = None
        if name is not None and not self._is_base(name):
            adapter = await self.adapters.find(self.engine, self.model_names, name)
        chosen.set(adapter)
        if adapter is None:
            self.check_model(name)

    def template_text(self, own: str | None = None) -> str:
        """The chat template: a request's `own`, the server's or the model's; "" without one."""
        found: Any = (
            own or self.chat_template or getattr(self.engine.input_processor.tokenizer, "chat_template", None) or ""
        )
        return "\n".join(found.values()) if isinstance(found, dict) else found

    def answer_format(self, own_template: str | None = None) -> AnswerFormat:
        """How answers are parsed, as the arguments say, or the template: a request's own, or else the server's."""
        template = self.template_text(own_template)
        if template not in self._formats:
            # Formats of others' templates are not kept.
            kept = {} if own_template else self._formats
            reasoning = self.args.reasoning_parser or None
            form = AnswerFormat.of(template, self.args.tool_call_parser or AUTO, reasoning)
            if form.tools is None and self.args.tool_prompt == "generic":
                form = replace(form, tools=ToolParserManager.get_tool_parser("hermes"))
            kept[template] = form
            return form
        return self._formats[template]

    @cached_property
    def fingerprint(self) -> str | None:
        """`system_fingerprint` of answers: of what makes the numbers, as --fingerprint-mode says."""
        mode = self.args.fingerprint_mode
        if mode in ("custom", "none"):
            return self.args.fingerprint_value
        config = self.engine.vllm_config
        sizes = config.parallel_config
        axes = (
            ("tp", sizes.tensor_parallel_size),
            ("pp", sizes.pipeline_parallel_size),
            ("dp", sizes.data_parallel_size),
        )
        devices = [f"{name}{size}" for name, size in axes if size > 1 and mode == "full"]
        digest = hashlib.sha256(repr(config).encode()).hexdigest()[:8]
        return "-".join(["vllm", __version__, *devices, digest])

    @cached_property
    def score_template(self) -> ScoreTemplate | None:
        """How /rerank and /score ask the model; None: its tokenizer joins the texts, or it reads them apart."""
        config, labels, source = self.engine.model_config, self.args.score_labels, self.args.score_template
        if config.runner_type == "pooling":
            if score_type(config) != "cross-encoder":
                return None
            source = source or self.chat_template
        if source is None:
            return default_template(
                config, self.engine.input_processor.tokenizer, labels, self.args.served_model_name or ()
            )
        return score_template(source, labels, config.hf_config.raw)

    def log_templates(self) -> None:
        """Have the log say which template scores pairs, where none is named, and whether one ignores tools."""
        with suppress(ValueError):  # requests for scores are answered by it
            _ = self.score_template
        args = self.args
        are_enabled = args.enable_auto_tool_choice or args.tool_call_parser or args.tool_parser_plugin
        if not are_enabled or args.tool_prompt == "generic" or not self.can("generate"):
            return
        with suppress(ValueError):  # an unsupported tokenizer, or none
            own = self.chat_template or self.tokenizer.chat_template
            template = chosen_template(own, None, tools=True)
            if template is not None and not shows_tools(template):
                warn_once(logger, TOOLS_IGNORED)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ApiError if skip_tokenizer_init left it out."""
        if self.engine.input_processor.tokenizer is None:
            raise ApiError(400, "this server runs without a tokenizer: texts cannot be read or written")
        return self.engine.input_processor.tokenizer

    @property
    def max_sequences(self) -> int:
        """Limit of sequences that run on all replicas or wait."""
        config = self.engine.vllm_config
        max_running = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
        return max_running + self.args.max_num_queued_reqs

    def check_model(self, name: str | None) -> str:
        """The name as the server lists it; the first for None and for the last part of a path. Raises ApiError 404 if
        there is no such model."""
        names = self.model_names
        if name is None or (name not in names and self._is_base(name)):
            return names[0]
        if name not in (names := [*names, *self.adapters.by_name]):
            message = f"there is no model {shown(name)} here; there is {', '.join(map(repr, names))}"
            raise ApiError(404, message, "model", "model_not_found")
        return name

    def _is_base(self, name: str) -> bool:
        names, model = self.model_names, self.engine.model_config.model
        return name in names or (names == [model] and name == Path(model).name)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """The model's tasks: "generate" or a pooling model's tasks and "pool"; "score": pairs of texts."""
        config = self.engine.model_config
        if config.runner_type != "pooling":
            return ("generate", "score")
        return (*config.pooling_tasks, *(("score",) if score_type(config) else ()), "pool")

    def can(self, task: str | None) -> bool:
        """Whether the model can do `task`; "vectors": it embeds texts or tokens; None: it need not."""
        return not {task, *(("embed", "token_embed") if task == "vectors" else ())}.isdisjoint((None, *self.tasks))

    def check_task(self, task: str | None) -> None:
        """Raises ApiError 400 if the model cannot do `task`; None: whatever it is."""
        if self.can(task):
            return
        does = [_DOES[each] for each in self.tasks if each in _DOES]
        wanted = _WANTED.get(str(task), f"has no task {task}")
        raise ApiError(400, f"this server's model {wanted}: it {', '.join(does)}", "model", "unsupported_task")

    def stopping_error(self) -> ApiError:
        """503, for requests that come after the server began to stop, or that it cancels."""
        return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=10)

    def check_accepting(self) -> None:
        """Raises ApiError 503 if the server is stopping."""
        if self.draining:
            raise self.stopping_error()

    def check_capacity(self, num_sequences: int, what: str = "n or best_of of each prompt") -> None:
        """Raises ApiError: 503 if the server is stopping, 429 if the queue is full, 400 if it could never hold them;
        `what` the sequences are."""
        self.check_accepting()
        limit = self.max_sequences
        if num_sequences > limit:
            message = (
                f"the request asks for {num_sequences} sequences ({what}), and the server holds "
                f"{limit} at once (--max-num-seqs and --max-num-queued-reqs)"
            )
            raise ApiError(400, message, code="too_many_sequences")
        if num_sequences > limit - self.engine.num_unfinished_sequences:
            message = (
                f"too many requests: {num_sequences} more sequences would exceed the queue's limit of "
                f"{self.args.max_num_queued_reqs} (--max-num-queued-reqs)"
            )
            self.http_metrics.count_full(self.model_names[0])
            raise ApiError(429, message, code="overloaded", retry_after=1)

    def check_count(self, count: int, name: str) -> None:
        """Raises ApiError if the field `name` has more entries than --max-prompts-per-request."""
        limit = self.args.max_prompts_per_request
        if count > limit:
            message = f"{name} has {count} entries, more than the limit of {limit} (--max-prompts-per-request)"
            raise ApiError(400, message, name, "too_many_prompts")


def server_state(request: Request) -> ServerState:
    """The state of the server that got `request`."""
    return state_of(request.app)


def state_of(app: Any) -> ServerState:
    """The state of an application's server. A program may give the application another one's."""
    return app.state.serving
