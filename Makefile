# Few verbs: install, serve, test, check, bench. Each sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2
ARGS ?=
PART ?= 1/1

# Tests start hundreds of processes, and each would compile penstock anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install serve test test-flaky test-gpu gpu-packages test-thorough check format bench bench-cpu bench-gateway test-peers test-peers-vllm test-kubernetes test-ray test-nixl test-parallel drills console dist lock clean

install: $(VENV)/.installed

serve: $(VENV)/.installed  ## serve MODEL; ARGS="--port 8011" passes arguments on
	$(BIN)/penstock serve $(MODEL) $(ARGS)

test: $(VENV)/.installed-dev  ## every check and every test; PARTS="checks fast slow"
	$(BIN)/python -m tools.suite $(PARTS)

test-flaky: $(VENV)/.installed-dev  ## the tests again and again beside a load, on one core; ARGS="--minutes 60"; goes on where it was
	$(BIN)/python -m tools.flaky $(ARGS)

test-gpu:  ## PART=1/3 PYTHON=python3: what needs a GPU, with what that Python has; nothing is installed
	$(PYTHON) -m tools.gpu_tests --part $(PART) $(FILES)

gpu-packages: $(VENV)/.installed-dev  ## what test-gpu needs beside torch, for a machine that can install nothing; PYTHON_VERSION=3.12
	$(BIN)/python -m tools.gpu_tests.packages --python $(or $(PYTHON_VERSION),3.12)

test-thorough: $(VENV)/.installed-dev  ## the property tests, each with ten times as many examples
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile thorough -n 2

check: $(VENV)/.installed-dev  ## format, lint, types, import contracts, docs freshness
	$(BIN)/python -m tools.suite checks

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.helm

bench: bench-cpu

bench-cpu: $(VENV)/.installed-dev  ## ARGS="--url llama.cpp=http://127.0.0.1:9001" measures a peer in the same run
	$(BIN)/penstock bench cpu --write docs/benchmarks.md $(ARGS)

bench-gateway: $(VENV)/.installed-dev  ## ARGS="--peer 'vllm-router=…'" measures a peer too
	$(BIN)/penstock bench gateway --write docs/benchmarks.md $(ARGS)

drills: $(VENV)/.installed-dev  ## the tests that take too long for `make test`
	$(BIN)/python -m pytest -m drill

drill-%: $(VENV)/.installed-dev  ## survival, limits, refusals, spike, greedy, pressure, slow_provider, slow_clients, fleet, zone, spot, rollout, fuzz, hostile: real processes, attacked
	$(BIN)/python -m tools.drills.$* $(ARGS)

test-parallel: $(VENV)/.installed-dev  ## models over several ranks: every family in every layout, as processes on this machine's CPU
	$(BIN)/python -m pytest tests/parallel tests/runner/ranks -m slow $(ARGS)

test-peers: test-peers-vllm  ## real vLLM and SGLang on a CPU, Triton and Dynamo's mocker as replicas, the Agents SDK and Codex as clients: they are fetched first
	$(BIN)/python tools/peers/install.py .peers
	PENSTOCK_PEERS=.peers $(BIN)/python -m pytest tests/peers tests/gateway/replicas/test_engine_poller.py -m slow

test-peers-vllm: $(VENV)/.installed-dev  ## vLLM's own tests of its API, against penstock; ARGS="openai/completion/test_completion.py -k echo"
	$(BIN)/python -m tools.peers.vllm_tests .peers $(ARGS)

test-ray: .ray/.installed  ## the fleet's driver on a real Ray cluster with pretended GPUs: Ray is fetched first
	.ray/bin/python -m pytest tests/ray -p no:xdist $(ARGS)

# An environment of its own, which sees the other one: Ray brings 60 packages.
.ray/.installed: $(VENV)/.installed-dev
	@echo "Installing Ray into .ray: about 400 MB"
	@$(BIN)/python -m venv .ray
	@.ray/bin/python tools/pip_progress.py .ray/pip.log install 'ray[default]>=2.60'
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> .ray/lib/$$(ls .ray/lib)/site-packages/penstock.pth
	@touch $@

test-nixl: .nixl/.installed  ## KV blocks by NIXL, over UCX on this machine: NIXL is fetched first
	.nixl/bin/python -m pytest tests/transfer -k nixl -p no:xdist $(ARGS)

# As Ray's; its dependencies are there already.
.nixl/.installed: $(VENV)/.installed-dev
	@echo "Installing NIXL into .nixl: about 70 MB"
	@$(BIN)/python -m venv .nixl
	@.nixl/bin/python tools/pip_progress.py .nixl/pip.log install --no-deps nixl-cu12==1.5.1
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> .nixl/lib/$$(ls .nixl/lib)/site-packages/penstock.pth
	@touch $@

test-kubernetes: $(VENV)/.installed-dev  ## pods of real processes on a real control plane, as root: it is built first; FILES="tests/kubernetes/test_node_agent.py"
	$(BIN)/python -m tools.kubernetes.install
	$(BIN)/python -m pytest -m drill $(or $(FILES),tests/kubernetes)

console: $(VENV)/.installed  ## the web console's page, from web/ into the package: needs npm, and nobody else does
	$(BIN)/python tools/console.py

dist: $(VENV)/.installed  ## what PyPI gets, built and checked, in dist/
	@$(PIP) build==1.6.1 twine==7.0.0
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

lock: $(VENV)/.installed
	$(BIN)/python tools/lock.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# What pip prints is kept, and shown if it fails.
PIP = $(BIN)/python tools/pip_progress.py $(VENV)/pip.log install

$(VENV)/.installed: pyproject.toml requirements.lock requirements-torch.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "penstock needs Python 3.11 or newer")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing penstock and what it needs into $(VENV): a minute or two, 1.1 GB (5.5 with torch for CUDA)"
	@$(PIP) --require-hashes -r requirements.lock
	@$(PIP) -r requirements-torch.lock
	@$(PIP) --no-deps -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.lock
	@echo "Installing what the tests need besides: about 1 GB, a minute or two"
	@$(PIP) --require-hashes -r requirements-dev.lock
	@touch $@
