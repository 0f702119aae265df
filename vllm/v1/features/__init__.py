"""The guests of the engine: what only some requests need, a folder each.

A guest has up to two sides. `scheduler.py` is what it asks of a step (`vllm/v1/core/guests.py` says what may be asked),
`runner.py` what it does around a forward pass (`vllm/v1/worker/gpu/guests.py`). `build.py` makes both lists from the
configuration, in the order of `ORDER` there; a guest that is not configured is not in them. The scheduler, the engine
core and the runner call these lists and name no guest.
"""
