"""Steps that run again without Python: CPU recordings, CUDA graphs, and pieces of steps with prompts."""
