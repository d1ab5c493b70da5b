/* copy_x86: the runs of an x86-64 kernel table, written once for any vector width.
 *
 * Private to copy_avx2.c and copy_avx512.c, which include it after they have defined:
 *   TARGET        the attribute that lets a function use the instruction set
 *   vector        the type of one register; WIDTH, its bytes
 *   load, store, store_past_cache, repeat     one register from or to memory, the last of
 *                 them from 8 repeated bytes; store_past_cache wants an aligned address
 *   vector_A_B    reads the source of one register full of B elements and converts it
 * Everything here is static: each of the two files gets its own copy, compiled for its
 * own instruction set.
 */
#ifndef MLS_COPY_X86_H
#define MLS_COPY_X86_H

#define MLS_INLINED static inline __attribute__((always_inline))

enum {
    PAGE = 4096, /* bytes of destination that one lane of a block covers */
    LANES = 4,   /* pages written side by side */
    AHEAD = 512  /* bytes of source that a conversion asks for in advance */
};

/* Any of the vector_A_B.  Always a constant where it is passed, and inlined with its
 * caller: no pointer is left in the machine code. */
typedef vector (*vector_function)(const unsigned char *src);

/* Write LANES pages side by side, past the cache.  Memory serves several streams better
 * than one: measured, a copy takes 27 % less time than page after page.  Asking ahead
 * gains a conversion 10 % and costs a plain copy 4 %. */
TARGET MLS_INLINED void stream_block(unsigned char *dst, const unsigned char *src,
                                     size_t from_bytes, size_t to_bytes,
                                     vector_function convert)
{
    /* one register of each page in turn */
    for (size_t i = 0; i < PAGE; i += WIDTH) {
        for (size_t lane = 0; lane < LANES; lane++) {
            const size_t at = lane * PAGE + i;
            const unsigned char *from = src + at / to_bytes * from_bytes;
            if (from_bytes > 1) {
                mls_prefetch(from + AHEAD, WIDTH / to_bytes * from_bytes);
            }
            store_past_cache(dst + at, convert(from));
        }
    }
}

/* A run of any conversion: scalar up to alignment when streaming, whole vectors, scalar
 * rest.  Inlined into each conversion, so that `convert` is no call. */
TARGET MLS_INLINED void convert_run(unsigned char *dst, const unsigned char *src,
                                    size_t count, bool past_cache, size_t from_bytes,
                                    size_t to_bytes, vector_function convert,
                                    mls_convert_run scalar)
{
    /* `head` elements bring the destination to a multiple of WIDTH, which streaming needs
     */
    const size_t items = WIDTH / to_bytes;
    const size_t block = (size_t)LANES * PAGE / to_bytes;
    const size_t head = mls_bytes_to_align(dst, WIDTH) / to_bytes;
    if (past_cache && (uintptr_t)dst % to_bytes == 0 && head <= count) {
        scalar(dst, src, head, false);
        dst += head * to_bytes, src += head * from_bytes, count -= head;
        for (; count >= block; count -= block) {
            stream_block(dst, src, from_bytes, to_bytes, convert);
            dst += block * to_bytes, src += block * from_bytes;
        }
        for (; count >= items; count -= items) {
            store_past_cache(dst, convert(src));
            dst += WIDTH, src += items * from_bytes;
        }
        _mm_sfence(); /* such stores are ordered by nothing else */
    } else {
        for (; count >= items; count -= items) {
            store(dst, convert(src));
            dst += WIDTH, src += items * from_bytes;
        }
    }
    scalar(dst, src, count, false);
}

/* The run that converts A to B, whose items have the given sizes.  Those of a table's
 * entry take void pointers; the sizes become constants of the inlined loop. */
#define MLS_DEFINE_RUN(A, B, from_bytes, to_bytes)                                       \
    TARGET static void A##_##B(void *dst, const void *src, size_t count, bool stream)    \
    {                                                                                    \
        convert_run(dst, src, count, stream, from_bytes, to_bytes, vector_##A##_##B,     \
                    mls_run_##A##_##B);                                                  \
    }

MLS_DEFINE_RUN(f16, bf16, 2, 2)
MLS_DEFINE_RUN(f16, f32, 2, 4)
MLS_DEFINE_RUN(bf16, f16, 2, 2)
MLS_DEFINE_RUN(bf16, f32, 2, 4)
MLS_DEFINE_RUN(f32, f16, 4, 2)
MLS_DEFINE_RUN(f32, bf16, 4, 2)

/* The C library copies best inside the cache; past it, bytes are "converted" by loading
 * them. */
TARGET static void copy_run(void *dst, const void *src, size_t bytes, bool stream)
{
    if (stream) {
        convert_run(dst, src, bytes, true, 1, 1, load, mls_kernels_scalar.copy);
    } else {
        memcpy(dst, src, bytes);
    }
}

/* Aligned stores whether streaming or not: the bytes in front are filled first, and the
 * pattern is then turned so that it goes on where they end. */
TARGET static void fill_run(void *dst, uint64_t pattern, size_t bytes, bool stream)
{
    unsigned char *to = dst;
    const size_t head = mls_bytes_to_align(to, WIDTH);
    if (bytes < head + WIDTH) {
        mls_kernels_scalar.fill(dst, pattern, bytes, false);
        return;
    }
    mls_kernels_scalar.fill(to, pattern, head, false);
    to += head, bytes -= head;
    const uint64_t turned = mls_pattern_at(pattern, head);
    const vector filled = repeat(turned);
    for (; bytes >= WIDTH; bytes -= WIDTH, to += WIDTH) {
        if (stream) {
            store_past_cache(to, filled);
        } else {
            store(to, filled);
        }
    }
    if (stream) {
        _mm_sfence();
    }
    mls_kernels_scalar.fill(to, turned, bytes, false);
}

#endif
