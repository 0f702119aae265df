"""What the servers of conftest.py are asked with."""

MODEL = "smollm2"
API_KEY = "the-key"
