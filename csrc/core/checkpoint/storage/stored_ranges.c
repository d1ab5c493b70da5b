/* stored_ranges: which stored bytes contain a requested part of one shard: its runs, its
 * blocks, its frames.
 *
 * A place is a byte range of a file that stores a shard or one of its layers, or the
 * zeros of a shard that are not stored. The visible ranges of a layer are its elements
 * that no later layer stores. A run is contiguous in the place and in the packed
 * requested part.
 *
 * If a place stores the whole shard, the runs are the intersection of shard and requested
 * part. If it is a layer, these runs are intersected with the layer's visible ranges.
 * Both sequences skip ahead: visible ranges by binary search, runs by restarting the
 * iterator. */
#include "checkpoint/storage/stored_ranges.h"

#include "base/size.h"
#include "safetensors/safetensors.h"

#include <stdio.h>
#include <string.h>

enum {
    SHOWN_NAME = 80, /* bytes of a name in a message */
    SHOWN_FILE = 90  /* bytes of a file path in a message */
};

/* Return the total length of all compressed frames: the end of the last one. */
static size_t compressed_bytes(const mls_compressed_frames *frames)
{
    return frames->ends[mls_compressed_frames_count(frames->bytes) - 1];
}

/* Set `*out` to the uncompressed bytes of a place. Returns false if they overflow, or if
 * the stored bytes exceed the file. Zeros, which have no file, cannot exceed one. */
bool mls_stored_bytes(const mls_stored_shard *place, size_t *out)
{
    uint64_t end;
    size_t stored;
    /* a layer's size includes its hidden elements */
    if (place->visible != NULL) {
        *out = place->bytes;
    } else if (!mls_size_mul(mls_part_count(place->part), place->item_bytes, out)) {
        return false;
    }
    stored = place->frames == NULL ? *out : compressed_bytes(place->frames);
    return place->file == NULL ||
           (mls_u64_add(place->offset, stored, &end) && end <= place->file_bytes &&
            end <= INT64_MAX); /* the largest offset that the system accepts */
}

/* Restart the iterator at element `first` of the shard: intersect the requested part with
 * elements `first` .. `end` of the shard's part. Runs are then counted from `first`. */
static void start_overlap(mls_stored_runs *r, size_t first, size_t end)
{
    mls_part part;
    mls_part_copy(&part, r->place->part);
    part.end = part.begin + end;
    part.begin += first;
    r->first = first;
    r->run.count = 0;
    mls_overlap_init(&r->overlap, &part, r->to);
}

/* Find the elements that bytes `from` .. `end` of the place touch, and start at the first
 * of them. Elements that are only partly in that range are included; mls_stored_runs_next
 * clips their bytes. */
void mls_stored_runs_init(mls_stored_runs *runs, const mls_stored_shard *place,
                          const mls_part *to, size_t from, size_t end)
{
    const size_t item = place->item_bytes;
    size_t first = from / item, after = end / item + (end % item != 0 ? 1 : 0);
    runs->place = place;
    runs->to = to;
    runs->from = from;
    runs->end = end;
    runs->missed = false;
    if (place->visible != NULL) {
        /* find the visible ranges by binary search: thousands may precede them */
        runs->visible_index =
            mls_row_ranges_find_at(place->visible, place->visible_count, first);
        runs->visible_end =
            after == 0
                ? 0
                : mls_row_ranges_find_at(place->visible, place->visible_count, after - 1);
        if (runs->visible_end < place->visible_count &&
            place->visible[runs->visible_end].at < after) {
            runs->visible_end++;
        }
        if (runs->visible_index >= runs->visible_end) {
            /* later layers hide all of these elements */
            runs->run.count = 0;
            runs->overlap.done = true;
            return;
        }
        /* convert positions in the layer to positions in the shard */
        const mls_row_range *first_range = &place->visible[runs->visible_index];
        const mls_row_range *last_range = &place->visible[runs->visible_end - 1];
        first =
            first_range->begin + (first > first_range->at ? first - first_range->at : 0);
        after = last_range->begin + (after - last_range->at < last_range->count
                                         ? after - last_range->at
                                         : last_range->count);
    }
    start_overlap(runs, first, after);
}

/* Advance to the next run that the shard and the requested part share, and count its
 * position `a` from the start of the shard. Returns false after the last. */
static bool next_run(mls_stored_runs *r)
{
    if (!mls_overlap_next(&r->overlap, &r->run)) {
        return false;
    }
    r->run.a += r->first;
    return true;
}

/* Advance to the first visible range that ends after the start of the current run.
 * Returns false if no such range is left. */
static bool next_visible_range(mls_stored_runs *r)
{
    const mls_row_range *list = r->place->visible;
    /* usually the next range; search if more are skipped */
    size_t at = r->visible_index + 1;
    if (at < r->visible_end && list[at].begin + list[at].count <= r->run.a) {
        at += mls_row_ranges_find(list + at, r->visible_end - at, r->run.a);
    }
    r->visible_index = at;
    return at < r->visible_end;
}

/* Drop the current run, which ends before the visible range `range`. The first time only
 * this run is dropped, because the next one often reaches `range`; the second time in a
 * row, restart at `range` instead of visiting all runs before it, and count anew. */
static void skip_run(mls_stored_runs *r, const mls_row_range *range)
{
    r->run.count = 0;
    if (r->missed) {
        const size_t end = r->first + (r->overlap.a_end - r->overlap.a_begin);
        if (range->begin >= end) {
            r->overlap.done = true; /* no requested element follows */
        } else {
            start_overlap(r, range->begin, end);
        }
    }
    r->missed = !r->missed;
}

/* Return the next intersection of a run and a visible range: position in the layer (`a`),
 * position in the requested part (`b`), and length, all in elements. Returns false after
 * the last. */
static bool next_common(mls_stored_runs *r, mls_run *out)
{
    while (r->run.count > 0 || next_run(r)) {
        const mls_row_range *range = &r->place->visible[r->visible_index];
        const size_t run_end = r->run.a + r->run.count, end = range->begin + range->count;
        if (end <= r->run.a) {
            if (!next_visible_range(r)) {
                return false;
            }
        } else if (run_end <= range->begin) {
            skip_run(r, range);
        } else {
            /* the rest of the run is kept for the next visible range */
            const size_t from = r->run.a > range->begin ? r->run.a : range->begin;
            const size_t until = run_end < end ? run_end : end;
            *out = (mls_run){range->at + (from - range->begin),
                             r->run.b + (from - r->run.a), until - from};
            r->run.b += until - r->run.a;
            r->run.count = run_end - until;
            r->run.a = until;
            r->missed = false;
            return true;
        }
    }
    return false;
}

/* Return the next run, converted to bytes and clipped to `from` .. `end`; false after the
 * last. */
bool mls_stored_runs_next(mls_stored_runs *runs, mls_stored_run *out)
{
    const size_t item = runs->place->item_bytes;
    mls_run next;
    for (;;) {
        if (runs->place->visible == NULL) {
            if (!mls_overlap_next(&runs->overlap, &next)) {
                return false;
            }
            next.a += runs->first;
        } else if (!next_common(runs, &next)) {
            return false;
        }
        /* `from` or `end` may be within an element: the iterators of the neighbouring
         * bytes return its other bytes */
        const size_t at = next.a * item, end = at + next.count * item;
        const size_t from = at < runs->from ? runs->from : at;
        const size_t until = end < runs->end ? end : runs->end;
        if (from < until) {
            *out = (mls_stored_run){from, until - from, next.b * item + (from - at)};
            return true;
        }
    }
}

/* Find the visible range that contains position `at` of the layer. Without visible ranges
 * the place stores the whole shard, so both positions are equal. */
size_t mls_stored_element(const mls_stored_shard *place, size_t at)
{
    if (place->visible == NULL) {
        return at;
    }
    const mls_row_range *range =
        &place->visible[mls_row_ranges_find_at(place->visible, place->visible_count, at)];
    return range->begin + (at - range->at);
}

/* Find the first run, and the end of the last requested element, without visiting the
 * runs between. */
bool mls_stored_range_of(const mls_stored_shard *place, const mls_part *to,
                         mls_stored_range *out)
{
    mls_stored_runs runs;
    mls_stored_run first;
    size_t bytes;
    if (!mls_stored_bytes(place, &bytes) || bytes == 0) {
        return false;
    }
    mls_stored_runs_init(&runs, place, to, 0, bytes);
    if (!mls_stored_runs_next(&runs, &first)) {
        return false;
    }
    /* the intersection of shard and part has no element from here on */
    size_t end = runs.first + (runs.overlap.a_end - runs.overlap.a_begin);
    if (place->visible != NULL) {
        /* the visible range of the last element, or the one before it */
        const mls_row_range *list = place->visible;
        const size_t at = mls_row_ranges_find(list, place->visible_count, end - 1);
        const bool inside = at < place->visible_count && list[at].begin < end;
        end = inside ? list[at].at + (end - list[at].begin)
                     : list[at - 1].at + list[at - 1].count;
    }
    end *= place->item_bytes;
    *out = (mls_stored_range){.from = first.at,
                              .end = end,
                              .to = first.to,
                              .together = first.at + first.count == end};
    return true;
}

/* Replace uncompressed offsets `*begin` .. `*end` of a place by compressed offsets of the
 * frames that contain them: compressed bytes are read in whole frames. */
static void round_to_frames(const mls_compressed_frames *frames, size_t *begin,
                            size_t *end)
{
    *begin = mls_compressed_frame_begin(frames, *begin / MLS_FRAME_BYTES);
    *end = frames->ends[(*end - 1) / MLS_FRAME_BYTES];
}

/* Add up the bytes that reading `to` loads from the place's file: whole blocks if it is
 * verified, whole frames if it is compressed. All members are 0 if nothing is requested,
 * or if the place exceeds its file. Runs are ascending, so one pass finds both ends, and
 * a block or frame that two runs share is counted once. */
mls_stored_reads mls_stored_reads_of(const mls_stored_shard *place, const mls_part *to,
                                     bool verify)
{
    const size_t block = MLS_SAFETENSORS_BLOCK;
    const bool blocks = verify && place->crcs != NULL;
    size_t bytes = 0;                  /* of the place, uncompressed */
    size_t first = SIZE_MAX, last = 0; /* start and end of the stored bytes to load */
    mls_stored_reads reads = {0};
    mls_stored_runs runs;
    mls_stored_run run;
    if (!mls_stored_bytes(place, &bytes)) {
        return reads;
    }
    mls_stored_runs_init(&runs, place, to, 0, bytes);
    const size_t stored = place->frames == NULL ? bytes : compressed_bytes(place->frames);
    while (mls_stored_runs_next(&runs, &run)) {
        size_t begin = run.at, end = run.at + run.count;
        if (place->frames != NULL) {
            round_to_frames(place->frames, &begin, &end);
        }
        if (blocks) {
            /* round up to a block; the last block may be shorter */
            const size_t rest = end % block == 0 ? 0 : block - end % block;
            begin -= begin % block;
            end += rest < stored - end ? rest : stored - end;
        }
        if (blocks || place->frames != NULL) {
            begin = begin > last ? begin : last; /* count shared blocks once */
        }
        first = first == SIZE_MAX ? begin : first;
        reads.bytes += end > begin ? end - begin : 0;
        last = end > last ? end : last;
    }
    if (first != SIZE_MAX) {
        reads.begin = place->offset + first;
        reads.end = place->offset + last;
    }
    return reads;
}

/* Prefix the text of an error with the names of tensor and file, and keep its other
 * fields. */
mls_code mls_stored_blame(const mls_stored_shard *place, mls_status *st)
{
    const mls_status why = *st;
    const mls_str name = place->name, state = place->state;
    char key[sizeof st->name];
    snprintf(key, sizeof key, "%.*s%s%.*s",
             (int)(name.length < sizeof key ? name.length : sizeof key),
             name.data == NULL ? "" : name.data, state.data == NULL ? "" : ".",
             (int)(state.length < sizeof key ? state.length : sizeof key),
             state.data == NULL ? "" : state.data);
    mls_fail(st, why.code, "tensor '%.*s', file '%.*s': %s", (int)SHOWN_NAME, key,
             (int)SHOWN_FILE, place->file == NULL ? "" : place->file, why.text);
    st->os_error = why.os_error;
    st->has_offset = why.has_offset;
    st->offset = why.offset;
    mls_status_name(st, key, strlen(key));
    return mls_status_differ(st, why.expected, why.got);
}
