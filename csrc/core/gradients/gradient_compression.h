/* wire: float32 gradients in fewer bytes, for slow connections.
 *
 * 16-bit floats saturate instead of becoming infinite.  INT8 has a scale for each
 * MLS_WIRE_BLOCK elements, the largest of them divided by 127.  What is lost stays with
 * its rank as a residual, and is added the next time (error feedback: Seide, Fu, Droppo,
 * Li and Yu, "1-bit stochastic gradient descent", 2014; Karimireddy, Rebjock, Stich and
 * Jaggi, "Error feedback fixes SignSGD", 2019).  NaN and infinity arrive as NaN, with
 * INT8 their whole block does; they leave no residual.
 */
#ifndef MLS_WIRE_H
#define MLS_WIRE_H

#include "gradients/bucket.h"
#include "array/copy/copy.h"
#include "base/status.h"
#include "base/string_view.h"

typedef enum mls_wire {
    MLS_WIRE_F16,
    MLS_WIRE_BF16,
    MLS_WIRE_INT8,
    MLS_WIRE_COUNT
} mls_wire;

enum { MLS_WIRE_BLOCK = 256 };

/* "float16", "bfloat16" or "int8". */
const char *mls_wire_name(mls_wire wire);

/* The wire of such a name; false: there is none. */
bool mls_wire_from_name(mls_text name, mls_wire *out);

/* Bytes of n encoded elements, a multiple of MLS_BUCKET_ALIGN.  n is that of an array of
 * float32 which lies in memory: nothing can overflow. */
size_t mls_wire_bytes(mls_wire wire, size_t n);

/* Encode n elements, together with what their residual holds, and keep in it what was
 * lost.  `residual` is NULL for none.  `dst` is aligned to MLS_BUCKET_ALIGN. */
void mls_wire_encode(const mls_kernels *kernels, mls_wire wire, const float *src,
                     float *residual, unsigned char *dst, size_t n);

/* Decode `count` of n encoded elements, from number `start`, a multiple of
 * MLS_WIRE_BLOCK. */
void mls_wire_decode(const mls_kernels *kernels, mls_wire wire, const unsigned char *src,
                     size_t n, size_t start, size_t count, float *dst);

/* ---- buckets whose segments are float32, sources and outputs ---- */

/* Check that all segments are sums of float32 in float32, which the functions below take
 * for granted.  MLS_E_VALUE. */
mls_code mls_wire_check(const mls_bucket *b, mls_status *st);

/* Bytes of the message to rank `of`, and of the messages to all other ranks. */
size_t mls_wire_bucket_bytes(const mls_bucket *b, mls_wire wire, size_t of);
size_t mls_wire_sent_bytes(const mls_bucket *b, mls_wire wire);

/* Encode all parts: those of the other ranks into `send`, rank after rank, and this
 * rank's own into `own`: its sum is made of what others would have seen of it.
 * residuals[i] has as many elements as segment i; NULL for no error feedback. */
void mls_wire_pack(const mls_bucket *b, const mls_kernels *kernels, mls_wire wire,
                   float *const *residuals, unsigned char *send, unsigned char *own);

/* Reduce what all ranks packed for this one, in the order of ranks, in float32: sums
 * only.  Sets the tallies. */
void mls_wire_reduce(const mls_bucket *b, const mls_kernels *kernels, mls_wire wire,
                     const unsigned char *own, const unsigned char *received);

#endif
