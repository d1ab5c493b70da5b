/* delta_array: elements of strided arrays by their number in C order; private to the
 * folder. */
#ifndef MLS_DELTA_ARRAY_H
#define MLS_DELTA_ARRAY_H

#include "array/tensor.h"

#include <stdbool.h>

/* Return the address of element number `number` in C order, which must be below the
 * array's length. */
unsigned char *mls_element_at(const mls_tensor *array, size_t number);

/* Return the address of `count` consecutive elements of `array`, in C order from number
 * `first` on. `in_order`: the array is contiguous, and the elements are not copied;
 * otherwise they are copied to `buffer`, which has memory for `count` of them. `buffer`
 * is not used if `in_order` is true or `count` is 0. */
const unsigned char *mls_block(const mls_tensor *array, bool in_order, size_t first,
                               size_t count, unsigned char *buffer);

#endif
