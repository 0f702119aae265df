"""Upstream's path of layers."""
