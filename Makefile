# Two commands on a fresh machine: `make serve` and `make test`. The rest are for work on the project.
# Flags for the server go through ARGS: make serve ARGS="--port 8123".

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# The oldest release of Triton that the kernels must run on; the installed one is the newest.
OLDEST_TRITON := 3.6.0
OLDEST_TRITON_DIR := .triton-$(OLDEST_TRITON)

# The clients bring hundreds of packages that neither the server nor its tests want.
CLIENTS_VENV := .venv-clients
CLIENTS_OF_PYPROJECT := import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"], sep="\n")

.PHONY: serve test clients lint verify kernels bench paper peers clean

serve: $(VENV)/installed
	$(BIN)/octavo serve $(ARGS)

test: $(VENV)/installed-test
	$(BIN)/octavo pull smollm2
	$(BIN)/octavo pull gemma3-270m
	$(BIN)/python -m pytest $(ARGS)

# Public clients of the APIs against the real server; prints a table and fails if a call does.
clients: $(VENV)/installed $(CLIENTS_VENV)/installed
	$(BIN)/octavo pull smollm2
	$(CLIENTS_VENV)/bin/python -m tests.clients --server-python $(BIN)/python $(ARGS)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict scheduler paged_cache

# All of deploy/, for real where this machine has the tools: image, alerts, board, manifests, pages, load test.
verify: $(VENV)/installed-test
	$(BIN)/octavo pull smollm2
	deploy/verify.sh --python $(BIN)/python $(ARGS)

# All that can be known of the GPU kernels without a GPU: about a quarter of an hour on two cores.
kernels: $(VENV)/installed-test $(OLDEST_TRITON_DIR)/installed
	$(BIN)/python -m tests.kernels.kernel_report --other-triton $(OLDEST_TRITON_DIR) $(ARGS)

bench: $(VENV)/installed
	$(BIN)/pip install --quiet --editable ".[bench]"
	$(BIN)/python benchmarks/kv_cache_cost.py
	$(BIN)/python benchmarks/baseline.py
	$(BIN)/python benchmarks/host_step_cost.py
	$(BIN)/python benchmarks/edge_cost.py
	$(BIN)/python benchmarks/prefix_cache_cost.py
	$(BIN)/python benchmarks/fairness.py
	$(BIN)/python benchmarks/quality.py
	$(BIN)/python benchmarks/cpu_limits.py
	$(BIN)/python benchmarks/context_cost.py

# The figures of the PagedAttention paper on this engine; writes docs/paper.md too. About ten minutes on two cores.
paper: $(VENV)/installed
	$(BIN)/pip install --quiet --editable ".[bench]"
	$(BIN)/octavo pull smollm2
	$(BIN)/python benchmarks/step_cost_model.py
	$(BIN)/python benchmarks/scheduler_cost.py
	$(BIN)/python benchmarks/paper.py $(ARGS)

# Octavo beside llama.cpp's server and vLLM, which must be there already; writes docs/peers.md too. About 25 minutes:
# make peers ARGS="--llama-server PATH/llama-server --vllm PATH/bin/vllm --vllm-model DIR"
peers: $(VENV)/installed
	$(BIN)/octavo pull smollm2
	$(BIN)/python benchmarks/peers.py $(ARGS)

# A stamp per kind of installation, so that a second run starts at once.
$(VENV)/installed: pyproject.toml setup.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --editable .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(BIN)/pip install --editable ".[test]"
	touch $@

$(CLIENTS_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(CLIENTS_VENV)
	$(PYTHON) -c '$(CLIENTS_OF_PYPROJECT)' > $(CLIENTS_VENV)/clients.txt
	$(CLIENTS_VENV)/bin/pip install --requirement $(CLIENTS_VENV)/clients.txt
	touch $@

$(OLDEST_TRITON_DIR)/installed: $(VENV)/installed-test
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(OLDEST_TRITON_DIR) triton==$(OLDEST_TRITON)
	touch $@

clean:
	rm -rf $(VENV) $(CLIENTS_VENV) $(OLDEST_TRITON_DIR) build *.egg-info kernels/cpu/*.so
