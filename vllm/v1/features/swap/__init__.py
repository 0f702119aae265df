"""CPU offload: evicted KV blocks in the host's memory, which are swapped in instead of recomputed."""
