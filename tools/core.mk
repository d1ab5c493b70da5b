# Build the C core, the library of include/mlstate/kv.h and their tests without Python.
#
#   make -f tools/core.mk lib|kv|tests|run|syntax [BUILD=folder] [CC=...] [OPT=...] [EXTRA=...]
#   make -f tools/core.mk install-kv [PREFIX=/usr/local] [LIBDIR=lib] [DESTDIR=...]
#
# A BUILD folder holds one variant (plain, sanitizers, another machine); RUN is the command that
# runs tests for another machine, such as qemu.  With LIB=file the tests use that library, which
# setup.py has built, instead of compiling the core again.  WITHOUT lists sources to leave out.

BUILD ?= build/core
LIB ?= $(BUILD)/libmlstate.a
KV_LIB ?= $(BUILD)/libmlstate_kv.a
OPT ?= -O2 -g
EXTRA ?=
RUN ?=
ONLY ?= *
WITHOUT ?=

WARNINGS := -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wcast-qual -Wvla -Wundef
FLAGS := -std=c11 -ffp-contract=off -fvisibility=hidden -D_GNU_SOURCE -D_DARWIN_C_SOURCE \
	$(WARNINGS) $(OPT) $(EXTRA) -Iinclude -Icsrc/core -Itests/core

SOURCES := $(filter-out $(WITHOUT),$(shell find csrc/core -name "*.c" | sort))
OBJECTS := $(patsubst csrc/core/%.c,$(BUILD)/core/%.o,$(SOURCES))
PUBLIC_SOURCES := $(shell find csrc/public -name "*.c" | sort)
PUBLIC_OBJECTS := $(patsubst csrc/%.c,$(BUILD)/%.o,$(PUBLIC_SOURCES))
# The folders that csrc/public and csrc/core/kv include, the same as in Package.swift.
KV_FOLDERS := base runtime array kv
KV_WITHOUT := csrc/core/array/copy/measure_copies.c
KV_SOURCES := $(filter-out $(KV_WITHOUT),$(filter $(addsuffix /%,$(addprefix csrc/core/,$(KV_FOLDERS))),$(SOURCES)))
KV_OBJECTS := $(KV_SOURCES:csrc/%.c=$(BUILD)/%.o) $(PUBLIC_OBJECTS)
# The version of the header, and the shared library: its major version is in its name.
KV_VERSION := $(shell awk '/define MLSTATE_KV_VERSION_M(AJOR|INOR) / { printf "%s%s", dot, $$3; dot = "." }' \
	include/mlstate/kv.h)
KV_MAJOR := $(firstword $(subst ., ,$(KV_VERSION)))
ifeq ($(shell uname -s),Darwin)
KV_SHARED := libmlstate_kv.$(KV_MAJOR).dylib
KV_LINK := libmlstate_kv.dylib
KV_SONAME := @rpath/$(KV_SHARED)
LINK_SHARED := -dynamiclib -install_name $(KV_SONAME)
else
KV_SHARED := libmlstate_kv.so.$(KV_MAJOR)
KV_LINK := libmlstate_kv.so
KV_SONAME := $(KV_SHARED)
LINK_SHARED := -shared -Wl,-soname,$(KV_SONAME) -Wl,-z,defs
endif
# LIBDIR is below PREFIX; UP leads from it back to PREFIX.
PREFIX ?= /usr/local
LIBDIR ?= lib
UP := $(shell echo "$(LIBDIR)" | sed 's,[^/][^/]*,..,g')
FILL := sed 's,@VERSION@,$(KV_VERSION),; s,@LIBDIR@,$(LIBDIR),; s,@UP@,$(UP),; s,@SHARED@,$(KV_SHARED),; s,@SONAME@,$(KV_SONAME),'
TEST_SOURCES := $(shell find tests/core -name "test_$(ONLY).c" | sort)
# Only GNU ld can replace the library's calls by a test's own (--wrap).
ifeq ($(shell uname -s),Darwin)
TEST_SOURCES := $(filter-out %_failure.c,$(TEST_SOURCES))
endif
TESTS := $(patsubst tests/core/%.c,$(BUILD)/tests/%,$(TEST_SOURCES))

comma := ,
# `make -s` prints nothing.
SAY := $(if $(findstring s,$(firstword -$(MAKEFLAGS))),:,echo)

.DEFAULT_GOAL := lib
.DELETE_ON_ERROR:
.SUFFIXES:
.SECONDARY: $(TESTS:=.o)
.PHONY: lib kv install-kv objects tests run syntax

lib: $(LIB)
kv: $(KV_LIB)
objects: $(OBJECTS)
tests: $(TESTS)

# Print the compiler's warnings, with LIB only those of the tests; no file is written.
CORE_SOURCES := $(if $(filter command,$(origin LIB)),,$(SOURCES))
syntax: $(patsubst %,%.checked,$(CORE_SOURCES) $(PUBLIC_SOURCES) $(TEST_SOURCES))
%.checked: %
	@$(CC) $(FLAGS) -fsyntax-only $<

run: tests
	@[ -n "$(TESTS)" ] || { echo "core-test: no tests/core/**/test_$(ONLY).c" >&2; exit 1; }
	@printf '%s\n' $(TESTS) | xargs -n 1 -P 2 env $(RUN)

$(BUILD)/%.o: csrc/%.c tools/core.mk
	@mkdir -p $(@D)
	@$(SAY) "cc $<"
	@$(CC) $(FLAGS) -fPIC -MMD -MP -c $< -o $@

# The folders are listed because their times change when a source is deleted.
$(BUILD)/libmlstate.a: $(OBJECTS) $(shell find csrc/core -type d)
	@mkdir -p $(@D)
	@rm -f $@
	@$(SAY) "ar $@"
	@$(AR) rcs $@ $(OBJECTS)

$(KV_LIB): $(KV_OBJECTS) $(shell find csrc/public $(KV_FOLDERS:%=csrc/core/%) -type d)
	@mkdir -p $(@D)
	@rm -f $@
	@$(SAY) "ar $@"
	@$(AR) rcs $@ $(KV_OBJECTS)

# Takes from the archive what the functions need; nothing else is exported (-fvisibility=hidden).
$(BUILD)/$(KV_SHARED): $(KV_LIB)
	@$(SAY) "ld $@"
	@$(CC) $(OPT) $(EXTRA) $(LINK_SHARED) $(PUBLIC_OBJECTS) $(KV_LIB) -lpthread -lm -o $@

install-kv: INTO := $(DESTDIR)$(PREFIX)
install-kv: $(BUILD)/$(KV_SHARED)
	@mkdir -p "$(INTO)/include/mlstate" "$(INTO)/$(LIBDIR)/pkgconfig" "$(INTO)/$(LIBDIR)/cmake/mlstate"
	@install -m 644 include/mlstate/kv.h "$(INTO)/include/mlstate"
	@install -m 644 $(KV_LIB) "$(INTO)/$(LIBDIR)"
	@install -m 755 $(BUILD)/$(KV_SHARED) "$(INTO)/$(LIBDIR)"
	@ln -sf $(KV_SHARED) "$(INTO)/$(LIBDIR)/$(KV_LINK)"
	@$(FILL) tools/packaging/mlstate-kv.pc >"$(INTO)/$(LIBDIR)/pkgconfig/mlstate-kv.pc"
	@for name in Config ConfigVersion; do $(FILL) tools/packaging/mlstate$$name.cmake \
	    >"$(INTO)/$(LIBDIR)/cmake/mlstate/mlstate$$name.cmake" || exit 1; done

$(BUILD)/tests/%.o: tests/core/%.c tools/core.mk
	@mkdir -p $(@D)
	@$(SAY) "cc $<"
	@$(CC) $(FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/tests/%: $(BUILD)/tests/%.o $(LIB) $(PUBLIC_OBJECTS)
	@$(CC) $(FLAGS) $< $(PUBLIC_OBJECTS) $(LIB) $(LINK) -lpthread -lm -o $@

$(BUILD)/tests/%_alloc_failure: LINK := $(patsubst %,-Wl$(comma)--wrap=%,malloc calloc realloc)
$(BUILD)/tests/%_call_failure: LINK := $(patsubst %,-Wl$(comma)--wrap=%,close faccessat fallocate fsync \
	fchown fstat fstatat ftruncate getentropy openat pread renameat)

-include $(OBJECTS:.o=.d) $(PUBLIC_OBJECTS:.o=.d) $(TESTS:=.d)
