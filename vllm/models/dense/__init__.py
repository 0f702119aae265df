"""Decoders whose layers are dense: a family a file, each a description of its configurations and a table of its
checkpoints' names. The folder is as long as the list of families; `vllm/models/decoder.py` builds them all."""
