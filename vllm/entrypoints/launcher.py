"""The former place of serve_http."""

from vllm.entrypoints.launchers.launcher import serve_http

__all__ = ["serve_http"]
