"""Check on the model at hand what the engine promises."""

from __future__ import annotations

from vllm.entrypoints.cli import selftest_invariance

NAME = "selftest"
HELP = "check the engine's promises on a model"
COMMANDS = (selftest_invariance,)
