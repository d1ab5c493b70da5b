/* pack: any run of a tensor's elements, in C order, packed.
 *
 * What is written to files in parts, by several threads, is fetched so from tensors of
 * any strides and either byte order.
 */
#ifndef MLS_PACK_H
#define MLS_PACK_H

#include "array/copy/copy.h"
#include "array/tensor.h"

#include <stddef.h>

/* Copy elements `first` .. `first + count` of `t`, which has so many, to `to`, in this
 * machine's byte order. */
void mls_pack(const mls_kernels *kernels, const mls_tensor *t, size_t first, size_t count,
              unsigned char *to);

#endif
