"""Markup around the content of answers, which is left out of it."""

KIMI_K3 = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
COHERE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
ERNIE45 = ("<response>", "</response>")
