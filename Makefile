.DEFAULT_GOAL := setup
.PHONY: help setup demo bench bench-gpu test test-all test-te test-gpu test-slurm test-versions cost-model results \
	support-table simulate lint format lock clean

BIN := .venv/bin

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## (the default) build .venv, or do nothing where it is up to date; PYTHON=... names the Python to use
	@scripts/setup.sh

demo: setup ## run `megatron-basp demo`, which needs no GPU
	@$(BIN)/megatron-basp demo $(ARGS)

bench: setup ## our exchange beside its peers, in .venv-bench; a few minutes, and as many for a first installation
	@scripts/bench_environment.sh
	@$(BIN)/megatron-basp bench attention $(ARGS)

test: setup lint ## lint, then pytest; ARGS="-k plan" and the like go to pytest
	$(BIN)/pytest -m "not slow and not transformer_engine" $(ARGS)

test-all: setup lint ## the same with the tests that take long
	$(BIN)/pytest -m "not transformer_engine" $(ARGS)

# Not part of the others: Transformer Engine is compiled first, once for a user. TE_WHEEL=FILE takes a wheel instead.
test-te: setup ## the contract with Transformer Engine, on the CPU, in .venv-te; the first time 10 to 30 minutes more
	@scripts/te_on_cpu.sh $(if $(TE_WHEEL),--wheel $(TE_WHEEL))
	.venv-te/bin/pytest tests/transformer_engine $(ARGS)

# The device is looked for without CUDA: a process that has initialized it cannot fork ranks that use it.
test-gpu: setup ## what needs a GPU: Transformer Engine's kernels, in .venv-te; one GPU is enough
	@scripts/te_on_cpu.sh $(if $(TE_WHEEL),--wheel $(TE_WHEEL))
	PYTORCH_NVML_BASED_CUDA_CHECK=1 .venv-te/bin/pytest tests/distributed -m gpu $(ARGS)

bench-gpu: setup ## the packing kernels' share of copy bandwidth, on one GPU; ARGS="--json"
	@$(BIN)/python scripts/bench/kernels_on_gpu.py $(ARGS)

# Debian: apt-get install slurm-wlm munge shellcheck; as root. The tests start daemons of their own, and end them.
test-slurm: setup ## jobs on a small SLURM on this machine: killed, requeued, resumed; some minutes
	$(BIN)/pytest tests/slurm $(ARGS)

test-versions: setup ## hooks and small runs with each Megatron release, and with checkouts: MEGATRON="path path"
	@$(BIN)/python -m tests.versions $(MEGATRON) $(if $(ARGS),-- $(ARGS))

cost-model: setup ## write the tables of docs/cost-model.md anew and draw its figure: modelled beside published
	@$(BIN)/python -m scripts.figures.cost_model

results: setup ## write the tables of docs/results.md anew and draw its figure: published, modelled, measured
	@$(BIN)/python -m scripts.figures.results

support-table: setup ## write the README's table of features anew from the tests that show them
	@$(BIN)/python -m tests.support_table

# SimGrid comes with Debian, for the system's Python: apt-get install python3-simgrid.
SIMGRID_PYTHON := /usr/bin/python3

simulate: setup ## exchanges on 8 to 512 GPUs, modelled and by SimGrid; into runs/simulate
	@$(BIN)/python -m scripts.simulate --python $(SIMGRID_PYTHON) $(ARGS)

lint: setup ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup ## let ruff fix and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Versions already in the lock stay; ARGS="--upgrade-package NAME" moves one. Universal: the same file for each Python.
lock: setup ## write requirements.lock anew from setup.py
	$(BIN)/uv pip compile --quiet --universal --python-version 3.12 --extra dev --no-emit-index-url \
		--custom-compile-command "make lock" --output-file requirements.lock setup.py $(ARGS)

clean: ## remove the environments, build products and caches; runs/ stays
	rm -rf .venv .venv-bench .venv-te .venv-versions build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
