# `make` lists the targets. The first use of one installs what it needs into .venv.

VENV ?= .venv
BIN := $(VENV)/bin
# Test processes at a time: many tests wait for a process or a timer. The `load` tests run alone, after the
# others.
JOBS ?= 3
# Processes that test with engines at a time, each with engines of its own: a test waits for one engine at a time,
# and a file of tests stays in one process.
ENGINE_JOBS ?= 2
# Not traced: tests that bound the CPU time and memory of whole processes, and generated input.
UNTRACED := tests/blackbox tests/fuzz
# Bytecode is written even where the environment says not to: starts are several times faster with the bytecode
# of packages, and the quick tests start about a thousand processes, of which each would compile kvroute again.
WITH_BYTECODE := env -u PYTHONDONTWRITEBYTECODE
PIP := $(WITH_BYTECODE) $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(WITH_BYTECODE) $(BIN)/pytest
PARALLEL = $(PYTEST) -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help up test chaos churn coverage test-engine test-engine-all engine-venv check lint types layers format docs compose bench bench-routing fuzz lock sbom audit clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: $(VENV)/.installed $(if $(TLS),$(VENV)/.installed-tls) ## run the gateway on 127.0.0.1:8080 with two workers [ENGINE=sim|vllm] [PORT=8080] [WORKERS=2] [TLS=1]
	@exec $(BIN)/kvroute up $(if $(ENGINE),--engine $(ENGINE)) $(if $(PORT),--port $(PORT)) $(if $(WORKERS),--workers $(WORKERS)) $(if $(TLS),--tls)

test: check ## lint, types, import layers, and every test except those with real engines
	$(PARALLEL) -m "not engine and not load" --durations=20 --durations-min=3
	$(PYTEST) -m "load and not engine" $$(grep -rl --include='test_*.py' 'pytest\.mark\.load' tests)

coverage: $(VENV)/.installed-dev ## measure lines and branches that the quick tests reach: 90% or more
	@$(BIN)/coverage erase
	$(PARALLEL) -m "not engine and not load and not heavy" $(UNTRACED:%=--ignore=%) --cov --cov-report= --cov-fail-under=0 \
	  --durations=20 --durations-min=3
	$(BIN)/coverage report

test-engine: engine-venv ## CI's tests against real vLLM workers (CPU); installs the engine into .venv-engine
	PREFILL_DECODE_REQUESTS=3 $(PYTEST) -n $(ENGINE_JOBS) --dist loadfile -m "engine and not full" tests/engine \
	  --durations=20 --durations-min=3

test-engine-all: engine-venv ## all tests against real vLLM workers [ARGS='--random-order SEED']
	$(PYTEST) -m engine tests/engine --durations=20 --durations-min=3 $(ARGS)

engine-venv: $(VENV)/.installed-dev ## install the engine into .venv-engine, once
	$(BIN)/python -m kvroute.deploy.engine_install

fuzz: $(VENV)/.installed-dev ## a million mutated requests and a million event frames [ARGS='--seed 2 --seconds 600']
	$(BIN)/python -m tests.fuzz.run $(ARGS)

check: $(VENV)/.installed-dev ## lint, types and import layers, two at a time
	@$(MAKE) --no-print-directory -j 2 lint types layers

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/plain_words.py
	$(BIN)/python scripts/engine_promises.py

types: $(VENV)/.installed-dev
	$(BIN)/mypy

layers: $(VENV)/.installed-dev
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.installed-dev ## format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(VENV)/.installed ## regenerate configs/reference.yaml, the tables in docs/configuration.md, and docs/metrics.md
	$(BIN)/python -m kvroute.app.reference

compose: $(VENV)/.installed ## render docker-compose.yml and prometheus.yml from configs/compose.yaml
	$(BIN)/python -m kvroute render -f configs/compose.yaml --to compose -o .

bench: $(VENV)/.installed-dev ## measure each part, then the gateway and other routers (ten minutes) [ARGS=--scenarios=a,c]
	@failed=; for bench in bench/micro_*.py 'bench/gateway.py --quick $(ARGS)'; do \
	  echo "== $$bench"; $(BIN)/python $$bench || failed="$$failed $$bench"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

bench-routing: $(VENV)/.installed-dev ## measure routing quality in virtual time: goals, figures, verdicts (minutes) [ARGS=--quick]
	@$(BIN)/python bench/routing.py $(ARGS)
	@$(if $(ARGS),,$(BIN)/python bench/prefill_decode.py)

chaos: $(VENV)/.installed-dev ## break something every 5 s under load, twice ten minutes; needs redis-server [ARGS='--seconds 60']
	@$(BIN)/python bench/chaos.py $(ARGS)

churn: $(VENV)/.installed-dev ## memory, tasks and sockets while workers, sessions and keys come and go, half an hour [ARGS='--seconds 120']
	@$(BIN)/python bench/churn.py $(ARGS)

lock: $(VENV)/.installed-dev ## lock the image's packages, with hashes [ARGS=--upgrade]
	@$(BIN)/python scripts/supply_chain.py lock $(ARGS)

sbom: $(VENV)/.installed-dev ## list the locked packages with licences in sbom.cdx.json (CycloneDX)
	@$(BIN)/python scripts/supply_chain.py sbom

audit: $(VENV)/.installed-dev ## look for known vulnerabilities in the locked packages; error 2: could not run
	@$(BIN)/python scripts/supply_chain.py audit $(ARGS)

clean: ## remove caches and build products
	rm -rf build dist htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests bench -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## also remove the virtual environments
	rm -rf $(VENV) .venv-engine bench/.venv-peers

# --- installation -----------------------------------------------------------------------------------------

# The first of the usual names that runs, is 3.11 or newer and can make a virtual environment; PYTHON=... overrides.
$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$($$python --version)"; \
	    $$python -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); exit 1; \
	  fi; \
	done; \
	echo "kvroute needs Python 3.11 or newer with its venv module (Debian: apt install python3-venv)" >&2; exit 1

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing kvroute into $(VENV) (once, half a minute)"
	@$(PIP) install -qq --editable .
	@touch $@

# What a self-signed certificate needs.
$(VENV)/.installed-tls: $(VENV)/.installed
	@$(PIP) install -qq --editable '.[tls]'
	@touch $@

# Dependency groups need pip 25.1.
$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing kvroute and its development tools into $(VENV) (once, a minute)"
	@$(PIP) install -qq --upgrade 'pip>=25.1'
	@$(PIP) install -qq --editable . --group dev
	@# xds-protos brings older copies of OpenTelemetry's messages, with which its exporter cannot be loaded.
	@$(PIP) install -qq --force-reinstall --no-deps opentelemetry-proto
	@touch $@ $(VENV)/.installed
