/* Sums of squares in a tree: the same root as of a plain recursion for any division of an
 * array, on every instruction set; dtypes without squares. */
#include "gradients/reduce/tree.h"
#include "support/cpus.h"
#include "support/random_bytes.h"
#include "support/tensors.h"

enum { LONGEST = 3000 };

static unsigned char items[LONGEST * 8];

/* Fills `count` items, not elements, with small numbers. */
static void fill_numbers(mls_dtype item, size_t count)
{
    uint64_t seed = 7;
    for (size_t i = 0; i < count; i++) {
        const float value = (float)(random_next(&seed) % 4096) / 512 - 4;
        write_float(item, items + i * mls_dtype_of(item)->item_bytes, value);
    }
}

/* Returns the sum of squares of `width` items from element `first` on, of elements first
 * .. end - 1 of a node with `size` elements. */
static double plain_root(mls_dtype item, size_t width, size_t first, size_t size,
                         size_t end)
{
    double root = 0;
    if (size > 1) {
        root = plain_root(item, width, first, size / 2, end);
        return first + size / 2 < end
                   ? root + plain_root(item, width, first + size / 2, size / 2, end)
                   : root;
    }
    for (size_t i = 0; i < width; i++) {
        const size_t bytes = mls_dtype_of(item)->item_bytes;
        const double x = read_float(item, items + (first * width + i) * bytes);
        root += x * x;
    }
    return root;
}

/* Returns whether every subtree of elements first .. end - 1 has the plain root. */
static bool has_plain_roots(mls_cpu cpu, mls_dtype dtype, size_t first, size_t end)
{
    const mls_dtype item = dtype == MLS_C64 ? MLS_F32 : dtype;
    const size_t width = dtype == MLS_C64 ? 2 : 1;
    const unsigned char *at = items + first * mls_dtype_of(dtype)->item_bytes;
    double sums[MLS_MOST_SUBTREES];
    const size_t count =
        mls_tree_squares(mls_kernels_of(cpu), dtype, at, first, end - first, sums);
    size_t done = first;
    for (size_t i = 0; i < count; i++) {
        size_t size = 1;
        while (done % (2 * size) == 0 && done + 2 * size <= end) {
            size *= 2;
        }
        const double expected = plain_root(item, width, done, size, done + size);
        if (memcmp(&expected, &sums[i], sizeof expected) != 0) {
            return false;
        }
        done += size;
    }
    return done == end;
}

TEST(subtrees_have_the_roots_of_a_plain_recursion)
{
    static const mls_dtype dtypes[] = {MLS_F16, MLS_BF16, MLS_F32, MLS_F64, MLS_C64};
    static const size_t cuts[] = {0, 1, 7, 512, 1000, 1023, 2048, 2999, LONGEST};
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        const bool is_complex = dtypes[d] == MLS_C64;
        fill_numbers(is_complex ? MLS_F32 : dtypes[d], (is_complex ? 2 : 1) * LONGEST);
        for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
            for (size_t j = i; j < sizeof cuts / sizeof *cuts; j++) {
                EACH_CPU (cpu) {
                    CHECK(has_plain_roots(cpu, dtypes[d], cuts[i], cuts[j]));
                }
            }
        }
    }
}

TEST(dtypes_without_squares_are_refused)
{
    CHECK(mls_tree_squares_check(MLS_BF16, &status) == MLS_OK);
    CHECK_FAILS(
        mls_tree_squares_check(MLS_I32, &status), MLS_E_DTYPE,
        "int32 has no squares in a tree: only float16, bfloat16, float32, float64 "
        "and complex64 have");
}
