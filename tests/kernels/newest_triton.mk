# The Triton kernels with the newest Triton, in an environment of its own: compiled, and in the interpreter. All other
# tests have the oldest one. Included by the Makefile.
NEWEST_TRITON ?= 3.9.0
NEWEST_VENV := .venv-triton-$(NEWEST_TRITON)
NEWEST_PYTHON := $(NEWEST_VENV)/bin/python
NEWEST_PIP := $(NEWEST_PYTHON) -m pip --quiet --no-input --disable-pip-version-check
NEWEST_TESTS := hopper/test_compile.py test_attention_compile.py test_norm_rope_compile.py \
	test_attention_numerics.py test_norm_rope_numerics.py

.PHONY: test-newest-triton
test-newest-triton: $(NEWEST_VENV)/.ready
	$(NEWEST_PYTHON) -m pytest -q $(PYTEST) -m "not exhaustive and not gpu" -k "not reference" $(addprefix tests/kernels/,$(NEWEST_TESTS))

$(NEWEST_VENV)/.ready: pyproject.toml setup.py constraints.txt
	test -x $(NEWEST_PYTHON) || $(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_PIP) install --no-compile -c constraints.txt torch triton==$(NEWEST_TRITON) setuptools wheel
	$(NEWEST_PIP) install --no-compile --no-build-isolation -c constraints.txt -e '.[test]'
	touch $@
