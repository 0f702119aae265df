"""The server's endpoints as objects that are called in Python: `init_app_state` fills an application's state with them.

A call is answered by the endpoint itself, from the request's fields to the answer's bytes; these come back as a model,
or, of a stream, as the text of each event.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
from collections.abc import AsyncGenerator, Mapping
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

from pydantic import BaseModel
from starlette.requests import Request, empty_receive
from starlette.responses import Response

from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.lora.request import NOT_ENABLED, LoRARequest
from vllm.server import serving
from vllm.server.errors import ApiError, as_api_error
from vllm.server.state import ServerState
from vllm.upstream import protocol
from vllm.upstream.protocol import Answer, ErrorInfo, ErrorResponse

# A request's headers that are about its body: another body is sent.
_OF_THE_BODY = ("content-type", "content-length", "content-encoding", "transfer-encoding")


class RequestRefusedError(VLLMClientError):
    """A request that an endpoint answers with an error, where upstream's raises; `create_error_response` has it."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class Serving:
    """An endpoint's object.

    Args:
        state: an application's, which has the server's.
    """

    def __init__(self, state: Any, server: ServerState) -> None:
        self._app = SimpleNamespace(state=state)
        self.server = server
        self.engine_client = server.engine
        self.model_config = server.engine.model_config

    @property
    def models(self) -> OpenAIServingModels:
        """The server's models."""
        return self._app.state.openai_serving_models

    def create_error_response(
        self,
        message: str | Exception,
        err_type: str = "BadRequestError",
        status_code: int = 400,
        param: str | None = None,
    ) -> ErrorResponse:
        """The answer for an error; an exception has its own type, status and field."""
        if not isinstance(message, Exception):
            return _error_response(ApiError(int(status_code), message, param), err_type)
        error = message.error if isinstance(message, RequestRefusedError) else as_api_error(message)
        if error.code == "internal_error" and isinstance(message, (ValueError, VLLMClientError)):
            error = ApiError(400, str(message), param)
        return _error_response(error)

    async def _whole(self, path: str, request: Any, raw_request: Request | None, model: type[Answer]) -> Any:
        """The answer as a model, or an ErrorResponse; bytes as the response that has them."""
        try:
            response = await self._respond(path, request, raw_request)
        except RequestRefusedError as refused:
            return _error_response(refused.error)
        if response.media_type == "text/event-stream":
            return _events(response)
        if response.media_type != "application/json":
            return response
        return model.model_validate_json(b"".join([part async for part in _parts(response)]))

    async def _respond(self, path: str, request: Any, raw_request: Request | None) -> Response:
        """The endpoint's answer. Raises RequestRefusedError, EngineDeadError."""
        fields = request.model_dump(exclude_unset=True) if isinstance(request, BaseModel) else request
        try:
            return await _endpoint(path)(self._request(path, fields, raw_request))
        except (ApiError, VLLMValidationError) as error:
            raise RequestRefusedError(as_api_error(error)) from error

    def _request(self, path: str, fields: Any, raw_request: Request | None) -> Request:
        """The HTTP request that the caller would have sent; it ends when `raw_request` does."""
        given = raw_request.headers.raw if raw_request is not None else []
        headers = [(name, value) for name, value in given if name.decode("latin-1").lower() not in _OF_THE_BODY]
        request_id = raw_request.headers.get("x-request-id") if raw_request is not None else None
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [*headers, (b"content-type", b"application/json")],
            "app": self._app,
            "state": {"request_id": request_id} if request_id else {},
        }
        messages = [{"type": "http.request", "body": json.dumps(fields, default=_plain).encode(), "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            if raw_request is None or raw_request.receive is empty_receive:
                # Nobody is connected who could leave: the caller cancels.
                await asyncio.Event().wait()
            return await raw_request.receive()  # type: ignore[union-attr]

        return Request(scope, receive)


class OpenAIServingChat(Serving):
    """/v1/chat/completions"""

    async def create_chat_completion(self, request: Any, raw_request: Request | None = None) -> Any:
        """A ChatCompletionResponse, a generator of events for a stream, or an ErrorResponse."""
        return await self._whole("/v1/chat/completions", request, raw_request, protocol.ChatCompletionResponse)


class OpenAIServingCompletion(Serving):
    """/v1/completions"""

    async def create_completion(self, request: Any, raw_request: Request | None = None) -> Any:
        """A CompletionResponse, a generator of events for a stream, or an ErrorResponse."""
        return await self._whole("/v1/completions", request, raw_request, protocol.CompletionResponse)


class OpenAIServingResponses(Serving):
    """/v1/responses"""

    async def create_responses(self, request: Any, raw_request: Request | None = None) -> Any:
        """An answer, a generator of events for a stream, or an ErrorResponse."""
        return await self._whole("/v1/responses", request, raw_request, Answer)


class AnthropicServingMessages(Serving):
    """/v1/messages"""

    async def create_messages(self, request: Any, raw_request: Request | None = None) -> Any:
        """A message, a generator of events for a stream, or an ErrorResponse."""
        return await self._whole("/v1/messages", request, raw_request, Answer)

    async def count_tokens(self, request: Any, raw_request: Request | None = None) -> Any:
        """How long the prompt would be, or an ErrorResponse."""
        return await self._whole("/v1/messages/count_tokens", request, raw_request, Answer)


class ServingTokenization(Serving):
    """/tokenize and /detokenize"""

    async def create_tokenize(self, request: Any, raw_request: Request | None = None) -> Any:
        """A TokenizeResponse or an ErrorResponse."""
        return await self._whole("/tokenize", request, raw_request, protocol.TokenizeResponse)

    async def create_detokenize(self, request: Any, raw_request: Request | None = None) -> Any:
        """A DetokenizeResponse or an ErrorResponse."""
        return await self._whole("/detokenize", request, raw_request, protocol.DetokenizeResponse)


class _ServingPooling(Serving):
    """An endpoint whose object is called itself and gives the HTTP response.

    Raises:
        RequestRefusedError: the request cannot be answered; `create_error_response` makes the error's model of it.
    """

    path: ClassVar[str]

    async def __call__(self, request: Any, raw_request: Request | None = None) -> Response:
        return await self._respond(self.path, request, raw_request)


class ServingEmbedding(_ServingPooling):
    """/v1/embeddings"""

    path = "/v1/embeddings"


class ServingClassification(_ServingPooling):
    """/classify"""

    path = "/classify"


class ServingPooling(_ServingPooling):
    """/pooling"""

    path = "/pooling"


class ServingScores(_ServingPooling):
    """/score and, for requests with documents, /rerank"""

    async def __call__(self, request: Any, raw_request: Request | None = None) -> Response:
        fields = request.model_dump(exclude_unset=True) if isinstance(request, BaseModel) else request
        path = "/rerank" if "documents" in fields and "query" in fields else "/score"
        return await self._respond(path, fields, raw_request)


class OpenAIServingModels(Serving):
    """The model and its adapters."""

    @property
    def lora_requests(self) -> dict[str, LoRARequest]:
        """The adapters by name."""
        return self.server.adapters.by_name

    @property
    def base_model_paths(self) -> list[Any]:
        """The model's names."""
        from vllm.upstream.server import BaseModelPath

        return [BaseModelPath(name, self.model_config.model) for name in self.server.model_names]

    def model_name(self, lora_request: LoRARequest | None = None) -> str:
        """The adapter's or the model's."""
        return self.server.model_names[0] if lora_request is None else lora_request.lora_name

    def is_base_model(self, model_name: str) -> bool:
        """Whether it is a name of the model itself."""
        return model_name in self.server.model_names

    async def show_available_models(self) -> protocol.ModelList:
        """The model and its adapters."""
        path, length = self.model_config.model, self.model_config.max_model_len
        names, created = self.server.model_names, self.server.created
        cards = [protocol.ModelCard(id=name, created=created, root=path, max_model_len=length) for name in names]
        for name, own in self.lora_requests.items():
            parent = own.base_model_name or names[0]
            cards.append(protocol.ModelCard(id=name, created=created, root=own.lora_path, parent=parent))
        return protocol.ModelList(data=cards)

    async def load_lora_adapter(self, request: Any, base_model_name: str | None = None) -> str | ErrorResponse:
        """Load an adapter, which requests name as their model from then on; what was done, or an error."""
        try:
            if self.engine_client.vllm_config.lora_config is None:
                raise ApiError(400, NOT_ENABLED, "lora_name", "invalid_value")
            await self.server.adapters.load(
                self.engine_client,
                self.server.model_names,
                request.lora_name,
                request.lora_path,
                load_inplace=request.load_inplace,
                base_model_name=base_model_name,
                is_3d_lora_weight=request.is_3d_lora_weight,
            )
        except (ApiError, VLLMValidationError) as error:
            return _error_response(as_api_error(error))
        return f"Success: LoRA adapter '{request.lora_name}' added successfully."

    async def unload_lora_adapter(self, request: Any) -> str | ErrorResponse:
        """Forget an adapter; what was done, or an error."""
        try:
            await self.server.adapters.unload(self.engine_client, request.lora_name)
        except ApiError as error:
            return _error_response(error)
        return f"Success: LoRA adapter '{request.lora_name}' removed successfully."


# Attribute of an application's state -> its object, and the task that it needs; None: whatever the model does.
_OBJECTS: dict[str, tuple[type[Serving], str | None]] = {
    "openai_serving_models": (OpenAIServingModels, None),
    "openai_serving_chat": (OpenAIServingChat, "generate"),
    "openai_serving_completion": (OpenAIServingCompletion, "generate"),
    "openai_serving_responses": (OpenAIServingResponses, "generate"),
    "anthropic_serving_messages": (AnthropicServingMessages, "generate"),
    "openai_serving_tokenization": (ServingTokenization, None),
    "serving_tokenization": (ServingTokenization, None),
    "serving_embedding": (ServingEmbedding, "vectors"),
    "serving_classification": (ServingClassification, "classify"),
    "serving_pooling": (ServingPooling, "pool"),
    "serving_scores": (ServingScores, "score"),
}
# Upstream's state has these for tasks that no model here does.
_NONE = ("openai_serving_transcription", "openai_serving_translation", "openai_serving_realtime")


def fill(state: Any, server: ServerState) -> None:
    """Give an application's state the endpoints' objects; None where the model cannot do what one is for."""
    for name, (kind, task) in _OBJECTS.items():
        setattr(state, name, kind(state, server) if server.can(task) else None)
    for name in _NONE:
        setattr(state, name, None)


_MODULES = {
    "/v1/chat/completions": "generation.chat",
    "/v1/completions": "generation.completion",
    "/v1/responses": "responses.responses",
    "/v1/messages": "messages.messages",
    "/v1/messages/count_tokens": "messages.messages",
    "/v1/embeddings": "pooling.embeddings",
    "/classify": "pooling.classify",
    "/pooling": "pooling.pooling",
    "/rerank": "pooling.rerank",
    "/score": "labels.scoring",
    "/tokenize": "tokenization",
    "/detokenize": "tokenization",
}


def _endpoint(path: str) -> Any:
    router = import_module(f"{serving.__name__}.{_MODULES[path]}").router
    return next(route.endpoint for route in router.routes if route.path == path)


def _events(response: Response) -> AsyncGenerator[str, None]:
    """The events of a streamed answer, each a text that ends with an empty line. Leaving early aborts the requests."""
    # The generator may be run by another task than this, which has chosen the model.
    return _events_in(contextvars.copy_context(), response)


async def _events_in(context: contextvars.Context, response: Response) -> AsyncGenerator[str, None]:
    event = b""
    async with contextlib.aclosing(_parts(response, context)) as parts:
        async for part in parts:
            event += part
            if event.endswith(b"\n\n"):
                yield event.decode()
                event = b""


async def _parts(response: Response, context: contextvars.Context | None = None) -> AsyncGenerator[bytes, None]:
    """The body, in the parts in which it is sent."""
    parts: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            parts.put_nowait(message["body"])

    async def run() -> None:
        try:
            await response({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
        finally:
            parts.put_nowait(None)

    task = (context or contextvars.copy_context()).run(asyncio.create_task, run())
    try:
        while (part := await parts.get()) is not None:
            yield part
        await task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _error_response(error: ApiError, kind: str | None = None) -> ErrorResponse:
    told = error.body()["error"]
    return ErrorResponse(
        error=ErrorInfo(message=told["message"], type=kind or told["type"], param=told["param"], code=error.status)
    )


def _plain(value: Any) -> Any:
    """For JSON, of what bodies made in Python may hold."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value)
