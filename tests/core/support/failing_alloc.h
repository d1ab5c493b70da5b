/* failing_alloc: allocations that fail on request.  Included by one file of a program,
 * which is linked with -Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc.
 */
#ifndef MLS_FAILING_ALLOC_H
#define MLS_FAILING_ALLOC_H

#include "base/status.h"
#include "support/runner.h"

#include <stdbool.h>
#include <stdlib.h>

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *block, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *block, size_t bytes);

static long countdown; /* allocations until one fails; 0 and below: none fails */
static bool has_failed;
static size_t requested_bytes; /* bytes of all allocations since take_requested */

static inline bool fails_now(size_t bytes)
{
    requested_bytes += bytes;
    if (countdown > 0 && --countdown == 0) {
        has_failed = true;
        return true;
    }
    return false;
}

void *__wrap_malloc(size_t bytes)
{
    return fails_now(bytes) ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t size)
{
    return fails_now(count * size) ? NULL : __real_calloc(count, size);
}

void *__wrap_realloc(void *block, size_t bytes)
{
    return fails_now(bytes) ? NULL : __real_realloc(block, bytes);
}

/* Return the bytes of all allocations since the last call. */
static inline size_t take_requested(void)
{
    const size_t bytes = requested_bytes;
    requested_bytes = 0;
    return bytes;
}

/* Run `job` with the n-th allocation failing, for n = 1, 2, ... until none fails; returns
 * the number of failures, one of which has this whole text. NULL: any. */
static inline long fail_each_with(mls_code (*job)(mls_status *st), const char *text)
{
    bool has_text = text == NULL;
    for (long n = 1; n < 10000; n++) {
        mls_status st;
        countdown = n;
        has_failed = false;
        const mls_code code = job(&st);
        countdown = 0;
        if (!has_failed) {
            CHECK(code == MLS_OK && has_text);
            return n - 1;
        }
        CHECK(code == MLS_E_MEMORY && st.code == MLS_E_MEMORY);
        CHECK(strstr(st.text, "no memory") != NULL || strstr(st.text, "no room") != NULL);
        has_text = has_text || strcmp(st.text, text) == 0;
    }
    CHECK(false && "the job allocates for ever");
    return 0;
}

static inline long fail_each(mls_code (*job)(mls_status *st))
{
    return fail_each_with(job, NULL);
}

#endif
