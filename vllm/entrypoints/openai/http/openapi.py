"""/openapi.json: FastAPI's description of the routes, completed."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from vllm.entrypoints.openai.http.routes import CHUNK_MODELS, REQUEST_MODELS, SCHEMA_REF

_TEXT = {"schema": {"type": "string"}}
_REQUEST_ID = {"X-Request-Id": {"description": "The request's, or a new one.", "required": True, **_TEXT}}
_HEADERS = {
    "401": {"WWW-Authenticate": {"description": "Bearer", "required": True, **_TEXT}},
    "429": {
        "Retry-After": {
            "description": "Seconds after which to try again.",
            "required": True,
            "schema": {"type": "integer", "minimum": 1},
        }
    },
}
_HEADERS["503"] = _HEADERS["429"]
_BEARER = "bearer"


def document(app: FastAPI, model_names: list[str], has_keys: bool) -> None:
    """Make `app.openapi` describe what the routes do themselves: parse and check bodies, check API keys.

    Args:
        app: with all its routes.
        model_names: accepted values of `model`.
        has_keys: clients must show an API key.
    """
    make_schema = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(make_schema(), model_names, has_keys)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(schema: dict[str, Any], model_names: list[str], has_keys: bool) -> None:
    components = schema["components"]
    models = [(model, "validation") for model in (*REQUEST_MODELS, *CHUNK_MODELS)]
    _, definitions = models_json_schema(models, ref_template=SCHEMA_REF + "{model}")  # type: ignore[arg-type]
    components["schemas"].update(definitions["$defs"])
    for model in REQUEST_MODELS:
        field = components["schemas"][model.__name__]["properties"]["model"]
        own = next(each for each in field.get("anyOf", [field]) if each["type"] == "string")
        own["enum"] = model_names
    # FastAPI's own errors never occur: request_body.py checks the bodies, and path parameters are strings.
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
    if has_keys:
        components["securitySchemes"] = {_BEARER: {"type": "http", "scheme": "bearer"}}
    for operations in schema["paths"].values():
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("422", None)
            for status, answer in answers.items():
                answer["headers"] = {**_REQUEST_ID, **_HEADERS.get(status, {})}
            if has_keys and "401" in answers:
                operation["security"] = [{_BEARER: []}]
