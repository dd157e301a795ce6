# The Ascend checks, in an environment of their own (see setup_env.sh). Included by the Makefile.
ASCEND_VENV ?= .venv-ascend
ASCEND_TEST = FUSION_PASS_ASCEND_STRICT=1 $(ASCEND_VENV)/bin/python -m pytest tests/ascend -q

.PHONY: test-ascend
test-ascend:
	tests/ascend/setup_env.sh $(ASCEND_VENV)
	$(ASCEND_TEST) --ignore tests/ascend/test_norm_rope_interpreter.py --ignore tests/ascend/test_attention_interpreter.py
	TRITON_INTERPRET=1 $(ASCEND_TEST) -k interpreter
