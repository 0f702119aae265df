"""The engine below `LLM`: core, executor, worker, sample, metrics. The folder keeps its version, so that readers who
know vLLM find the scheduler, the sampler and the readings where they look for them."""
