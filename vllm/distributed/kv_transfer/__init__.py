"""The KV cache of one engine for another: it is not handed over."""
