/* runner: a minimal test framework for plain C.
 *
 * TEST(name) { ... } defines a test, named after the behaviour that it protects; main,
 * defined here, runs all tests of the file in their order.  CHECK counts a failure and
 * continues; REQUIRE leaves the test.  Tests do not depend on each other.
 */
#ifndef MLS_RUNNER_H
#define MLS_RUNNER_H

#include "base/status.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* TRIES: the number of random cases; EVERY: the step through many cases. The slices of
 * sanitizers and emulators check memory and kernels; they define MLS_FEWER_TRIES, which
 * runs an eighth of the random cases and every n-th of the others. The plain run tries
 * all. */
#ifdef MLS_FEWER_TRIES
#    define TRIES(n) (((n) + 7) / 8)
#    define EVERY(n) (n)
#else
#    define TRIES(n) (n)
#    define EVERY(n) 1
#endif

static int runner_failures; /* of the current test */

static mls_status status; /* for the calls of the current test; zeroed before it */

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            printf("    %s:%d: %s\n", __FILE__, __LINE__, #condition);                   \
            runner_failures++;                                                           \
        }                                                                                \
    } while (0)

#define REQUIRE(condition)                                                               \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            printf("    %s:%d: %s\n", __FILE__, __LINE__, #condition);                   \
            runner_failures++;                                                           \
            return;                                                                      \
        }                                                                                \
    } while (0)

#define CHECK_TEXT(got, expected)                                                        \
    do {                                                                                 \
        if (strcmp((got), (expected)) != 0) {                                            \
            printf("    %s:%d: \"%s\" is not \"%s\"\n", __FILE__, __LINE__, (got),       \
                   (expected));                                                          \
            runner_failures++;                                                           \
        }                                                                                \
    } while (0)

/* A call with `&status` fails with this code and this whole text. */
#define CHECK_FAILS(call, expected, text_expected)                                       \
    do {                                                                                 \
        CHECK((call) == (expected));                                                     \
        CHECK_TEXT(status.text, text_expected);                                          \
    } while (0)

typedef struct runner_test {
    const char *name;
    void (*run)(void);
    int line;
    struct runner_test *next;
} runner_test;

static runner_test *runner_tests; /* by line: compilers may reorder constructors */

static inline void runner_add(runner_test *test)
{
    runner_test **at = &runner_tests;
    while (*at != NULL && (*at)->line < test->line) {
        at = &(*at)->next;
    }
    test->next = *at;
    *at = test;
}

#define TEST(name)                                                                       \
    static void name(void);                                                              \
    __attribute__((constructor)) static void runner_add_##name(void)                     \
    {                                                                                    \
        static runner_test test = {#name, name, __LINE__, NULL};                         \
        runner_add(&test);                                                               \
    }                                                                                    \
    static void name(void)

/* BEFORE_ALL { ... } runs before the first test, AFTER_ALL { ... } after the last one;
 * BEFORE_EACH and AFTER_EACH run around every test.  Their failures count as well; a test
 * does not start if BEFORE_EACH failed. */
#define BEFORE_ALL  RUNNER_HOOK(runner_before_all)
#define AFTER_ALL   RUNNER_HOOK(runner_after_all)
#define BEFORE_EACH RUNNER_HOOK(runner_before_each)
#define AFTER_EACH  RUNNER_HOOK(runner_after_each)
#define RUNNER_HOOK(hook)                                                                \
    static void hook##_here(void);                                                       \
    __attribute__((constructor)) static void hook##_set(void)                            \
    {                                                                                    \
        hook = hook##_here;                                                              \
    }                                                                                    \
    static void hook##_here(void)

static inline void runner_no_op(void)
{
}

static void (*runner_before_all)(void) = runner_no_op;
static void (*runner_after_all)(void) = runner_no_op;
static void (*runner_before_each)(void) = runner_no_op;
static void (*runner_after_each)(void) = runner_no_op;

/* Whether no check failed since the last call. */
static inline bool runner_passed(const char *name)
{
    const bool passed = runner_failures == 0;
    if (!passed) {
        printf("FAILED %s: %s\n", __BASE_FILE__, name);
    }
    runner_failures = 0;
    return passed;
}

int main(void)
{
    int passed = 0, failed = 0;
    runner_before_all();
    if (!runner_passed("before all")) {
        return 1;
    }
    for (const runner_test *t = runner_tests; t != NULL; t = t->next) {
        memset(&status, 0, sizeof status);
        runner_before_each();
        if (runner_failures == 0) {
            t->run();
        }
        runner_after_each();
        *(runner_passed(t->name) ? &passed : &failed) += 1;
    }
    runner_after_all();
    failed += !runner_passed("after all");
    printf("%s: %d passed, %d failed\n", __BASE_FILE__, passed, failed);
    return failed == 0 ? 0 : 1;
}

#endif
