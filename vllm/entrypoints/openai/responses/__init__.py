"""The Responses API: it is not served."""
