# Every target sets itself up in .venv. Needed: Python 3.11 or newer, make, and a package index.

BIN := .venv/bin
READY := .venv/.ready

# What `make run` starts, how many processes `make test` uses, what is passed on to pytest or the benchmarks, and how
# coverage is measured (nothing: not at all, a fifth faster).
RUN ?= postbus demo --pipeline
JOBS ?= 3
ARGS ?=
COV ?= --cov=postbus --cov-branch --cov-report=term

# Hundreds of tests start Python: with compiled modules at hand that takes two thirds of the time.
export PYTHONDONTWRITEBYTECODE :=

EXTRAS := dev spark nats kafka mcp
COMPILE = $(BIN)/uv pip compile pyproject.toml --quiet --universal --generate-hashes --no-emit-index-url \
	--custom-compile-command 'make lock' $(UPGRADE)

.DEFAULT_GOAL := help
.PHONY: help run test check bench faults services docs lock clean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

run: $(READY) ## start Postbus and show it working
	$(BIN)/$(RUN) $(ARGS)

test: $(READY) ## run every test, with coverage; a few that fail are tried once more alone
	$(BIN)/python tools/gate.py -n $(JOBS) --dist loadgroup $(COV) $(ARGS)

check: $(READY) ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY) ## run the benchmarks and keep their results
	$(BIN)/python -m benchmarks $(ARGS)

faults: $(READY) ## run the full fault campaign (make test runs the short one)
	POSTBUS_CAMPAIGN=full $(BIN)/python -m pytest tests/faults tests/broker tests/conformance tests/inbox tests/kernel tests/remote \
		tests/server tests/spark tests/upstream $(ARGS)

services: $(READY) ## run a NATS server and a Kafka broker to try things on, until Ctrl-C
	@$(BIN)/python tools/services.py

docs: $(READY) ## write docs/reference anew
	$(BIN)/python tools/reference.py

# all.txt is resolved first and holds the others to the same versions, so any of them can be installed together.
lock: $(READY) ## write the lock files anew (UPGRADE=--upgrade takes newer versions)
	@test -x $(BIN)/uv || $(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(COMPILE) --all-extras -o requirements/all.txt
	$(COMPILE) -c requirements/all.txt -o requirements/core.txt
	for extra in $(EXTRAS); do $(COMPILE) -c requirements/all.txt --extra $$extra -o requirements/$$extra.txt || exit 1; done
	$(subst pyproject.toml,requirements/bench-peers.in,$(COMPILE)) -c requirements/all.txt -o requirements/bench-peers.txt

clean: ## remove everything that make made
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml requirements/dev.txt tools/setup tools/services.py deploy/kafka/pom.xml deploy/spark/pom.xml
	@tools/setup
	@touch $@
