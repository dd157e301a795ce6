# The Ascend checks, in an environment of their own (see setup_env.sh). Included by the Makefile.
ASCEND_VENV ?= .venv-ascend
# Two workers for two cores; a worker that is done takes tests from the other one.
ASCEND_PYTEST ?= -n 2 --dist worksteal
ASCEND_TEST = ASCEND_TESTS_STRICT=1 $(ASCEND_VENV)/bin/python -m pytest -q $(ASCEND_PYTEST)

.PHONY: test-ascend
test-ascend:
	tests/ascend/setup_env.sh $(ASCEND_VENV)
	$(ASCEND_TEST) tests/ascend --ignore-glob '*_interpreter.py'
	TRITON_INTERPRET=1 $(ASCEND_TEST) tests/ascend/test_*_interpreter.py
