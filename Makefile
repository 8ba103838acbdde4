# Two commands matter: `make demo` and `make test`. Both set everything up by themselves.
# On Linux without a GPU, save a download of CUDA:  make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP_INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
WORKERS ?= auto

.PHONY: demo test test-slow test-gpu check size docs clean setup
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tercet needs Python 3.11 or newer; $$($(PYTHON) --version) is at hand. Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_INDEX) -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_INDEX) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/tercet demo

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS)

test-slow: $(READY)
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -n $(WORKERS) -m slow --timeout 3600

# On a machine with a CUDA device: the kernels' tests, compiled instead of interpreted, and sizes past 2^31 elements.
test-gpu: $(READY)
	$(BIN)/python -m pytest -p on_gpu -p no:xdist tests/ops -k "triton or gpu"

check: $(READY)
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src tests bench docs README.md

size:
	@find src -name '*.py' | xargs wc -l | sort -n | tail -40

docs: $(READY)
	$(BIN)/python -m pytest tests/docs

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis

# Logits of both architectures beside llama.cpp's; builds llama.cpp once (6 to 15 minutes on two cores). Not part of CI.
.PHONY: interop
interop: $(READY)
	$(BIN)/python bench/interop/run.py
