/* copy_avx2: copy, fill and convert with AVX2 and F16C, 32 bytes of destination at a
 * time.
 *
 * Processors with AVX-512 use these kernels too: on an AMD EPYC (family 25 model 17)
 * registers twice as wide took 0.92 to 1.08 times as long (bench_kernels.py).
 *
 * F16C converts float16. AVX2 has no instruction for bfloat16, so integer arithmetic
 * converts it, as in float_convert.h.
 */
#include "array/copy/copy_kernels.h"

#if defined(__x86_64__)

#    include <immintrin.h>
#    include <string.h>

#    define TARGET __attribute__((target("avx2,f16c")))

enum { WIDTH = 32 }; /* bytes of a vector */
typedef __m256i vector;

TARGET static inline vector load(const unsigned char *src)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)src);
}

TARGET static inline void store(unsigned char *dst, vector value)
{
    _mm256_storeu_si256((__m256i *)(void *)dst, value);
}

/* Store to an address that is a multiple of WIDTH, bypassing the cache. */
TARGET static inline void store_past_cache(unsigned char *dst, vector value)
{
    _mm256_stream_si256((__m256i *)(void *)dst, value);
}

TARGET static inline vector repeat_pattern(uint64_t bytes)
{
    return _mm256_set1_epi64x((long long)bytes);
}

/* Round 8 floats to bfloat16, ties to even; results are in the lower halves of 8 lanes.
 * The function adds just less than half a unit, and one more if the result would be odd,
 * so that a carry reaches the upper half exactly if the value rounds up. A NaN keeps its
 * upper half with the quiet bit set: rounding could turn it into infinity. */
TARGET static inline __m256i round_to_bf16(__m256i bits)
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

TARGET static inline __m256i join_lanes(__m128i low, __m128i high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

/* Load 8 float16 and convert them to floats; always exact. */
TARGET static inline __m256 load_f16(const unsigned char *src)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)src));
}

/* Load 8 bfloat16 as the bits of floats: each is the upper half of a float. */
TARGET static inline __m256i load_bf16(const unsigned char *src)
{
    const __m128i bf16 = _mm_loadu_si128((const __m128i *)(const void *)src);
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16);
}

/* Convert 8 floats to float16. The rounding mode is explicit, so that the thread's own
 * mode has no effect. */
TARGET static inline __m128i to_f16(__m256 values)
{
    return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* Round twice 8 floats to 16 bfloat16. The pack instruction works on each 128-bit half,
 * so the result is reordered. */
TARGET static inline __m256i pack_bf16(__m256i low, __m256i high)
{
    const __m256i packed = _mm256_packus_epi32(round_to_bf16(low), round_to_bf16(high));
    return _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
}

/* vector_A_B reads the A elements for one register of B and converts them: 8 elements if
 * 2-byte items become 4-byte items, else 16. */
TARGET static inline vector vector_f32_f16(const unsigned char *src)
{
    return join_lanes(to_f16(_mm256_castsi256_ps(load(src))),
                      to_f16(_mm256_castsi256_ps(load(src + 32))));
}

TARGET static inline vector vector_f16_f32(const unsigned char *src)
{
    return _mm256_castps_si256(load_f16(src));
}

TARGET static inline vector vector_f32_bf16(const unsigned char *src)
{
    return pack_bf16(load(src), load(src + 32));
}

TARGET static inline vector vector_bf16_f32(const unsigned char *src)
{
    return load_bf16(src);
}

TARGET static inline vector vector_f16_bf16(const unsigned char *src)
{
    return pack_bf16(_mm256_castps_si256(load_f16(src)),
                     _mm256_castps_si256(load_f16(src + 16)));
}

TARGET static inline vector vector_bf16_f16(const unsigned char *src)
{
    return join_lanes(to_f16(_mm256_castsi256_ps(load_bf16(src))),
                      to_f16(_mm256_castsi256_ps(load_bf16(src + 16))));
}

#    define MLS_INLINED static inline __attribute__((always_inline))

/* Type of vector_A_B. Always passed as a constant and inlined into its caller, so no
 * indirect call remains. */
typedef vector (*vector_function)(const unsigned char *src);

/* Convert whole vectors with stores that bypass the cache; `dst` is aligned. Four at a
 * time, with loads before stores. */
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

/* Convert a run: up to alignment (scalar if streaming), then whole vectors, then the
 * scalar rest. Inlined into each conversion, so that `convert` is not a function call. */
TARGET MLS_INLINED void convert_run(unsigned char *dst, const unsigned char *src,
                                    size_t count, mls_store how, size_t from_bytes,
                                    size_t to_bytes, vector_function convert,
                                    mls_convert_run scalar)
{
    /* streaming needs a destination that is a multiple of WIDTH: `head` elements precede
     * it */
    const size_t items = WIDTH / to_bytes;
    const size_t head = mls_bytes_to_align(dst, WIDTH) / to_bytes;
    if (how == MLS_STORE_STREAM && (uintptr_t)dst % to_bytes == 0 && head <= count) {
        scalar(dst, src, head, MLS_STORE_PLAIN);
        dst += head * to_bytes, src += head * from_bytes, count -= head;
        const size_t done =
            stream_vectors(dst, src, count, from_bytes, to_bytes, convert);
        dst += done * to_bytes, src += done * from_bytes, count -= done;
        _mm_sfence(); /* nothing else orders non-temporal stores */
    } else {
        /* One unaligned store, then aligned ones. The first of these overlaps it. Stores
         * across cache lines took 1.15 times as long. */
        if (head > 0 && count >= items) {
            store(dst, convert(src));
            dst += head * to_bytes, src += head * from_bytes, count -= head;
        }
        for (; count >= items; count -= items) {
            store(dst, convert(src));
            dst += WIDTH, src += items * from_bytes;
        }
    }
    scalar(dst, src, count, MLS_STORE_PLAIN);
}

/* Define the run that converts A to B, with the given item sizes. The function takes void
 * pointers for the table; the sizes become constants of the inlined loop. */
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

/* Copy through the cache, from the end: see next_part in copy.c. */
TARGET MLS_INLINED void copy_by_loop(unsigned char *dst, const unsigned char *src,
                                     size_t bytes)
{
    enum { SHORT = 2048, STEP = 4 * WIDTH };
    if (bytes >= SHORT) {
        const size_t tail = (uintptr_t)(dst + bytes) % WIDTH;
        /* the unaligned end; the loop stores most of it again */
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

/* Return whether memcpy is slow for two addresses on some processors. From a few KiB on,
 * glibc uses `rep movsb`, which on an AMD EPYC (Zen 3) has a tenth of the loop's speed if
 * `dst` is 1 to 31 bytes ahead of `src` modulo 4096. Trials do not show that, because
 * other copies have other addresses. */
static inline bool is_slow_by_memcpy(const void *dst, const void *src)
{
    enum { PAGE = 4096, SLOW = 32 };
    const size_t ahead = ((uintptr_t)dst - (uintptr_t)src) % PAGE;
    return ahead > 0 && ahead < SLOW;
}

/* Copy by memcpy, in parts as long as a trial: glibc stores longer ones past the cache,
 * and the trials have not measured that. */
static void copy_by_memcpy(unsigned char *dst, const unsigned char *src, size_t bytes)
{
    for (size_t part; bytes > 0; bytes -= part, dst += part, src += part) {
        part = bytes < MLS_STORE_TRIAL_BYTES ? bytes : MLS_STORE_TRIAL_BYTES;
        memcpy(dst, src, part);
    }
}

/* Stores that bypass the cache use convert_run; its "conversion" is a load. */
TARGET static void copy_run(void *dst, const void *src, size_t bytes, mls_store how)
{
    if (how == MLS_STORE_STREAM) {
        convert_run(dst, src, bytes, how, 1, 1, load, mls_kernels_scalar.copy);
    } else if (how == MLS_STORE_LOOP || is_slow_by_memcpy(dst, src)) {
        copy_by_loop(dst, src, bytes);
    } else {
        copy_by_memcpy(dst, src, bytes);
    }
}

/* Fill with aligned stores. The bytes before the aligned address are filled first, and
 * the pattern is then rotated to continue after them. */
TARGET static void fill_run(void *dst, uint64_t pattern, size_t bytes, mls_store how)
{
    unsigned char *to = dst;
    const size_t head = mls_bytes_to_align(to, WIDTH);
    if (bytes < head + WIDTH ||
        (how != MLS_STORE_STREAM && mls_pattern_is_byte(pattern))) {
        mls_kernels_scalar.fill(dst, pattern, bytes, how);
        return;
    }
    mls_kernels_scalar.fill(to, pattern, head, how);
    to += head, bytes -= head;
    const uint64_t turned = mls_pattern_at(pattern, head);
    const vector filled = repeat_pattern(turned);
    for (; bytes >= WIDTH; bytes -= WIDTH, to += WIDTH) {
        if (how == MLS_STORE_STREAM) {
            store_past_cache(to, filled);
        } else {
            store(to, filled);
        }
    }
    if (how == MLS_STORE_STREAM) {
        _mm_sfence();
    }
    mls_kernels_scalar.fill(to, turned, bytes, how);
}

TARGET MLS_INLINED void put_small(unsigned char *to, __m128i value, bool streams)
{
    if (streams) {
        _mm_stream_si128((__m128i *)(void *)to, value);
    } else {
        _mm_store_si128((__m128i *)(void *)to, value);
    }
}

/* Vectors of 16 bytes, because arrays of NumPy are aligned to no more. Through the cache,
 * unaligned larger ones are faster. The vector with the end of the tokens is assembled on
 * the stack. */
TARGET MLS_INLINED void pad_rows_by(unsigned char *to, const unsigned char *from,
                                    size_t src_step, size_t used, size_t row, size_t rows,
                                    uint64_t pattern, bool streams)
{
    enum { SMALL = 16 };
    const __m128i padding = _mm_set1_epi64x((long long)pattern);
    const vector filled = repeat_pattern(pattern);
    const size_t whole = used / SMALL * SMALL;
    for (; rows > 0; rows--, to += row, from += src_step) {
        size_t at = 0;
        for (; !streams && at + WIDTH <= whole; at += WIDTH) {
            store(to + at, load(from + at));
        }
        for (; at < whole; at += SMALL) {
            const __m128i *const next = (const __m128i *)(const void *)(from + at);
            put_small(to + at, _mm_loadu_si128(next), streams);
        }
        if (used > whole) {
            __m128i edge = padding;
            memcpy(&edge, from + whole, used - whole);
            put_small(to + at, edge, streams);
            at += SMALL;
        }
        for (; !streams && at + WIDTH <= row; at += WIDTH) {
            store(to + at, filled);
        }
        for (; at < row; at += SMALL) {
            put_small(to + at, padding, streams);
        }
    }
}

TARGET static void pad_rows(void *dst, const void *src, size_t src_step, size_t used,
                            size_t row, size_t rows, uint64_t pattern, mls_store how)
{
    if (how != MLS_STORE_STREAM) {
        pad_rows_by(dst, src, src_step, used, row, rows, pattern, false);
    } else {
        pad_rows_by(dst, src, src_step, used, row, rows, pattern, true);
        _mm_sfence();
    }
}

#    define MLS_TABLE_OF(set)                                                            \
        {                                                                                \
            .cpu = (set),                                                                \
            .copy_variants = MLS_STORE_BIT(MLS_STORE_PLAIN) |                            \
                             MLS_STORE_BIT(MLS_STORE_LOOP) |                             \
                             MLS_STORE_BIT(MLS_STORE_STREAM),                            \
            .variants =                                                                  \
                MLS_STORE_BIT(MLS_STORE_PLAIN) | MLS_STORE_BIT(MLS_STORE_STREAM),        \
            .copy = copy_run,                                                            \
            .fill = fill_run,                                                            \
            .pad_rows = pad_rows,                                                        \
            .convert = MLS_CONVERT_TABLE,                                                \
        }

/* mls_cpu_offers must be true for a table's set before any of its kernels is called. The
 * second table differs by its name only, which selects kernels elsewhere. */
const mls_kernels mls_kernels_avx2 = MLS_TABLE_OF(MLS_CPU_AVX2);
const mls_kernels mls_kernels_avx512 = MLS_TABLE_OF(MLS_CPU_AVX512);

#endif
