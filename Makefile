# Everything happens in .venv; nothing outside this folder but the user's cache is touched.
PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=

# Hundreds of processes are started by the tests: none of them is to compile what another one has.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
STAMP := .venv/.built
# Tests that passed only when they were run again.
AGAIN := .pytest-again.txt
CORE := $(wildcard chasqui/_core/*.pyx chasqui/_core/*.pxd)
PIP := -m pip -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help build demo test test-fast sync lint types fuzz faults faults-long chaos chaos-peers bench bench-check servers spark-venv demo-spark interop-venv airflow-venv test-airflow clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

build: $(STAMP) ## Make .venv, compile the core and install chasqui into it, editable
	@true

demo: build ## Run the main job on an embedded server
	@$(BIN)/python -m chasqui demo --report chasqui-demo.html

test: build servers interop-venv spark-venv ## Run the whole suite
	@rm -f $(AGAIN)
	@{ $(call tested,not spark and not airflow,-n 5 --dist worksteal); } && { $(call tested,spark); }; \
	verdict=$$?; [ ! -s $(AGAIN) ] || { echo "Passed only when run again, alone:"; cat $(AGAIN); }; exit $$verdict

test-fast: build ## Run the suite without its slow tests and without Spark, four at a time
	@$(BIN)/python -m pytest -n 4 --dist worksteal -m "not slow and not spark and not airflow" $(PYTEST_ARGS)

test-airflow: build servers airflow-venv ## Run the DAGs of the Airflow integration
	@$(BIN)/python -m pytest -m airflow $(PYTEST_ARGS)

sync: build ## Make chasqui/sync.py out of chasqui/queue.py
	@$(BIN)/python tools/make_sync.py

lint: build ## Check style and format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check --quiet

types: build ## Check types
	@$(BIN)/mypy

fuzz: build ## Feed the core broken input under the sanitizers
	@$(BIN)/python -m tests.fuzz

faults: build servers ## Run every fault of the catalogue; without PYTEST_ARGS the results are kept
	@$(BIN)/python -m pytest -n 6 --dist worksteal -m fault $(or $(PYTEST_ARGS),--fault-results=tests/faults/results.json)

faults-long: build servers ## Run the tests that need minutes each
	@$(BIN)/python -m pytest -m long --timeout 3600 $(PYTEST_ARGS)

chaos: build servers ## Harm producers, workers and a server by a seeded schedule (CHAOS_ARGS="--seed 1")
	@$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

chaos-peers: build servers ## The same faults for other queues (CHAOS_ARGS="--peer arq")
	@$(BIN)/python -m tests.chaos --peers $(CHAOS_ARGS)

bench: build servers ## Measure against other queues and the machine's limit (BENCH_ARGS=--quick)
	@$(BIN)/python $(PIP) install 'chasqui[bench]'
	@$(BIN)/python -m bench $(BENCH_ARGS)

bench-check: build ## Check that no hot path got more than 20 % slower than the baseline
	@$(BIN)/python -m bench.check

servers: build ## Get the servers the tests run on
	@$(BIN)/python -m tests.servers get

spark-venv: .venv/.spark ## Put Spark into .venv, and what writes Delta Lake and Iceberg (about 1.2 GB)
	@true

demo-spark: spark-venv ## Take the tour of queues as DataFrames
	@$(BIN)/python -m chasqui spark demo

interop-venv: .venv-interop/.built ## Make .venv-interop, with the other implementation of the wire format
	@true

airflow-venv: .venv-airflow/.built ## Make .venv-airflow, with Airflow (about 350 MB)
	@true

clean: ## Remove everything made here
	@rm -rf .venv .venv-bench-* .venv-interop .venv-airflow bench/out build dist wheelhouse vendor *.egg-info
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	@rm -f $(AGAIN) chasqui/_core/*.c chasqui/_core/*.so
	@find bench chasqui tests -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# A changed .pyx is compiled in place; changed metadata or flags mean a new install, and new C
# because Cython does not see that its directives changed.
$(STAMP): pyproject.toml setup.py $(CORE)
ifneq ($(wildcard $(STAMP)),)
	@$(if $(filter %.toml %.py,$?),$(install),$(BIN)/python setup.py --quiet build_ext --inplace)
else
	@$(install)
endif
	@touch $@

# Processes are killed, stopped and raced here, five tests side by side on two cores: mostly they wait.
# One that fails is judged alone, once more: what is broken fails again, and what passes then is named at
# the end. A run that ended without a verdict fails.
define tested
$(BIN)/python -m pytest $(2) -m "$(1)" $(PYTEST_ARGS) || { \
	echo "Again, alone, what failed:"; \
	$(BIN)/python -m pytest -m "$(1)" --last-failed --last-failed-no-failures none \
		--passed-again $(AGAIN) $(PYTEST_ARGS); }
endef

define install
$(call venv,.venv)
echo "Installing chasqui and its tools into .venv; the first time takes a minute."
rm -f chasqui/_core/*.c chasqui/_core/*.so
$(BIN)/python $(PIP) install --editable '.[dev]'
endef

.venv/.spark: pyproject.toml | build
	@echo "Installing Spark into .venv; the first time takes some minutes."
	@$(BIN)/python $(PIP) install --editable '.[delta,iceberg,spark-connect]'
	@touch $@

.venv-interop/.built: pyproject.toml | build
	@$(call venv,.venv-interop)
	@.venv-interop/bin/python $(PIP) install --editable '.[interop]'
	@touch $@

.venv-airflow/.built: pyproject.toml | build
	@echo "Installing Airflow into .venv-airflow; the first time takes some minutes."
	@$(call venv,.venv-airflow)
	@.venv-airflow/bin/python $(PIP) install --editable '.[airflow]'
	@touch $@

define venv
$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("chasqui needs Python 3.11 or newer: make PYTHON=python3.11")'
$(PYTHON) -m venv $(1)
endef
