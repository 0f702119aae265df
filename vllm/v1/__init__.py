"""The engine below `LLM`: core, executor, worker, sample, metrics.

The folder keeps its version: who knows vLLM looks for the scheduler, the sampler and the readings here.
"""
