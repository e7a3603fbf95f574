# `make demo` and `make test` do everything on a machine that has python3 (3.11 or later), pip and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_CONSTRAINT
MAKEFLAGS += --no-print-directory
# Tests start hundreds of processes: what they import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test prove prove-2.11 check fix bench gpu gpu-first prove-big clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       install into $(VENV) and train the quickstart (3 to 5 minutes on two cores)"
	@echo "make test       the tests that take seconds: every module (6 to 12 minutes on two cores)"
	@echo "make prove      what takes longer, a sixteenth of the proofs' matrices (15 to 40 minutes)"
	@echo "make prove-2.11 of these what is compiled, under the torch that machines with GPUs have"
	@echo "make check      the whole gate: format, lint, types, import contracts, tests, proofs"
	@echo "make fix        format, and mend what the linter can"
	@echo "make bench      the measurements that docs/benchmarks.md quotes"
	@echo "make gpu        the tests that need a CUDA device"
	@echo "make gpu-first  the first ten minutes on a CUDA device: build/gpu-first.md"
	@echo "make prove-big  the rest of them, and proofs that take minutes or many GiB"

# Installed once, and again when what is to be installed changes.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# DEMO: more keys of the recipe, for instance DEMO=train.max_steps=5
demo: $(STAMP)
	$(BIN)/shardwise train $(DEMO)

# WORKERS: how many tests run at once; those of the proofs have ranks of their own
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
SHARED := --dist loadfile --no-loadscope-reorder --durations=10

test: $(STAMP)
	$(PYTEST) $(SHARED) -n $(or $(WORKERS),4)

prove: $(STAMP)
	$(PYTEST) $(SHARED) -n $(or $(WORKERS),3) -m "prove and not big"
	@$(MAKE) prove-2.11

# What is compiled, under the torch that machines with GPUs have: of 4.7 GB, fetched once.
OLDER := $(VENV)/torch-2.11
COMPILED := tests/techniques/test_compile.py tests/techniques/lora/test_joint.py tests/drift/test_compile.py \
	tests/methods/test_compiled_loss.py

$(OLDER): $(STAMP)
	PIP_CONSTRAINT=/dev/null $(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@.part torch==2.11.0
	@mv $@.part $@

prove-2.11: $(OLDER)
	PYTHONPATH=$(OLDER) $(PYTEST) $(SHARED) -n 2 -m "not gpu and not big" $(COMPILED)

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) test
	@$(MAKE) prove

fix: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a quiet machine: half an hour or more on two cores. The last needs a CUDA device and says so.
bench: $(STAMP)
	$(BIN)/python bench/cost.py
	$(BIN)/python bench/loss.py
	$(BIN)/python bench/data.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/step.py --json build/bench/step.json
	$(BIN)/python bench/step.py --compile --json build/bench/compile.json
	$(BIN)/python bench/pipeline.py --json build/bench/pipeline.json
	$(BIN)/python bench/context.py --json build/bench/context.json
	$(BIN)/python bench/seconds.py --json build/bench/seconds.json
	$(BIN)/python bench/gpu.py

gpu: $(STAMP)
	$(BIN)/python -m pytest -q -m gpu --timeout 600 tests/gpu

gpu-first: $(STAMP)
	$(BIN)/python bench/gpu_first.py

prove-big: $(STAMP)
	$(PYTEST) -m big --timeout 3600 --durations=0

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
