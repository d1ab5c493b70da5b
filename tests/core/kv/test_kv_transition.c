#include "kv/kv_transition.h"
#include "support/cpus.h"
#include "support/tensors.h"

/* Fill memory with distinct words and return a view of a shape of it. */
static mls_tensor numbered(uint16_t *words, int rank, const size_t *dimensions)
{
    size_t count = 1;
    for (int axis = 0; axis < rank; axis++) {
        count *= dimensions[axis];
    }
    for (size_t i = 0; i < count; i++) {
        words[i] = (uint16_t)(i * 2654435761U >> 7);
    }
    return tensor_of(words, MLS_U16, rank, dimensions);
}

/* Whether dst has the tokens of src and 9 elsewhere; both are C-contiguous. */
static bool is_moved(const mls_tensor *dst, const mls_tensor *src, int axis,
                     size_t position)
{
    size_t outer = 1, inner = 1;
    for (int i = 0; i < axis; i++) {
        outer *= dst->shape[i];
    }
    for (int i = axis + 1; i < dst->rank; i++) {
        inner *= dst->shape[i];
    }
    const uint16_t *to = (const uint16_t *)(const void *)dst->data;
    const uint16_t *from = (const uint16_t *)(const void *)src->data;
    const size_t row = dst->shape[axis] * inner, source_row = src->shape[axis] * inner;
    for (size_t i = 0; i < outer * row; i++) {
        const size_t at = i % row;
        const uint16_t want = at < position * inner ? from[i / row * source_row + at] : 9;
        if (to[i] != want) {
            return false;
        }
    }
    return true;
}

/* Caches with 1, 2 and many rows, short and long, below and above the size at which
 * threads share them. */
TEST(every_axis_moves_with_threads_too)
{
    static const size_t shapes[][5] = {{3, 1, 2, 5, 7},      {1, 1, 1, 1, 1},
                                       {2, 300, 1, 3, 1700}, {700, 5, 900, 1, 1},
                                       {1, 1, 70, 70, 700},  {1, 3200, 1, 1, 1000},
                                       {40, 1, 80000, 1, 1}};
    enum { WORDS = 8 << 20 };
    static uint16_t from[WORDS], to[WORDS];
    mls_pool *pool = NULL;
    REQUIRE(mls_pool_new(3, &pool, &status) == MLS_OK);
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        for (int axis = 0; axis < 5; axis++) {
            size_t longer[5];
            memcpy(longer, shapes[i], sizeof longer);
            longer[axis] = shapes[i][axis] * 2 + 1;
            size_t words = 1;
            for (int j = 0; j < 5; j++) {
                words *= longer[j];
            }
            if (words > WORDS) {
                continue;
            }
            const mls_tensor src = numbered(from, 5, shapes[i]);
            const mls_tensor dst = numbered(to, 5, longer);
            const size_t positions[] = {0, shapes[i][axis] / 2, shapes[i][axis]};
            for (int j = 0; j < 3; j++) {
                mls_element pad;
                REQUIRE(mls_element_encode(9, &dst, &pad, &status) == MLS_OK);
                const mls_kv_request request = {.position = (int64_t)positions[j],
                                                .axis = axis,
                                                .pad = &pad,
                                                .memory = (mls_kv_memory)j};
                mls_kv_move(mls_kernels_of(best_cpu()), j == 1 ? NULL : pool, &dst, &src,
                            &request);
                CHECK(is_moved(&dst, &src, axis, positions[j]));
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
