/* gradient_compression: formats of compressed gradients, for slow connections, and the
 * elements that share an int8 scale.
 *
 * 16-bit floats saturate instead of becoming infinite. INT8 has one scale for each
 * MLS_GRADIENT_COMPRESSION_BLOCK elements: the largest magnitude divided by 127. The
 * rounding error stays on its rank as a residual and is added in the next step (error
 * feedback: Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent", 2014;
 * Karimireddy, Rebjock, Stich and Jaggi, "Error feedback fixes SignSGD", 2019). NaN and
 * infinity decode as NaN (with INT8, their whole block) and leave no residual.
 */
#ifndef MLS_GRADIENT_COMPRESSION_H
#define MLS_GRADIENT_COMPRESSION_H

#include "array/copy/copy.h"
#include "base/status.h"
#include "base/string_view.h"
#include "gradients/bucket.h"

typedef enum mls_gradient_compression {
    MLS_GRADIENT_COMPRESSION_F16,
    MLS_GRADIENT_COMPRESSION_BF16,
    MLS_GRADIENT_COMPRESSION_INT8,
    MLS_GRADIENT_COMPRESSION_COUNT
} mls_gradient_compression;

enum { MLS_GRADIENT_COMPRESSION_BLOCK = 256 };

/* Looks up "float16", "bfloat16" or "int8"; returns false for an unknown name, and leaves
 * `*out` as it is. */
bool mls_gradient_compression_from_name(mls_str name, mls_gradient_compression *out);

/* Returns the bytes of n encoded elements, a multiple of MLS_BUCKET_ALIGN. Cannot
 * overflow if n float32 elements fit in memory. */
size_t mls_gradient_compression_bytes(mls_gradient_compression compression, size_t n);

/* Encodes n elements of `src` plus their residual, and stores the new rounding error in
 * the residual (n elements; NULL: no error feedback). `dst` has
 * mls_gradient_compression_bytes bytes, aligned to MLS_BUCKET_ALIGN. */
void mls_gradient_compression_encode(const mls_kernels *kernels,
                                     mls_gradient_compression compression,
                                     const float *src, float *residual,
                                     unsigned char *dst, size_t n);

/* Decodes `count` of n encoded elements, beginning with element `start`, a multiple of
 * MLS_GRADIENT_COMPRESSION_BLOCK. `src` is the start of all n encoded elements; `dst`
 * receives `count` elements. */
void mls_gradient_compression_decode(const mls_kernels *kernels,
                                     mls_gradient_compression compression,
                                     const unsigned char *src, size_t n, size_t start,
                                     size_t count, float *dst);

/* ---- buckets with float32 sources and outputs ---- */

/* Checks that all segments are float32 sums with float32 outputs; the functions below
 * rely on it. MLS_E_VALUE. */
mls_code mls_gradient_compression_check(const mls_bucket *b, mls_status *st);

/* Return the bytes of this rank's message to rank `receiver`, and of its messages to all
 * other ranks together. */
size_t mls_gradient_compression_bucket_bytes(const mls_bucket *b,
                                             mls_gradient_compression compression,
                                             size_t receiver);
size_t mls_gradient_compression_sent_bytes(const mls_bucket *b,
                                           mls_gradient_compression compression);

/* Encodes all parts: those of the other ranks into `messages`, in rank order, and this
 * rank's part into `own_parts`, so that the sum uses it as the other ranks would decode
 * it. residuals[i] has as many elements as segment i; `residuals` is NULL for no error
 * feedback. */
void mls_gradient_compression_pack(const mls_bucket *b, const mls_kernels *kernels,
                                   mls_gradient_compression compression,
                                   float *const *residuals, unsigned char *messages,
                                   unsigned char *own_parts);

/* Decodes and sums the messages for this rank, in rank order and in float32, into the
 * outputs of the segments. `own_parts` is this rank's part from
 * mls_gradient_compression_pack; `received` has the messages of the other ranks in rank
 * order. Sets the norm partials. */
void mls_gradient_compression_reduce(const mls_bucket *b, const mls_kernels *kernels,
                                     mls_gradient_compression compression,
                                     const unsigned char *own_parts,
                                     const unsigned char *received);

#endif
