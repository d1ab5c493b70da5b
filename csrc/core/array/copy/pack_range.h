/* pack_range: copy consecutive elements of a tensor, in C order, to or from packed
 * memory.
 *
 * Threads that write parts of a tensor to a file use it for tensors with any strides and
 * either byte order.
 */
#ifndef MLS_PACK_RANGE_H
#define MLS_PACK_RANGE_H

#include "array/copy/copy.h"
#include "array/tensor.h"

#include <stddef.h>

/* Copy elements first .. first + count - 1 of `t`, counted in C order, to adjacent memory
 * at `to`, in this machine's byte order, converted to `dtype`. The dtypes must convert,
 * and the range must be inside the tensor. */
void mls_pack_range(const mls_kernels *kernels, const mls_tensor *t, mls_dtype dtype,
                    size_t first, size_t count, unsigned char *to);

/* The reverse of mls_pack_range: copy `count` adjacent elements at `from`, of the
 * tensor's dtype and in this machine's byte order, to elements first .. first + count - 1
 * of `t`. */
void mls_unpack_range(const mls_kernels *kernels, const mls_tensor *t, size_t first,
                      size_t count, unsigned char *from);

#endif
