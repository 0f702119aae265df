"""What pydantic does not say in a request's schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.protocol.base import RequestModel


def exactly_one(**fields: dict[str, Any]) -> Callable[[dict[str, Any], type[RequestModel]], None]:
    """For a request model's `json_schema_extra`: of these fields (name=schema) one is there and not null."""

    def extend(schema: dict[str, Any], model: type[RequestModel]) -> None:
        document: Any = RequestModel.model_config["json_schema_extra"]
        document(schema, model)
        schema["oneOf"] = [{"required": [name], "properties": {name: own}} for name, own in fields.items()]

    return extend


def check_exactly_one(request: RequestModel, *names: str) -> str:
    """The one of these fields that is there.

    Raises:
        ApiError: none is, or several are.
    """
    given = [name for name in names if getattr(request, name) is not None]
    if not given:
        raise ApiError(400, f"{' or '.join(names)} is required", param=names[0], code="missing_field")
    if len(given) > 1:
        raise ApiError(
            400, f"{' and '.join(given)} exclude each other: give one of them", param=given[1], code="invalid_value"
        )
    return given[0]
