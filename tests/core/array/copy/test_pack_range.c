/* Any range of any tensor's elements, compared with a plain loop over them. */
#include "array/copy/pack_range.h"
#include "support/cpus.h"
#include "support/random_bytes.h"
#include "support/tensors.h"

#include <stdint.h>
#include <stdlib.h>

enum { GUARD = 16, MOST = 1 << 16 };

static const mls_kernels *kernels; /* the machine's fastest */

/* Numbers that differ in either byte order. */
static unsigned char memory[8 * MOST];

/* All elements in C order, by the definition of strides. */
static unsigned char *packed_by_loop(const mls_tensor *t, size_t *count)
{
    const size_t item = mls_tensor_item_bytes(t);
    CHECK(mls_tensor_count(t, count));
    unsigned char *out = malloc(*count * item + 1);
    for (size_t element = 0; element < *count; element++) {
        const unsigned char *from = t->data;
        size_t rest = element;
        for (int axis = t->rank - 1; axis >= 0; axis--) {
            from += (ptrdiff_t)(rest % t->shape[axis]) * t->strides[axis];
            rest /= t->shape[axis];
        }
        for (size_t i = 0; i < item; i++) {
            /* each half of a complex number is swapped */
            const size_t half = t->dtype == MLS_C64 ? 4 : item;
            const size_t j = t->swapped ? i / half * half + half - 1 - i % half : i;
            out[element * item + i] = from[j];
        }
    }
    return out;
}

/* Pack elements `first` .. `first + n` and compare; the guard bytes must not change. */
static bool range_is_right(const mls_tensor *t, const unsigned char *expected,
                           size_t first, size_t n)
{
    const size_t item = mls_tensor_item_bytes(t), bytes = n * item;
    unsigned char *got = malloc(bytes + 2 * GUARD);
    memset(got, 0xA5, bytes + 2 * GUARD);
    mls_pack_range(kernels, t, t->dtype, first, n, got + GUARD);
    bool good = memcmp(got + GUARD, expected + first * item, bytes) == 0;
    for (size_t i = 0; i < GUARD; i++) {
        good = good && got[i] == 0xA5 && got[GUARD + bytes + i] == 0xA5;
    }
    free(got);
    return good;
}

/* Every range of a small tensor. */
static void check_all_ranges(const mls_tensor *t)
{
    size_t count, wrong = 0;
    unsigned char *expected = packed_by_loop(t, &count);
    for (size_t first = 0; first <= count; first++) {
        for (size_t n = 0; first + n <= count; n++) {
            wrong += range_is_right(t, expected, first, n) ? 0 : 1;
        }
    }
    CHECK(wrong == 0);
    free(expected);
}

TEST(contiguous_tensors_of_any_rank_are_packed)
{
    const size_t shape[] = {3, 2, 4, 2};
    for (int rank = 0; rank <= 4; rank++) {
        const mls_tensor t = tensor_of(memory, MLS_F32, rank, shape);
        check_all_ranges(&t);
    }
}

TEST(every_item_size_and_byte_order_is_packed)
{
    static const mls_dtype dtypes[] = {MLS_U8, MLS_BF16, MLS_F32, MLS_I64, MLS_C64};
    const size_t shape[] = {3, 5};
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        mls_tensor t = tensor_of(memory, dtypes[i], 2, shape);
        check_all_ranges(&t);
        t.swapped = true;
        check_all_ranges(&t);
    }
}

TEST(views_of_any_strides_are_packed)
{
    static const struct {
        const char *name;
        mls_dtype dtype;
        int rank;
        size_t shape[6];
        ptrdiff_t strides[6];
        size_t start; /* bytes before the first element */
    } cases[] = {
        {"transposed", MLS_U16, 3, {3, 4, 5}, {2, 6, 24}, 0},
        {"gaps that are not whole items", MLS_F32, 3, {4, 3, 4}, {1001, 64, 12}, 0},
        {"all axes backward", MLS_F32, 3, {3, 4, 3}, {-48, -12, -4}, 140},
        {"two axes backward", MLS_F32, 3, {3, 4, 3}, {-48, 12, -4}, 104},
        {"lengths of 1", MLS_F32, 6, {1, 3, 1, 1, 4, 1}, {9999, 16, 16, 9999, 4, 4}, 0},
        {"no elements", MLS_F32, 3, {3, 0, 4}, {0, 16, 4}, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int before = runner_failures;
        mls_tensor t = tensor_of(memory, cases[i].dtype, cases[i].rank, cases[i].shape);
        memcpy(t.strides, cases[i].strides, sizeof cases[i].strides);
        t.data += cases[i].start;
        check_all_ranges(&t);
        t.swapped = true;
        check_all_ranges(&t);
        if (runner_failures > before) {
            printf("    %s\n", cases[i].name);
        }
    }
}

TEST(broadcast_tensors_are_packed)
{
    const size_t shape[] = {4, 3, 5};
    for (int broadcast = 1; broadcast < 8; broadcast++) {
        mls_tensor t = tensor_of(memory, MLS_F64, 3, shape);
        for (int axis = 0; axis < 3; axis++) {
            t.strides[axis] = broadcast >> axis & 1 ? 0 : t.strides[axis];
        }
        check_all_ranges(&t);
        t.swapped = true;
        check_all_ranges(&t);
    }
}

TEST(maximum_rank_is_packed)
{
    size_t shape[MLS_MAX_RANK];
    for (int axis = 0; axis < MLS_MAX_RANK; axis++) {
        shape[axis] = axis % 13 == 0 ? 2 : 1;
    }
    mls_tensor t = tensor_of(memory, MLS_U16, MLS_MAX_RANK, shape);
    check_all_ranges(&t);
}

/* As a file is written: consecutive pieces of sizes that match no axis. */
TEST(packed_ranges_join_to_the_whole_tensor)
{
    static const size_t steps[] = {1, 7, 129, 1000, 4096, 40000};
    const size_t shape[] = {8, 64, 100};
    mls_tensor t = tensor_of(memory, MLS_F32, 3, shape);
    t.strides[0] = 4 * 100;
    t.strides[1] = 4 * 100 * 8;
    size_t count, wrong = 0;
    unsigned char *expected = packed_by_loop(&t, &count);
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        for (size_t first = 0; first < count; first += steps[i]) {
            const size_t left = count - first;
            const size_t n = left < steps[i] ? left : steps[i];
            wrong += range_is_right(&t, expected, first, n) ? 0 : 1;
        }
    }
    CHECK(wrong == 0);
    free(expected);
}

TEST(every_instruction_set_packs_the_same)
{
    const mls_kernels *const fastest = kernels;
    const size_t shape[] = {6, 31};
    mls_tensor t = tensor_of(memory, MLS_F32, 2, shape);
    t.strides[0] = 4;
    t.strides[1] = 24;
    t.swapped = true;
    EACH_CPU (cpu) {
        kernels = mls_kernels_of(cpu);
        check_all_ranges(&t);
    }
    kernels = fastest;
}

BEFORE_ALL
{
    kernels = mls_kernels_of(best_cpu());
    fill_random(memory, sizeof memory, 1);
}
