# Thin: the work is in scripts/ and in the tools' settings in pyproject.toml.

# HOST: the version of Megatron, one of HOSTS, by default the newest. TESTS: what to run, for example one file.
HOSTS := $(shell sed -n 's/^ *[a-zA-Z]*.\{0,1\}name="\([0-9.]*\)".*/\1/p' vtp_plugin/host/versions/known_versions.py)
HOST := $(lastword $(HOSTS))
TESTS := tests
# How many workers take files of tests in turn. Processes leave the cores idle while they wait for each other.
WORKERS := 2
VENV := $(if $(filter $(lastword $(HOSTS)),$(HOST)),.venv,.venv-$(HOST))
BIN := $(VENV)/bin
STAMP := $(VENV)/.env-ready
# How long each test took: `make slowest` reads it.
TIMES := $(CURDIR)/out/times-$(HOST).json
# One thread per process: tests and demo start several processes on few cores.
PYTEST := OMP_NUM_THREADS=1 VTP_TEST_TIMES=$(TIMES) $(BIN)/python -m pytest $(TESTS) --numprocesses=$(WORKERS) --dist=loadfile \
	--no-loadscope-reorder --durations=15

# Tests start many processes; without compiled files each would compile the plugin again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env smoke lint check test test-changed test-unit test-full test-busy test-lanes test-mm test-swift test-site slowest coverage site demo clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP) ## make .venv, with HOST=0.12 .venv-0.12, with HOST=swift ms-swift's .venv-swift (PYTHON=/path chooses the interpreter)

$(STAMP): pyproject.toml scripts/make_env.sh
	@PYTHON="$(PYTHON)" bash scripts/make_env.sh $(HOST) $(VENV) $(STAMP)

# What the smoke test is taken from: one of the first two trains, by megatron.training where this Megatron has it.
SMOKE := tests/multiproc/training/test_training.py tests/multiproc/layouts/test_host_grid.py \
	tests/house/test_imports.py tests/house/test_doctests.py

smoke: $(STAMP) ## run this first, under a minute: ruff, import rules, examples, and 1,2 trained and compared with the uniform run
	if [ -x $(BIN)/ruff ]; then $(BIN)/ruff check -q . && $(BIN)/ruff format -q --check .; fi
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 0 -m smoke --durations=3 $(SMOKE)

lint: $(STAMP) ## ruff (lint and format) and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

check: lint ## what needs no run: `make lint`, and rules of sources, words and documents, which `make test` runs, too
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not full" tests/house

test: $(STAMP) ## the tests that every change runs (about 35 minutes on 2 idle cores); with HOST=0.12, those that this Megatron can run
	$(PYTEST) -m "not full"

# COMMIT: what is compared with, by default the last commit.
test-changed: $(STAMP) ## the tests that a change can reach, and a few that stand for all runs; `make test` runs all
	$(MAKE) test TESTS="$$($(BIN)/python scripts/changed_tests.py $(COMMIT))"

test-unit: $(STAMP) ## the tests that start no pool of ranks, for another Python: make test-unit PYTHON=python3.13 VENV=.venv-3.13
	$(MAKE) test TESTS="tests/unit tests/property tests/ordering"

test-full: $(STAMP) ## all tests, whole grids included (up to 75 minutes)
	$(PYTEST)

slowest: $(STAMP) ## where the time of the last run of the tests went, by folder, file and test
	$(BIN)/python scripts/slowest.py $(TIMES)

# What a busy machine can break: time limits, and the order of lines.
BUSY := env OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not full" tests/hang tests/multiproc/options/test_bad_input.py \
	tests/multiproc/options/test_training_bad_input.py

test-busy: $(STAMP) ## the default tests beside 6 busy processes; tests of hangs and bad input 3 times beside 20
	bash scripts/busy.sh 6 env $(PYTEST) -m "not full"
	for round in 1 2 3; do bash scripts/busy.sh 20 $(BUSY) || exit 1; done

# The lanes of make test-full that need fetched trees; the variables that name them: tests/mindspeed/conftest.py.
test-lanes: ## minutes of each lane: MindSpeed-LLM's and MindSpeed-MM's own scripts on CPU; VTP_ variables, VENV=/its/environment
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 --timeout 1000 -m core tests/mindspeed

test-mm: ## MindSpeed-MM's own script on CPU; set VTP_MINDSPEED_MM, VTP_MINDSPEED, VTP_MEGATRON_LM to its trees, VENV=/its/environment
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 --timeout 1000 --durations=0 tests/mindspeed/test_mm_*.py

test-swift: ## ms-swift's Megatron on unequal stages, on CPUs, in the environment that make env HOST=swift makes (20 minutes)
	OMP_NUM_THREADS=1 .venv-swift/bin/python -m pytest -n 0 --timeout 3000 --durations=0 tests/swift

test-device: $(STAMP) ## the tests for a GPU, then training scripts on it; ranks may share it, see docs/guides/gpus.md
	$(BIN)/python -m pytest -n 0 tests/device
	VTP_TEST_DEVICE=cuda $(BIN)/python -m pytest -n 0 tests/multiproc/training/test_training.py \
		tests/multiproc/u_shape/test_u_training.py tests/multiproc/layouts/test_unequal_dp_training.py

test-site: $(STAMP) ## build the site and look at pages in Chromium, which must be there
	VTP_TEST_BROWSER=required $(BIN)/python -m pytest -n 0 tests/browser

# Said also where a test fails: a process that coverage slows down may be late.
coverage: $(STAMP) ## run `make test`, or TESTS=FILES, and print which share of each package's lines was run
	$(BIN)/python -m coverage erase
	$(subst -m pytest,-m coverage run -m pytest,$(PYTEST)) -m "not full"; tested=$$?; mkdir -p out && \
	$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage json --quiet -o out/coverage.json && \
	$(BIN)/python scripts/coverage_by_package.py out/coverage.json && exit $$tested

site: $(STAMP) ## the documents as a site with search, in out/site; warnings are errors
	$(BIN)/python scripts/make_site.py

demo: $(STAMP) ## train a small GPT with --vtp-size-list 1,2 on this machine's CPU
	$(BIN)/python examples/demo.py

clean: ## remove caches, build results, the site and what make demo wrote; .venv and .venv-* stay (rm -rf removes them)
	rm -rf build dist out/demo out/site out/coverage.json *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -path "./.venv*" -prune -o -name __pycache__ -type d -exec rm -rf {} +
