"""Architectures without a description here: transformers' modules, with attention, linears and head of ours."""
