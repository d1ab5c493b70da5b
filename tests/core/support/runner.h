/* runner: a minimal test framework for plain C.
 *
 * A test file lists its tests in one table and calls RUN_TESTS from main.  CHECK counts a
 * failure and continues; REQUIRE leaves the test.  Tests do not depend on each other.
 */
#ifndef MLS_RUNNER_H
#define MLS_RUNNER_H

#include <stdio.h>
#include <string.h>

typedef struct test_case {
    const char *name;
    void (*run)(void);
} test_case;

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

static inline int runner_main(const char *file, const test_case *tests, size_t count)
{
    int failed = 0;
    for (size_t i = 0; i < count; i++) {
        runner_failures = 0;
        tests[i].run();
        if (runner_failures > 0) {
            printf("FAILED %s: %s\n", file, tests[i].name);
            failed++;
        }
    }
    printf("%s: %d passed, %d failed\n", file, (int)count - failed, failed);
    return failed == 0 ? 0 : 1;
}

#define TEST(name)       {#name, name}
#define RUN_TESTS(tests) runner_main(__FILE__, tests, sizeof(tests) / sizeof((tests)[0]))

#endif
