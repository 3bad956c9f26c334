# `make serve` and `make test` work in a fresh clone; everything goes into .venv.

PORT  ?= 8000
MODEL ?= demo
ARGS  ?=
WORKERS ?= 4
SLOW_WORKERS ?= 3
RANKS ?= 2
# The backend of MLX: cpu (on a Mac this is Metal), or cuda.
EXTRA ?= cpu
# The first interpreter that is new enough and works (shims of version managers may not).
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo $$python; break; }; done)

BIN   := .venv/bin
SERVES := .venv/.serves-$(EXTRA)
READY := .venv/.ready-$(EXTRA)
LOCK  := requirements/develop.txt
LOCKING := --universal --python-version 3.11 --generate-hashes --quiet \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links

.PHONY: help setup serve test test-slow test-ranks test-ray clients agents lint lint-style lint-types lint-imports lint-docs hooks format bench bench-peers soak chaos abuse fuzz zoo compose-test dist release lock platforms clean

help:
	@echo "make setup         create .venv with everything for serving and testing (make serve: for serving)"
	@echo "make serve         serve MODEL=$(MODEL) on PORT=$(PORT), more flags in ARGS"
	@echo "make test          run all tests except the slow ones, WORKERS=$(WORKERS) in parallel (more pytest arguments in ARGS)"
	@echo "make test-slow     run the slow tests: whole servers with the demo model, soak, fuzz, the zoo"
	@echo "make test-ranks    run the end-to-end tests with engines of RANKS=$(RANKS) ranks"
	@echo "make test-ray      install Ray, and run a cluster of three nodes on this machine"
	@echo "make clients       install real clients, try each, write docs/clients.md (25 minutes)"
	@echo "make agents        install real coding agents, try each, write a table of docs/clients.md (10 minutes)"
	@echo "make docs          write the generated parts of the documentation (except for zoo and clients), and its site"
	@echo "make lint          ruff, mypy, import contracts, the links of the documentation"
	@echo "make hooks         run the checks of make lint, except lint-docs, before each commit (pre-commit)"
	@echo "make format        ruff format, and fix what ruff can fix"
	@echo "make bench         compare with mlx_lm.server, in alternating runs"
	@echo "make bench-peers   install other servers, measure them beside this one, write docs/benchmarks.md (hours; it goes on where it was stopped)"
	@echo "make soak          30 minutes of mixed load against a whole server"
	@echo "make chaos         20 minutes of load while processes, sockets and disks fail (ARGS=\"--seconds 60 --seed 3\")"
	@echo "make abuse         do all that one client could hurt others by, and measure the others"
	@echo "make fuzz          10,000 requests generated from /openapi.json, every answer checked"
	@echo "make test-store    100,000 random operations on the SSD tier, with faults of the disk and kills"
	@echo "make zoo           try every architecture of mlx-lm, write docs/models.md and a list of docs/adapters.md (10 minutes)"
	@echo "make compose-test  build, start and test the three containers (needs a Docker daemon)"
	@echo "make dist          build wheel and source distribution, and try both in clean environments"
	@echo "make release       the same for VERSION=1.2.3, with a commit and a tag"
	@echo "make lock          update the pinned versions to match pyproject.toml (needs uv)"
	@echo "make platforms     check that wheels of all dependencies exist for arm64, x86-64 and macOS (needs uv)"
	@echo "make clean         remove .venv and caches"

setup: $(READY)

# Bytecode of all that is installed is half of an installation's time: what serving imports is
# enough, and COMPILE makes that, also where the environment tells Python to keep none.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --no-compile
COMPILE = PYTHONDONTWRITEBYTECODE= $(BIN)/python -c \
	'import services.supervision.local, services.processes.router, services.processes.kvstore, engine.core, engine.replica.build'
# $(1): a file of pinned versions, $(2): the extras that it has.
UNPINNED = $(PIP_INSTALL) 'setuptools>=77' '.[$(2)]'
ifeq ($(EXTRA),cpu)
INSTALL = $(PIP_INSTALL) --require-hashes -r $(1) || { \
	echo "The pinned versions do not install here; installing what pyproject.toml allows." >&2; \
	$(UNPINNED); }
else
INSTALL = $(UNPINNED)
endif
VENV = test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/it" >&2; exit 1; }; \
	$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear .venv
EDITABLE = PYTHONWARNINGS=ignore $(PIP_INSTALL) --no-deps --editable .
comma := ,

$(SERVES): pyproject.toml requirements/serve.txt
	@$(VENV)
	@$(call INSTALL,requirements/serve.txt,$(EXTRA))
	@$(EDITABLE)
	@$(COMPILE)
	@touch $@

$(READY): pyproject.toml $(LOCK) requirements/vision.txt
	@$(VENV)
	@$(call INSTALL,$(LOCK),$(EXTRA)$(comma)dev)
	@$(PIP_INSTALL) --no-deps --require-hashes -r requirements/vision.txt
	@$(EDITABLE) --no-build-isolation
	@$(COMPILE)
	@touch $(SERVES) $@

serve: $(SERVES)
	@exec $(BIN)/python -m mlx_lm_server --model $(MODEL) --port $(PORT) $(ARGS)

# Workers take files in the order of tests/conftest.py.
BY_FILE = --dist loadfile --no-loadscope-reorder

# Every worker imports all tests: without bytecode, each would compile them at every run.
test test-slow test-ranks: export PYTHONDONTWRITEBYTECODE =

# Many tests wait for processes more than they compute, so there are more workers than cores.
test: setup
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) $(BY_FILE) $(ARGS)

# Each of these tests keeps all cores busy, but not while its servers start and stop, or while it
# waits. Other files are not even read, unless ARGS names some.
SLOW_FILES = $(sort $(shell grep -rl --include='test_*.py' 'mark.slow' tests))
test-slow: setup
	$(BIN)/python -m pytest -m slow -n $(SLOW_WORKERS) $(BY_FILE) $(if $(filter tests%,$(ARGS)),,$(SLOW_FILES)) $(ARGS)

# Without those that are about the router alone, about Ray, or about faults and load for minutes.
NOT_OF_RANKS = $(addprefix %/test_,abuse.py chaos.py fuzz.py localai.py page.py ray.py soak.py two_machines.py)
test-ranks: setup
	TEST_RANKS=$(RANKS) $(BIN)/python -m pytest --timeout 600 $(ARGS) tests/engine/parallel tests/zoo/test_zoo.py \
		$(filter-out $(NOT_OF_RANKS),$(wildcard tests/e2e/*/test_*.py))

# With Ray, which is not among what the other tests need.
test-ray: setup
	$(BIN)/python -m pip install --quiet 'ray>=2.50,<3'
	RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest -s tests/e2e/ranks/test_ray.py $(ARGS)

clients: setup
	$(BIN)/python -m tests.clients --write docs/clients.md $(ARGS)

agents: setup
	$(BIN)/python -m tests.agents --write docs/clients.md $(ARGS)
	REPLAY_TEST=1 $(BIN)/python -m pytest tests/agents/test_replay.py

# The tables of docs/models.md and docs/clients.md take minutes: make zoo, make clients.
.PHONY: docs
docs: setup
	$(BIN)/python -m tests.generated_docs
	$(MAKE) lint-docs
	@echo "the site is build/docs/index.html"

lint: lint-style lint-types lint-imports lint-docs

lint-style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: setup
	$(BIN)/mypy

lint-imports: setup
	$(BIN)/lint-imports --no-logo

# The site in build/docs. A link that leads nowhere is an error. Sphinx has an environment of its own.
lint-docs: build/docs-env/.ready
	build/docs-env/bin/python -m sphinx --conf-dir docs --fresh-env --fail-on-warning --keep-going --quiet . build/docs

build/docs-env/.ready: requirements/docs.txt
	$(PYTHON) -m venv --clear build/docs-env
	build/docs-env/bin/python -m pip install --quiet --no-compile --require-hashes --requirement $<
	@touch $@

hooks: setup
	$(BIN)/python -m pip install --quiet 'pre-commit>=4,<5'
	$(BIN)/pre-commit install

format: setup
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m bench $(ARGS)

bench-peers: setup
	$(BIN)/python -m pip install --quiet 'matplotlib>=3.9,<4'
	$(BIN)/python -m bench.peers --write docs/benchmarks.md $(ARGS)

soak: setup
	$(BIN)/python -m tests.e2e.soak $(ARGS)

chaos: setup
	$(BIN)/python -m tests.e2e.chaos $(ARGS)

abuse: setup
	$(BIN)/python -m tests.e2e.abuse $(ARGS)
	$(BIN)/python -m tests.e2e.abuse --without-keys $(ARGS)

fuzz: setup
	$(BIN)/python -m tests.e2e.fuzz $(ARGS)

.PHONY: test-store
test-store: setup
	$(BIN)/python -m tests.kvstore.store_run $(ARGS)

zoo: setup
	$(BIN)/python -m zoo --write docs/models.md $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m zoo.adapters --write docs/adapters.md)

compose-test: setup
	COMPOSE_TEST=1 $(BIN)/python -m pytest -s tests/deploy/test_compose.py $(ARGS)

# The wheel and the source of this version in dist/, each installed into a clean environment and tried.
dist: setup
	$(BIN)/python deploy/release.py $(if $(URL),--url $(URL))

# The same after a change to VERSION; then a commit and a tag, which are yours to push.
release: setup
	@test -n "$(VERSION)" || { echo "make release VERSION=1.2.3" >&2; exit 1; }
	@test -z "$$(git status --porcelain)" || { echo "there are changes without a commit" >&2; exit 1; }
	$(BIN)/python deploy/release.py --version $(VERSION) $(if $(URL),--url $(URL))
	git commit --quiet --all --message "Version $(VERSION)"
	git tag --annotate v$(VERSION) --message "Version $(VERSION)"
	@echo "git push origin HEAD v$(VERSION)   publishes it (.github/workflows/release.yml)"

# PIN="-P name" upgrades one package; without it, only pins change that have to.
lock:
	uv pip compile pyproject.toml --extra cpu $(PIN) --output-file requirements/serve.txt $(LOCKING)
	uv pip compile pyproject.toml --extra cpu --extra dev $(PIN) \
		--constraints requirements/serve.txt --output-file requirements/develop.txt $(LOCKING)
	uv pip compile pyproject.toml --extra redis \
		--constraints requirements/develop.txt --output-file requirements/router.txt $(LOCKING)
	$(PYTHON) -c 'import tomllib; from pathlib import Path; \
	print(*tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"], sep="\n")' \
	| uv pip compile - $(PIN) --output-file requirements/docs.txt $(LOCKING)

# Wheels alone, of the oldest systems that MLX supports. Nothing is installed.
platforms:
	@for python in 3.11 3.14; do \
		for platform in aarch64-manylinux_2_35 x86_64-manylinux_2_35; do \
			uv pip compile pyproject.toml --all-extras --python-version $$python \
				--python-platform $$platform --only-binary :all: --quiet --output-file /dev/null || exit 1; \
			echo "$$platform, Python $$python: all extras"; \
		done; \
		MACOSX_DEPLOYMENT_TARGET=14.0 uv pip compile pyproject.toml --extra dev --python-version $$python \
			--python-platform aarch64-apple-darwin --only-binary :all: --quiet --output-file /dev/null || exit 1; \
		echo "aarch64-apple-darwin, Python $$python: the server and its tests"; \
	done

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
