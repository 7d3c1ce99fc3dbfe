# `make demo` and `make test` set everything up in .venv, once, and then run offline.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-faults lint format types contracts unit examples clean

help:
	@echo "make demo    train over a lossy network, twice, and write a report"
	@echo "make test    every check that CI runs"
	@echo "make test-faults  faults that strike a job of three hosts (root), as a table"
	@echo "make clean   remove what the two have made"

# The stamps hold what was installed; sources are installed editable.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("tailbound needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[demo]"
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[demo,dev,adapters]"
	touch $@

demo: $(VENV)/.demo
	$(BIN)/tailbound demo $(ARGS)

test: lint types contracts unit examples

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports --no-logo

# torch is imported first, so that tests that need it cannot all be skipped unseen.
unit: $(VENV)/.dev
	$(BIN)/python -c "import torch; print('torch', torch.__version__)"
	rm -f .coverage .coverage.*
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest $(ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --fail-under=95
	$(BIN)/coverage report --include='*/tailbound/protocol/*,*/tailbound/reduction.py' --fail-under=100

# Part of unit; alone it takes minutes instead of a quarter of an hour.
test-faults: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/faults $(ARGS)

examples: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 3 examples/server_plan.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 3 examples/both_bounds.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/ddp_hook.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 4 examples/fsdp_replicas.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/lightning_callback.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/hf_trainer.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/accelerate_loop.py
	rm -rf $(VENV)/traces
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/record_trace.py $(VENV)/traces
	$(BIN)/tailbound plan $(VENV)/traces
	rm -rf $(VENV)/elastic && mkdir $(VENV)/elastic
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 3 --max-restarts 1 examples/elastic.py $(VENV)/elastic --kill

clean:
	rm -rf $(VENV) .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
