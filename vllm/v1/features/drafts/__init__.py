"""Speculation: tokens that are drafted, and computed and verified several a step."""
