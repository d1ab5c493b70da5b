/* delta_scalar: finds the elements that differ in two blocks, in plain C: the reference.
 *
 * Groups of 32 bytes that are equal on both sides are skipped after one test, because
 * most elements have not changed. */
#include "follow/delta_kernels.h"

#include <string.h>

enum { GROUP = 32 };

typedef struct item16 {
    uint64_t low, high;
} item16;

/* Return whether the GROUP bytes at `a` and `b` are equal. */
static bool same_group(const unsigned char *a, const unsigned char *b)
{
    uint64_t x[GROUP / 8], y[GROUP / 8], bits = 0;
    memcpy(x, a, sizeof x);
    memcpy(y, b, sizeof y);
    for (size_t i = 0; i < GROUP / 8; i++) {
        bits |= x[i] ^ y[i];
    }
    return bits == 0;
}

/* Define compare_SIZE, the kernel (see mls_delta_compare) for elements of `size` bytes.
 * Two elements are read as `x` and `y` of type `type`; they differ if the expression
 * `unequal` is true. A number is always stored, and counted only if its elements differ:
 * a branch would often be mispredicted. */
#define DEFINE_COMPARE(size, type, unequal)                                              \
    static size_t compare_##size(const unsigned char *a, const unsigned char *b,         \
                                 size_t count, uint16_t *numbers)                        \
    {                                                                                    \
        size_t changed = 0;                                                              \
        for (size_t first = 0; first < count; first += GROUP / (size)) {                 \
            const size_t rest = count - first;                                           \
            const size_t items = rest < GROUP / (size) ? rest : GROUP / (size);          \
            if (items == GROUP / (size) &&                                               \
                same_group(a + first * (size), b + first * (size))) {                    \
                continue;                                                                \
            }                                                                            \
            for (size_t i = first; i < first + items; i++) {                             \
                type x, y;                                                               \
                memcpy(&x, a + i * (size), sizeof x);                                    \
                memcpy(&y, b + i * (size), sizeof y);                                    \
                numbers[changed] = (uint16_t)i;                                          \
                changed += (unequal);                                                    \
            }                                                                            \
        }                                                                                \
        return changed;                                                                  \
    }

DEFINE_COMPARE(1, uint8_t, x != y)
DEFINE_COMPARE(2, uint16_t, x != y)
DEFINE_COMPARE(4, uint32_t, x != y)
DEFINE_COMPARE(8, uint64_t, x != y)
DEFINE_COMPARE(16, item16, x.low != y.low || x.high != y.high)

const mls_delta_kernels mls_delta_scalar = {
    .compare = {compare_1, compare_2, compare_4, compare_8, compare_16}};
