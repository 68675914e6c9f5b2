# Two commands on a fresh machine: `make serve` and `make test`. The rest are for work on the project.
# Flags for the server go through ARGS: make serve ARGS="--port 8123".

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: serve test lint bench clean

serve: $(VENV)/installed
	$(BIN)/octavo serve $(ARGS)

test: $(VENV)/installed-test
	$(BIN)/octavo pull smollm2
	$(BIN)/octavo pull gemma3-270m
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict scheduler paged_cache

bench: $(VENV)/installed
	$(BIN)/pip install --quiet --editable ".[bench]"
	$(BIN)/python benchmarks/kv_cache_cost.py
	$(BIN)/python benchmarks/baseline.py

# A stamp per kind of installation, so that a second run starts at once.
$(VENV)/installed: pyproject.toml setup.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/pip install --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info kernels/cpu/*.so
