# make run | test | lint : everything they need is installed into .venv on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PLUGINS := $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
EDITABLE := -e . $(addprefix -e ,$(PLUGINS))
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml)

.PHONY: run test lint clean

run: $(VENV)/.installed
	$(BIN)/llamacli run < /dev/null

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

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
