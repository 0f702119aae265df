"""The server: `python -m` of this module is `vllm serve`; imported, it has the application."""

from __future__ import annotations

if __name__ == "__main__":
    # Before the application is imported: that takes as long as the engine's start, which it is to go along with.
    from vllm.entrypoints.cli import main, serve

    main.run_as("python -m vllm.entrypoints.openai.api_server", serve)

from vllm.entrypoints.openai.app import build_app

__all__ = ["build_app"]
