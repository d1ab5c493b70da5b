/* wire: float32 gradients in fewer bytes, for slow connections.
 *
 * 16-bit floats saturate instead of becoming infinite.  INT8 has a scale for each
 * MLS_GRADIENT_COMPRESSION_BLOCK elements, the largest of them divided by 127.  What is
 * lost stays with its rank as a residual, and is added the next time (error feedback:
 * Seide, Fu, Droppo, Li and Yu, "1-bit stochastic gradient descent", 2014; Karimireddy,
 * Rebjock, Stich and Jaggi, "Error feedback fixes SignSGD", 2019).  NaN and infinity
 * arrive as NaN, with INT8 their whole block does; they leave no residual.
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

/* "float16", "bfloat16" or "int8". */
const char *mls_gradient_compression_name(mls_gradient_compression wire);

/* The wire of such a name; false: there is none. */
bool mls_gradient_compression_from_name(mls_str name, mls_gradient_compression *out);

/* Bytes of n encoded elements, a multiple of MLS_BUCKET_ALIGN.  n is that of an array of
 * float32 which lies in memory: nothing can overflow. */
size_t mls_gradient_compression_bytes(mls_gradient_compression wire, size_t n);

/* Encode n elements, together with what their residual holds, and keep in it what was
 * lost.  `residual` is NULL for none.  `dst` is aligned to MLS_BUCKET_ALIGN. */
void mls_gradient_compression_encode(const mls_kernels *kernels,
                                     mls_gradient_compression wire, const float *src,
                                     float *residual, unsigned char *dst, size_t n);

/* Decode `count` of n encoded elements, from number `start`, a multiple of
 * MLS_GRADIENT_COMPRESSION_BLOCK. */
void mls_gradient_compression_decode(const mls_kernels *kernels,
                                     mls_gradient_compression wire,
                                     const unsigned char *src, size_t n, size_t start,
                                     size_t count, float *dst);

/* ---- buckets whose segments are float32, sources and outputs ---- */

/* Check that all segments are sums of float32 in float32, which the functions below take
 * for granted.  MLS_E_VALUE. */
mls_code mls_gradient_compression_check(const mls_bucket *b, mls_status *st);

/* Bytes of the message to rank `of`, and of the messages to all other ranks. */
size_t mls_gradient_compression_bucket_bytes(const mls_bucket *b,
                                             mls_gradient_compression wire, size_t of);
size_t mls_gradient_compression_sent_bytes(const mls_bucket *b,
                                           mls_gradient_compression wire);

/* Encode all parts: those of the other ranks into `send`, rank after rank, and this
 * rank's own into `own`: its sum is made of what others would have seen of it.
 * residuals[i] has as many elements as segment i; NULL for no error feedback. */
void mls_gradient_compression_pack(const mls_bucket *b, const mls_kernels *kernels,
                                   mls_gradient_compression wire, float *const *residuals,
                                   unsigned char *send, unsigned char *own);

/* Reduce what all ranks packed for this one, in the order of ranks, in float32: sums
 * only.  Sets the tallies. */
void mls_gradient_compression_reduce(const mls_bucket *b, const mls_kernels *kernels,
                                     mls_gradient_compression wire,
                                     const unsigned char *own,
                                     const unsigned char *received);

#endif
