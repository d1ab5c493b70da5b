/* copy_avx2: copy, fill and convert with AVX2 and F16C, 32 bytes of destination at a
 * time.
 *
 * Processors with AVX-512 use these kernels too: on an AMD EPYC (family 25 model 17)
 * registers twice as wide took 0.92 to 1.08 times as long (bench_kernels.py).
 *
 * Halves are float16, which the processor converts itself; brains are bfloat16, for which
 * AVX2 has no instruction: they are made by integer arithmetic, as in float_convert.h.
 */
#include "array/copy/copy_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <string.h>

#    define TARGET __attribute__((target("avx2,f16c")))

enum { WIDTH = 32 }; /* bytes of a vector */
typedef __m256i vector;

/* One register from memory or to it, at any address. */
TARGET static inline vector load(const unsigned char *src)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)src);
}

TARGET static inline void store(unsigned char *dst, vector value)
{
    _mm256_storeu_si256((__m256i *)(void *)dst, value);
}

/* To an address that is a multiple of WIDTH, round the cache. */
TARGET static inline void store_past_cache(unsigned char *dst, vector value)
{
    _mm256_stream_si256((__m256i *)(void *)dst, value);
}

/* Eight bytes four times over. */
TARGET static inline vector repeat(uint64_t bytes)
{
    return _mm256_set1_epi64x((long long)bytes);
}

/* 8 floats as the lower halves of 8 lanes of bfloat16, rounded to nearest even.  Adding
 * just less than half a unit, and one more where the result would be odd, carries into
 * the upper half exactly when rounding goes up.  NaN takes its upper half with the quiet
 * bit set: it must not be rounded, which could make it infinity. */
TARGET static inline __m256i round_to_brain(__m256i bits)
{
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000));
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, quiet, nan);
}

/* The two halves of a register. */
TARGET static inline __m256i join(__m128i low, __m128i high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

/* 8 float16 from memory as floats; always exact. */
TARGET static inline __m256 load_halves(const unsigned char *src)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)src));
}

/* 8 bfloat16 from memory as the bits of floats: each is the upper half of one. */
TARGET static inline __m256i load_brains(const unsigned char *src)
{
    const __m128i brains = _mm_loadu_si128((const __m128i *)(const void *)src);
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(brains), 16);
}

/* 8 floats as float16.  The rounding is named, so that the thread's own mode has no say.
 */
TARGET static inline __m128i to_halves(__m256 values)
{
    return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* Two times 8 brains as 16; packing works per 128-bit half, so the halves are reordered.
 */
TARGET static inline __m256i pack_brains(__m256i low, __m256i high)
{
    const __m256i packed = _mm256_packus_epi32(round_to_brain(low), round_to_brain(high));
    return _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
}

/* vector_A_B reads one register full of B elements and converts it.  From 2-byte to
 * 4-byte items 8 are read, else 16. */
TARGET static inline vector vector_f32_f16(const unsigned char *src)
{
    return join(to_halves(_mm256_castsi256_ps(load(src))),
                to_halves(_mm256_castsi256_ps(load(src + 32))));
}

TARGET static inline vector vector_f16_f32(const unsigned char *src)
{
    return _mm256_castps_si256(load_halves(src));
}

TARGET static inline vector vector_f32_bf16(const unsigned char *src)
{
    return pack_brains(load(src), load(src + 32));
}

TARGET static inline vector vector_bf16_f32(const unsigned char *src)
{
    return load_brains(src);
}

TARGET static inline vector vector_f16_bf16(const unsigned char *src)
{
    return pack_brains(_mm256_castps_si256(load_halves(src)),
                       _mm256_castps_si256(load_halves(src + 16)));
}

TARGET static inline vector vector_bf16_f16(const unsigned char *src)
{
    return join(to_halves(_mm256_castsi256_ps(load_brains(src))),
                to_halves(_mm256_castsi256_ps(load_brains(src + 16))));
}

#    define MLS_INLINED static inline __attribute__((always_inline))

enum {
    PAGE = 4096, /* bytes of destination that one stream of a block covers */
    STREAMS = 4, /* pages that a block of MLS_STORE_STREAM4 writes side by side */
    LINE = 64    /* bytes that a stream stores in one go: part of a cache line would take
                  * twice the time */
};

/* Any of the vector_A_B.  Always a constant where it is passed, and inlined with its
 * caller: no pointer is left in the machine code. */
typedef vector (*vector_function)(const unsigned char *src);

/* Whole vectors, past the cache; `dst` is aligned.  Four at a time: loads before stores.
 */
TARGET MLS_INLINED size_t stream_vectors(unsigned char *dst, const unsigned char *src,
                                         size_t count, size_t from_bytes, size_t to_bytes,
                                         vector_function convert)
{
    enum { TOGETHER = 4 };
    const size_t items = WIDTH / to_bytes;
    const size_t step = items * from_bytes;
    size_t left = count;
    for (; left >= TOGETHER * items; left -= TOGETHER * items) {
        const vector a = convert(src), b = convert(src + step);
        const vector c = convert(src + 2 * step), d = convert(src + 3 * step);
        store_past_cache(dst, a);
        store_past_cache(dst + WIDTH, b);
        store_past_cache(dst + (size_t)2 * WIDTH, c);
        store_past_cache(dst + (size_t)3 * WIDTH, d);
        dst += (size_t)TOGETHER * WIDTH, src += TOGETHER * step;
    }
    for (; left >= items; left -= items) {
        store_past_cache(dst, convert(src));
        dst += WIDTH, src += step;
    }
    return count - left;
}

/* A run of any conversion: scalar up to alignment when streaming, whole vectors, scalar
 * rest.  Inlined into each conversion, so that `convert` is no call. */
TARGET MLS_INLINED void convert_run(unsigned char *dst, const unsigned char *src,
                                    size_t count, mls_store how, size_t from_bytes,
                                    size_t to_bytes, vector_function convert,
                                    mls_convert_run scalar)
{
    /* `head` elements bring the destination to a multiple of WIDTH, which streaming needs
     */
    const size_t items = WIDTH / to_bytes;
    const size_t head = mls_bytes_to_align(dst, WIDTH) / to_bytes;
    if (how != MLS_STORE_PLAIN && (uintptr_t)dst % to_bytes == 0 && head <= count) {
        scalar(dst, src, head, MLS_STORE_PLAIN);
        dst += head * to_bytes, src += head * from_bytes, count -= head;
        const size_t done =
            stream_vectors(dst, src, count, from_bytes, to_bytes, convert);
        dst += done * to_bytes, src += done * from_bytes, count -= done;
        _mm_sfence(); /* such stores are ordered by nothing else */
    } else {
        for (; count >= items; count -= items) {
            store(dst, convert(src));
            dst += WIDTH, src += items * from_bytes;
        }
    }
    scalar(dst, src, count, MLS_STORE_PLAIN);
}

/* The run that converts A to B, whose items have the given sizes.  Those of a table's
 * entry take void pointers; the sizes become constants of the inlined loop. */
#    define MLS_DEFINE_RUN(A, B, from_bytes, to_bytes)                                   \
        TARGET static void A##_##B(void *dst, const void *src, size_t count,             \
                                   mls_store how)                                        \
        {                                                                                \
            convert_run(dst, src, count, how, from_bytes, to_bytes, vector_##A##_##B,    \
                        mls_run_##A##_##B);                                              \
        }

MLS_DEFINE_RUN(f16, bf16, 2, 2)
MLS_DEFINE_RUN(f16, f32, 2, 4)
MLS_DEFINE_RUN(bf16, f16, 2, 2)
MLS_DEFINE_RUN(bf16, f32, 2, 4)
MLS_DEFINE_RUN(f32, f16, 4, 2)
MLS_DEFINE_RUN(f32, bf16, 4, 2)

/* STREAMS pages of an aligned destination side by side, a cache line of each in turn. */
TARGET MLS_INLINED void stream_pages(unsigned char *dst, const unsigned char *src)
{
    for (size_t i = 0; i < PAGE; i += LINE) {
        for (size_t stream = 0; stream < STREAMS; stream++) {
            for (size_t at = stream * PAGE + i; at < stream * PAGE + i + LINE;
                 at += WIDTH) {
                store_past_cache(dst + at, load(src + at));
            }
        }
    }
}

/* Through the cache, from the end: see next_part in copy.c.  Long runs do not go to
 * memcpy: between a few KiB and the size of the L2 cache glibc uses `rep movsb`, which on
 * an AMD EPYC (Zen 3) has half the speed of this loop, and a tenth if `dst` is 1 to 31
 * bytes ahead of `src` modulo 4096. */
TARGET MLS_INLINED void copy_through_cache(unsigned char *dst, const unsigned char *src,
                                           size_t bytes)
{
    enum { SHORT = 2048, STEP = 4 * WIDTH };
    if (bytes >= SHORT) {
        const size_t tail = (uintptr_t)(dst + bytes) % WIDTH;
        /* the loop stores most of it again */
        store(dst + bytes - WIDTH, load(src + bytes - WIDTH));
        for (bytes -= tail; bytes >= STEP; bytes -= STEP) {
            const unsigned char *const from = src + bytes;
            unsigned char *const to = dst + bytes;
            const vector a = load(from - WIDTH), b = load(from - (size_t)2 * WIDTH);
            const vector c = load(from - (size_t)3 * WIDTH), d = load(from - STEP);
            store(to - WIDTH, a);
            store(to - (size_t)2 * WIDTH, b);
            store(to - (size_t)3 * WIDTH, c);
            store(to - STEP, d);
        }
    }
    memcpy(dst, src, bytes);
}

/* Past the cache, bytes are "converted" by loading them. */
TARGET static void copy_run(void *dst, const void *src, size_t bytes, mls_store how)
{
    if (how == MLS_STORE_PLAIN) {
        copy_through_cache(dst, src, bytes);
        return;
    }
    unsigned char *to = dst;
    const unsigned char *from = src;
    const size_t head = mls_bytes_to_align(to, WIDTH);
    const size_t block = (size_t)STREAMS * PAGE;
    if (how == MLS_STORE_STREAM4 && bytes >= head + block) {
        memcpy(to, from, head);
        to += head, from += head, bytes -= head;
        for (; bytes >= block; bytes -= block, to += block, from += block) {
            stream_pages(to, from);
        }
    }
    convert_run(to, from, bytes, how, 1, 1, load, mls_kernels_scalar.copy);
}

/* Past the cache with aligned stores: the bytes in front are filled first, and the
 * pattern is then turned so that it goes on after them. */
TARGET static void fill_run(void *dst, uint64_t pattern, size_t bytes, mls_store how)
{
    unsigned char *to = dst;
    const size_t head = mls_bytes_to_align(to, WIDTH);
    if (bytes < head + WIDTH ||
        (how == MLS_STORE_PLAIN && mls_pattern_is_byte(pattern))) {
        mls_kernels_scalar.fill(dst, pattern, bytes, how);
        return;
    }
    mls_kernels_scalar.fill(to, pattern, head, how);
    to += head, bytes -= head;
    const uint64_t turned = mls_pattern_at(pattern, head);
    const vector filled = repeat(turned);
    for (; bytes >= WIDTH; bytes -= WIDTH, to += WIDTH) {
        if (how != MLS_STORE_PLAIN) {
            store_past_cache(to, filled);
        } else {
            store(to, filled);
        }
    }
    if (how != MLS_STORE_PLAIN) {
        _mm_sfence();
    }
    mls_kernels_scalar.fill(to, turned, bytes, how);
}

#    define MLS_TABLE_OF(set)                                                            \
        {                                                                                \
            .cpu = (set),                                                                \
            .copy_variants = 3,                                                          \
            .variants = 2,                                                               \
            .copy = copy_run,                                                            \
            .fill = fill_run,                                                            \
            .convert = MLS_CONVERT_TABLE,                                                \
        }

/* mls_cpu_offers(MLS_CPU_AVX2) must be true before any of these is called.  The second
 * table differs in its name alone: other kernels are chosen by it. */
const mls_kernels mls_kernels_avx2 = MLS_TABLE_OF(MLS_CPU_AVX2);
const mls_kernels mls_kernels_avx512 = MLS_TABLE_OF(MLS_CPU_AVX512);

#endif
