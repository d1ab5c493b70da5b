/* tree: splits a part into subtrees, and adds the squares of each in chunks that stay in
 * the L1 cache.
 *
 * The root of a chunk is computed level by level; a binary counter over the chunks adds
 * their roots.
 */
#include "gradients/reduce/tree.h"

#include <string.h>

enum { CHUNK = 512 /* elements; a power of two */, LEVELS = 64, EIGHT = 8 };

/* Return the dtype of an item, two of which are a complex number. */
static mls_dtype item_dtype(mls_dtype dtype)
{
    return dtype == MLS_C64 ? MLS_F32 : dtype;
}

mls_code mls_tree_squares_check(mls_dtype dtype, mls_status *st)
{
    const char *name = mls_dtype_of(dtype)->name;
    if ((int)item_dtype(dtype) < MLS_CONVERTIBLE) {
        return MLS_OK;
    }
    mls_fail(st, MLS_E_DTYPE,
             "%s has no squares in a tree: only float16, bfloat16, float32, float64 and "
             "complex64 have",
             name);
    return mls_status_got(st, "%s", name);
}

/* Store the sums of `count` adjacent pairs of `values`. */
static void add_pairs(double *restrict sums, const double *restrict values, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        sums[i] = values[2 * i] + values[2 * i + 1];
    }
}

/* Store the roots of the squares of `count` runs of EIGHT values. */
static void add_eight_squares(double *restrict roots, const double *restrict v,
                              size_t count)
{
    for (size_t i = 0; i < count; i++, v += EIGHT) {
        const double a = v[0] * v[0] + v[1] * v[1], b = v[2] * v[2] + v[3] * v[3];
        const double c = v[4] * v[4] + v[5] * v[5], d = v[6] * v[6] + v[7] * v[7];
        roots[i] = (a + b) + (c + d);
    }
}

/* Return the root of `count` items, a power of two of at most 2 * CHUNK. */
static double chunk_root(const mls_kernels *kernels, mls_dtype item, const void *items,
                         size_t count)
{
    double squares[2 * CHUNK], sums[CHUNK];
    if (item == MLS_F64) {
        memcpy(squares, items, count * sizeof *squares);
    } else {
        kernels->convert[item][MLS_F64](squares, items, count, MLS_STORE_CACHED);
    }
    size_t left = count;
    double *from = squares, *to = sums;
    if (count >= EIGHT) {
        left = count / EIGHT;
        add_eight_squares(sums, squares, left);
        from = sums;
        to = squares;
    } else {
        for (size_t i = 0; i < count; i++) {
            squares[i] *= squares[i];
        }
    }
    for (size_t pairs = left / 2; pairs > 0; pairs /= 2) {
        add_pairs(to, from, pairs);
        double *const next = from;
        from = to;
        to = next;
    }
    return from[0];
}

/* Return the root of `count` elements, a power of two, of `width` items each. */
static double subtree_root(const mls_kernels *kernels, mls_dtype item, size_t width,
                           const unsigned char *items, size_t count)
{
    const size_t chunk = (count < CHUNK ? count : CHUNK) * width;
    const size_t bytes = chunk * mls_dtype_of(item)->item_bytes;
    double pending[LEVELS], root = 0;
    for (size_t i = 0; i < count * width / chunk; i++, items += bytes) {
        size_t level = 0;
        root = chunk_root(kernels, item, items, chunk);
        for (; i >> level & 1; level++) {
            root = pending[level] + root;
        }
        pending[level] = root;
    }
    return root;
}

size_t mls_tree_squares(const mls_kernels *kernels, mls_dtype dtype, const void *items,
                        size_t first, size_t count, double *sums)
{
    const unsigned char *at = items;
    const size_t bytes = mls_dtype_of(dtype)->item_bytes, end = first + count;
    size_t subtrees = 0;
    while (first < end) {
        size_t size = 1;
        while (first % (2 * size) == 0 && 2 * size <= end - first) {
            size *= 2;
        }
        sums[subtrees++] =
            subtree_root(kernels, item_dtype(dtype), dtype == MLS_C64 ? 2 : 1, at, size);
        first += size;
        at += size * bytes;
    }
    return subtrees;
}
