/* compat: what two state dicts have in common, and where they differ in names, shapes and
 * dtypes.  The bytes of the tensors are not looked at (diff.h does that).
 *
 * Names are paired up before (name_match.h).
 */
#ifndef MLS_COMPAT_H
#define MLS_COMPAT_H

#include "base/status.h"
#include "array/tensor.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>

/* What is known of a tensor without touching its memory.  All of it is borrowed.  The
 * dtype is a name, so that types which the core does not know can be told apart too. */
typedef struct mls_facts {
    const size_t *shape;
    const char *dtype;
    int rank;
} mls_facts;

/* One name with what each side has under it; `has_source` or `has_target` may be false,
 * not both. */
typedef struct mls_fact_pair {
    mls_text name;
    mls_facts source, target;
    bool has_source, has_target;
} mls_fact_pair;

/* A pair can differ in shape and in dtype at once, so these are bits. */
enum {
    MLS_SAME = 0,
    MLS_MISSING = 1,    /* only the source has it */
    MLS_UNEXPECTED = 2, /* only the target has it */
    MLS_SHAPE_DIFFERS = 4,
    MLS_DTYPE_DIFFERS = 8
};

/* How often each bit occurs, and how many pairs have none. */
typedef struct mls_compat_counts {
    size_t missing, unexpected, shapes, dtypes, same;
} mls_compat_counts;

bool mls_facts_same_shape(const mls_facts *a, const mls_facts *b);
bool mls_facts_same_dtype(const mls_facts *a, const mls_facts *b);

enum { MLS_FACTS_HEAD_MOST = 8 * (3 + MLS_MAX_RANK) };

/* Write to `out` what a digest of a tensor begins with, as 64-bit little-endian numbers:
 * the lengths of its name and of its dtype's name, the rank and the dimensions.  Returns
 * the bytes, at most MLS_FACTS_HEAD_MOST. */
size_t mls_facts_head(mls_text name, const mls_facts *facts, unsigned char *out);

/* The bits of each pair into `out` (`count` of them), and their sums. */
mls_compat_counts mls_compat_compare(const mls_fact_pair *pairs, size_t count,
                                     unsigned char *out);

#endif
