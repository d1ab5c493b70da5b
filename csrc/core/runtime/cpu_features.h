/* cpu_features: the instruction sets of a machine, which one is used, cache sizes, number
 * of processors.
 */
#ifndef MLS_CPU_FEATURES_H
#define MLS_CPU_FEATURES_H

#include "base/status.h"

typedef enum mls_cpu {
    MLS_CPU_SCALAR, /* reference implementation: plain C, present everywhere */
    MLS_CPU_AVX2,   /* x86-64 with AVX2, FMA and F16C */
    MLS_CPU_AVX512, /* x86-64 with AVX-512 F, BW, DQ and VL */
    MLS_CPU_NEON,   /* arm64, always present */
    MLS_CPU_COUNT
} mls_cpu;

/* Return "scalar", "avx2", "avx512" or "neon". */
const char *mls_cpu_name(mls_cpu cpu);

/* Return whether this machine and this build can run `cpu`. */
bool mls_cpu_offers(mls_cpu cpu);

/* Set `*out` to the instruction set with this name, or to the best one offered if `name`
 * is NULL or "".
 * MLS_E_VALUE: the name is unknown or the set is not offered here; the text lists those
 * that are. */
mls_code mls_cpu_choose(const char *name, mls_cpu *out, mls_status *st);

/* MLS_CPU_TABLES declares the kernel tables NAME_scalar, NAME_avx2 and so on: a constant
 * of `type` for each instruction set of this architecture, which the files of its kernels
 * define. MLS_CPU_TABLE is the address of the table for `cpu`; for sets of other
 * architectures, of the scalar table. */
#if defined(__x86_64__)
#    define MLS_CPU_TABLES(type, name)                                                   \
        extern const type name##_scalar, name##_avx2, name##_avx512
#    define MLS_CPU_TABLE(cpu, name)                                                     \
        ((cpu) == MLS_CPU_AVX512 ? &name##_avx512                                        \
         : (cpu) == MLS_CPU_AVX2 ? &name##_avx2                                          \
                                 : &name##_scalar)
#elif defined(__aarch64__)
#    define MLS_CPU_TABLES(type, name) extern const type name##_scalar, name##_neon
#    define MLS_CPU_TABLE(cpu, name)                                                     \
        ((cpu) == MLS_CPU_NEON ? &name##_neon : &name##_scalar)
#else
#    define MLS_CPU_TABLES(type, name) extern const type name##_scalar
#    define MLS_CPU_TABLE(cpu, name)   ((void)(cpu), &name##_scalar)
#endif

/* The same for kernels with NAME_scalar and NAME_avx2 only, used with AVX-512 too. */
#if defined(__x86_64__)
#    define MLS_CPU_AVX2_TABLES(type, name) extern const type name##_scalar, name##_avx2
#    define MLS_CPU_AVX2_TABLE(cpu, name)                                                \
        ((cpu) == MLS_CPU_SCALAR ? &name##_scalar : &name##_avx2)
#else
#    define MLS_CPU_AVX2_TABLES(type, name) extern const type name##_scalar
#    define MLS_CPU_AVX2_TABLE(cpu, name)   ((void)(cpu), &name##_scalar)
#endif

/* Return whether the processor prefetches sequential memory within a page well enough
 * that explicit prefetches only cost time. True for AMD (measured on Zen 5), false for
 * Intel. */
bool mls_cpu_follows_runs(void);

/* Return the size in bytes of the cache at `level` (1 for data, 2 or 3) as the system
 * reports it. Level 3 means the last level if there are fewer. Returns a typical size if
 * the system reports none. */
size_t mls_cpu_cache_bytes(int level);

/* Return the number of processors that this process may run on, at least 1. */
size_t mls_cpu_count(void);

#endif
