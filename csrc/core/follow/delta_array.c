/* delta_array: reads a strided array's elements by their number in C order; the array's
 * checksum.
 *
 * Arrays in C order are read in place, others row by row of their last axis.
 */
#include "follow/delta_array.h"

#include "follow/delta_kernels.h"

#include "array/strided_iter.h"
#include "base/size.h"

#include <string.h>

/* Return the address of an element. Split the number into an index for each axis, the
 * last axis fastest. */
unsigned char *mls_element_at(const mls_tensor *array, size_t number)
{
    unsigned char *at = array->data;
    for (int axis = array->rank - 1; axis >= 0; axis--) {
        at += (ptrdiff_t)(number % array->shape[axis]) * array->strides[axis];
        number /= array->shape[axis];
    }
    return at;
}

/* Return consecutive elements, in the array or copied to `buffer`. Copy row by row of the
 * last axis, whose elements have one stride; a 0-d array has one row of one element. */
const unsigned char *mls_block(const mls_tensor *array, bool in_order, size_t first,
                               size_t count, unsigned char *buffer)
{
    const size_t item = mls_tensor_item_bytes(array);
    if (in_order || count == 0) {
        return array->data + first * item;
    }
    const size_t row = array->rank == 0 ? 1 : array->shape[array->rank - 1];
    const ptrdiff_t stride = array->rank == 0 ? 0 : array->strides[array->rank - 1];
    for (size_t done = 0; done < count;) {
        const size_t rest = row - (first + done) % row;
        const size_t items = mls_size_least(rest, count - done);
        const unsigned char *from = mls_element_at(array, first + done);
        if (stride == (ptrdiff_t)item) {
            memcpy(buffer + done * item, from, items * item);
        } else {
            mls_gather(buffer + done * item, from, stride, item, items);
        }
        done += items;
    }
    return buffer;
}

/* Continue a CRC32C with the elements of an array. Strided elements are copied to a block
 * on the stack first. */
uint32_t mls_tensor_crc(const mls_crc_kernels *crc32c, const mls_tensor *tensor,
                        uint32_t crc)
{
    unsigned char buffer[MLS_DELTA_BLOCK_BYTES];
    const size_t item = mls_tensor_item_bytes(tensor);
    size_t count = 0;
    (void)mls_tensor_count(tensor, &count); /* fits: the array is in memory */
    if (mls_tensor_is_contiguous(tensor)) {
        return crc32c->update(crc, tensor->data, count * item);
    }
    const size_t step = sizeof buffer / item;
    for (size_t first = 0; first < count; first += step) {
        const size_t items = mls_size_least(step, count - first);
        const unsigned char *block =
            mls_block(tensor, false /* not in order */, first, items, buffer);
        crc = crc32c->update(crc, block, items * item);
    }
    return crc;
}
