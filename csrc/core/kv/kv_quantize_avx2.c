/* kv_quantize_avx2: arithmetic of quantized caches with AVX2 and F16C.
 *
 * A vector has 8 floats, and the size of a group is a multiple of 8. Scales and biases
 * are computed for 8 groups at a time. GCC does not make vectors of the plain loops,
 * because comparisons of floats may trap.
 */
#include "kv/quantize_kernels.h"

#if defined(__x86_64__)

#    include "simd/avx2.h"

enum { BYTES = 16 }; /* of a vector of codes */

/* Load 8 elements of `dtype` (float16, bfloat16 or float32) as floats. `dtype` is a
 * constant in every call, so the branches disappear. */
MLS_INLINED floats load_floats(const unsigned char *items, mls_dtype dtype)
{
    return dtype == MLS_F16    ? floats_f16(items)
           : dtype == MLS_BF16 ? floats_bf16(items)
                               : floats_f32(items);
}

/* Store 8 floats as elements of `dtype`: float16, bfloat16 or float32. */
MLS_INLINED void store_floats(unsigned char *items, floats values, mls_dtype dtype)
{
    if (dtype == MLS_F16) {
        store_f16(items, values);
    } else if (dtype == MLS_BF16) {
        store_bf16(items, values);
    } else {
        store_f32(items, values);
    }
}

MLS_INLINED size_t item_bytes(mls_dtype dtype)
{
    return dtype == MLS_F32 ? 4 : 2;
}

/* ---- scales and biases ---- */

MLS_INLINED float smallest(__m256 v)
{
    __m128 w = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_min_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_min_ss(w, _mm_movehdup_ps(w)));
}

MLS_INLINED float largest(__m256 v)
{
    __m128 w = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    w = _mm_max_ps(w, _mm_movehl_ps(w, w));
    return _mm_cvtss_f32(_mm_max_ss(w, _mm_movehdup_ps(w)));
}

MLS_INLINED bool has_nan(__m256 v)
{
    return _mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) != 0;
}

/* Set `*low` and `*high` to the smallest and largest of the `size` elements of a group at
 * `items`. Returns a register with a NaN if an element is not finite; multiplying by 0
 * makes it one. */
MLS_INLINED __m256 find_range(const unsigned char *items, size_t size, float *low,
                              float *high, mls_dtype dtype)
{
    const size_t step = FLOATS * item_bytes(dtype);
    __m256 lows = load_floats(items, dtype), highs = lows;
    __m256 not_finite = _mm256_setzero_ps();
    for (size_t i = 0; i < size; i += FLOATS, items += step) {
        const __m256 value = load_floats(items, dtype);
        lows = _mm256_min_ps(value, lows);
        highs = _mm256_max_ps(value, highs);
        not_finite = _mm256_or_ps(not_finite, _mm256_mul_ps(value, _mm256_setzero_ps()));
    }
    *low = smallest(lows);
    *high = largest(highs);
    return not_finite;
}

/* Compute the scales and biases of 8 groups from their smallest (`lows`) and largest
 * (`highs`) elements, as choose_affine of the scalar file does for one. `max_code` has
 * the largest code in each lane. Returns a register with a NaN if the range of a group is
 * not finite. */
MLS_INLINED __m256 choose_scales(const float *lows, const float *highs, __m256 max_code,
                                 __m256 *scales, __m256 *biases)
{
    const __m256 sign = _mm256_set1_ps(-0.0F), zero = _mm256_setzero_ps();
    const __m256 low = _mm256_loadu_ps(lows), high = _mm256_loadu_ps(highs);
    const __m256 range = _mm256_sub_ps(high, low);
    const __m256 from_low = _mm256_cmp_ps(_mm256_andnot_ps(sign, low),
                                          _mm256_andnot_ps(sign, high), _CMP_GT_OQ);
    const __m256 step_size =
        _mm256_max_ps(_mm256_div_ps(range, max_code), _mm256_set1_ps(1e-7F));
    const __m256 scale = _mm256_xor_ps(step_size, _mm256_andnot_ps(from_low, sign));
    const __m256 edge = _mm256_blendv_ps(high, low, from_low);
    const __m256 steps = _mm256_round_ps(_mm256_div_ps(edge, scale),
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 has_steps =
        _mm256_cmp_ps(_mm256_andnot_ps(sign, steps), zero, _CMP_GT_OQ);
    *scales = _mm256_blendv_ps(scale, _mm256_div_ps(edge, steps), has_steps);
    *biases = _mm256_and_ps(edge, has_steps);
    return _mm256_mul_ps(range, zero);
}

/* Store the first `count` lanes, which are the scales or the biases of `count` groups, as
 * elements of `dtype`. Writes nothing behind them. */
MLS_INLINED void store_lanes(unsigned char *items, __m256 lanes, size_t count,
                             mls_dtype dtype)
{
    if (count == FLOATS) {
        store_floats(items, lanes, dtype);
        return;
    }
    unsigned char all[WIDTH];
    store_floats(all, lanes, dtype);
    memcpy(items, all, count * item_bytes(dtype));
}

/* Load `count` elements of `dtype` as floats; the other lanes are 0. Reads nothing behind
 * them. */
MLS_INLINED __m256 load_lanes(const unsigned char *items, size_t count, mls_dtype dtype)
{
    if (count == FLOATS) {
        return load_floats(items, dtype);
    }
    unsigned char all[WIDTH] = {0};
    memcpy(all, items, count * item_bytes(dtype));
    return load_floats(all, dtype);
}

/* ---- strings of bits ---- */

MLS_INLINED __m128i load_16(const void *bytes)
{
    return _mm_loadu_si128((const __m128i *)bytes);
}

MLS_INLINED void store_16(void *bytes, __m128i v)
{
    _mm_storeu_si128((__m128i *)bytes, v);
}

/* Constants for codes of `bits` bits: the weights and join_* of join_16, split_* and the
 * factors of split_16. */
typedef struct code_layout {
    unsigned bits;
    __m128i pair_weights, weights, join_order, join_shift;
    __m256i split_order, factors;
    __m128i split_shift;
} code_layout;

/* Return the constants with which join_16 and split_16 move codes of `bits` bits, 2 to 6:
 * orders of shuffles, multipliers that shift, and counts of shifts. */
MLS_INLINED code_layout layout_of(unsigned bits)
{
    unsigned char joined[BYTES], split[2 * BYTES];
    uint16_t factors[BYTES];
    for (unsigned i = 0; i < BYTES; i++) { /* a shuffle writes 0 for an index of 128 */
        joined[i] = (unsigned char)(i < bits ? i : i < 2 * bits ? 8 + i - bits : 128);
        split[2 * i] = (unsigned char)(i * bits / 8);
        split[2 * i + 1] = (unsigned char)(i * bits / 8 + 1);
        factors[i] = (uint16_t)(1U << (16 - bits - i * bits % 8));
    }
    return (code_layout){
        .bits = bits,
        .pair_weights = _mm_set1_epi16((short)(1 | 1 << (bits + 8))),
        .weights = _mm_set1_epi32(1 | 1 << (2 * bits + 16)),
        .join_order = load_16(joined),
        .join_shift = _mm_cvtsi32_si128((int)(32 - 4 * bits)),
        .split_order = _mm256_loadu_si256((const __m256i *)(const void *)split),
        .factors = _mm256_loadu_si256((const __m256i *)(const void *)factors),
        .split_shift = _mm_cvtsi32_si128((int)(16 - bits))};
}

/* Join 16 codes of l->bits bits, one in each byte of `codes`, to a string of 2 * l->bits
 * bytes; the other bytes of the result are 0. Pairs of codes are joined by one
 * multiplication, pairs of pairs by the next one, and 8 codes by shifts in each half of
 * the register. */
MLS_INLINED __m128i join_16(__m128i codes, const code_layout *l)
{
    const __m128i low = _mm_set1_epi64x(0xFFFFFFFF);
    const __m128i pairs = _mm_maddubs_epi16(codes, l->pair_weights);
    const __m128i fours = _mm_madd_epi16(pairs, l->weights);
    const __m128i upper = _mm_srl_epi64(_mm_andnot_si128(low, fours), l->join_shift);
    const __m128i eights = _mm_or_si128(_mm_and_si128(low, fours), upper);
    return _mm_shuffle_epi8(eights, l->join_order);
}

/* Split the first 16 codes of `string`, of l->bits bits each, one into each byte. A
 * 16-bit lane gets the two bytes with its code, a multiplication moves the code to the
 * upper end of the lane, and a shift to the lower one. */
MLS_INLINED __m128i split_16(__m128i string, const code_layout *l)
{
    const __m256i bytes = _mm256_broadcastsi128_si256(string);
    const __m256i lanes =
        _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, l->split_order), l->factors);
    const __m256i wide = _mm256_srl_epi16(lanes, l->split_shift);
    return _mm_packus_epi16(_mm256_castsi256_si128(wide),
                            _mm256_extracti128_si256(wide, 1));
}

/* Join `count` codes of l->bits bits, a multiple of 8, one in each byte of `codes`, to a
 * string of bits at `joined`. Full vectors are stored only if 16 bytes fit before `end`,
 * the end of all codes, since a store writes more bytes than it has codes for. */
MLS_INLINED void join_codes(const unsigned char *codes, size_t count,
                            unsigned char *joined, const unsigned char *end,
                            const code_layout *l)
{
    const unsigned bits = l->bits;
    for (; count >= BYTES && end - joined >= BYTES; count -= BYTES) {
        store_16(joined, join_16(load_16(codes), l));
        codes += BYTES;
        joined += 2 * bits;
    }
    for (; count > 0; count -= 8, codes += 8, joined += bits) {
        mls_join_8(codes, bits, joined);
    }
}

/* Split the string of bits at `joined` to `count` codes, a multiple of 8, one in each
 * byte of `codes`. Full vectors are loaded only if 16 bytes fit before `end`, the end of
 * all codes. */
MLS_INLINED void split_codes(const unsigned char *joined, const unsigned char *end,
                             size_t count, unsigned char *codes, const code_layout *l)
{
    const unsigned bits = l->bits;
    for (; count >= BYTES && end - joined >= BYTES; count -= BYTES) {
        store_16(codes, split_16(load_16(joined), l));
        codes += BYTES;
        joined += 2 * bits;
    }
    for (; count > 0; count -= 8, codes += 8, joined += bits) {
        mls_split_8(joined, bits, codes);
    }
}

/* ---- runs ---- */

/* Return the codes of 8 elements, one in each 32-bit lane: (x - bias) / scale, rounded
 * and clipped to 0 .. `max_code`. */
MLS_INLINED __m256i encode_8(__m256 x, __m256 scale, __m256 bias, __m256 max_code)
{
    const __m256 v = _mm256_div_ps(_mm256_sub_ps(x, bias), scale);
    const __m256 positive = _mm256_max_ps(v, _mm256_setzero_ps()); /* NaN: zero */
    return _mm256_cvtps_epi32(_mm256_min_ps(positive, max_code));
}

/* Encode the `size` elements of a group at `items`, one code in each byte of `codes`.
 * `max_code` is the largest code. */
MLS_INLINED void encode_group(const unsigned char *items, size_t size, float scale,
                              float bias, float max_code, unsigned char *codes,
                              mls_dtype dtype)
{
    const __m256 scales = _mm256_set1_ps(scale), biases = _mm256_set1_ps(bias);
    const __m256 most = _mm256_set1_ps(max_code);
    const size_t step = FLOATS * item_bytes(dtype);
    for (size_t i = 0; i < size; i += FLOATS, items += step) {
        const __m256i wide = encode_8(load_floats(items, dtype), scales, biases, most);
        const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(wide),
                                              _mm256_extracti128_si256(wide, 1));
        _mm_storel_epi64((__m128i *)(void *)(codes + i), _mm_packus_epi16(pairs, pairs));
    }
}

/* Store 8 floats, none of them NaN, as bfloat16. It is faster than store_bf16, which
 * keeps NaNs. */
MLS_INLINED void store_bf16_numbers(unsigned char *items, floats values)
{
    const __m256i all = _mm256_srli_epi32(rounded_numbers(values), 16);
    store_half(items, _mm_packus_epi32(_mm256_castsi256_si128(all),
                                       _mm256_extracti128_si256(all, 1)));
}

/* Write scale * code + bias as `dtype` to `items` for the `size` codes of a group, one in
 * each byte of `codes`. `is_finite`: scale and bias are finite, so no result is NaN. */
MLS_INLINED void decode_group(const unsigned char *codes, size_t size, float scale,
                              float bias, unsigned char *items, mls_dtype dtype,
                              bool is_finite)
{
    const __m256 scales = _mm256_set1_ps(scale), biases = _mm256_set1_ps(bias);
    const size_t step = FLOATS * item_bytes(dtype);
    for (size_t i = 0; i < size; i += FLOATS, items += step) {
        const __m256 v =
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_quarter(codes + i)));
        const floats x = _mm256_add_ps(_mm256_mul_ps(v, scales), biases);
        if (dtype == MLS_BF16 && is_finite) {
            store_bf16_numbers(items, x);
        } else {
            store_floats(items, x, dtype);
        }
    }
}

/* Quantize the groups of `run`, whose arrays have `dtype`, 8 groups at a time, since
 * choosing a scale needs a slow division. Returns false as soon as a value or a range is
 * not finite; the groups that follow are not written then. */
MLS_INLINED bool quantize_run(const mls_group_run *run, mls_dtype dtype)
{
    const size_t item = item_bytes(dtype), size = run->size;
    const size_t row = size * run->bits / 8; /* bytes of the codes of a group */
    const float max_code = (float)((1U << run->bits) - 1);
    const unsigned char *values = run->values, *const end =
                                                   run->codes + run->groups * row;
    unsigned char *joined = run->codes, buffer[MLS_QUANTIZE_MOST_GROUP];
    /* codes of 8 bits are not joined; any other number of bits makes a valid layout */
    const code_layout layout = layout_of(run->bits == 8 ? 4 : run->bits);
    float lows[FLOATS] = {0}, highs[FLOATS] = {0}, scale[FLOATS], bias[FLOATS];
    for (size_t first = 0; first < run->groups; first += FLOATS) {
        const size_t rest = run->groups - first, count = rest < FLOATS ? rest : FLOATS;
        __m256 scales, biases, not_finite = _mm256_setzero_ps();
        for (size_t i = 0; i < count; i++) {
            const __m256 bad =
                find_range(values + i * size * item, size, &lows[i], &highs[i], dtype);
            not_finite = _mm256_or_ps(not_finite, bad);
        }
        const __m256 bad =
            choose_scales(lows, highs, _mm256_set1_ps(max_code), &scales, &biases);
        not_finite = _mm256_or_ps(not_finite, bad);
        if (has_nan(not_finite)) {
            return false;
        }
        store_lanes((unsigned char *)run->scales + first * item, scales, count, dtype);
        store_lanes((unsigned char *)run->biases + first * item, biases, count, dtype);
        _mm256_storeu_ps(scale, scales);
        _mm256_storeu_ps(bias, biases);
        for (size_t i = 0; i < count; i++, values += size * item, joined += row) {
            unsigned char *codes = run->bits == 8 ? joined : buffer;
            encode_group(values, size, scale[i], bias[i], max_code, codes, dtype);
            if (run->bits != 8) {
                join_codes(codes, size, joined, end, &layout);
            }
        }
    }
    return true;
}

/* Write the values of the groups of `run`, whose arrays have `dtype`, 8 groups at a time.
 * If their scales and biases are finite, so are the results, and the check for NaN is
 * left out. */
MLS_INLINED void dequantize_run(const mls_group_run *run, mls_dtype dtype)
{
    const size_t item = item_bytes(dtype), size = run->size;
    const size_t row = size * run->bits / 8;
    const unsigned char *joined = run->codes, *const end = joined + run->groups * row;
    unsigned char *values = run->values, buffer[MLS_QUANTIZE_MOST_GROUP];
    const code_layout layout = layout_of(run->bits == 8 ? 4 : run->bits);
    const __m256 zero = _mm256_setzero_ps();
    float scale[FLOATS], bias[FLOATS];
    for (size_t first = 0; first < run->groups; first += FLOATS) {
        const size_t rest = run->groups - first, count = rest < FLOATS ? rest : FLOATS;
        const size_t at = first * item;
        const __m256 scales =
            load_lanes((const unsigned char *)run->scales + at, count, dtype);
        const __m256 biases =
            load_lanes((const unsigned char *)run->biases + at, count, dtype);
        const bool is_finite = !has_nan(
            _mm256_or_ps(_mm256_mul_ps(scales, zero), _mm256_mul_ps(biases, zero)));
        _mm256_storeu_ps(scale, scales);
        _mm256_storeu_ps(bias, biases);
        for (size_t i = 0; i < count; i++, values += size * item, joined += row) {
            if (run->bits != 8) {
                split_codes(joined, end, size, buffer, &layout);
            }
            const unsigned char *codes = run->bits == 8 ? joined : buffer;
            if (is_finite) {
                decode_group(codes, size, scale[i], bias[i], values, dtype, true);
            } else {
                decode_group(codes, size, scale[i], bias[i], values, dtype, false);
            }
        }
    }
}

MLS_TARGET static bool quantize_f16(const mls_group_run *run)
{
    return quantize_run(run, MLS_F16);
}

MLS_TARGET static bool quantize_bf16(const mls_group_run *run)
{
    return quantize_run(run, MLS_BF16);
}

MLS_TARGET static bool quantize_f32(const mls_group_run *run)
{
    return quantize_run(run, MLS_F32);
}

MLS_TARGET static void dequantize_f16(const mls_group_run *run)
{
    dequantize_run(run, MLS_F16);
}

MLS_TARGET static void dequantize_bf16(const mls_group_run *run)
{
    dequantize_run(run, MLS_BF16);
}

MLS_TARGET static void dequantize_f32(const mls_group_run *run)
{
    dequantize_run(run, MLS_F32);
}

const mls_group_kernels mls_group_avx2 = {
    .quantize =
        {[MLS_F16] = quantize_f16, [MLS_BF16] = quantize_bf16, [MLS_F32] = quantize_f32},
    .dequantize = {[MLS_F16] = dequantize_f16,
                   [MLS_BF16] = dequantize_bf16,
                   [MLS_F32] = dequantize_f32}};

#endif
