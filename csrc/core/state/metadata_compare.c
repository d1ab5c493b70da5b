/* metadata_compare: which of two states' tensors are missing, unexpected, or of another
 * shape or dtype; start of a digest.
 *
 * Most dtype names are the same constants of dtype.c on both sides, so comparing pointers
 * is enough; otherwise the text is compared.
 */
#include "state/metadata_compare.h"

#include "base/size.h"

#include <string.h>

bool mls_tensor_meta_same_shape(const mls_tensor_meta *a, const mls_tensor_meta *b)
{
    const bool same_part =
        a->part == NULL || b->part == NULL || strcmp(a->part, b->part) == 0;
    return same_part && mls_shape_equal(a->rank, a->shape, b->rank, b->shape);
}

/* Equal pointers are the common case. */
bool mls_tensor_meta_same_dtype(const mls_tensor_meta *a, const mls_tensor_meta *b)
{
    return a->dtype == b->dtype || strcmp(a->dtype, b->dtype) == 0;
}

size_t mls_tensor_meta_head(mls_str name, const mls_tensor_meta *meta, unsigned char *out)
{
    const size_t rank = (size_t)meta->rank;
    /* one space between the dtype's name and the part */
    const size_t part_bytes = meta->part == NULL ? 0 : 1 + strlen(meta->part);
    mls_store_le64(out, name.length);
    mls_store_le64(out + 8, strlen(meta->dtype) + part_bytes);
    mls_store_le64(out + 16, rank);
    for (size_t axis = 0; axis < rank; axis++) {
        mls_store_le64(out + 24 + 8 * axis, meta->shape[axis]);
    }
    return 24 + 8 * rank;
}

/* Return the result bits of a pair. Shape and dtype are compared only if both sides have
 * the tensor. */
static unsigned char bits_of(const mls_meta_pair *pair)
{
    if (!pair->has_target) {
        return MLS_MISSING;
    }
    if (!pair->has_source) {
        return MLS_UNEXPECTED;
    }
    const int shape =
        mls_tensor_meta_same_shape(&pair->source, &pair->target) ? 0 : MLS_SHAPE_DIFFERS;
    const int dtype =
        mls_tensor_meta_same_dtype(&pair->source, &pair->target) ? 0 : MLS_DTYPE_DIFFERS;
    return (unsigned char)(shape | dtype);
}

/* Set the result bits of each pair and count them in one pass: usually nothing differs,
 * and the caller needs only the counts. */
mls_metadata_counts mls_metadata_compare(const mls_meta_pair *pairs, size_t count,
                                         unsigned char *out)
{
    mls_metadata_counts counts = {0};
    for (size_t i = 0; i < count; i++) {
        out[i] = bits_of(&pairs[i]);
        counts.missing += (out[i] & MLS_MISSING) != 0;
        counts.unexpected += (out[i] & MLS_UNEXPECTED) != 0;
        counts.shapes += (out[i] & MLS_SHAPE_DIFFERS) != 0;
        counts.dtypes += (out[i] & MLS_DTYPE_DIFFERS) != 0;
        counts.same += out[i] == MLS_SAME;
    }
    return counts;
}
