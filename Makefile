# The commands of this repository. `make help` lists them.
# A Python outside anyone's home directory is preferred: Slurm jobs of the tests run as an ordinary user.
PYTHON ?= $(firstword $(wildcard /usr/bin/python3.11 /usr/bin/python3.12 /usr/bin/python3.13) python3)
VENV := .venv
BIN := $(VENV)/bin
# Python compiles a module when it is first imported; to compile all that pip installs takes longer than the rest.
PIP := $(BIN)/python -m pip
INSTALL := install --quiet --no-compile -c constraints.txt
# What `make setup` installs besides the extra dev, for example trackers.
EXTRAS ?=
STAMP := $(VENV)/.installed$(addprefix -,$(EXTRAS))
# For example `make test PYTEST_ARGS='-k doctor'`; `-n 0` runs all in one process.
# PyTorch's own index of wheels, e.g. https://download.pytorch.org/whl/cpu, .../whl/cu130 or .../whl/rocm7.1; where it
# is empty torch comes from PyPI (or from the index of pip's settings), whose build for Linux on x86-64 brings CUDA.
TORCH_INDEX ?=
# For example `make demo TEXTS=~/texts`.
TEXTS ?=
PYTEST_ARGS ?=
GPU_ARGS ?=
# For example `make soak-slurm VERSION=26.05 TESTS=tests/on_slurm/test_runs.py`; with RECORD=1 the outcome of every file
# goes to benchmarks/results/slurm_versions.json.
VERSION ?= 24.11
TESTS ?= tests/on_slurm tests/faults
SMOKE := $(patsubst %,tests/on_slurm/test_%.py,client runs topology sites outages) tests/faults/test_faults.py
ON_VERSION = $(BIN)/python -m tests.on_slurm.versions $(VERSION) pytest -n 0 $(if $(RECORD),-p tests.on_slurm.version_table)
GPU_PYTHON ?= 3.12
# Children compile their byte code once, whatever the caller's shell says.
unexport PYTHONDONTWRITEBYTECODE
unexport PYTHONPATH

COMMA := ,

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak faults soak-slurm smoke-slurm lint format docs pictures site package bench chaos gpu gpu-wheels slurm-up slurm-down clean

help: ## list the commands
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@# Debian's setuptools cannot build the source archives that lm-eval depends on.
	$(PIP) $(INSTALL) --upgrade pip setuptools hatchling editables
	$(if $(TORCH_INDEX),$(PIP) $(INSTALL) --index-url $(TORCH_INDEX) torch)
	@$(PIP) uninstall --quiet --yes zslurm 2>/dev/null # the former name of the distribution
	$(PIP) $(INSTALL) --no-build-isolation -e '.[dev$(addprefix $(COMMA),$(EXTRAS))]'
	@touch $(VENV)/.installed $@

setup: $(STAMP) ## make .venv and install everything

demo: $(STAMP) ## train a tiny ZAYA1 on real text, or on TEXTS=DIR, on this machine; interrupt it, continue it
	$(BIN)/zslurm demo $(TEXTS)

test: lint ## run every test (Slurm tests need root and the packages that .ci/run installs)
	$(BIN)/python -m pytest -m 'not soak and not faults' -n auto $(PYTEST_ARGS)

soak: $(STAMP) ## run the long tests as well
	$(BIN)/python -m pytest $(PYTEST_ARGS)

faults: $(STAMP) ## inject every fault into a run on a real Slurm; writes benchmarks/results/faults.md (root)
	$(BIN)/python -m pytest tests/faults tests/foreign -m 'not soak' $(PYTEST_ARGS)

soak-slurm: $(STAMP) ## run TESTS on another VERSION of Slurm: 22.05, 24.11 or 26.05 (root)
	$(ON_VERSION) $(TESTS) $(PYTEST_ARGS)

smoke-slurm: $(STAMP) ## run what finds most differences between versions of Slurm, about eight minutes (root)
	$(ON_VERSION) $(SMOKE) -k 'not test_the_run_survives or 04- or 17-' $(PYTEST_ARGS)

lint: $(STAMP) ## ruff, mypy, which package may import which, tables and words of the documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples # as a user's checker sees zslurm
	@# import-linter does not follow links: it gets a copy, as a wheel has it
	@rm -rf .imports && mkdir .imports && cp -rL zslurm .imports/
	cd .imports && ../$(BIN)/lint-imports --no-cache --config ../pyproject.toml
	@rm -rf .imports
	$(BIN)/python -m docs.tables --check
	$(BIN)/python -m docs.vocabulary
	$(BIN)/python -m docs.language

format: $(STAMP) ## let ruff format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## write the tables of the documents that come from the program
	$(BIN)/python -m docs.tables

pictures: $(STAMP) ## draw the pictures of the documents, from results of benchmarks and from commands that run
	$(BIN)/python -m docs.pictures

site: $(STAMP) ## build the documents as a site, in site/
	$(BIN)/python -m docs.site site

package: $(STAMP) ## build wheel and sdist in dist/, check both, and install the wheel alone as on a login node
	@rm -rf dist .package && mkdir .package
	$(BIN)/python -m hatchling build -t sdist -t wheel
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv --without-pip .package/venv
	$(PIP) --python .package/venv/bin/python $(INSTALL) dist/*.whl
	cd .package && ../$(BIN)/python ../tests/installed_alone.py venv/bin
	@rm -rf .package

bench: $(STAMP) ## measure; results go to benchmarks/results/
	$(BIN)/python -m benchmarks

chaos: $(STAMP) ## compare training stacks under faults on the Slurm of the tests, two hours (root)
	$(BIN)/python -m benchmarks chaos_table

# For example `make gpu GPU_ARGS='kernels --results out'`; GPU_ARGS=--list shows the parts. The first Python with a torch
# that finds a GPU is used, .venv first. It keeps the caller's PYTHONPATH, and nothing is downloaded then.
gpu: export PYTHONPATH := $(PYTHONPATH)
gpu: ## build, test and measure everything that needs a GPU, in two calls of nine minutes
	@for python in $(BIN)/python python3; do \
		if $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
			exec $$python -m benchmarks gpu $(GPU_ARGS); \
		fi; \
	done; \
	PYTHONPATH= $(MAKE) --no-print-directory $(STAMP) && $(BIN)/python -m benchmarks gpu $(GPU_ARGS)

# The packages of pyproject.toml that a Python with torch, transformers, typer and h5py may lack.
gpu-wheels: $(STAMP) ## fill wheels/ for a GPU machine without a network; GPU_PYTHON=3.12 is that machine's Python
	@rm -rf wheels
	$(PIP) download --quiet --disable-pip-version-check --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
		--platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 \
		--dest wheels -c constraints.txt pydantic yamlcore zlib-ng

slurm-up: $(STAMP) ## start a real Slurm of 8 nodes on this machine (root)
	@$(BIN)/python -m tests.on_slurm up

slurm-down: $(STAMP) ## stop it and clean up
	@$(BIN)/python -m tests.on_slurm down

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
