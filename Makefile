# `make demo` and `make test` set up .venv when it is missing; later calls only check time stamps.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# The models here are small: several threads on busy cores only wait for each other.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint types contracts wheel-check bench clean

demo: $(VENV)/.examples
	$(BIN)/zdtrain fit configs/digits.yaml

test: $(VENV)/.test
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest --doctest-modules zdtrain --ignore=zdtrain/__main__.py

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/zdtrain lint zdtrain examples

types: $(VENV)/.dev $(VENV)/.test # the plugins and plots it checks import pytest and matplotlib
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

wheel-check: $(VENV)/.dev
	rm -rf build dist
	$(BIN)/python -m build --wheel --outdir dist . > /dev/null
	$(BIN)/python .ci/wheel_check.py dist/*.whl

bench: $(VENV)/.examples
	$(BIN)/python -m benchmarks.step_overhead

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# One stamp per extra. torch first and by its exact version: an open range may pick another build of several gigabytes.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) --editable '.[$*]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or later is needed, found {sys.version}: set PYTHON")'
	$(PYTHON) -m venv $(VENV)
