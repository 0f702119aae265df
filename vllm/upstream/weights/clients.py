"""Clients by which a trainer tells engines what to do."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from vllm.upstream.weights.transfer import host_copy
from vllm.utils.ray_utils import import_ray_for


class HTTPVLLMWeightSyncClient:
    """A server, by its routes for trainers; it runs with VLLM_SERVER_DEV_MODE=1."""

    def __init__(self, base_url: str, timeout: float = 300.0) -> None:
        """`timeout`: seconds for each call."""
        self._base_url = base_url.rstrip("/")
        self._timeout = timeout

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """{"path": FILE} of the server's machine; {"weights": pairs}, which the request's body brings; or names,
        dtype_names and shapes of what is sent to the group."""
        if "weights" in update_info:
            from safetensors.torch import save

            weights = {name: host_copy(tensor) for name, tensor in dict(update_info["weights"]).items()}
            self._post_bytes("update_weights", save(weights), "application/octet-stream")
        else:
            self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {} if weight_version is None else {"weight_version": weight_version})

    def _post(self, route: str, body: dict[str, Any]) -> None:
        self._post_bytes(route, json.dumps(body).encode(), "application/json")

    def _post_bytes(self, route: str, body: bytes, kind: str) -> None:
        """Raises RuntimeError, with what the server answered."""
        request = urllib.request.Request(f"{self._base_url}/{route}", body, {"Content-Type": kind})
        try:
            urllib.request.urlopen(request, timeout=self._timeout).close()
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")
            raise RuntimeError(f"{route}: the server answered {error.code}: {answer}") from None


class RayVLLMWeightSyncClient:
    """Ray actors that hold an LLM or AsyncLLM each."""

    def __init__(self, handles: Any) -> None:
        """`handles`: an actor, or several."""
        self._handles = list(handles) if isinstance(handles, Sequence) else [handles]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update", *(() if weight_version is None else (weight_version,)))

    def _call(self, method: str, *args: Any) -> None:
        ray = import_ray_for()
        ray.get([getattr(handle, method).remote(*args) for handle in self._handles])
