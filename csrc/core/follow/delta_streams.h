/* delta_streams: the encoding of gaps: reads and writes the units of a delta's streams;
 * private to the folder.
 */
#ifndef MLS_DELTA_STREAMS_H
#define MLS_DELTA_STREAMS_H

#include "follow/delta.h"

#include <string.h>

/* Return the greatest unit of a width of `gap_bytes` (1 or 2): so many unchanged
 * elements, continued by the next unit. */
static inline size_t mls_delta_escape(size_t gap_bytes)
{
    return gap_bytes == 1 ? UINT8_MAX : UINT16_MAX;
}

/* Return the unit of `gap_bytes` bytes at `gaps`, which is little-endian. */
static inline size_t mls_delta_unit(const unsigned char *gaps, size_t gap_bytes)
{
    return gap_bytes == 1 ? gaps[0] : gaps[0] | (size_t)gaps[1] << 8;
}

/* Position in the stream `gaps`, to read the numbers of the changed elements one after
 * the other. */
typedef struct mls_delta_reader {
    const unsigned char *at, *end;
    size_t gap_bytes;
    size_t next; /* the smallest number that the next element can have */
} mls_delta_reader;

static inline mls_delta_reader mls_delta_read(const mls_delta *delta)
{
    return (mls_delta_reader){.at = delta->gaps,
                              .end = delta->gaps + delta->gaps_bytes,
                              .gap_bytes = delta->gap_bytes};
}

/* Set `*number` to the number of the next changed element. Returns false at the end of
 * the stream, which consists of whole units. `gap_bytes` is reader->gap_bytes, as a
 * constant where the caller knows it. */
static inline bool mls_delta_next(mls_delta_reader *reader, size_t gap_bytes,
                                  size_t *number)
{
    while (reader->at < reader->end) {
        const size_t unit = mls_delta_unit(reader->at, gap_bytes);
        reader->at += gap_bytes;
        reader->next += unit;
        if (unit != mls_delta_escape(gap_bytes)) {
            *number = reader->next++;
            return true;
        }
    }
    return false;
}

/* The delta that is being written, and the room of its streams. Set `delta.elements`,
 * `delta.item_bytes` and `delta.gap_bytes`, and zero the rest. */
typedef struct mls_delta_writer {
    mls_delta delta;
    size_t gaps_room, values_room;
    size_t next; /* the smallest number that the next element can have */
} mls_delta_writer;

/* Make room in both streams for `changed` more elements, with numbers below `end`.
 * Returns false if memory runs out. */
bool mls_delta_reserve(mls_delta_writer *writer, size_t changed, size_t end);

/* Copy an element of `size` bytes. Constant sizes let the compiler use one load and one
 * store. */
static inline void mls_delta_copy(unsigned char *to, const unsigned char *from,
                                  size_t size)
{
    switch (size) {
    case 1:
        *to = *from;
        break;
    case 2:
        memcpy(to, from, 2);
        break;
    case 4:
        memcpy(to, from, 4);
        break;
    case 8:
        memcpy(to, from, 8);
        break;
    default:
        memcpy(to, from, size);
        break;
    }
}

/* Append the element `number`, at least writer->next, with its `size` bytes at `value`.
 * Room was reserved with mls_delta_reserve. A size of 0 appends its gap alone.
 * `gap_bytes` is the writer's width of gaps. */
static inline void mls_delta_put(mls_delta_writer *writer, size_t gap_bytes,
                                 size_t number, const unsigned char *value, size_t size)
{
    mls_delta *d = &writer->delta;
    const size_t escape = mls_delta_escape(gap_bytes);
    size_t gap = number - writer->next;
    while (gap >= escape) {
        memset(d->gaps + d->gaps_bytes, UINT8_MAX, gap_bytes);
        d->gaps_bytes += gap_bytes;
        gap -= escape;
    }
    d->gaps[d->gaps_bytes] = (unsigned char)gap;
    if (gap_bytes == 2) {
        d->gaps[d->gaps_bytes + 1] = (unsigned char)(gap >> 8);
    }
    d->gaps_bytes += gap_bytes;
    if (size > 0) {
        mls_delta_copy(d->values + d->values_bytes, value, size);
        d->values_bytes += size;
    }
    d->changed++;
    writer->next = number + 1;
}

/* End the writing of gaps of 1 byte: choose the width with fewer bytes and give the delta
 * to the caller. `complete` is false if memory ran out before. MLS_E_MEMORY: the streams
 * are freed and `*out` is untouched. */
mls_code mls_delta_finish(mls_delta_writer *writer, bool complete, mls_delta *out,
                          mls_status *st);

#endif
