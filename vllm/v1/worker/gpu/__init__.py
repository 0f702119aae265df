"""The V2 model runner, for CUDA and the CPU; the name is upstream's."""
