/* kv_quantize_scalar: the groups of kv_quantize in plain C, the reference for others. */
#include "kv/quantize_kernels.h"

static bool choose(const float *x, size_t groups, size_t size, float levels,
                   float *scales, float *biases)
{
    bool is_finite = true;
    for (size_t group = 0; group < groups; group++, x += size) {
        float low = x[0], high = x[0];
        float not_finite = 0; /* becomes NaN once an element is infinite or NaN */
        for (size_t i = 0; i < size; i++) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
            not_finite += x[i] - x[i];
        }
        is_finite =
            mls_choose_affine(low, high, levels, &scales[group], &biases[group]) &&
            !isnan(not_finite) && is_finite;
    }
    return is_finite;
}

static void encode(const float *x, size_t groups, size_t size, float levels,
                   const float *scales, const float *biases, unsigned char *codes)
{
    const float round = 0x1.8p23F; /* adding it rounds to an integer, ties to even */
    for (size_t group = 0; group < groups; group++, x += size, codes += size) {
        for (size_t i = 0; i < size; i++) {
            float code = (x[i] - biases[group]) / scales[group];
            code = code > 0 ? code : 0;
            code = code < levels ? code : levels;
            codes[i] = (unsigned char)(int32_t)((code + round) - round);
        }
    }
}

static void decode(const unsigned char *codes, size_t groups, size_t size,
                   const float *scales, const float *biases, float *x)
{
    for (size_t group = 0; group < groups; group++, x += size, codes += size) {
        for (size_t i = 0; i < size; i++) {
            x[i] = scales[group] * (float)codes[i] + biases[group];
        }
    }
}

static void join(const unsigned char *codes, size_t count, unsigned bits,
                 unsigned char *joined)
{
    for (size_t i = 0; i < count; i += 8) {
        mls_join_8(codes + i, bits, joined + i / 8 * bits);
    }
}

static void split(const unsigned char *joined, size_t count, unsigned bits,
                  unsigned char *codes)
{
    for (size_t i = 0; i < count; i += 8) {
        mls_split_8(joined + i / 8 * bits, bits, codes + i);
    }
}

const mls_group_kernels mls_group_scalar = {choose, encode, decode, join, split};
