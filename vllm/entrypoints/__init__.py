"""Entry points for Python: LLM and AsyncLLM."""
