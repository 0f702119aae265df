"""Requests and their adapters."""

from __future__ import annotations

from vllm.v1.adapters import AdapterPool
from vllm.v1.request import Request, RequestStatus


def bind(request: Request, pool: AdapterPool | None) -> None:
    """Give a request its adapter, before it is queued.

    Raises:
        VLLMValidationError: as AdapterPool.bind.
    """
    if request.lora_request is not None:
        assert pool is not None, "the input processor refuses adapters that are not enabled"
        request.adapter = pool.bind(request.lora_request)
        request.adapter_number = request.adapter.number or -1


def release(request: Request) -> None:
    """The request ends; its status is still that before."""
    if (adapter := request.adapter) is not None:
        if request.status is RequestStatus.RUNNING:
            adapter.pool.end(adapter)
        adapter.pool.release(adapter)
