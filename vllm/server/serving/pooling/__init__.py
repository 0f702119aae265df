"""Endpoints of pooling models."""
