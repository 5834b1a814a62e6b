# make demo | test | bench: each sets up its own virtual environment first, and again when the requirements change.
#
# PYTHON=…          the interpreter to build it with (the first of the list below that is 3.11 or newer)
# TORCH_INDEX=…     the index to get PyTorch from: that of its small CPU build, say
# CUDNN=1           install cuDNN too (1 GB), for the tests that ask it; they are skipped without

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CUDNN_STAMP := $(VENV)/.cudnn
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
TORCH_INDEX ?=
CUDNN ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test bench format clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/memsize report notebooks/model.py:Test --input 3,64,64

test: $(STAMP) $(if $(CUDNN),$(CUDNN_STAMP))
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest --numprocesses 2 --dist worksteal

bench: $(STAMP)
	$(BIN)/python -m benchmarks

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch comes first and alone: once the pinned build is there, nothing that depends on torch asks for another.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "memsize needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(PIP) --constraint constraints.txt --editable '.[test,dev,quant]'
	@touch $@

$(CUDNN_STAMP): $(STAMP)
	$(PIP) --constraint constraints.txt --editable '.[cudnn]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
