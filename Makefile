# `make help` lists the targets. Every target builds .venv by itself when there is none.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

WORKERS ?= 2
PYTEST_ARGS ?=
BENCHMARKS ?= benchmarks/training_speed.py

# One thread per process: the test workers share the cores instead of fighting over them.
test: export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test lint format bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP)  ## build or update .venv (PYTHON=... chooses the interpreter, 3.11 or newer)

$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	    $(PYTHON) -c '' 2>/dev/null || { \
	        echo "error: '$(PYTHON)' does not run. Install Python 3.11 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }; \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	        echo "error: Python 3.11 or newer is needed, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12" >&2; exit 1; }; \
	    $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	        echo "error: '$(PYTHON)' cannot make virtual environments (no ensurepip). On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }; \
	    echo "making $(VENV) with $$($(PYTHON) -V)"; \
	    $(PYTHON) -m venv $(VENV); \
	fi
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' && $(BIN)/python -m pip --version >/dev/null || { \
	    echo "error: $(VENV) is broken or older than Python 3.11. Remove it and run make again." >&2; exit 1; }
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## train on digits with the adaptive sampler: pipeline, pictures, report in demo/
	$(BIN)/accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	    train_scripts/train_unconditional.py --config examples/digits.yaml --output_dir demo --overwrite_output_dir
	$(BIN)/python examples/recognise_digits.py demo
	@echo "Look at demo/samples.png and demo/report.html."

lint: $(STAMP)  ## ruff check and ruff format --check
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

test: lint  ## lint, then tests and doctests (PYTEST_ARGS="-k name", WORKERS=2)
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

format: $(STAMP)  ## let ruff fix and format the code
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: $(STAMP)  ## run the benchmarks listed in BENCHMARKS
ifeq ($(strip $(BENCHMARKS)),)
	@echo "no benchmarks yet"
else
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script"; done
endif

clean:  ## remove caches, builds and the demo's output (.venv stays)
	rm -rf build dist demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
