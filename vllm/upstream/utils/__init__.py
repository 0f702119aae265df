"""Helpers of `vllm.utils` that nothing here uses."""
