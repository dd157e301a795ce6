# `make demo` and `make test` start from nothing: they make .venv, install into it, and run.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/python -m pip --quiet --no-input --disable-pip-version-check
# Two workers for two cores; a worker that is done takes tests from the other one. `make test PYTEST="-n 0 -k mrope"`
# passes what you like.
PYTEST ?= -n 2 --dist worksteal

# Where it is set, every process compiles the modules of PyTorch and transformers that it imports again: six seconds and
# more, and the tests start some fifty.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-exhaustive test-gpu lint format wheel clean
.DEFAULT_GOAL := test

# PyTorch's CUDA builds bring the triton that they need. Its CPU build brings none: then the one of the oldest supported
# PyTorch is installed, so that the kernels can be interpreted and compiled without a GPU. (--no-compile: most of what is
# installed is never imported.)
$(READY): pyproject.toml setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --no-compile -c constraints.txt torch setuptools wheel
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install --no-compile triton==3.6.0
	$(PIP) install --no-compile --no-build-isolation -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/fusion-pass demo

test: $(READY)
	$(BIN)/python -m pytest -m "not exhaustive" $(PYTEST)

test-exhaustive: $(READY)
	$(BIN)/python -m pytest -m exhaustive

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu

lint: $(READY) build/typed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/typed $(BIN)/mypy -p fusion_pass

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The packages as they install: mypy cannot see that `kernels/` is `fusion_pass.kernels`, so it reads this folder of links.
.PHONY: build/typed
build/typed:
	rm -rf $@ && mkdir -p $@/fusion_pass
	ln -s $(CURDIR)/fusion_pass/* $(CURDIR)/patterns $(CURDIR)/kernels $@/fusion_pass/

wheel: $(READY)
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache *.egg-info

# Checks that need a toolchain of their own bring their own targets.
-include tests/*/*.mk
