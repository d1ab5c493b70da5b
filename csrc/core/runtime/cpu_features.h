/* cpu: which instruction sets this machine offers, and which one to use.
 */
#ifndef MLS_CPU_H
#define MLS_CPU_H

#include "base/status.h"

typedef enum mls_cpu {
    MLS_CPU_SCALAR, /* the oracle: plain C, present everywhere */
    MLS_CPU_AVX2,   /* x86-64 with AVX2, FMA and F16C */
    MLS_CPU_AVX512, /* x86-64 with AVX-512 F, BW, DQ and VL */
    MLS_CPU_NEON,   /* arm64, always present there */
    MLS_CPU_COUNT
} mls_cpu;

/* "scalar", "avx2", "avx512" or "neon". */
const char *mls_cpu_name(mls_cpu cpu);

/* Whether this machine, and this build, can run `cpu`. */
bool mls_cpu_offers(mls_cpu cpu);

/* Choose: the set called `wanted`, or the best one offered where `wanted` is NULL or "".
 * MLS_E_VALUE: no such name, or not offered here; the text lists what is. */
mls_code mls_cpu_choose(const char *wanted, mls_cpu *out, mls_status *st);

/* Whether the processor fetches a run of memory well enough by itself within a page, so
 * that asking for each line only costs: AMD's do (measured on Zen 5), Intel's do not. */
bool mls_cpu_follows_runs(void);

/* Bytes of the cache at `level` (1, of data, to 3) as the system reports it.  Level 3 is
 * the last level if there are fewer.  A usual size if the system does not say. */
size_t mls_cpu_cache_bytes(int level);

/* Processors that this process may run on, at least 1. */
size_t mls_cpu_count(void);

#endif
