/* inlined_loops: how the functions and loops of a file of kernels are compiled. The file
 * defines MLS_TARGET, the attribute that lets a function use the instruction set. */
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
