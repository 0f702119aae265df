"""The parts of gpu_check.py: each is a set of cases, run in a process of its own."""
