/* convert_vectors: the vector loops of copy_avx2.c and copy_neon.c between float16,
 * bfloat16 and float32; simd/ rounds.
 *
 * These two files include a header of simd/ and define `vector` first.
 *
 * vector_A_B reads the A elements for one register of B and converts them: one register
 * of floats if B has items of 4 bytes, else two.
 */
#ifndef MLS_CONVERT_VECTORS_H
#define MLS_CONVERT_VECTORS_H

#define MLS_DEFINE_WIDENING(A)                                                           \
    MLS_INLINED vector vector_##A##_f32(const unsigned char *src)                        \
    {                                                                                    \
        return (vector)floats_##A(src);                                                  \
    }

#define MLS_DEFINE_PACKING(A, B, bytes)                                                  \
    MLS_INLINED vector vector_##A##_##B(const unsigned char *src)                        \
    {                                                                                    \
        return (vector)pack_##B(floats_##A(src), floats_##A(src + FLOATS * (bytes)));    \
    }

MLS_DEFINE_WIDENING(f16)
MLS_DEFINE_WIDENING(bf16)
MLS_DEFINE_PACKING(f32, f16, 4)
MLS_DEFINE_PACKING(f32, bf16, 4)
MLS_DEFINE_PACKING(f16, bf16, 2)
MLS_DEFINE_PACKING(bf16, f16, 2)

/* Type of vector_A_B. Always passed as a constant and inlined into its caller, so no
 * indirect call remains. */
typedef vector (*vector_function)(const unsigned char *src);

/* Defines the run that converts A to B, with the given item sizes. The function takes
 * void pointers for the table; the sizes become constants of the inlined loop. */
#define MLS_DEFINE_RUN(A, B, from_bytes, to_bytes)                                       \
    MLS_TARGET static void A##_##B(void *dst, const void *src, size_t count,             \
                                   mls_store how)                                        \
    {                                                                                    \
        convert_run(dst, src, count, how, from_bytes, to_bytes, vector_##A##_##B,        \
                    mls_run_##A##_##B);                                                  \
    }

/* All runs, after the file's own convert_run. */
#define MLS_DEFINE_RUNS                                                                  \
    MLS_DEFINE_RUN(f16, bf16, 2, 2)                                                      \
    MLS_DEFINE_RUN(f16, f32, 2, 4)                                                       \
    MLS_DEFINE_RUN(bf16, f16, 2, 2)                                                      \
    MLS_DEFINE_RUN(bf16, f32, 2, 4)                                                      \
    MLS_DEFINE_RUN(f32, f16, 4, 2)                                                       \
    MLS_DEFINE_RUN(f32, bf16, 4, 2)

#endif
