# The verbs of the project. `make` lists them; each one sets up .venv first, when it is not there or out of date.

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

.NOTPARALLEL:
.PHONY: help setup serve test lint type fmt bench docs constraints

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.installed ## install the tested versions into .venv

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("roseinfer needs Python 3.11 or newer and $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -c 'import ensurepip' || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,dev]'
	@touch $@

serve: setup ## serve on port 8000; options in ARGS="--port 9000"
	@exec $(BIN)/roseinfer serve $(ARGS)

lint: setup ## style, formatting, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

type: setup ## mypy --strict over src, tests and tools
	$(BIN)/mypy

test: lint type ## everything that must hold: lint, types, tests
	$(BIN)/pytest $(ARGS)

fmt: setup ## format, and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup ## 64 streams, 20 ms apart, 128 tokens each, through the engine
	$(BIN)/roseinfer bench streaming --prompt Hello --pretok --num-requests 64 --submit-interval-ms 20 --submit-schedule absolute --max-batch-size 64 --prefill-max-batch-size 64 --max-new-tokens 128 --no-stop-on-eos --no-prefix-cache --stream-interval 8 $(ARGS)

docs: setup ## write the generated pages again
	$(BIN)/python tools/generate_docs.py

constraints: setup ## move to the newest versions that pyproject.toml allows, and pin them
	$(BIN)/python -m pip install --upgrade --upgrade-strategy eager -e '.[test,dev,loadtest]'
	$(BIN)/python tools/pin_constraints.py
