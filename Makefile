# Everything a fresh machine needs is set up by the targets themselves: Python 3.11 or newer, make, gcc.
PYTHON ?= python3
VENV ?= .venv
# Processes of the test suites; one that has no more to do takes over from another (tests of a file stay together till then).
WORKERS ?= 2
IN_SEVERAL = -n $(WORKERS) --dist worksteal
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help demo demo-vllm bench-vllm test browser test-slow test-vllm remote-ready test-remote test-remote-vllm bench-remote soak campaign planted-faults planted-faults-vllm bench bench-peers bench-report hit-ratios lint types wheel clean

help:
	@echo "make demo       replay a real trace with real bytes through the cache, kill it midway, go on warm"
	@echo "make demo-vllm  vllm serve on CPUs: a chat, a stop, the chat again; then a kill (3 GB the first time; ARGS=--json)"
	@echo "make test       the test suite; COV=1: with branch coverage; HYPOTHESIS_PROFILE=nightly: other examples"
	@echo "make browser    install chromium where that is possible: the tests open a report page in it"
	@echo "make test-slow  the tests marked slow (minutes)"
	@echo "make bench      all benchmarks, about 8 minutes; QUICK=1: a few minutes; SMOKE=1: do they run?"
	@echo "make bench-peers  tiercache and its peers in one run, about 10 minutes, and the first time to build (ARGS=--help)"
	@echo "make test-vllm  the real vLLM on CPUs, 3 GB the first time; SLOW=1: all of it; VLLM=0.28.0: another version of it"
	@echo "make test-remote  key tiers on the real Mooncake Store and redis-server, in a private network (142 MB the first time; ARGS=...)"
	@echo "make bench-remote  the Mooncake tier against Mooncake's raw client, in pairs (under a minute; ARGS=--json)"
	@echo "make test-remote-vllm  real vLLM over a real Redis and a real Mooncake Store, which are killed under load"
	@echo "make bench-vllm first tokens of a real vLLM on CPUs: computed, loaded, and with its own connectors (about 15 minutes)"
	@echo "make soak       10 minutes at 100 % full with faults: nothing may grow (SOAK_S=seconds)"
	@echo "make campaign   10,000 power cuts (about four minutes on two quiet cores)"
	@echo "make bench-report  docs/benchmarks.md and its pictures, from the newest results"
	@echo "make hit-ratios  every policy on whole traces (../shared/traces, or ARGS='--traces DIR'): docs/policy.md"
	@echo "make planted-faults  take each protection out on purpose: the tests must notice (minutes)"
	@echo "make planted-faults-vllm  the same with the real vLLM, the most telling ones; ALL=1: each that can be seen there"
	@echo "make lint       ruff: lint and format"
	@echo "make types      mypy --strict"
	@echo "make wheel      build the wheel and smoke-test it in a clean venv"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[cli]'
	touch $@

$(VENV)/test.stamp: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[test,lint]'
	touch $@ $(VENV)/demo.stamp

demo: $(VENV)/demo.stamp
	$(BIN)/tiercache demo

demo-vllm:
	python=$$($(PYTHON) tests/vllm/vllm_venv.py) && PYTHONPATH="$(CURDIR)" "$$python" -m bench.vllm.demo $(ARGS)

# The gate is the share of branches; the figure that coverage itself shows mixes lines into it.
test: $(VENV)/test.stamp
ifdef COV
	$(BIN)/python -m pytest $(IN_SEVERAL) --cov --cov-report=term --cov-report=html --cov-report=json
	$(BIN)/python tests/branch_coverage.py htmlcov/coverage.json 90
else
	$(BIN)/python -m pytest $(IN_SEVERAL)
endif

# As root with apt-get; anywhere else, or where that fails, the tests that need it skip, and this says so. Never fails.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && export DEBIAN_FRONTEND=noninteractive && timeout 300 apt-get -qq update >/dev/null \
	  && timeout 600 apt-get -qq install -y --no-install-recommends chromium >/dev/null; } \
	  || echo "*** NO CHROMIUM, AND IT COULD NOT BE INSTALLED: THE TESTS OF THE REPORT PAGE IN A BROWSER ARE SKIPPED ***" >&2

test-slow: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(IN_SEVERAL) -m slow

# vLLM lives in an environment of its own, in a cache folder that checkouts share; the package is this checkout's.
VLLM_MARKS := vllm and not remote$(if $(SLOW),, and not slow)
test-vllm:
	python=$$($(PYTHON) tests/vllm/vllm_venv.py) $(if $(VLLM),&& older=$$($(PYTHON) tests/vllm/vllm_venv.py --overlay $(VLLM))) \
	  && PYTHONPATH="$${older:+$$older:}$(CURDIR)" "$$python" -m pytest $(IN_SEVERAL) -m "$(VLLM_MARKS)" tests/vllm $(ARGS)

# Mooncake's clients listen on every address, so all of it runs in a network of its own, which has lo alone; what has to
# come from outside is fetched before that. Most of these tests wait: more of them at a time than there are cores.
REMOTE_S ?= 1200
IN_PRIVATE := timeout -k 10 $(REMOTE_S) $(BIN)/python tests/remote_real/private_network.py
REMOTE_PATH = $(BIN)/python tests/remote_real/debian_packages.py >/dev/null \
	  && exports=$$($(BIN)/python tests/remote_real/mooncake_folder.py --shell) && eval "$$exports"
# Can Debian's packages, Mooncake's wheel and a network namespace be had here?
remote-ready: $(VENV)/test.stamp
	$(REMOTE_PATH) && $(IN_PRIVATE) true

test-remote: WORKERS = 4
test-remote: $(VENV)/test.stamp
	$(REMOTE_PATH) && $(IN_PRIVATE) $(BIN)/python -m pytest -m remote tests/remote_real $(IN_SEVERAL) $(ARGS)

test-remote-vllm: $(VENV)/test.stamp
	$(REMOTE_PATH) && python=$$($(PYTHON) tests/vllm/vllm_venv.py) \
	  && $(IN_PRIVATE) "$$python" -m pytest -m "vllm and remote" tests/vllm $(IN_SEVERAL) $(ARGS)

bench-remote: $(VENV)/test.stamp
	$(REMOTE_PATH) && $(IN_PRIVATE) $(BIN)/python -m bench.remote.tier $(ARGS)

soak: $(VENV)/test.stamp
	$(BIN)/python tests/faults/soak.py --seconds $(or $(SOAK_S),600)

campaign: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m campaign

$(VENV)/bench.stamp: pyproject.toml | $(BIN)/python
	$(PIP) install -e '.[bench]'
	touch $@

# BENCH_FLAGS: --bench-dir=DIR (where files go), --bench-trace=FILE, --bench-strict, -k lookup, ...
BENCH_SCALE := $(if $(SMOKE),smoke --bench-no-results,$(if $(QUICK),quick,full))
bench: $(VENV)/bench.stamp
	$(BIN)/python -m pytest -q bench --bench-scale $(BENCH_SCALE) $(BENCH_FLAGS)

bench-report: $(VENV)/bench.stamp
	$(BIN)/python -m bench.report

hit-ratios: $(VENV)/demo.stamp
	$(BIN)/python -m bench.hit_ratios $(ARGS)

bench-peers: $(VENV)/demo.stamp
	$(BIN)/python bench/peers/run.py $(ARGS)

bench-vllm:
	python=$$($(PYTHON) tests/vllm/vllm_venv.py) && PYTHONPATH="$(CURDIR)" "$$python" -m bench.vllm.run $(ARGS)

planted-faults: $(VENV)/test.stamp
	$(BIN)/python tests/planted/plant.py

planted-faults-vllm:
	python=$$($(PYTHON) tests/vllm/vllm_venv.py) && PYTHONPATH="$(CURDIR)" "$$python" tests/planted/plant.py --real-vllm $(if $(ALL),--all) $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test.stamp
	$(BIN)/mypy

wheel: $(VENV)/test.stamp
	rm -rf dist $(VENV)/wheel
	$(BIN)/python -m build --wheel --outdir dist .
	$(PYTHON) -m venv $(VENV)/wheel
	$(VENV)/wheel/bin/pip --quiet install "$$(ls dist/*.whl)[cli]"
	$(VENV)/wheel/bin/python tests/smoke_wheel.py
	$(VENV)/wheel/bin/tiercache replay example --no-data --requests 500 --dram 5% --json >/dev/null

clean:
	rm -rf $(VENV) dist build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis htmlcov .coverage
