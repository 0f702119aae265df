"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter()
