# The only commands anyone needs. `make demo` and `make test` work on a fresh machine with Python 3.11+.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Modules are compiled when they are first imported: compiling all takes over a minute, and most are never imported.
PIP    := $(BIN)/python -m pip install --no-compile --disable-pip-version-check --constraint constraints.txt
UV     := $(shell command -v uv 2>/dev/null)
# Use uv if it is installed, except for torch: only pip reads the index that may be configured for the CPU build.
ADD    := $(if $(UV),$(UV) pip install --python $(BIN)/python --constraint constraints.txt,$(PIP))
# The extra envs is installed last, because it needs box2d.
EXTRAS := torch,envpool,lora,tensorboard,ray,kubernetes,docs,dev

.PHONY: help setup demo test bytecode test-quick test-long test-kubernetes test-criu coverage lint format docs docs-serve bench bench-buffer scaling aaps stagger defaults learning offpolicy aride async elastic scale bench-peers clean
help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(VENV)/.demo-ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "farstep needs Python 3.11 or newer; try: make PYTHON=python3.11 demo")'
	@echo "creating $(VENV): torch (about 200 MB), farstep and Gymnasium"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(if $(UV),$(PIP) torch==2.13.0 && $(ADD),$(PIP) torch==2.13.0) --editable '.[torch]'
	@touch $@

setup: $(VENV)/.ready  ## create .venv and install farstep with all that its tests and benchmarks need
$(VENV)/.ready: $(VENV)/.demo-ready
	@echo "installing what tests and benchmarks need (a few minutes the first time: environments, Ray, JAX, tools)"
	@# box2d has no wheel for ARM: box2d-py is compiled beside the rest, with the swig that pip brings.
	@test "$$(uname -m)" = x86_64 || { echo "  box2d (compiling, about a minute)"; $(PIP) --quiet swig setuptools wheel && { \
	  PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(VENV)/wheels box2d-py==2.3.8 & box2d=$$!; \
	  $(ADD) --quiet --editable '.[$(EXTRAS)]' && wait $$box2d && $(ADD) --quiet $(VENV)/wheels/*.whl; }; }
	@$(ADD) --quiet --editable '.[envs,$(EXTRAS)]'
	@touch $(VENV)/.docs-ready $@

$(VENV)/.docs-ready: $(VENV)/.demo-ready  # `make setup` makes it too
	@echo "installing what the site needs"
	@$(ADD) --quiet --editable '.[docs]'
	@touch $@

demo: $(VENV)/.demo-ready  ## train CartPole-v1 on two local workers until it is solved; installs only torch, farstep and Gymnasium
	@$(BIN)/python examples/cartpole_ppo.py
	@echo "next: . $(BIN)/activate, then farstep train ppo --env CartPole-v1"

test: setup      ## all tests except the long ones, in four processes, since many of them mostly wait
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

bytecode: setup  ## compile what tests import once; otherwise each of their processes does on a fresh clone
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only --quiet --quiet

test-quick: setup  ## units and in-process contracts, two processes, under two minutes: run it while you edit
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" \
	  --ignore tests/cluster --ignore tests/docs --ignore tests/engines --ignore tests/learning $(PYTEST_OPTIONS)

test-long: setup ## tests that `make test` leaves out: benchmarks, learning, and the engines of the other tests
	@$(BIN)/python -m pytest -m long $(PYTEST_OPTIONS)

test-kubernetes: setup  ## the launcher contract on a real Kubernetes cluster, built once from Debian's sources (needs root)
	@$(BIN)/python -m tests.engines.kubernetes_cluster

test-criu: setup  ## workers that are parked on disk, with criu, built once from Debian's sources (needs root)
	@$(BIN)/python -m tests.engines.criu_build

coverage: setup  ## make test, then the modules of which it ran less than 90 %; some tests: PYTEST_OPTIONS=tests/wire
	@$(BIN)/python -m tests.line_coverage $(MAKE) --no-print-directory test

lint: setup      ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup    ## let ruff rewrite the code
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

docs: $(VENV)/.docs-ready  ## build the documentation as a site into build/site; open build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # not --quiet, which hides and ignores warnings

docs-serve: $(VENV)/.docs-ready  ## show the site in a browser, and build it again when a page changes
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

bench: setup     ## throughput against the limit and the peers that bench-peers installed
	@$(BIN)/python benchmarks/throughput.py

bench-buffer: setup  ## rows per second of the buffer against plain arrays and the peers that bench-peers installed
	@$(BIN)/python benchmarks/buffer.py

scaling: setup   ## how throughput and the head's cost grow with workers, environments and rollout length
	@$(BIN)/python benchmarks/scaling.py

aaps: setup      ## the AAPS experiment: return, pulls and bytes for thresholds from 0 to 1 (many hours; continues where it was stopped)
	@$(BIN)/python benchmarks/aaps.py

stagger: setup   ## staggered resets against environments that begin together, on a chain and on Pendulum (ten minutes)
	@$(BIN)/python benchmarks/stagger.py

defaults: setup  ## steps that every learner needs with its defaults, 16 to 128 environments (many hours; continues where it was stopped)
	@$(BIN)/python benchmarks/defaults.py --tasks main Pendulum-v1 HalfCheetah-v5

learning: setup  ## seconds and steps to learn CartPole and LunarLander, beside CleanRL and RLlib (three hours; see the top of the file)
	@$(BIN)/python benchmarks/learning.py

offpolicy: setup ## replay learners: updates during collection or after it, and SAC and DQN beside CleanRL, SB3 and RLlib (hours)
	@$(BIN)/python benchmarks/offpolicy.py

aride: setup     ## A-RIDE without DPER, Retrace, asynchronous workers and warm-up (half an hour; continues where it was stopped)
	@$(BIN)/python benchmarks/aride.py --jobs 3 --seeds 5

async: setup     ## asynchronous against synchronous PPO, with environments that take uneven time (half an hour)
	@$(BIN)/python benchmarks/async.py

elastic: setup   ## released against held workers and Ray actors, starts, adaptive batches, shared cores (half an hour on 16 cores; continues where it was stopped)
	@$(BIN)/python benchmarks/elastic.py

scale: setup     ## what up to 1,000 simulated workers cost one head (three minutes)
	@$(BIN)/python benchmarks/scale.py

bench-peers:     ## install the peers, each in a virtual environment of its own
	@$(PYTHON) benchmarks/setup_peers.py

clean:           ## remove what make made
	rm -rf $(VENV) benchmarks/.venvs
