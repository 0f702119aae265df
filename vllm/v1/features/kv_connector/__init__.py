"""Connectors of others: classes after upstream's interface that carry KV blocks out of an engine and into it."""
