/* delta_apply: writes the values of a checked delta, block by block if a checksum is
 * wanted, so that a block is still in the cache when it is read. */
#include "follow/delta_array.h"
#include "follow/delta_streams.h"

#include "base/size.h"

enum {
    CRC_BYTES = 256 << 10, /* of a block */
    BATCH = 64
};

/* Position in a delta that is applied. */
typedef struct application {
    mls_delta_reader reader;
    const unsigned char *values, *values_end; /* the next value; the end of all values */
    unsigned char *undo; /* the place of the next overwritten element; NULL: no log */
    const mls_tensor *target;
    bool in_order; /* the target's elements are in C order */
} application;

/* Read the numbers of the next changed elements, at most BATCH and all below `end`, into
 * `numbers`, and return how many. If the target is in C order, ask the processor for
 * their cache lines, which are too far apart for it to foresee them. `gap_bytes`, `size`:
 * bytes of a unit of the gaps and of an element. */
static inline size_t read_batch(application *a, size_t end, size_t gap_bytes, size_t size,
                                size_t *numbers)
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
            __builtin_prefetch(data + number * size, 1);
        }
        count += unit != escape;
    }
    a->reader.at = at;
    a->reader.next = next;
    return count;
}

static inline unsigned char *element_of(const application *a, size_t number, size_t size)
{
    return a->in_order ? a->target->data + number * size
                       : mls_element_at(a->target, number);
}

/* Write the next `count` values of the delta, of `size` bytes each, to the elements
 * `numbers`, and save the old ones in the undo log. The log may be the memory of the
 * values, so an old element waits in `old` until its new value has been read. */
static inline void write_batch(application *a, const size_t *numbers, size_t count,
                               size_t size)
{
    const unsigned char *value = a->values;
    unsigned char *undo = a->undo, old[16];
    a->values += count * size;
    for (size_t i = 0; i < count; i++) {
        unsigned char *element = element_of(a, numbers[i], size);
        memcpy(old, element, size);
        memcpy(element, value + i * size, size);
        memcpy(undo + i * size, old, size);
    }
    a->undo += count * size;
}

/* Write the elements with numbers below `end`, with an undo log: a batch while the lines
 * of the next one are on their way. The values are counted too: a stream that changed
 * after the check must not lead outside of their memory. `gap_bytes`, `size`: as in
 * read_batch. */
static inline void write_logged(application *a, size_t end, size_t gap_bytes, size_t size)
{
    size_t numbers[2][BATCH];
    size_t count = read_batch(a, end, gap_bytes, size, numbers[0]);
    for (size_t turn = 0; count > 0; turn ^= 1) {
        const size_t values = (size_t)(a->values_end - a->values) / size;
        const size_t next = read_batch(a, end, gap_bytes, size, numbers[turn ^ 1]);
        write_batch(a, numbers[turn], mls_size_least(count, values), size);
        count = next;
    }
}

/* Write the elements with numbers below `end` without an undo log; a gap has `gap_bytes`
 * bytes, an element `size`. Nothing is loaded, so no store waits for its cache line, and
 * batches would only cost time. */
static inline void write_alone(application *a, size_t end, size_t gap_bytes, size_t size)
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
            memcpy(element_of(a, number, size), value, size);
            value += size;
        }
    }
    a->reader.at = at;
    a->reader.next = next;
    a->values = value;
}

/* Write the next values of the delta, as long as their elements are before number `end`;
 * keep the overwritten ones if the application has an undo log. `gap_bytes`, `size`:
 * bytes of a unit of the gaps and of an element. */
static inline void write_until(application *a, size_t end, size_t gap_bytes, size_t size)
{
    if (a->undo == NULL) {
        write_alone(a, end, gap_bytes, size);
    } else {
        write_logged(a, end, gap_bytes, size);
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
