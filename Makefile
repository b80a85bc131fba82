# make run | test | test-bounds | test-kills | lint : everything they need is installed into .venv on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
EDITABLE := -e . $(addprefix -e ,$(PLUGINS))
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml)

.PHONY: run test test-bounds test-kills lint clean

run: $(VENV)/.installed
	$(BIN)/llamacli run < /dev/null

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

# Every kernel's memory between pages that nobody may touch; functions of arrays with Numba's own checks.
GUARDED := tests/engine tests/kernels/test_attention.py tests/kernels/test_linear.py tests/kernels/test_encoding.py \
           tests/kernels/test_sampling_kernels.py tests/sampling tests/kv tests/test_goldens.py tests/kernels/kv_types tests/branches tests/ops tests/tools/test_embedding.py \
           tests/test_session.py tests/test_session_state.py plugins
test-bounds: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -p llamacli.testing.guarded --guard=end $(GUARDED)
	$(BIN)/python -m pytest -q -p llamacli.testing.guarded --guard=start $(GUARDED)
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m pytest -q tests/sampling tests/kernels/test_sampling_kernels.py

test-kills: $(VENV)/.installed-test
	PYTHONPATH=tests:tests/support $(BIN)/python tests/kv/test_snapshot.py 200

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(PROJECTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(EDITABLE)
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[lint]'
	touch $@
