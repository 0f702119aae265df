"""The parts of gpu_check.py: sets of cases, each run in its own process."""
