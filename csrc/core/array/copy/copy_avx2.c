/* copy_avx2: copies, fills and converts packed elements with AVX2 and F16C, through the
 * cache or past it.
 *
 * Processors with AVX-512 use these kernels too: on an AMD EPYC (family 25 model 17)
 * registers twice as wide took 0.92 to 1.08 times as long (bench_kernels.py).
 */
#include "array/copy/copy_kernels.h"

#if defined(__x86_64__)

#    include "simd/avx2.h"

typedef __m256i vector;

MLS_INLINED vector load(const unsigned char *src)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)src);
}

MLS_INLINED void store(unsigned char *dst, vector value)
{
    _mm256_storeu_si256((__m256i *)(void *)dst, value);
}

/* Store to an address that is a multiple of WIDTH, bypassing the cache. */
MLS_TARGET static inline void store_past_cache(unsigned char *dst, vector value)
{
    _mm256_stream_si256((__m256i *)(void *)dst, value);
}

MLS_TARGET static inline vector repeat_pattern(uint64_t bytes)
{
    return _mm256_set1_epi64x((long long)bytes);
}

#    include "array/copy/convert_vectors.h"

/* Convert as many whole vectors as `count` elements fill, with stores that bypass the
 * cache. Returns the number of converted elements. `dst` must be a multiple of WIDTH;
 * `from_bytes` and `to_bytes` are the sizes of an element. Four vectors at a time, with
 * loads before stores. */
MLS_INLINED size_t stream_vectors(unsigned char *dst, const unsigned char *src,
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

/* Convert `count` elements of `from_bytes` bytes to elements of `to_bytes` bytes: whole
 * vectors with `convert`, the rest with `scalar`. If `how` is MLS_STORE_STREAM, `scalar`
 * first converts the elements up to an aligned address. Inlined into each conversion, so
 * that `convert` is not a function call. */
MLS_INLINED void convert_run(unsigned char *dst, const unsigned char *src, size_t count,
                             mls_store how, size_t from_bytes, size_t to_bytes,
                             vector_function convert, mls_convert_run scalar)
{
    /* streaming needs a destination that is a multiple of WIDTH: `head` elements precede
     * it */
    const size_t items = WIDTH / to_bytes;
    const size_t head = mls_bytes_to_align(dst, WIDTH) / to_bytes;
    if (how == MLS_STORE_STREAM && (uintptr_t)dst % to_bytes == 0 && head <= count) {
        scalar(dst, src, head, MLS_STORE_CACHED);
        dst += head * to_bytes, src += head * from_bytes, count -= head;
        const size_t done =
            stream_vectors(dst, src, count, from_bytes, to_bytes, convert);
        dst += done * to_bytes, src += done * from_bytes, count -= done;
        _mm_sfence(); /* nothing else orders stores past the cache */
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
    scalar(dst, src, count, MLS_STORE_CACHED);
}

MLS_DEFINE_RUNS

/* Copy through the cache, from the end, in whole vectors: the system clears a fresh huge
 * page in ascending order, so its end is cached (see next_part in copy.c). memcpy copies
 * the rest at the start, and short copies. */
MLS_INLINED void copy_by_loop(unsigned char *dst, const unsigned char *src, size_t bytes)
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

/* Copy `bytes` bytes with the kind of store `how`. Stores that bypass the cache use
 * convert_run; its "conversion" is a load. */
MLS_TARGET static void copy_run(void *dst, const void *src, size_t bytes, mls_store how)
{
    if (how == MLS_STORE_STREAM) {
        convert_run(dst, src, bytes, how, 1, 1, load, mls_kernels_scalar.copy);
    } else if (how == MLS_STORE_LOOP || is_slow_by_memcpy(dst, src)) {
        copy_by_loop(dst, src, bytes);
    } else {
        memcpy(dst, src, bytes);
    }
}

/* Repeat `pattern` over `bytes` bytes with aligned stores. The bytes before the first
 * aligned address are filled by the scalar kernel, and the pattern is then rotated to
 * continue after them. Short fills, and patterns that memset can fill unless they are
 * streamed, use the scalar kernel alone. */
MLS_TARGET static void fill_run(void *dst, uint64_t pattern, size_t bytes, mls_store how)
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

/* Store 16 bytes at `to`, a multiple of 16, past the cache if `streams`. */
MLS_INLINED void store_16(unsigned char *to, __m128i value, bool streams)
{
    if (streams) {
        _mm_stream_si128((__m128i *)(void *)to, value);
    } else {
        _mm_store_si128((__m128i *)(void *)to, value);
    }
}

/* The kernel pad_rows (see below, and copy.h) with stores past the cache if `streams`,
 * without their fence. `to` has the rows without gaps. Vectors of 16 bytes, because
 * arrays of NumPy are aligned to no more; through the cache, unaligned larger ones are
 * faster. The vector with the end of the copied bytes is assembled on the stack. */
MLS_INLINED void pad_rows_by(unsigned char *to, const unsigned char *from,
                             size_t src_step, size_t used, size_t row, size_t rows,
                             uint64_t pattern, bool streams)
{
    enum { SMALL = 16 };
    const __m128i padding = _mm_set1_epi64x((long long)pattern);
    const vector filled = repeat_pattern(pattern);
    const size_t full = used / SMALL * SMALL;
    for (; rows > 0; rows--, to += row, from += src_step) {
        size_t at = 0;
        for (; !streams && at + WIDTH <= full; at += WIDTH) {
            store(to + at, load(from + at));
        }
        for (; at < full; at += SMALL) {
            const __m128i *const next = (const __m128i *)(const void *)(from + at);
            store_16(to + at, _mm_loadu_si128(next), streams);
        }
        if (used > full) {
            __m128i edge = padding;
            memcpy(&edge, from + full, used - full);
            store_16(to + at, edge, streams);
            at += SMALL;
        }
        for (; !streams && at + WIDTH <= row; at += WIDTH) {
            store(to + at, filled);
        }
        for (; at < row; at += SMALL) {
            store_16(to + at, padding, streams);
        }
    }
}

/* Copy `rows` rows of `used` bytes, which start `src_step` bytes apart, and fill each up
 * to `row` bytes with the pattern, with the kind of store `how`. A fence ends stores that
 * bypass the cache. */
MLS_TARGET static void pad_rows(void *dst, const void *src, size_t src_step, size_t used,
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
            .copy_variants = MLS_STORE_BIT(MLS_STORE_CACHED) |                           \
                             MLS_STORE_BIT(MLS_STORE_LOOP) |                             \
                             MLS_STORE_BIT(MLS_STORE_STREAM),                            \
            .variants =                                                                  \
                MLS_STORE_BIT(MLS_STORE_CACHED) | MLS_STORE_BIT(MLS_STORE_STREAM),       \
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
