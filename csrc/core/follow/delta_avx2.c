/* delta_avx2: finds the elements that differ in two blocks, with AVX2.
 *
 * Compares 64 bytes at a time and visits the set bits of a mask. Runs with AVX-512 too,
 * unless the processor has VBMI2. */
#include "follow/delta_kernels.h"

#if defined(__x86_64__)

#    include "base/size.h"
#    include "simd/avx2.h"

enum { STEP = 2 * WIDTH, SURE = 4 }; /* bytes of two registers; see store_numbers */
/* Added to a mask that may be 0, for which the number of its lowest bit is undefined. */
static const uint64_t HIGHEST = (uint64_t)1 << 63;

MLS_INLINED __m256i load_register(const unsigned char *bytes)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)bytes);
}

/* Return a register whose items of `size` bytes are all ones if the items of `a` and `b`
 * are equal, else zeros. 16-byte items are compared as two halves. */
MLS_INLINED __m256i equal_items(__m256i a, __m256i b, size_t size)
{
    return size == 1   ? _mm256_cmpeq_epi8(a, b)
           : size == 2 ? _mm256_cmpeq_epi16(a, b)
           : size == 4 ? _mm256_cmpeq_epi32(a, b)
                       : _mm256_cmpeq_epi64(a, b);
}

/* Compare STEP bytes of `a` and `b`, and return a bit for each: the bit of an item's
 * first byte is set if the item differs; all others are clear. */
MLS_INLINED uint64_t unequal_items(const unsigned char *a, const unsigned char *b,
                                   size_t size)
{
    const __m256i low = equal_items(load_register(a), load_register(b), size);
    const __m256i high =
        equal_items(load_register(a + WIDTH), load_register(b + WIDTH), size);
    const uint64_t bits = ~((uint64_t)(uint32_t)_mm256_movemask_epi8(low) |
                            (uint64_t)(uint32_t)_mm256_movemask_epi8(high) << WIDTH);
    return size == 1   ? bits
           : size == 2 ? bits & 0x5555555555555555U
           : size == 4 ? bits & 0x1111111111111111U
           : size == 8 ? bits & 0x0101010101010101U
                       : (bits | bits >> 8) & 0x0001000100010001U;
}

/* Store the number of each item with a set bit in `bits` (see unequal_items), and return
 * their count. `first` is the number of the first of the items of `size` bytes. SURE
 * numbers are stored without a test, even if fewer bits are set, so that the number of
 * rounds is rarely mispredicted. */
MLS_INLINED size_t store_numbers(uint64_t bits, size_t first, size_t size,
                                 uint16_t *numbers)
{
    const size_t changed = (size_t)__builtin_popcountll(bits);
    size_t stored = 0;
    do {
        MLS_UNROLLED
        for (size_t i = 0; i < SURE; i++, bits &= bits - 1) {
            const size_t byte = (size_t)__builtin_ctzll(bits | HIGHEST);
            numbers[stored++] = (uint16_t)(first + byte / size);
        }
    } while (stored < changed);
    return changed;
}

/* The comparison of a kernel (see mls_delta_compare) for items of `size` bytes: stores
 * the numbers of the different items in `numbers`, and returns how many they are. Two
 * steps share one test for differences, since most items are equal. The last bytes are
 * copied, so that nothing is read behind them. */
MLS_INLINED size_t compare_items(const unsigned char *a, const unsigned char *b,
                                 size_t count, uint16_t *numbers, size_t size)
{
    const size_t bytes = count * size;
    size_t changed = 0, at = 0;
    for (; at + 2 * STEP <= bytes; at += 2 * STEP) {
        const size_t middle = at + STEP;
        const uint64_t low = unequal_items(a + at, b + at, size);
        const uint64_t high = unequal_items(a + middle, b + middle, size);
        if ((low | high) != 0) {
            changed += store_numbers(low, at / size, size, numbers + changed);
            changed += store_numbers(high, middle / size, size, numbers + changed);
        }
    }
    for (; at < bytes; at += STEP) {
        unsigned char last_a[STEP] = {0}, last_b[STEP] = {0};
        memcpy(last_a, a + at, mls_size_least(STEP, bytes - at));
        memcpy(last_b, b + at, mls_size_least(STEP, bytes - at));
        const uint64_t bits = unequal_items(last_a, last_b, size);
        changed += store_numbers(bits, at / size, size, numbers + changed);
    }
    return changed;
}

MLS_DEFINE_COMPARE(1)
MLS_DEFINE_COMPARE(2)
MLS_DEFINE_COMPARE(4)
MLS_DEFINE_COMPARE(8)
MLS_DEFINE_COMPARE(16)

const mls_delta_kernels mls_delta_avx2 = {
    .compare = {compare_1, compare_2, compare_4, compare_8, compare_16}};

#endif
