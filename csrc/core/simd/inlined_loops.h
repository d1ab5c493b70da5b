/* inlined_loops: how functions and loops of kernels are compiled: inlined and unrolled.
 *
 * The file of kernels defines MLS_TARGET, the attribute that lets a function use the
 * instruction set. */
#ifndef MLS_SIMD_INLINED_LOOPS_H
#define MLS_SIMD_INLINED_LOOPS_H

#define MLS_INLINED MLS_TARGET static inline __attribute__((always_inline))

/* Loops over arrays of registers must be unrolled; otherwise the array is kept in
 * memory. */
#if defined(__clang__)
#    define MLS_UNROLLED _Pragma("unroll")
#else
#    define MLS_UNROLLED _Pragma("GCC unroll 16")
#endif

#endif
