/* delta_avx512: finds the elements that differ in two blocks, with AVX-512 VBMI2.
 *
 * Compares 32 items at a time and compresses their numbers with one instruction, without
 * a branch: how many items of a step differ cannot be predicted. */
#include "follow/delta_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>

#    define MLS_TARGET                                                                   \
        __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,popcnt")))

#    include "simd/inlined_loops.h"

#    include <string.h>

enum { STEP = 32 }; /* items */

/* Return whether the processor has VBMI2, which can compress 16-bit numbers. */
bool mls_delta_compress_offered(void)
{
    return __builtin_cpu_supports("avx512vbmi2") != 0;
}

MLS_INLINED __m512i load_register(const unsigned char *bytes)
{
    return _mm512_loadu_si512(bytes);
}

/* unequal_SIZE: compare STEP items of SIZE bytes, and return a bit for each, set if it
 * differs. */
MLS_INLINED uint32_t unequal_1(const unsigned char *a, const unsigned char *b)
{
    return _mm256_cmpneq_epi8_mask(_mm256_loadu_si256((const __m256i *)(const void *)a),
                                   _mm256_loadu_si256((const __m256i *)(const void *)b));
}

MLS_INLINED uint32_t unequal_2(const unsigned char *a, const unsigned char *b)
{
    return _mm512_cmpneq_epi16_mask(load_register(a), load_register(b));
}

/* unequal_SIZE for 4 bytes: a register has 16 items. */
MLS_INLINED uint32_t unequal_4(const unsigned char *a, const unsigned char *b)
{
    uint32_t bits = 0;
    MLS_UNROLLED
    for (uint32_t i = 0; i < 2; i++) {
        const __mmask16 items = _mm512_cmpneq_epi32_mask(load_register(a + i * 64),
                                                         load_register(b + i * 64));
        bits |= (uint32_t)items << (i * 16);
    }
    return bits;
}

/* unequal_SIZE for 8 bytes: a register has 8 items. */
MLS_INLINED uint32_t unequal_8(const unsigned char *a, const unsigned char *b)
{
    uint32_t bits = 0;
    MLS_UNROLLED
    for (uint32_t i = 0; i < 4; i++) {
        const __mmask8 items = _mm512_cmpneq_epi64_mask(load_register(a + i * 64),
                                                        load_register(b + i * 64));
        bits |= (uint32_t)items << (i * 8);
    }
    return bits;
}

/* Call unequal_SIZE for items of `size` bytes, a constant. */
MLS_INLINED uint32_t unequal_items(const unsigned char *a, const unsigned char *b,
                                   size_t size)
{
    return size == 1   ? unequal_1(a, b)
           : size == 2 ? unequal_2(a, b)
           : size == 4 ? unequal_4(a, b)
                       : unequal_8(a, b);
}

/* The comparison of a kernel (see mls_delta_compare) for items of `size` bytes: stores
 * the numbers of the different items in `numbers`, and returns how many they are. Always
 * stores STEP numbers; those after the ones that count are overwritten by the next step.
 * The last step is filled up with equal items. */
MLS_INLINED size_t compare_items(const unsigned char *a, const unsigned char *b,
                                 size_t count, uint16_t *numbers, size_t size)
{
    unsigned char last_a[STEP * 8] = {0}, last_b[STEP * 8] = {0};
    uint16_t first[STEP];
    size_t changed = 0;
    for (size_t i = 0; i < STEP; i++) {
        first[i] = (uint16_t)i;
    }
    __m512i current = _mm512_loadu_si512(first); /* the numbers of the step's items */
    for (size_t at = 0; at < count; at += STEP) {
        const unsigned char *left = a + at * size, *right = b + at * size;
        if (count - at < STEP) {
            memcpy(last_a, left, (count - at) * size);
            memcpy(last_b, right, (count - at) * size);
            left = last_a;
            right = last_b;
        }
        const uint32_t bits = unequal_items(left, right, size);
        _mm512_storeu_si512(numbers + changed,
                            _mm512_maskz_compress_epi16(bits, current));
        changed += (size_t)__builtin_popcount(bits);
        current = _mm512_add_epi16(current, _mm512_set1_epi16(STEP));
    }
    return changed;
}

MLS_DEFINE_COMPARE(1)
MLS_DEFINE_COMPARE(2)
MLS_DEFINE_COMPARE(4)
MLS_DEFINE_COMPARE(8)

/* The comparison of a kernel (see mls_delta_compare) for items of 16 bytes, as pairs of 8
 * bytes: the numbers of the different halves are stored first, and then replaced by those
 * of the items. An item that differs in both halves is stored once. */
MLS_TARGET static size_t compare_16(const unsigned char *a, const unsigned char *b,
                                    size_t count, uint16_t *numbers)
{
    const size_t halves = compare_items(a, b, 2 * count, numbers, 8);
    size_t changed = 0;
    for (size_t i = 0; i < halves; i++) {
        const uint16_t item = numbers[i] / 2;
        if (changed == 0 || numbers[changed - 1] != item) {
            numbers[changed++] = item;
        }
    }
    return changed;
}

const mls_delta_kernels mls_delta_avx512 = {
    .compare = {compare_1, compare_2, compare_4, compare_8, compare_16}};

#endif
