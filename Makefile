# Everything runs from .venv, which these targets set up on first use. Overridable: PYTHON, PIP_ARGS, ARGS.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt $(PIP_ARGS)
TORCH := torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: help setup sglang-cpu demo test test-slow test-emulated test-sglang test-sglang-ci test-all nightly lint format bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}: make PYTHON=python3.11 ...")'
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first, by its exact version: a range may pull a build for another accelerator, several gigabytes large.
$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/.created
	@echo "== installing accelrl and what it runs on (a few minutes from an empty cache)"
	@$(PIP) "$(TORCH)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "== installing the development tools"
	@$(PIP) -e ".[dev]"
	@touch $@

$(VENV)/.bench: $(VENV)/.run
	@echo "== installing what the benchmarks compare with"
	@$(PIP) -e ".[bench]"
	@touch $@

setup: $(VENV)/.dev ## prepare .venv for running and developing

sglang-cpu: ## SGLang and its router on the CPU, in an environment of its own (.venv-sglang, kept in the user's cache)
	@PIP_ARGS="$(PIP_ARGS)" $(PYTHON) ci/sglang_cpu/install.py

demo: $(VENV)/.run ## watch a tiny model learn on the CPU (under a minute)
	@echo "== training the built-in example: python -m train --accelerator cpu $(ARGS)"
	@$(BIN)/accelrl train --accelerator cpu $(ARGS)

test: $(VENV)/.dev ## the fast test suite, in parallel
	@echo "== running the fast tests"
	@$(BIN)/python -m pytest -n auto $(ARGS)

test-slow: $(VENV)/.dev ## tests that start Ray or several processes, two files at a time
	@echo "== running the slow tests"
	@$(BIN)/python -m pytest -m "slow and not nightly and not sglang" -n 2 --dist loadfile --durations 10 $(ARGS)

test-emulated: $(VENV)/.dev ## tests on the emulated MUSA device (needs g++; builds it on first use)
	@$(BIN)/python -m pytest -m "emulated and not nightly" -n 2 $(ARGS)

test-sglang-ci: $(VENV)/.dev sglang-cpu ## one run on one real SGLang server: every weight channel, and parity
	@$(BIN)/python -m pytest -m "sglang and not nightly" --durations 3 tests/train/test_sglang_training.py $(ARGS)

test-sglang: $(VENV)/.dev sglang-cpu ## tests on real SGLang servers
	@$(BIN)/python -m pytest -m "sglang and not nightly" $(ARGS)

test-all: test test-slow ## fast and slow tests

nightly: $(VENV)/.dev ## tests that take minutes each
	@$(BIN)/python -m pytest -m nightly $(ARGS)

lint: $(VENV)/.dev ## style, types, layers
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

format: $(VENV)/.dev ## put the code into shape
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: $(VENV)/.bench ## all benchmarks, as ratios (about fifteen minutes)
	@$(BIN)/python -m benchmarks $(ARGS)

clean: ## remove .venv and caches
	rm -rf $(VENV) .venv-sglang build *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
