"""Attention: metadata and backends."""
