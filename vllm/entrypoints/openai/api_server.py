"""`python -m` of this module is `vllm serve`; imported, it offers `build_app`."""

from __future__ import annotations

if __name__ == "__main__":
    # Before the slow import of the application, which is to run while the engine starts.
    from vllm.entrypoints.cli import main, serve

    main.run_as("python -m vllm.entrypoints.openai.api_server", serve)

from vllm.entrypoints.openai.app import build_app

__all__ = ["build_app"]
