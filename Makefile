# Every target makes its own environment: `make run` and `make test` are all a fresh machine needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')

VERSION ?= 2.15.0
# An index of torch's wheels, for instance of those without CUDA: make run TORCH_INDEX=...
TORCH_INDEX ?=
export TORCH_INDEX

.PHONY: help run picture test test-all test-gpu test-torch test-min endurance mutants lint docs bench clean format

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# torch comes first and through the constraints, so that nothing else can pull another build of it.
$(VENV)/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install --quiet --constraint constraints.txt --editable '.[lab]'
	@touch $@

# `make run` needs neither the test tools nor the documentation tools, so they are a separate step.
$(VENV)/.ready: $(VENV)/.run
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	@touch $@

# The type checker of editors brings its own JavaScript engine.
$(VENV)/.lint: $(VENV)/.ready
	$(PIP) install --quiet --constraint constraints.txt --editable '.[lint]'
	@touch $@

$(VENV)/.bench: $(VENV)/.ready
	$(PIP) install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $@

run: $(VENV)/.run  ## the tour, then the default race: prints numbers and a table, and writes tour.html and race.html
	@$(BIN)/moduli tour
	@$(BIN)/moduli race $(ARGS)

picture: $(VENV)/.run  ## run the default race and redraw the picture of the README from it
	@$(BIN)/moduli race --out site/race.html
	@$(BIN)/python docs/img/draw.py site/race.jsonl

# Measuring coverage doubles the run time, so only .ci/run does it (COVERAGE=1), and the laws with thousands of cases run without it.
test: $(VENV)/.ready  ## the test suite, warnings as errors; without what takes minutes; COVERAGE=1 measures coverage
ifdef COVERAGE
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term --part covered $(ARGS)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --part uncovered $(ARGS)
else
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)
endif

test-all: $(VENV)/.ready  ## every test there is: killed writers, process pools, all of the law book (about half an hour)
	@$(MAKE) test ARGS="--all $(ARGS)"

# Triton takes a gigabyte, so it gets its own environment.
$(VENV)-gpu/.ready: pyproject.toml constraints.txt
	@test -x $(VENV)-gpu/bin/python || $(PYTHON) -m venv $(VENV)-gpu
	$(VENV)-gpu/bin/pip --disable-pip-version-check install --quiet --constraint constraints.txt torch
	$(VENV)-gpu/bin/pip --disable-pip-version-check install --quiet --editable '.[gpu-test]'
	@touch $@

test-gpu: $(VENV)-gpu/.ready  ## generated Triton kernels in its interpreter, and compiled for GPUs that need not be here
	@TRITON_INTERPRET=1 $(VENV)-gpu/bin/python -m pytest tests/gpu $(ARGS)

test-torch: $(VENV)/.run  ## the tests with another torch: make test-torch VERSION=2.14.1 ARGS='tests/labels -q'
	@$(BIN)/python tools/torch_venv.py $(VERSION) -- $(ARGS)

test-min: $(VENV)/.run  ## the tests with the oldest release of each dependency that pyproject.toml allows
	@$(BIN)/python tools/torch_venv.py minimum -- $(ARGS)

endurance: $(VENV)/.ready  ## threads, interrupts and damaged files for at most ten minutes, with counts: make endurance ARGS='interrupts'
	@$(BIN)/python tools/endurance $(ARGS)

mutants: $(VENV)/.ready  ## break links line by line and see whether their quick tests notice: make mutants ARGS='Dion LMO'
	@$(BIN)/python tools/mutants.py $(ARGS)

lint: $(VENV)/.lint  ## ruff, mypy --strict, pyright on a user's program, the order of the rooms, their front doors, and their names
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/basedpyright --project tools/consumer --pythonpath $(BIN)/python
	@$(BIN)/lint-imports
	@$(BIN)/python tools/check_rooms.py
	@$(BIN)/python tools/check_names.py

docs: $(VENV)/.ready  ## draw the picture of the README if its race is new, run new notebooks, and build the site into site/
	@$(BIN)/python docs/img/draw.py
	@$(BIN)/python docs/gallery/build.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.bench  ## side-by-side ratios against the peers, written to docs/benchmarks.md
	@$(BIN)/python benchmarks/run.py $(ARGS)

format: $(VENV)/.ready  ## let ruff rewrite what it can
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format --quiet .

clean:  ## remove everything that was built, the environment included
	rm -rf $(VENV) $(VENV)-gpu site dist build .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
