"""Audits: how far models' readings are from a reference's on the same rows, and whether a cheaper one will do."""
