# Build the C core and its tests without Python.
#
#   make -f tools/core.mk lib|tests|run|syntax [BUILD=folder] [CC=...] [OPT=...] [EXTRA=...]
#
# A BUILD folder holds one variant (plain, sanitizers, another machine); RUN is the command that
# runs tests for another machine, such as qemu.  With LIB=file the tests use that library, which
# setup.py has built, instead of compiling the core again.  WITHOUT lists sources to leave out.

BUILD ?= build/core
LIB ?= $(BUILD)/libmlstate.a
OPT ?= -O2 -g
EXTRA ?=
RUN ?=
ONLY ?= *
WITHOUT ?=

WARNINGS := -Wall -Wextra -Wshadow -Wconversion -Wstrict-prototypes -Wcast-qual -Wvla -Wundef
FLAGS := -std=c11 -ffp-contract=off -fvisibility=hidden -D_GNU_SOURCE -D_DARWIN_C_SOURCE \
	$(WARNINGS) $(OPT) $(EXTRA) -Icsrc/core -Itests/core

SOURCES := $(filter-out $(WITHOUT),$(shell find csrc/core -name "*.c" | sort))
OBJECTS := $(patsubst csrc/core/%.c,$(BUILD)/core/%.o,$(SOURCES))
TEST_SOURCES := $(shell find tests/core -name "test_$(ONLY).c" | sort)
# Only GNU ld can replace the library's malloc by a test's own (--wrap).
ifeq ($(shell uname -s),Darwin)
TEST_SOURCES := $(filter-out %_alloc_failure.c,$(TEST_SOURCES))
endif
TESTS := $(patsubst tests/core/%.c,$(BUILD)/tests/%,$(TEST_SOURCES))

# `make -s` prints nothing.
SAY := $(if $(findstring s,$(firstword -$(MAKEFLAGS))),:,echo)

.DEFAULT_GOAL := lib
.DELETE_ON_ERROR:
.SUFFIXES:
.PHONY: lib objects tests run syntax

lib: $(LIB)
objects: $(OBJECTS)
tests: $(TESTS)

# Print the compiler's warnings, with LIB only those of the tests; no file is written.
CORE_SOURCES := $(if $(filter command,$(origin LIB)),,$(SOURCES))
syntax: $(patsubst %,%.checked,$(CORE_SOURCES) $(TEST_SOURCES))
%.checked: %
	@$(CC) $(FLAGS) -fsyntax-only $<

run: tests
	@[ -n "$(TESTS)" ] || { echo "core-test: no tests/core/**/test_$(ONLY).c" >&2; exit 1; }
	@printf '%s\n' $(TESTS) | xargs -n 1 -P 2 env $(RUN)

$(BUILD)/core/%.o: csrc/core/%.c tools/core.mk
	@mkdir -p $(@D)
	@$(SAY) "cc $<"
	@$(CC) $(FLAGS) -fPIC -MMD -MP -c $< -o $@

# The folders are listed because their times change when a source is deleted.
$(BUILD)/libmlstate.a: $(OBJECTS) $(shell find csrc/core -type d)
	@mkdir -p $(@D)
	@rm -f $@
	@$(SAY) "ar $@"
	@$(AR) rcs $@ $(OBJECTS)

$(BUILD)/tests/%: tests/core/%.c $(LIB) tools/core.mk
	@mkdir -p $(@D)
	@$(SAY) "cc $<"
	@$(CC) $(FLAGS) -MMD -MP -MF $@.d $< $(LIB) $(LINK) -lpthread -lm -o $@

$(BUILD)/tests/%_alloc_failure: LINK := -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc

-include $(OBJECTS:.o=.d) $(TESTS:=.d)
