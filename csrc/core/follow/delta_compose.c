/* delta_compose: composes two deltas to one, and filters a delta of one part to the
 * elements of another part. */
#include "follow/delta_streams.h"

/* ---- compose ---- */

/* A delta that is read element by element. */
typedef struct source {
    mls_delta_reader reader;
    const unsigned char *value; /* of the current element */
    size_t number, size;        /* of the current element; bytes of an element */
    bool ended;
} source;

/* Go to the next changed element, or set `ended`. */
static void advance_source(source *s)
{
    s->value += s->size;
    s->ended = !mls_delta_next(&s->reader, s->reader.gap_bytes, &s->number);
}

/* Return a source at the first changed element of a delta. */
static source read_source(const mls_delta *delta)
{
    source s = {.reader = mls_delta_read(delta),
                .value = delta->values,
                .size = delta->item_bytes};
    s.ended = !mls_delta_next(&s.reader, s.reader.gap_bytes, &s.number);
    return s;
}

/* Make one delta of two. Merge the elements of both by number. For a number of both, the
 * value of `second` is written, and both advance. */
mls_code mls_delta_compose(const mls_delta *first, const mls_delta *second,
                           mls_delta *out, mls_status *st)
{
    if (first->elements != second->elements || first->item_bytes != second->item_bytes) {
        return mls_fail(st, MLS_E_SHAPE,
                        "deltas of %zu elements of %zu bytes and of %zu of %zu bytes "
                        "belong to different arrays",
                        first->elements, first->item_bytes, second->elements,
                        second->item_bytes);
    }
    mls_delta_writer writer = {.delta = {.elements = first->elements,
                                         .item_bytes = first->item_bytes,
                                         .gap_bytes = 1}};
    source a = read_source(first), b = read_source(second);
    /* the sum cannot overflow: both have their values in memory */
    const bool has_room =
        mls_delta_reserve(&writer, first->changed + second->changed, first->elements);
    while (has_room && !(a.ended && b.ended)) {
        const bool from_a = !a.ended && (b.ended || a.number < b.number);
        const bool both = !a.ended && !b.ended && a.number == b.number;
        source *s = from_a ? &a : &b;
        mls_delta_put(&writer, 1, s->number, s->value, s->size);
        advance_source(s);
        if (both) {
            advance_source(&a);
        }
    }
    return mls_delta_finish(&writer, has_room, out, st);
}

/* ---- filter ---- */

/* Convert a delta of one part to another part. Walk over the runs of elements that both
 * parts have, and over the changed elements. A run is `count` elements that begin at
 * number `a` of the array of `from` and at number `b` of the array of `to`. */
mls_code mls_delta_filter(const mls_delta *delta, const mls_part *from,
                          const mls_part *to, mls_delta *out, mls_status *st)
{
    const size_t count = mls_part_count(from);
    if (count != delta->elements) {
        return mls_fail(
            st, MLS_E_SHAPE,
            "a delta of %zu elements does not belong to a part with %zu elements",
            delta->elements, count);
    }
    mls_delta_writer writer = {.delta = {.elements = mls_part_count(to),
                                         .item_bytes = delta->item_bytes,
                                         .gap_bytes = 1}};
    source s = read_source(delta);
    mls_overlap overlap;
    mls_run run;
    const bool has_room =
        mls_delta_reserve(&writer, delta->changed, writer.delta.elements);
    /* runs ascend in both parts, because both have the C order of the tensor */
    mls_overlap_init(&overlap, from, to);
    while (has_room && !s.ended && mls_overlap_next(&overlap, &run)) {
        while (!s.ended && s.number < run.a) {
            advance_source(&s);
        }
        while (!s.ended && s.number - run.a < run.count) {
            mls_delta_put(&writer, 1, s.number - run.a + run.b, s.value, s.size);
            advance_source(&s);
        }
    }
    return mls_delta_finish(&writer, has_room, out, st);
}
