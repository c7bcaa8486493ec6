# Everything that one does with this project. `make help` lists it.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

#: Any Python >= 3.11; the first that fits is taken.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
#: How the project gets into the environment: "editable", to work on it, or "wheel", as users get it (CI).
INSTALL ?= editable
#: Handed to pytest: make test ARGS="-k pragma"
ARGS ?=

BIN := $(VENV)/bin
SOURCES := $(shell find $(wildcard taas taas_magic) -name '*.py' -o -name py.typed) pyproject.toml README.md LICENSE
WHEEL_BUILT := dist/.built
DEMO := $(VENV)/.demo-$(INSTALL)
DEV := $(VENV)/.dev-$(INSTALL)
INSTALLED_FROM := pyproject.toml constraints-dev.txt $(if $(filter wheel,$(INSTALL)),$(WHEEL_BUILT))

.PHONY: help
help: ## This list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-8s %s\n", $$1, $$2 }'

.PHONY: demo
demo: $(DEMO) ## Run notebooks/quickstart.ipynb and show what it does
	@$(BIN)/python scripts/run_notebook.py notebooks/quickstart.ipynb

# Against a wheel, the tests run where the packages' sources are not, so that they cannot be what is tested.
.PHONY: test
test: $(DEV) ## Run all tests
ifeq ($(INSTALL),wheel)
	@rm -rf build/beside-wheel && mkdir -p build/beside-wheel
	@cp -r .ci $(filter-out taas taas_magic build dist,$(wildcard *)) build/beside-wheel
	@cd build/beside-wheel && TAAS_TEST_WHEEL=1 $(abspath $(BIN))/pytest $(ARGS)
else
	@$(BIN)/pytest $(ARGS)
endif

.PHONY: lint
lint: $(DEV) ## Check style with ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

.PHONY: format
format: $(DEV) ## Rewrite the sources in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: types
types: $(DEV) ## Check types with mypy
	@$(BIN)/mypy

.PHONY: docs
docs: $(DEV) ## Build the documentation into docs/_build/html; a warning is an error
	@$(BIN)/sphinx-build -q -E -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

.PHONY: wheel
wheel: $(WHEEL_BUILT) ## Build the wheel, check what it holds, and run a cell from it alone
	@$(BIN)/python scripts/check_wheel.py dist/*.whl
	@scripts/smoke_wheel.sh $(BIN)/python dist/*.whl

.PHONY: bench
bench: $(DEMO) ## Measure how long a cell takes to start, beside torchrun and Accelerate
	@$(BIN)/python benchmarks/launch.py

.PHONY: clean
clean: ## Remove everything that make made
	@rm -rf $(VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found; name one: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "make: $(PYTHON) could not make $(VENV); on Debian: apt install python3-venv" >&2; exit 1; }

$(DEMO): $(INSTALLED_FROM) | $(BIN)/python
	@scripts/install.sh $(BIN)/python demo $(INSTALL)
	@touch $@

$(DEV): $(INSTALLED_FROM) | $(BIN)/python
	@scripts/install.sh $(BIN)/python dev $(INSTALL)
	@touch $@ $(DEMO)

$(WHEEL_BUILT): $(SOURCES) | $(BIN)/python
	@rm -rf dist && mkdir dist
	@$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist .
	@touch $@
