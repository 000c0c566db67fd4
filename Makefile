# Everything sets itself up in .venv. On a machine with a GPU the same commands use it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test lint clean

demo: $(VENV)/.installed  ## a language model learns arithmetic, in minutes on two cores
	$(BIN)/lowmem-grpo run arithmetic overwrite_output_dir=true

test: $(VENV)/.installed-dev  ## the whole test suite
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs outputs
