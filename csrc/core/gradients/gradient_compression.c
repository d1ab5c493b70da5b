/* gradient_compression: sends float32 gradients as float16, bfloat16 or int8 with error
 * feedback; sums the decoded messages.
 *
 * Encodes in blocks, so that the residual is computed while a block is in the cache.
 *
 * An INT8 part holds the scales of all its blocks and then the codes, one byte for each
 * element. A 16-bit part holds only the elements. Both are padded with zeros to
 * MLS_BUCKET_ALIGN, so that old memory contents never leave the rank.
 */
#include "gradients/gradient_compression.h"

#include "base/size.h"

#include <math.h>
#include <string.h>

static const float F16_MAX = 65504.0f;
static const float BF16_MAX = 3.3895313892515355e38f;

/* Return the number of blocks of n elements; the last one may be shorter. */
static size_t blocks_of(size_t n)
{
    return n / MLS_GRADIENT_COMPRESSION_BLOCK + (n % MLS_GRADIENT_COMPRESSION_BLOCK != 0);
}

/* Return the bytes of n encoded elements without padding. */
static size_t encoded_bytes(mls_gradient_compression compression, size_t n)
{
    return compression == MLS_GRADIENT_COMPRESSION_INT8 ? n + blocks_of(n) * sizeof(float)
                                                        : 2 * n;
}

/* Look up a name; returns false if it is unknown, and `*out` is unchanged then. */
bool mls_gradient_compression_from_name(mls_str name, mls_gradient_compression *out)
{
    static const char *const names[MLS_GRADIENT_COMPRESSION_COUNT] = {
        [MLS_GRADIENT_COMPRESSION_F16] = "float16",
        [MLS_GRADIENT_COMPRESSION_BF16] = "bfloat16",
        [MLS_GRADIENT_COMPRESSION_INT8] = "int8"};
    for (int compression = 0; compression < MLS_GRADIENT_COMPRESSION_COUNT;
         compression++) {
        if (mls_str_is(name, names[compression])) {
            *out = (mls_gradient_compression)compression;
            return true;
        }
    }
    return false;
}

/* Padding keeps the next part of a message aligned. */
size_t mls_gradient_compression_bytes(mls_gradient_compression compression, size_t n)
{
    const size_t bytes = encoded_bytes(compression, n);
    return (bytes + MLS_BUCKET_ALIGN - 1) / MLS_BUCKET_ALIGN * MLS_BUCKET_ALIGN;
}

/* ---- one block ---- */

/* Set `block` to `count` values to encode: the gradient plus the residual of the previous
 * step (NULL: none). */
static void add_residual(float *block, const float *src, const float *residual,
                         size_t count)
{
    for (size_t i = 0; i < count; i++) {
        block[i] = residual == NULL ? src[i] : src[i] + residual[i];
    }
}

/* Limit the finite ones of `count` values in `block` to +-`limit`: an infinite rounding
 * error could never be compensated, whereas the excess of a clamped value stays in the
 * residual. Infinities become NaN, so that all three formats report them alike; a NaN
 * fails every comparison and is kept. */
static void clamp_values(float *block, size_t count, float limit)
{
    for (size_t i = 0; i < count; i++) {
        const float value = block[i];
        block[i] = isinf(value)     ? NAN
                   : value > limit  ? limit
                   : value < -limit ? -limit
                                    : value;
    }
}

/* Write the int8 codes of `count` elements, and return their scale: the largest magnitude
 * divided by 127. The scale is NaN if any element is not finite; the whole block then
 * decodes as NaN, including its finite elements. */
static float quantize_block(const float *block, signed char *codes, size_t count)
{
    /* 1.5 * 2^23: floats of this size are 1 apart, so adding it rounds to the nearest
     * integer, ties to even, and subtracting it again is exact. The compiler must not
     * fuse the product with the addition: see -ffp-contract. */
    const float shift = 12582912.0f;
    float largest = 0, nonfinite_mark = 0;
    for (size_t i = 0; i < count; i++) {
        const float magnitude = fabsf(block[i]);
        largest = magnitude > largest ? magnitude : largest;
        /* becomes NaN if an element is NaN or infinite, else stays 0 */
        nonfinite_mark += block[i] * 0.0f;
    }
    if (!(nonfinite_mark == 0)) {
        memset(codes, 1, count); /* any code: times NaN it is NaN */
        return NAN;
    }
    const float scale = largest / 127.0f;
    /* the inverse of a subnormal scale may be infinite: treat such elements as 0 */
    const float inverse = largest < 1e-36f ? 0.0f : 127.0f / largest;
    for (size_t i = 0; i < count; i++) {
        codes[i] = (signed char)((block[i] * inverse + shift) - shift);
    }
    /* all codes are 0 then */
    return inverse == 0 ? 0.0f : scale;
}

/* Set `block` to code times scale for `count` elements. Codes and scale come from another
 * rank; every byte is a valid code. */
static void dequantize_block(const signed char *codes, float scale, float *block,
                             size_t count)
{
    for (size_t i = 0; i < count; i++) {
        block[i] = (float)codes[i] * scale;
    }
}

/* Store the rounding error: the intended values (`intended`) minus the decoded ones
 * (`decoded`). Stores 0 if either is not finite: a NaN residual would spoil every later
 * step, and this step is lost anyway. */
static void store_residual(float *residual, const float *intended, const float *decoded,
                           size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const float error = intended[i] - decoded[i];
        residual[i] = error * 0.0f == 0 ? error : 0.0f;
    }
}

/* ---- arrays ---- */

/* Return the dtype of the elements of a 16-bit format. */
static mls_dtype dtype_of_format(mls_gradient_compression compression)
{
    return compression == MLS_GRADIENT_COMPRESSION_F16 ? MLS_F16 : MLS_BF16;
}

/* Decode elements `start` to start + `count` - 1 of a part to `dst`. `n`: elements of the
 * whole part; the INT8 codes are behind the scales of all its blocks. INT8 needs a
 * `start` at the beginning of a block. */
void mls_gradient_compression_decode(const mls_kernels *kernels,
                                     mls_gradient_compression compression,
                                     const unsigned char *src, size_t n, size_t start,
                                     size_t count, float *dst)
{
    if (compression != MLS_GRADIENT_COMPRESSION_INT8) {
        const unsigned char *halves = src + 2 * start; /* 16 bits each */
        kernels->convert[dtype_of_format(compression)][MLS_F32](dst, halves, count,
                                                                MLS_STORE_CACHED);
        return;
    }
    const signed char *codes = (const signed char *)src + blocks_of(n) * sizeof(float);
    for (size_t i = 0; i < count; i += MLS_GRADIENT_COMPRESSION_BLOCK) {
        float scale;
        const size_t length = mls_size_least(count - i, MLS_GRADIENT_COMPRESSION_BLOCK);
        memcpy(&scale, src + (start + i) / MLS_GRADIENT_COMPRESSION_BLOCK * sizeof scale,
               sizeof scale);
        dequantize_block(codes + start + i, scale, dst + i, length);
    }
}

/* Encode n elements block by block, and update the residual. It is computed from the
 * decoded output, so it is exact with all kernels. The three blocks take 3 KiB of
 * stack. */
void mls_gradient_compression_encode(const mls_kernels *kernels,
                                     mls_gradient_compression compression,
                                     const float *src, float *residual,
                                     unsigned char *dst, size_t n)
{
    float intended[MLS_GRADIENT_COMPRESSION_BLOCK],
        decoded[MLS_GRADIENT_COMPRESSION_BLOCK],
        saturated[MLS_GRADIENT_COMPRESSION_BLOCK];
    const size_t bytes = encoded_bytes(compression, n);
    memset(dst + bytes, 0, mls_gradient_compression_bytes(compression, n) - bytes);
    for (size_t start = 0; start < n; start += MLS_GRADIENT_COMPRESSION_BLOCK) {
        const size_t length = mls_size_least(n - start, MLS_GRADIENT_COMPRESSION_BLOCK);
        add_residual(intended, src + start, residual == NULL ? NULL : residual + start,
                     length);
        if (compression == MLS_GRADIENT_COMPRESSION_INT8) {
            signed char *codes = (signed char *)dst + blocks_of(n) * sizeof(float);
            const float scale = quantize_block(intended, codes + start, length);
            memcpy(dst + start / MLS_GRADIENT_COMPRESSION_BLOCK * sizeof scale, &scale,
                   sizeof scale);
        } else {
            /* a copy: the residual is measured against the unclamped values */
            memcpy(saturated, intended, length * sizeof *intended);
            clamp_values(saturated, length,
                         compression == MLS_GRADIENT_COMPRESSION_F16 ? F16_MAX
                                                                     : BF16_MAX);
            kernels->convert[MLS_F32][dtype_of_format(compression)](
                dst + 2 * start, saturated, length, MLS_STORE_CACHED);
        }
        if (residual != NULL) {
            mls_gradient_compression_decode(kernels, compression, dst, n, start, length,
                                            decoded);
            store_residual(residual + start, intended, decoded, length);
        }
    }
}

/* ---- buckets ---- */

/* Check that all reductions of the bucket are float32 sums. */
mls_code mls_gradient_compression_check(const mls_bucket *b, mls_status *st)
{
    for (size_t i = 0; i < b->count; i++) {
        const mls_reduction *r = &b->segments[i].reduction;
        if (r->dtype != MLS_F32 || r->out_dtype != MLS_F32 || r->op != MLS_REDUCE_SUM) {
            return mls_fail(st, MLS_E_VALUE, "only sums of float32 can be compressed");
        }
    }
    return MLS_OK;
}

/* Add up rank `receiver`'s encoded parts. All ranks have equal counts, so sender and
 * receiver compute the same size. */
size_t mls_gradient_compression_bucket_bytes(const mls_bucket *b,
                                             mls_gradient_compression compression,
                                             size_t receiver)
{
    size_t total = 0;
    for (size_t i = 0; i < b->count; i++) {
        total +=
            mls_gradient_compression_bytes(compression, b->segments[i].counts[receiver]);
    }
    return total;
}

/* Add up the messages to all other ranks. They are smaller than the arrays in memory, so
 * the sum cannot overflow. */
size_t mls_gradient_compression_sent_bytes(const mls_bucket *b,
                                           mls_gradient_compression compression)
{
    size_t total = 0;
    for (size_t rank = 0; rank < b->world; rank++) {
        total += rank == b->rank
                     ? 0
                     : mls_gradient_compression_bucket_bytes(b, compression, rank);
    }
    return total;
}

/* Encode all parts: of other ranks into `messages`, of this rank into `own_parts`.
 * Messages are in rank order, and segments in order within a message, as sum_segment
 * reads them. */
void mls_gradient_compression_pack(const mls_bucket *b, const mls_kernels *kernels,
                                   mls_gradient_compression compression,
                                   float *const *residuals, unsigned char *messages,
                                   unsigned char *own_parts)
{
    for (size_t receiver = 0; receiver < b->world; receiver++) {
        /* both pointers advance behind each part */
        unsigned char **at = receiver == b->rank ? &own_parts : &messages;
        for (size_t i = 0; i < b->count; i++) {
            const mls_segment *s = &b->segments[i];
            const size_t start = mls_segment_elements(s, receiver);
            const float *src = (const float *)(const void *)s->data;
            float *residual = residuals == NULL ? NULL : residuals[i] + start;
            mls_gradient_compression_encode(kernels, compression, src + start, residual,
                                            *at, s->counts[receiver]);
            *at += mls_gradient_compression_bytes(compression, s->counts[receiver]);
        }
    }
}

/* Sum segment `s` over all ranks, in rank order, into `s->out`. The segment begins `at`
 * bytes into `own_parts` and into each message of `message_bytes` bytes in `received`.
 * All ranks of a block come before the next block, so that the block stays in the L1
 * cache. `s->out` may be this rank's part of the array, which is not read any more:
 * `own_parts` holds it as the other ranks would decode it. */
static void sum_segment(const mls_bucket *b, const mls_kernels *kernels,
                        mls_gradient_compression compression,
                        const unsigned char *own_parts, const unsigned char *received,
                        size_t message_bytes, size_t at, const mls_segment *s)
{
    float block[MLS_GRADIENT_COMPRESSION_BLOCK];
    float *out = s->out;
    const size_t n = s->counts[b->rank];
    for (size_t start = 0; start < n; start += MLS_GRADIENT_COMPRESSION_BLOCK) {
        const size_t length = mls_size_least(n - start, MLS_GRADIENT_COMPRESSION_BLOCK);
        for (size_t sender = 0; sender < b->world; sender++) {
            /* no message from this rank: skip it */
            const size_t messages_before = sender < b->rank ? sender : sender - 1;
            const unsigned char *from =
                sender == b->rank ? own_parts + at
                                  : received + messages_before * message_bytes + at;
            /* rank 0 initialises the sum: adding to zero would turn -0 into +0 */
            mls_gradient_compression_decode(kernels, compression, from, n, start, length,
                                            sender == 0 ? out + start : block);
            for (size_t i = 0; sender > 0 && i < length; i++) {
                out[start + i] += block[i];
            }
        }
    }
}

/* Sum each segment into its output, then run its reduction on the output as the only
 * source. */
void mls_gradient_compression_reduce(const mls_bucket *b, const mls_kernels *kernels,
                                     mls_gradient_compression compression,
                                     const unsigned char *own_parts,
                                     const unsigned char *received)
{
    size_t at = 0;
    const size_t message_bytes =
        mls_gradient_compression_bucket_bytes(b, compression, b->rank);
    for (size_t i = 0; i < b->count; i++) {
        mls_segment *s = &b->segments[i];
        const void *sum = s->out;
        s->norm_partial = (mls_norm_partial){0};
        sum_segment(b, kernels, compression, own_parts, received, message_bytes, at, s);
        /* one source, in place: only the division and the norm partial remain */
        mls_reduce_run(kernels, &s->reduction, &sum, 1, s->out, s->counts[b->rank],
                       mls_cached(), &s->norm_partial);
        at += mls_gradient_compression_bytes(compression, s->counts[b->rank]);
    }
}
