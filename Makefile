# Two commands matter: `make serve` and `make test`. On a CUDA machine: `make serve EXTRA=cuda,dev TORCH=torch`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= -c constraints.txt
EXTRA ?= dev
ARGS ?=

.PHONY: serve test compiled test-compiled check format test-gpu bench demo-live clean

serve: $(VENV)/.installed
	@$(BIN)/mcp-discovery model fetch >/dev/null
	@$(BIN)/mcp-discovery certs init
	@$(BIN)/mcp-discovery serve $(ARGS)

# The folder is left out too: its imports need the packages of the extra `cuda`.
test: $(VENV)/.installed
	$(BIN)/pytest -m "not gpu" --ignore=tests/gpu $(ARGS)

# A wheel whose engine's core is C (docs/operations.md). From a copy: what it leaves beside its sources would run
# instead of them, whatever became of these.
COMPILED := build/compiled
compiled: $(VENV)/.installed
	rm -rf $(COMPILED)
	mkdir -p $(COMPILED)/source
	cp -r engine mcp_discovery pyproject.toml README.md LICENSE $(COMPILED)/source
	rm -f dist/*-cp*.whl
	HATCH_BUILD_HOOK_ENABLE_MYPYC=1 $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist $(COMPILED)/source
	@ls dist/*-cp*.whl

# The engine's tests over it, from a folder where nothing else is.
test-compiled: compiled
	$(BIN)/pip install --quiet --no-deps --target $(COMPILED)/test dist/*-cp*.whl
	cp -r tests benchmarks pyproject.toml $(COMPILED)/test
	cd $(COMPILED)/test && $(CURDIR)/$(BIN)/python -c 'from engine.core import COMPILED; assert COMPILED'
	cd $(COMPILED)/test && $(CURDIR)/$(BIN)/python -m pytest -m "not gpu and not interpreted" tests/engine tests/simulation $(ARGS)

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-gpu: $(VENV)/.installed
	$(BIN)/pytest -m gpu $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/mcp-discovery model fetch >/dev/null
	$(BIN)/python -m benchmarks.call $(ARGS)
	$(BIN)/python -m benchmarks.ladder --start --device cpu --rungs 1,2,4,8 --out benchmarks/results/ladder-cpu.json

# Needs the network and npx; uv starts the servers from PyPI.
demo-live: $(VENV)/.installed
	@$(BIN)/mcp-discovery model fetch >/dev/null
	@$(BIN)/pip install --disable-pip-version-check --quiet uv
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks.demo_live $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Touched last, so that an installation that broke off is done again.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --progress-bar on $(TORCH) -e ".[$(EXTRA)]"
	@touch $@
