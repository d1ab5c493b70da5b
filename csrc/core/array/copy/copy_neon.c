/* copy_neon: copies, fills and converts packed elements with NEON.
 *
 * Every arm64 processor has NEON, so no run-time check is needed.
 *
 * The C library does plain copies, since it knows the best stores for each core. The
 * table has no variant that bypasses the cache.
 */
#include "array/copy/copy_kernels.h"

#if defined(__aarch64__)

#    include "simd/neon.h"

typedef uint8x16_t vector;

#    include "array/copy/convert_vectors.h"

/* Convert `count` elements of `from_bytes` to elements of `to_bytes` each: whole vectors
 * (`convert`), then the rest (`scalar`). Stores are plain, regardless of `how`. Inlined
 * into each conversion, so that `convert` is not a function call. */
MLS_INLINED void convert_run(unsigned char *dst, const unsigned char *src, size_t count,
                             mls_store how, size_t from_bytes, size_t to_bytes,
                             vector_function convert, mls_convert_run scalar)
{
    const size_t items = WIDTH / to_bytes;
    for (; count >= items; count -= items) {
        vst1q_u8(dst, convert(src));
        dst += WIDTH, src += items * from_bytes;
    }
    scalar(dst, src, count, how);
}

MLS_DEFINE_RUNS

/* The kernel `copy`. memcpy chooses the stores; `store` is not used. */
static void copy_run(void *dst, const void *src, size_t bytes, mls_store store)
{
    (void)store;
    memcpy(dst, src, bytes);
}

/* Repeat the 8 bytes of `pattern` over `bytes` bytes. Any alignment works: the size of a
 * register is a multiple of the pattern's size. Stores are plain for every `store`. */
static void fill_run(void *dst, uint64_t pattern, size_t bytes, mls_store store)
{
    unsigned char *to = dst;
    if (mls_pattern_is_byte(pattern)) {
        memset(dst, (int)(pattern & 0xFFU), bytes);
        return;
    }
    const vector filled = vreinterpretq_u8_u64(vdupq_n_u64(pattern));
    for (; bytes >= WIDTH; bytes -= WIDTH, to += WIDTH) {
        vst1q_u8(to, filled);
    }
    mls_kernels_scalar.fill(to, pattern, bytes, store);
}

const mls_kernels mls_kernels_neon = {
    .cpu = MLS_CPU_NEON,
    .copy_variants = MLS_STORE_BIT(MLS_STORE_CACHED),
    .variants = MLS_STORE_BIT(MLS_STORE_CACHED),
    .copy = copy_run,
    .fill = fill_run,
    .convert = MLS_CONVERT_TABLE,
};

#endif
