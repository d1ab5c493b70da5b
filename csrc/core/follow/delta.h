/* delta: the elements of an array that differ from a base, as gaps and values.
 *
 * Elements are numbered in C order and compared by their bytes: -0 differs from 0, and a
 * NaN equals a NaN of the same bits. A delta has two streams:
 * - `values`: the bytes of the changed elements, in ascending order of their numbers;
 * - `gaps`: for each of them, the number of unchanged elements since the one before (or
 *   since the start), in units of 1 byte or of 2 bytes, little-endian. A unit of 255 (of
 *   65535 for 2 bytes) means that many unchanged elements and is continued by the next
 *   unit; every other unit ends a gap.
 * Each list of numbers has exactly one stream of each width. docs/follow_format.md
 * specifies the bytes for other programs.
 *
 * A delta is untrusted until mls_delta_check has accepted it. The undo log of an
 * application is a delta too: the same gaps with the overwritten elements.
 */
#ifndef MLS_DELTA_H
#define MLS_DELTA_H

#include "array/tensor.h"
#include "crc32c/crc32c.h"
#include "sharding/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Functions that return a delta allocate both streams: free them with mls_delta_fini.
 * Functions that read one borrow its memory, which may belong to anyone. */
typedef struct mls_delta {
    size_t elements;   /* of the array */
    size_t item_bytes; /* of an element: 1, 2, 4, 8 or 16 */
    size_t changed;    /* elements with a value */
    size_t gap_bytes;  /* of a unit of `gaps`: 1 or 2 */
    unsigned char *gaps, *values;
    size_t gaps_bytes, values_bytes;
} mls_delta;

/* Free both streams of a delta that a function of this header returned. Accepts a zeroed
 * struct, and zeroes it. */
void mls_delta_fini(mls_delta *delta);

/* The kernels for one instruction set; constant and complete. */
typedef struct mls_delta_kernels mls_delta_kernels;
/* Return the fastest kernels for `cpu`; mls_cpu_offers(cpu) must be true. */
const mls_delta_kernels *mls_delta_kernels_of(mls_cpu cpu);

/* Compare the arrays `base` and `changed`, of any strides, and set `*out` to the elements
 * of `changed` that differ. The width of the gaps is the one with fewer bytes; 1 if both
 * have equally many. If `crc` is not NULL, it receives the CRC32C of all elements of
 * `changed`. On failure `*out` and `*crc` are untouched.
 * MLS_E_SHAPE, MLS_E_DTYPE: the arrays differ in it; MLS_E_DTYPE also if an array is
 * byte-swapped. MLS_E_SIZE: more elements than size_t can count. MLS_E_MEMORY. */
mls_code mls_delta_encode(const mls_delta_kernels *kernels, const mls_crc_kernels *crc32c,
                          const mls_tensor *base, const mls_tensor *changed,
                          mls_delta *out, uint32_t *crc, mls_status *st);

/* Check everything that the other functions rely on: widths and sizes of the streams,
 * numbers below `elements`, a gap for each value.
 * MLS_E_FORMAT: the offset of the status is a byte of `gaps`, if one is at fault. */
mls_code mls_delta_check(const mls_delta *delta, mls_status *st);

/* Check that a delta belongs to an array of the length and element size of `target`.
 * MLS_E_SHAPE: it does not. MLS_E_DTYPE: `target` is byte-swapped. */
mls_code mls_delta_check_target(const mls_delta *delta, const mls_tensor *target,
                                mls_status *st);

/* Write the values of a delta that passed both checks to `target`. If `undo` is not NULL,
 * it receives the overwritten elements, `values_bytes` bytes; it may be `delta->values`,
 * which are then exchanged. If `crc` is not NULL, it receives the CRC32C of all elements
 * of `target` after the change. The streams must not overlap the target. Cannot fail. If
 * another process changes a stream after the check, nothing outside of the target is
 * written. */
void mls_delta_apply(const mls_delta *delta, const mls_crc_kernels *crc32c,
                     const mls_tensor *target, unsigned char *undo, uint32_t *crc);

/* Set `*out` to the delta that has the effect of `first`, then `second`: all elements of
 * both, with the values of `second` if both have a value. Both passed mls_delta_check.
 * MLS_E_SHAPE: they belong to arrays of different lengths or element sizes.
 * MLS_E_MEMORY. `*out` is untouched on failure. */
mls_code mls_delta_compose(const mls_delta *first, const mls_delta *second,
                           mls_delta *out, mls_status *st);

/* Convert a delta of the array of part `from` to a delta `*out` of the array of part
 * `to`: the changed elements that both parts have, with their numbers in `to`. Both are
 * parts of one tensor; the delta passed mls_delta_check.
 * MLS_E_SHAPE: `from` does not have as many elements as the delta's array. MLS_E_MEMORY.
 * `*out` is untouched on failure. */
mls_code mls_delta_filter(const mls_delta *delta, const mls_part *from,
                          const mls_part *to, mls_delta *out, mls_status *st);

/* Return the CRC32C of the bytes whose CRC32C is `crc` (0: none), followed by the
 * elements of `tensor` in C order. */
uint32_t mls_tensor_crc(const mls_crc_kernels *crc32c, const mls_tensor *tensor,
                        uint32_t crc);

#endif
