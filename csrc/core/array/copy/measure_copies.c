/* measure_copies: trial copies in temporary memory, so that cpu_store_choice.c decides at
 * once: large and small results.
 *
 * A variant is a kind of store: memcpy, a loop of vectors, or past the cache. A trial is
 * a timed copy with one of them; the decision is made for each operation and size class
 * (cpu_store_choice.h).
 */
#include "array/copy/measure_copies.h"

#include "base/memory.h"

#include <string.h>

enum {
    BYTES = 16 << 20,        /* of source and of destination */
    RESULTS = 2 * MLS_STORES /* two for each variant: see mls_store_turn */
};

/* Copy, convert, fill and checksum BYTES bytes from `from` to `to`. Each operation is a
 * trial that measures itself, since `large` describes a large result. */
static void run_trials(const mls_kernels *kernels, const mls_crc_kernels *crc,
                       unsigned char *to, unsigned char *from, mls_destination large)
{
    /* narrow twice, because its results have half of the bytes */
    static const mls_dtype pairs[][2] = {
        {MLS_F32, MLS_F32}, {MLS_F32, MLS_F16}, {MLS_F32, MLS_F16}, {MLS_F16, MLS_F32}};
    const mls_element filler = {.bytes = {1}, .size = 2};
    const size_t count = BYTES / 4, halves = BYTES / 2;
    mls_tensor result, source;
    mls_status st;
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        if (mls_tensor_init(&result, to, pairs[i][1], 1, &count, &st) == MLS_OK &&
            mls_tensor_init(&source, from, pairs[i][0], 1, &count, &st) == MLS_OK) {
            mls_copy(kernels, &result, &source, large);
        }
    }
    if (mls_tensor_init(&result, to, MLS_U16, 1, &halves, &st) == MLS_OK) {
        mls_fill(kernels, &result, filler, large);
    }
    (void)mls_crc_copy(crc, kernels->choices, 0, to, from, BYTES, large);
}

/* Copy the smallest result of each size class below MLS_STORING_WITHIN from `from` to
 * `to`, until the loop and memcpy have their trials. A class that ends where the next one
 * starts is empty. */
static void run_small_trials(const mls_kernels *kernels, unsigned char *to,
                             const unsigned char *from)
{
    for (int size = MLS_STORING_SMALL; size < MLS_STORING_WITHIN; size++) {
        const size_t bytes = kernels->choices->least[size]; /* at most 2 MiB */
        const bool is_empty = bytes >= kernels->choices->least[size + 1];
        for (int i = 0; i < 2 * MLS_STORE_TRIALS_SMALL && !is_empty; i++) {
            mls_copy_bytes(kernels, to, from, bytes, (mls_destination){.bytes = bytes});
        }
    }
}

/* Decide how to store, by trials. Run all operations until the best way to store is
 * known. Each operation measures itself and adds its time to the choices of `kernels`. */
mls_code mls_measure_copies(const mls_kernels *kernels, const mls_crc_kernels *crc,
                            mls_status *st)
{
    mls_pages pages;
    const mls_code code = mls_pages_init(&pages, (size_t)2 * BYTES, st);
    if (code != MLS_OK) {
        return code;
    }
    memset(pages.data, 1, (size_t)2 * BYTES); /* touch the pages: no trial may fault */
    const size_t least = kernels->choices->least[MLS_STORING_WITHIN];
    const mls_destination large = {.bytes = BYTES > least ? BYTES : least};
    for (int i = 0; i < RESULTS; i++) {
        run_trials(kernels, crc, pages.data, pages.data + BYTES, large);
    }
    run_small_trials(kernels, pages.data, pages.data + BYTES);
    mls_pages_fini(&pages);
    return MLS_OK;
}
