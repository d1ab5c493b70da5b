/* write_sparse: finds the rows of zeros that a sparse save omits, if they are a quarter
 * of a shard.
 *
 * Several threads scan the memory once before writing. The scan of a shard stops when too
 * few of its rows are zero, so a dense state costs about one cache line for most rows. */
#include "checkpoint/write/write_plan.h"

#include "array/copy/pack_range.h"
#include "base/memory.h"

#include <stdatomic.h>
#include <string.h>

enum {
    PIECE = 4 << 20, /* bytes that one task scans */
    STEP = 256 << 10 /* bytes that are packed at a time; stays in the cache */
};

/* ---- one shard ---- */

/* Packed memory is returned in place, without a copy; strided memory is packed into
 * `buffer`. */
const unsigned char *mls_planned_elements(const mls_shard_job *job,
                                          const mls_shard_item *item, size_t first,
                                          size_t count, unsigned char *buffer)
{
    if (item->data != NULL) {
        return item->data + (item->first + first) * mls_dtype_of(item->dtype)->item_bytes;
    }
    mls_pack_range(job->kernels, item->strided, item->dtype, item->first + first, count,
                   buffer);
    return buffer;
}

/* ---- many shards ---- */

typedef struct scanned_shard {
    size_t shard;
    mls_row_cut rows;
    size_t most;          /* most non-zero rows for which zero rows are omitted */
    unsigned char *bits;  /* bits of the non-zero rows */
    atomic_size_t filled; /* number of non-zero rows */
} scanned_shard;

/* A task: several small shards, or elements `from` .. `to` of one. */
typedef struct piece {
    size_t first, count; /* range in the scanned shards */
    size_t from, to;     /* used only if `count` is 1 */
} piece;

typedef struct sparse_scan {
    mls_write_plan *plan;
    scanned_shard *shards;
    size_t count;
    piece *pieces;
    unsigned char *bits; /* bits of all shards */
    atomic_bool no_memory;
} sparse_scan;

/* Return whether shard `number` is scanned for zero rows: it is written whole and has
 * bytes. */
static bool is_candidate(const mls_write_plan *plan, size_t number)
{
    const mls_planned *planned = &plan->planned[number];
    return planned->layers == NULL && !planned->is_reused &&
           plan->index.shards[number].bytes > 0;
}

/* Divide shard `number` into rows. A shard below `pack_below` is one row: it shares a
 * file, and a list of its rows could be as large as the shard. */
static mls_row_cut divide_rows(const mls_write_plan *plan, size_t number)
{
    const mls_index_shard *shard = &plan->index.shards[number];
    const mls_part part = mls_index_part(shard);
    mls_row_cut rows = mls_rows_of(&part, mls_dtype_of(shard->dtype)->item_bytes);
    if (shard->bytes < plan->job->pack_below) {
        rows.row = rows.elements;
    }
    return rows;
}

/* List the shards to scan for zero rows, and allocate their bits (all 0: no row is known
 * to be filled) and the room for pieces. A shard is written whole once more than `most`
 * of its rows are filled. MLS_E_MEMORY: the caller frees the arrays. */
static mls_code list_candidates(sparse_scan *s, mls_status *st)
{
    const mls_write_plan *plan = s->plan;
    size_t shards = 0, pieces = 0, bits = 0;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        if (is_candidate(plan, i)) {
            const mls_row_cut rows = divide_rows(plan, i);
            shards++;
            pieces += plan->index.shards[i].bytes / PIECE + 1;
            bits += mls_rows_bitmap_bytes(&rows);
        }
    }
    s->shards = mls_alloc(shards, sizeof *s->shards);
    s->pieces = mls_alloc(pieces, sizeof *s->pieces);
    s->bits = mls_alloc(bits, 1);
    if (s->shards == NULL || s->pieces == NULL || s->bits == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to look for zeros in %zu shards",
                        shards);
    }
    /* a second pass assigns each shard its range of bits */
    unsigned char *bits_left = s->bits;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        if (is_candidate(plan, i)) {
            scanned_shard *shard = &s->shards[s->count++];
            shard->shard = i;
            shard->rows = divide_rows(plan, i);
            const size_t count = mls_rows_count(&shard->rows);
            /* zero rows must be a quarter of all rows, rounded up */
            shard->most = count - (count + 3) / 4; /* three quarters */
            shard->bits = bits_left;
            atomic_init(&shard->filled, 0);
            bits_left += mls_rows_bitmap_bytes(&shard->rows);
        }
    }
    return MLS_OK;
}

/* Divide all candidates into pieces of about PIECE bytes, one task each: a range of a
 * large shard's elements, or several small shards. Returns their number. */
static size_t make_pieces(const sparse_scan *s)
{
    size_t count = 0, room = 0; /* bytes that the last piece can still take */
    for (size_t i = 0; i < s->count; i++) {
        const mls_row_cut *rows = &s->shards[i].rows;
        const size_t bytes = rows->elements * rows->item;
        const size_t step = PIECE / rows->item;
        /* fits into the previous piece */
        if (bytes <= room) {
            s->pieces[count - 1].count++;
            room -= bytes;
            continue;
        }
        for (size_t from = 0; from < rows->elements; from += step) {
            const size_t left = rows->elements - from;
            s->pieces[count++] = (piece){.first = i,
                                         .count = 1,
                                         .from = from,
                                         .to = from + (left < step ? left : step)};
        }
        room = bytes < PIECE ? PIECE - bytes : 0;
    }
    return count;
}

/* Mark the rows that have a non-zero byte in elements `from` .. `to` of a shard. Stops
 * once so many rows are filled that the shard is not sparse. `buffer` (STEP bytes)
 * receives packed elements; it may be NULL for packed memory. */
static void scan_rows(const sparse_scan *s, scanned_shard *shard, size_t from, size_t to,
                      unsigned char *buffer)
{
    const mls_shard_item *item = s->plan->planned[shard->shard].item;
    const mls_row_cut *rows = &shard->rows;
    /* other tasks count rows of the same shard; all of them stop at the limit */
    while (from < to && atomic_load(&shard->filled) <= shard->most) {
        const size_t left = to - from, most = STEP / rows->item;
        const size_t step = left < most ? left : most;
        const unsigned char *data =
            mls_planned_elements(s->plan->job, item, from, step, buffer);
        atomic_fetch_add(&shard->filled,
                         mls_rows_mark_filled(rows, shard->bits, from, step, data));
        from += step;
    }
}

/* Thread function: scan piece `index`. A buffer is allocated only for strided memory. If
 * that fails, `no_memory` is set. */
static void scan_task(void *context, size_t index)
{
    sparse_scan *s = context;
    const piece *p = &s->pieces[index];
    unsigned char *buffer = NULL;
    for (size_t i = p->first; i < p->first + p->count; i++) {
        scanned_shard *shard = &s->shards[i];
        if (s->plan->planned[shard->shard].item->data == NULL && buffer == NULL &&
            (buffer = mls_alloc(STEP, 1)) == NULL) {
            atomic_store(&s->no_memory, true);
            return;
        }
        const bool alone = p->count == 1;
        scan_rows(s, shard, alone ? p->from : 0, alone ? p->to : shard->rows.elements,
                  buffer);
    }
    mls_free(buffer);
}

/* Give each sparse shard a layer of its rows that are not zero, and report its omitted
 * bytes as done. MLS_E_MEMORY, MLS_E_STOPPED. */
static mls_code set_sparse_layers(const sparse_scan *s, mls_status *st)
{
    for (size_t i = 0; i < s->count; i++) {
        const scanned_shard *scanned = &s->shards[i];
        mls_planned *planned = &s->plan->planned[scanned->shard];
        const mls_index_shard *shard = &s->plan->index.shards[scanned->shard];
        if (atomic_load(&scanned->filled) > scanned->most) {
            continue; /* stays plain, and is reported when it is written */
        }
        if (mls_planned_set_layers(planned, false /* no committed layers */,
                                   &scanned->rows, scanned->bits, st) != MLS_OK) {
            return st->code;
        }
        if (!mls_progress_report(s->plan->job->progress,
                                 shard->bytes - mls_planned_bytes(planned, shard))) {
            return mls_fail(st, MLS_E_STOPPED, "stopped");
        }
    }
    return MLS_OK;
}

/* Scan the shards that are written whole. Runs after reuse is decided, because only these
 * are scanned, and before files are assigned, because a shard's remaining size determines
 * its file. */
mls_code mls_write_plan_sparse(mls_write_plan *plan, mls_status *st)
{
    if (!plan->job->sparse) {
        return MLS_OK;
    }
    sparse_scan s = {.plan = plan};
    atomic_init(&s.no_memory, false);
    mls_code code = list_candidates(&s, st);
    if (code == MLS_OK) {
        mls_pool_run(plan->job->pool, scan_task, &s, make_pieces(&s));
        code = atomic_load(&s.no_memory)
                   ? mls_fail(st, MLS_E_MEMORY, "no memory for a buffer of 256 KiB")
                   : set_sparse_layers(&s, st);
    }
    mls_free(s.shards);
    mls_free(s.pieces);
    mls_free(s.bits);
    return code;
}
