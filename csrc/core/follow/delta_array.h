/* delta_array: elements of strided arrays by their number in C order; private to the
 * folder. */
#ifndef MLS_DELTA_ARRAY_H
#define MLS_DELTA_ARRAY_H

#include "array/tensor.h"

#include <stdbool.h>

/* Returns the address of an element; the number must be below the array's length. */
unsigned char *mls_element_at(const mls_tensor *array, size_t number);

/* Returns `count` consecutive elements from number `first` on: in the memory of an array
 * in C order, otherwise gathered in `room`. */
const unsigned char *mls_block(const mls_tensor *array, bool in_order, size_t first,
                               size_t count, unsigned char *room);

#endif
