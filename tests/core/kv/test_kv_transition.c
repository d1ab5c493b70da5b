#include "kv/kv_transition.h"
#include "support/cpus.h"
#include "support/tensors.h"

/* Caches with 1, 2 and many rows, short and long, below and above the size at which
 * threads share them: threads move what one thread moves, which tests/kv compares with
 * NumPy. */
TEST(threads_move_like_one)
{
    static const size_t shapes[][5] = {{3, 1, 2, 5, 7},      {1, 1, 1, 1, 1},
                                       {2, 300, 1, 3, 1700}, {700, 5, 900, 1, 1},
                                       {1, 1, 70, 70, 700},  {1, 3200, 1, 1, 1000},
                                       {40, 1, 80000, 1, 1}};
    enum { WORDS = 8 << 20 };
    static uint16_t from[WORDS], by_one[WORDS], by_threads[WORDS];
    const mls_kernels *kernels = mls_kernels_of(best_cpu());
    mls_pool *pool = NULL;
    REQUIRE(mls_pool_new(3, &pool, &status) == MLS_OK);
    for (size_t i = 0; i < WORDS; i++) {
        from[i] = (uint16_t)(i * 2654435761U >> 7);
    }
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        for (int axis = 0; axis < 5; axis++) {
            size_t longer[5], words = 1;
            memcpy(longer, shapes[i], sizeof longer);
            longer[axis] = shapes[i][axis] * 2 + 1;
            for (int j = 0; j < 5; j++) {
                words *= longer[j];
            }
            if (words > WORDS) {
                continue;
            }
            const mls_tensor src = tensor_of(from, MLS_U16, 5, shapes[i]);
            const mls_tensor one = tensor_of(by_one, MLS_U16, 5, longer);
            const mls_tensor many = tensor_of(by_threads, MLS_U16, 5, longer);
            for (int memory = 0; memory < 3; memory++) {
                mls_element pad;
                REQUIRE(mls_element_encode(9, &one, &pad, &status) == MLS_OK);
                const mls_kv_request request = {
                    .position = (int64_t)(shapes[i][axis] * (size_t)memory / 2),
                    .axis = axis,
                    .pad = &pad,
                    .memory = (mls_kv_memory)memory};
                memset(by_threads, 0xA5, words * sizeof *by_threads);
                mls_kv_move(kernels, NULL, &one, &src, &request);
                mls_kv_move(kernels, pool, &many, &src, &request);
                CHECK(memcmp(by_one, by_threads, words * sizeof *by_one) == 0);
            }
        }
    }
    mls_pool_free(pool);
}

/* Fill bytes with a pattern that no padding of the tests has. */
static void number_bytes(unsigned char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        bytes[i] = (unsigned char)(i * 37 + 11);
    }
}

enum { MOST_ROW = 96, MOST_ROWS = 5, MARGIN = 32 };

/* Whether the kernel writes the rows as the scalar loops would, and nothing around
 * them. */
static bool rows_are_padded(const mls_kernels *kernels, size_t used, size_t row,
                            size_t rows, size_t src_step, size_t src_shift, mls_store how)
{
    static unsigned char from[MOST_ROWS * (MOST_ROW + 8) + 16];
    static _Alignas(64) unsigned char got[MARGIN + MOST_ROWS * MOST_ROW + MARGIN];
    static unsigned char want[sizeof got];
    const uint64_t pattern = 0x8877665544332211U;
    number_bytes(from, sizeof from);
    memset(got, 0xEE, sizeof got);
    memset(want, 0xEE, sizeof want);
    for (size_t i = 0; i < rows; i++) {
        unsigned char *const to = want + MARGIN + i * row;
        memcpy(to, from + src_shift + i * src_step, used);
        for (size_t at = used; at < row; at++) {
            to[at] = ((const unsigned char *)&pattern)[at % 8];
        }
    }
    kernels->pad_rows(got + MARGIN, from + src_shift, src_step, used, row, rows, pattern,
                      how);
    return memcmp(got, want, sizeof got) == 0;
}

/* Every number of token bytes and every row length, at any alignment of the source. The
 * pattern of the padding stays aligned to the row: an element is not torn. */
TEST(row_kernels_copy_tokens_and_pad)
{
    EACH_CPU (cpu) {
        const mls_kernels *kernels = mls_kernels_of(cpu);
        if (kernels->pad_rows == NULL) {
            continue;
        }
        for (size_t row = 16; row <= MOST_ROW; row += 16) {
            for (size_t used = 0; used <= row; used += EVERY(3)) {
                for (size_t rows = 1; rows <= MOST_ROWS; rows += 2) {
                    for (int i = MLS_STORE_CACHED; i <= MLS_STORE_STREAM; i++) {
                        const mls_store how = (mls_store)i;
                        CHECK(rows_are_padded(kernels, used, row, rows, used, used % 16,
                                              how));
                        CHECK(
                            rows_are_padded(kernels, used, row, rows, used + 8, 0, how));
                    }
                }
            }
        }
    }
}
