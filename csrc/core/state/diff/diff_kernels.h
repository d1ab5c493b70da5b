/* diff_kernels: the tables of functions that compare elements; private to diff*.c. */
#ifndef MLS_DIFF_KERNELS_H
#define MLS_DIFF_KERNELS_H

#include "array/float_convert.h"
#include "state/diff/diff.h"

/* The tables; constant and complete. mls_diff_vector exists on x86-64 and arm64, and runs
 * if mls_cpu_offers any set but the scalar one. */
extern const mls_diff_kernels mls_diff_scalar, mls_diff_vector;

/* The reference kernels. The vector table uses them for blocks with NaN and
 * for dtypes without a vector kernel. */
#define MLS_DIFF_DECLARATION(id, suffix, ...)                                            \
    void mls_diff_##suffix(const void *a, const void *b, size_t count,                   \
                           mls_diff_result *into);
MLS_DTYPES(MLS_DIFF_DECLARATION)

/* Entries of every table that have only a reference kernel. */
#define MLS_DIFF_ENTRY(id, suffix, ...) [MLS_##id] = mls_diff_##suffix,
#define MLS_DIFF_RARE                                                                    \
    [MLS_I64] = mls_diff_i64, [MLS_U64] = mls_diff_u64,                                  \
    MLS_COMPLEX_DTYPES(MLS_DIFF_ENTRY) MLS_FLOAT8_DTYPES(MLS_DIFF_ENTRY)

#endif
