/* delta_apply: writes the values of a checked delta to an array, and the old values to an
 * undo log.
 *
 * If a checksum is wanted, values are written block by block, so that a block is still in
 * the cache when it is read. */
#include "follow/delta_array.h"
#include "follow/delta_streams.h"

#include "base/size.h"

enum {
    CRC_BYTES = 256 << 10, /* of a block */
    BATCH = 64 /* elements that are prefetched together; two batches fit the cache */
};

/* Position in a delta that is applied. The comments below call an element's number in C
 * order its number; `gap_bytes` and `item_bytes` are the widths of a unit of the gaps (1
 * or 2) and of an element, as constants where the compiler knows them. */
typedef struct application {
    mls_delta_reader reader;
    const unsigned char *values, *values_end; /* the next value; the end of all values */
    unsigned char *undo; /* the place of the next overwritten element; NULL: no log */
    const mls_tensor *target;
    bool in_order; /* the target's elements are in C order */
} application;

/* Read the numbers of the next changed elements, at most BATCH and all below `end`, into
 * `numbers`, and return how many. If the target is in C order, prefetch the elements:
 * they are too far apart for the processor to foresee them. */
static inline size_t read_batch(application *a, size_t end, size_t gap_bytes,
                                size_t item_bytes, size_t *numbers)
{
    const size_t escape = mls_delta_escape(gap_bytes);
    const unsigned char *at = a->reader.at;
    unsigned char *data = a->in_order ? a->target->data : NULL;
    size_t next = a->reader.next, count = 0;
    for (; at < a->reader.end && count < BATCH; at += gap_bytes) {
        const size_t unit = mls_delta_unit(at, gap_bytes), number = next + unit;
        if (number >= end) {
            break;
        }
        next = number + (unit != escape);
        numbers[count] = number; /* stored for an escape too, and then overwritten */
        if (data != NULL) {
            __builtin_prefetch(data + number * item_bytes, 1);
        }
        count += unit != escape;
    }
    a->reader.at = at;
    a->reader.next = next;
    return count;
}

/* Return the address of an element in the target. */
static inline unsigned char *element_of(const application *a, size_t number,
                                        size_t item_bytes)
{
    return a->in_order ? a->target->data + number * item_bytes
                       : mls_element_at(a->target, number);
}

/* Write the next `count` values of the delta, of `item_bytes` bytes each, to the elements
 * `numbers`, and save the old ones in the undo log. The log may be the memory of the
 * values, so an old element waits in `old` until its new value has been read. */
static inline void write_batch(application *a, const size_t *numbers, size_t count,
                               size_t item_bytes)
{
    const unsigned char *value = a->values;
    unsigned char *undo = a->undo, old[16];
    a->values += count * item_bytes;
    for (size_t i = 0; i < count; i++) {
        unsigned char *element = element_of(a, numbers[i], item_bytes);
        memcpy(old, element, item_bytes);
        memcpy(element, value + i * item_bytes, item_bytes);
        memcpy(undo + i * item_bytes, old, item_bytes);
    }
    a->undo += count * item_bytes;
}

/* Write the changed elements with numbers below `end`, and save the old ones in the undo
 * log. Batches alternate between two buffers: one is prefetched while the other is
 * written. Another process may have changed the gaps since the check, so each batch is
 * limited to the values that are left. */
static inline void write_with_undo(application *a, size_t end, size_t gap_bytes,
                                   size_t item_bytes)
{
    size_t numbers[2][BATCH];
    size_t count = read_batch(a, end, gap_bytes, item_bytes, numbers[0]);
    for (size_t current = 0; count > 0; current ^= 1) {
        const size_t values_left = (size_t)(a->values_end - a->values) / item_bytes;
        const size_t next_count =
            read_batch(a, end, gap_bytes, item_bytes, numbers[current ^ 1]);
        write_batch(a, numbers[current], mls_size_least(count, values_left), item_bytes);
        count = next_count;
    }
}

/* Write the changed elements with numbers below `end`, without an undo log. No old
 * element is loaded, so no store waits for its cache line, and batches would only cost
 * time. */
static inline void write_without_undo(application *a, size_t end, size_t gap_bytes,
                                      size_t item_bytes)
{
    const size_t escape = mls_delta_escape(gap_bytes);
    const unsigned char *at = a->reader.at, *value = a->values;
    size_t next = a->reader.next;
    for (; at < a->reader.end && value < a->values_end; at += gap_bytes) {
        const size_t unit = mls_delta_unit(at, gap_bytes), number = next + unit;
        if (number >= end) {
            break;
        }
        next = number + (unit != escape);
        if (unit != escape) {
            memcpy(element_of(a, number, item_bytes), value, item_bytes);
            value += item_bytes;
        }
    }
    a->reader.at = at;
    a->reader.next = next;
    a->values = value;
}

/* Write the changed elements with numbers below `end`; save the old ones if there is an
 * undo log. */
static inline void write_until(application *a, size_t end, size_t gap_bytes,
                               size_t item_bytes)
{
    if (a->undo == NULL) {
        write_without_undo(a, end, gap_bytes, item_bytes);
    } else {
        write_with_undo(a, end, gap_bytes, item_bytes);
    }
}

/* write_GAP_SIZE: write_until for gaps of GAP bytes and elements of SIZE bytes. Constant
 * sizes let the compiler move an element with one instruction. */
#define DEFINE_WRITE(gap, size)                                                          \
    static void write_##gap##_##size(application *a, size_t end)                         \
    {                                                                                    \
        write_until(a, end, gap, size);                                                  \
    }
#define DEFINE_WRITES(size) DEFINE_WRITE(1, size) DEFINE_WRITE(2, size)

DEFINE_WRITES(1)
DEFINE_WRITES(2)
DEFINE_WRITES(4)
DEFINE_WRITES(8)
DEFINE_WRITES(16)

typedef void (*write_function)(application *a, size_t end);

/* Return the write function for the widths of a delta. The size of an element is a power
 * of 2, so its exponent is the second index. */
static write_function choose_write(const mls_delta *delta)
{
    static const write_function functions[2][5] = {
        {write_1_1, write_1_2, write_1_4, write_1_8, write_1_16},
        {write_2_1, write_2_2, write_2_4, write_2_8, write_2_16}};
    return functions[delta->gap_bytes - 1][__builtin_ctzll(delta->item_bytes)];
}

/* Write the values of a delta to an array. If a checksum is wanted, an array in C order
 * is written and then read block by block, while a block is in the cache. */
void mls_delta_apply(const mls_delta *delta, const mls_crc_kernels *crc32c,
                     const mls_tensor *target, unsigned char *undo, uint32_t *crc)
{
    const write_function write = choose_write(delta);
    application a = {.reader = mls_delta_read(delta),
                     .values = delta->values,
                     .values_end = delta->values + delta->values_bytes,
                     .undo = undo,
                     .target = target,
                     .in_order = mls_tensor_is_contiguous(target)};
    if (crc == NULL || !a.in_order) {
        write(&a, delta->elements);
        if (crc != NULL) {
            *crc = mls_tensor_crc(crc32c, target, 0);
        }
        return;
    }
    const size_t size = delta->item_bytes, step = CRC_BYTES / size;
    uint32_t sum = 0;
    for (size_t first = 0; first < delta->elements; first += step) {
        const size_t count = mls_size_least(step, delta->elements - first);
        write(&a, first + count);
        sum = crc32c->update(sum, target->data + first * size, count * size);
    }
    *crc = sum;
}
