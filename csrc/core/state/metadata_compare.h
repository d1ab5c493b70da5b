/* metadata_compare: compares two state dicts by the names, shapes and dtypes of their
 * tensors; diff.h compares the values.
 *
 * The caller pairs the names beforehand.
 */
#ifndef MLS_METADATA_COMPARE_H
#define MLS_METADATA_COMPARE_H

#include "array/tensor.h"
#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>

/* Metadata of a tensor. All pointers are borrowed. The dtype is a name, so that dtypes
 * unknown to the core can be compared too. */
typedef struct mls_tensor_meta {
    const size_t *shape;
    const char *part; /* text of the part that is present, or NULL for all elements */
    const char *dtype;
    int rank;
} mls_tensor_meta;

/* A name with the metadata of each side; at least one of `has_source` and `has_target` is
 * true. */
typedef struct mls_meta_pair {
    mls_str name;
    mls_tensor_meta source, target;
    bool has_source, has_target;
} mls_meta_pair;

/* Result bits: a pair may differ in both shape and dtype. */
enum {
    MLS_SAME = 0,
    MLS_MISSING = 1,    /* only the source has it */
    MLS_UNEXPECTED = 2, /* only the target has it */
    MLS_SHAPE_DIFFERS = 4,
    MLS_DTYPE_DIFFERS = 8
};

/* Number of pairs with each bit, and without any. */
typedef struct mls_metadata_counts {
    size_t missing, unexpected, shapes, dtypes, same;
} mls_metadata_counts;

/* Return whether two tensors have equal shapes, or equal names of their dtypes. Two parts
 * have equal shapes only if they are one part; the shape of a part is that of the whole
 * tensor, so a part and a tensor without a part are compared by it alone. */
bool mls_tensor_meta_same_shape(const mls_tensor_meta *a, const mls_tensor_meta *b);
bool mls_tensor_meta_same_dtype(const mls_tensor_meta *a, const mls_tensor_meta *b);

enum { MLS_META_HEAD_MOST = 8 * (3 + MLS_MAX_RANK) }; /* bytes */

/* Writes the first bytes of a tensor's digest to `out`, as 64-bit little-endian numbers:
 * the lengths of its name and of its dtype's name (of a part: with a space and the text
 * of the part), the rank, and the dimensions. Returns the number of bytes, at most
 * MLS_META_HEAD_MOST. */
size_t mls_tensor_meta_head(mls_str name, const mls_tensor_meta *meta,
                            unsigned char *out);

/* Writes the result bits of each pair to `out` (`count` entries), and returns their
 * counts. */
mls_metadata_counts mls_metadata_compare(const mls_meta_pair *pairs, size_t count,
                                         unsigned char *out);

#endif
