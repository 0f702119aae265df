"""Fields that completions and chat take beyond other generating routes, and chat beyond completions."""

from __future__ import annotations

from vllm.server.protocol.base import REFUSED_FIELDS, RequestModel


class VersionFields(RequestModel):
    """Fields of completions and chat."""

    return_weight_versions: bool | None = None


REFUSED_OF_CHOICES = {
    name: each
    for name, each in REFUSED_FIELDS.items()
    if name not in {*VersionFields.model_fields, "kv_transfer_params"}
}
CHAT_ALONE = frozenset(
    "documents reasoning_effort reasoning include_reasoning thinking_token_budget verbosity prediction".split()
)
