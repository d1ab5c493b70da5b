/* wire: elements go through in blocks, so that what is lost is known while it is warm.
 *
 * An INT8 part has the scales of all its blocks first, then the codes: one byte for each
 * element.  16-bit parts are the elements alone.  Either is padded with zeros to
 * MLS_BUCKET_ALIGN: what memory held before stays with its rank.
 */
#include "gradients/gradient_compression.h"

#include <math.h>
#include <string.h>

/* The largest finite number of each type. */
static const float F16_MAX = 65504.0f;
static const float BF16_MAX = 3.3895313892515355e38f;

const char *mls_wire_name(mls_wire wire)
{
    static const char *const names[MLS_WIRE_COUNT] = {[MLS_WIRE_F16] = "float16",
                                                      [MLS_WIRE_BF16] = "bfloat16",
                                                      [MLS_WIRE_INT8] = "int8"};
    return names[wire];
}

/* Blocks of n elements; the last one may be short. */
static size_t blocks_of(size_t n)
{
    return n / MLS_WIRE_BLOCK + (n % MLS_WIRE_BLOCK != 0);
}

/* Without padding. */
static size_t encoded_bytes(mls_wire wire, size_t n)
{
    return wire == MLS_WIRE_INT8 ? n + blocks_of(n) * sizeof(float) : 2 * n;
}

bool mls_wire_from_name(mls_text name, mls_wire *out)
{
    for (int wire = 0; wire < MLS_WIRE_COUNT; wire++) {
        if (mls_text_is(name, mls_wire_name((mls_wire)wire))) {
            *out = (mls_wire)wire;
            return true;
        }
    }
    return false;
}

/* Padded, so that what follows in a message is aligned too. */
size_t mls_wire_bytes(mls_wire wire, size_t n)
{
    const size_t bytes = encoded_bytes(wire, n);
    return (bytes + MLS_BUCKET_ALIGN - 1) / MLS_BUCKET_ALIGN * MLS_BUCKET_ALIGN;
}

/* ---- one block ---- */

/* Elements with what was lost of them the last time. */
static void take(float *block, const float *src, const float *residual, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        block[i] = residual == NULL ? src[i] : src[i] + residual[i];
    }
}

/* Keep finite what is finite: an infinite difference could never be made good.  What is
 * above the limit stays in the residual.  An infinity becomes NaN, so that all three
 * wires tell of it alike; NaN fails every comparison and stays. */
static void saturate(float *block, size_t count, float limit)
{
    for (size_t i = 0; i < count; i++) {
        const float value = block[i];
        block[i] = isinf(value)     ? NAN
                   : value > limit  ? limit
                   : value < -limit ? -limit
                                    : value;
    }
}

/* Codes of a block, and their scale, which is NaN where an element is not finite: the
 * whole block then arrives as NaN, its finite elements too. */
static float quantize(const float *block, signed char *codes, size_t count)
{
    /* 1.5 * 2^23: floats of this size are one apart, so that adding it rounds to the
     * nearest integer, ties to even, and taking it off again is exact.  The compiler may
     * not join the product before it into one rounding: see -ffp-contract. */
    const float shift = 12582912.0f;
    float largest = 0, spoiled = 0;
    for (size_t i = 0; i < count; i++) {
        const float size = fabsf(block[i]);
        largest = size > largest ? size : largest;
        spoiled += block[i] * 0.0f; /* NaN for NaN and for infinity, else 0 */
    }
    if (!(spoiled == 0)) {
        memset(codes, 1, count); /* any code would do: times NaN it is NaN */
        return NAN;
    }
    const float scale = largest / 127.0f;
    /* the inverse of a subnormal scale may be infinite: such elements are as good as 0 */
    const float inverse = largest < 1e-36f ? 0.0f : 127.0f / largest;
    for (size_t i = 0; i < count; i++) {
        codes[i] = (signed char)((block[i] * inverse + shift) - shift);
    }
    return inverse == 0 ? 0.0f : scale;
}

/* The other way.  Codes and scales come from another rank: any byte is a valid code. */
static void dequantize(const signed char *codes, float scale, float *block, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        block[i] = (float)codes[i] * scale;
    }
}

/* What was meant, less what arrives; nothing where either is not finite: a residual that
 * is NaN would spoil every step to come, and this one is lost in any case. */
static void keep_lost(float *residual, const float *meant, const float *arrives,
                      size_t count)
{
    for (size_t i = 0; i < count; i++) {
        const float lost = meant[i] - arrives[i];
        residual[i] = lost * 0.0f == 0 ? lost : 0.0f;
    }
}

/* ---- arrays ---- */

/* The dtype that a 16-bit wire is made of; not asked for INT8. */
static mls_dtype half_of(mls_wire wire)
{
    return wire == MLS_WIRE_F16 ? MLS_F16 : MLS_BF16;
}

/* `n` tells where the codes begin: behind the scales of all blocks, of which a caller may
 * want only some. */
void mls_wire_decode(const mls_kernels *kernels, mls_wire wire, const unsigned char *src,
                     size_t n, size_t start, size_t count, float *dst)
{
    if (wire != MLS_WIRE_INT8) {
        kernels->convert[half_of(wire)][MLS_F32](dst, src + 2 * start, count,
                                                 MLS_STORE_PLAIN);
        return;
    }
    const signed char *codes = (const signed char *)src + blocks_of(n) * sizeof(float);
    for (size_t i = 0; i < count; i += MLS_WIRE_BLOCK) {
        float scale;
        const size_t left = count - i < MLS_WIRE_BLOCK ? count - i : MLS_WIRE_BLOCK;
        memcpy(&scale, src + (start + i) / MLS_WIRE_BLOCK * sizeof scale, sizeof scale);
        dequantize(codes + start + i, scale, dst + i, left);
    }
}

/* The three blocks take 3 KiB of the stack.  What arrives is found by decoding what was
 * just written, so that the residual is what was lost, whatever the kernels do. */
void mls_wire_encode(const mls_kernels *kernels, mls_wire wire, const float *src,
                     float *residual, unsigned char *dst, size_t n)
{
    float meant[MLS_WIRE_BLOCK], arrives[MLS_WIRE_BLOCK], saturated[MLS_WIRE_BLOCK];
    const size_t bytes = encoded_bytes(wire, n);
    memset(dst + bytes, 0, mls_wire_bytes(wire, n) - bytes);
    for (size_t start = 0; start < n; start += MLS_WIRE_BLOCK) {
        const size_t left = n - start < MLS_WIRE_BLOCK ? n - start : MLS_WIRE_BLOCK;
        take(meant, src + start, residual == NULL ? NULL : residual + start, left);
        if (wire == MLS_WIRE_INT8) {
            signed char *codes = (signed char *)dst + blocks_of(n) * sizeof(float);
            const float scale = quantize(meant, codes + start, left);
            memcpy(dst + start / MLS_WIRE_BLOCK * sizeof scale, &scale, sizeof scale);
        } else {
            /* a copy: the residual is measured against what was meant */
            memcpy(saturated, meant, left * sizeof *meant);
            saturate(saturated, left, wire == MLS_WIRE_F16 ? F16_MAX : BF16_MAX);
            kernels->convert[MLS_F32][half_of(wire)](dst + 2 * start, saturated, left,
                                                     MLS_STORE_PLAIN);
        }
        if (residual != NULL) {
            mls_wire_decode(kernels, wire, dst, n, start, left, arrives);
            keep_lost(residual + start, meant, arrives, left);
        }
    }
}

/* ---- buckets ---- */

mls_code mls_wire_check(const mls_bucket *b, mls_status *st)
{
    for (size_t i = 0; i < b->count; i++) {
        const mls_reduction *r = &b->segments[i].reduction;
        if (r->dtype != MLS_F32 || r->out_dtype != MLS_F32 || r->op != MLS_REDUCE_SUM) {
            return mls_fail(st, MLS_E_VALUE, "only sums of float32 can be compressed");
        }
    }
    return MLS_OK;
}

/* Every rank has the same counts, so that sender and receiver find the same number. */
size_t mls_wire_bucket_bytes(const mls_bucket *b, mls_wire wire, size_t of)
{
    size_t total = 0;
    for (size_t i = 0; i < b->count; i++) {
        total += mls_wire_bytes(wire, b->segments[i].counts[of]);
    }
    return total;
}

/* No more than the arrays have in memory, so the sum cannot overflow. */
size_t mls_wire_sent_bytes(const mls_bucket *b, mls_wire wire)
{
    size_t total = 0;
    for (size_t rank = 0; rank < b->world; rank++) {
        total += rank == b->rank ? 0 : mls_wire_bucket_bytes(b, wire, rank);
    }
    return total;
}

/* Rank after rank, and within a message segment after segment, as add_up reads them. */
void mls_wire_pack(const mls_bucket *b, const mls_kernels *kernels, mls_wire wire,
                   float *const *residuals, unsigned char *send, unsigned char *own)
{
    for (size_t to = 0; to < b->world; to++) {
        unsigned char **at = to == b->rank ? &own : &send;
        for (size_t i = 0; i < b->count; i++) {
            const mls_segment *s = &b->segments[i];
            const float *src = (const float *)(const void *)s->data;
            float *residual = residuals == NULL ? NULL : residuals[i];
            for (size_t rank = 0; rank < to; rank++) {
                src += s->counts[rank];
                residual += residual == NULL ? 0 : s->counts[rank];
            }
            mls_wire_encode(kernels, wire, src, residual, *at, s->counts[to]);
            *at += mls_wire_bytes(wire, s->counts[to]);
        }
    }
}

/* Add up what all ranks sent of one segment, `at` bytes into their messages, each of
 * `message` bytes.  All ranks of a block come before the next block: it stays in the
 * innermost cache.  `out` may be this rank's part of the array, which is not read any
 * more: `own` has it as the others would have seen it. */
static void add_up(const mls_bucket *b, const mls_kernels *kernels, mls_wire wire,
                   const unsigned char *own, const unsigned char *received,
                   size_t message, size_t at, const mls_segment *s)
{
    float block[MLS_WIRE_BLOCK];
    float *out = s->out;
    const size_t n = s->counts[b->rank];
    for (size_t start = 0; start < n; start += MLS_WIRE_BLOCK) {
        const size_t left = n - start < MLS_WIRE_BLOCK ? n - start : MLS_WIRE_BLOCK;
        for (size_t of = 0; of < b->world; of++) {
            /* this rank sends itself nothing: later messages lie one place earlier */
            const size_t before = of < b->rank ? of : of - 1;
            const unsigned char *from =
                of == b->rank ? own + at : received + before * message + at;
            /* rank 0 begins the sum, so that no zero is added and -0 stays what it is */
            mls_wire_decode(kernels, wire, from, n, start, left,
                            of == 0 ? out + start : block);
            for (size_t i = 0; of > 0 && i < left; i++) {
                out[start + i] += block[i];
            }
        }
    }
}

/* Decoded sums lie in the output already, so the reduction that follows has one source.
 */
void mls_wire_reduce(const mls_bucket *b, const mls_kernels *kernels, mls_wire wire,
                     const unsigned char *own, const unsigned char *received)
{
    size_t at = 0;
    const size_t message = mls_wire_bucket_bytes(b, wire, b->rank);
    for (size_t i = 0; i < b->count; i++) {
        mls_segment *s = &b->segments[i];
        const void *sum = s->out;
        s->tally = (mls_tally){0};
        add_up(b, kernels, wire, own, received, message, at, s);
        /* one source, in place: what is left to do is to divide and to tally */
        mls_reduce_run(kernels, &s->reduction, &sum, 1, s->out, s->counts[b->rank],
                       mls_cached(), &s->tally);
        at += mls_wire_bytes(wire, s->counts[b->rank]);
    }
}
