/* shard_sparse: what of a shard is not worth writing, since it is zero.
 *
 * Memory is looked at once before anything is written, in pieces by several threads.  A
 * shard whose rows mostly hold something is given up as soon as that is known, so a dense
 * state costs a line of the cache for each of most of its rows.
 */
#include "checkpoint/write/write_plan.h"

#include "base/memory.h"
#include "array/copy/pack_range.h"

#include <stdatomic.h>
#include <string.h>

enum {
    PIECE = 4 << 20, /* bytes that one task looks at */
    STEP = 256 << 10 /* bytes that are packed at a time: they stay in the cache */
};

/* ---- one shard ---- */

/* What lies packed is looked at, and written, from where it lies. */
const unsigned char *mls_planned_elements(const mls_shard_job *job,
                                          const mls_shard_item *item, size_t first,
                                          size_t count, unsigned char *room)
{
    if (item->data != NULL) {
        return item->data + (item->first + first) * mls_dtype_of(item->dtype)->item_bytes;
    }
    mls_pack(job->kernels, item->strided, item->first + first, count, room);
    return room;
}

/* ---- many ---- */

/* A shard that is looked at. */
typedef struct sifted {
    size_t shard;
    mls_row_cut rows;
    size_t most;          /* rows that may hold something, for others to be left out */
    unsigned char *bits;  /* of those that do */
    atomic_size_t filled; /* how many these are */
} sifted;

/* A part of one, or all of several small ones; of the only one elements `from` .. `to`.
 */
typedef struct piece {
    size_t first, count; /* of the sifted */
    size_t from, to;
} piece;

typedef struct sifting {
    mls_shard_plan *plan;
    sifted *shards;
    size_t count;
    piece *pieces;
    unsigned char *bits; /* of all of them */
    atomic_bool no_memory;
} sifting;

/* Whether it is to be looked at: what is not written anyway, and what has no bytes, is
 * not. */
static bool is_candidate(const mls_shard_plan *plan, size_t number)
{
    const mls_planned *planned = &plan->planned[number];
    return planned->layers == NULL && !planned->kept &&
           plan->index.shards[number].bytes > 0;
}

/* What is small shares a file, and lists of its rows would be as long as itself: it is
 * one row, which is there or not. */
static mls_row_cut cut(const mls_shard_plan *plan, size_t number)
{
    const mls_index_shard *shard = &plan->index.shards[number];
    const mls_part part = mls_index_part(shard);
    mls_row_cut rows = mls_rows_of(&part, mls_dtype_of(shard->dtype)->item_bytes);
    if (shard->bytes < plan->job->pack_below) {
        rows.row = rows.elements;
    }
    return rows;
}

/* Room for everything, and who is looked at. */
static mls_code list_candidates(sifting *s, mls_status *st)
{
    const mls_shard_plan *plan = s->plan;
    size_t shards = 0, pieces = 0, bits = 0;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        if (is_candidate(plan, i)) {
            const mls_row_cut rows = cut(plan, i);
            shards++;
            pieces += plan->index.shards[i].bytes / PIECE + 1;
            bits += mls_rows_bits(&rows);
        }
    }
    s->shards = mls_alloc(shards, sizeof *s->shards);
    s->pieces = mls_alloc(pieces, sizeof *s->pieces);
    s->bits = mls_alloc(bits, 1);
    if (s->shards == NULL || s->pieces == NULL || s->bits == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to look for zeros in %zu shards",
                        shards);
    }
    /* a second time along, now that there is room: the bits of one lie behind those of
     * the one before */
    unsigned char *at = s->bits;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        if (is_candidate(plan, i)) {
            sifted *one = &s->shards[s->count++];
            one->shard = i;
            one->rows = cut(plan, i);
            const size_t count = mls_rows_count(&one->rows);
            one->most = count - (count + 3) / 4; /* three quarters */
            one->bits = at;
            atomic_init(&one->filled, 0);
            at += mls_rows_bits(&one->rows);
        }
    }
    return MLS_OK;
}

/* Cut large ones, put small ones together; returns how many pieces there are. */
static size_t make_pieces(const sifting *s)
{
    size_t count = 0, room = 0; /* bytes that the last piece still takes */
    for (size_t i = 0; i < s->count; i++) {
        const mls_row_cut *rows = &s->shards[i].rows;
        const size_t bytes = rows->elements * rows->item;
        const size_t step = PIECE / rows->item;
        /* one that fits behind others is no piece of its own */
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

/* Elements `from` .. `to` of one shard, until too many rows hold something. */
static void sift(const sifting *s, sifted *one, size_t from, size_t to,
                 unsigned char *buffer)
{
    const mls_shard_item *item = s->plan->planned[one->shard].item;
    const mls_row_cut *rows = &one->rows;
    /* other tasks count rows of the same shard: whoever sees that it is full stops all */
    while (from < to && atomic_load(&one->filled) <= one->most) {
        const size_t left = to - from, most = STEP / rows->item;
        const size_t step = left < most ? left : most;
        const unsigned char *data =
            mls_planned_elements(s->plan->job, item, from, step, buffer);
        atomic_fetch_add(&one->filled,
                         mls_rows_mark_filled(rows, one->bits, from, step, data));
        from += step;
    }
}

/* For the pool.  Only what is strided needs memory. */
static void sift_task(void *context, size_t index)
{
    sifting *s = context;
    const piece *p = &s->pieces[index];
    unsigned char *buffer = NULL;
    for (size_t i = p->first; i < p->first + p->count; i++) {
        sifted *one = &s->shards[i];
        if (s->plan->planned[one->shard].item->data == NULL && buffer == NULL &&
            (buffer = mls_alloc(STEP, 1)) == NULL) {
            atomic_store(&s->no_memory, true);
            return;
        }
        const bool alone = p->count == 1;
        sift(s, one, alone ? p->from : 0, alone ? p->to : one->rows.elements, buffer);
    }
    mls_free(buffer);
}

/* What was found decides; what is left out counts as done. */
static mls_code settle(const sifting *s, mls_status *st)
{
    const mls_progress *progress = s->plan->job->progress;
    for (size_t i = 0; i < s->count; i++) {
        const sifted *one = &s->shards[i];
        mls_planned *planned = &s->plan->planned[one->shard];
        const mls_index_shard *shard = &s->plan->index.shards[one->shard];
        if (atomic_load(&one->filled) > one->most) {
            continue; /* plain, and reported when it is written */
        }
        if (mls_planned_set_layers(planned, false, &one->rows, one->bits, st) != MLS_OK) {
            return st->code;
        }
        if (progress != NULL &&
            !progress->report(progress->context,
                              shard->bytes - mls_planned_bytes(planned, shard))) {
            return mls_fail(st, MLS_E_STOPPED, "stopped");
        }
    }
    return MLS_OK;
}

/* Between what stays and where the rest goes: only what is to be written is looked at,
 * and how much of it is decides which file it goes into. */
mls_code mls_shard_plan_sift(mls_shard_plan *plan, mls_status *st)
{
    if (!plan->job->sparse) {
        return MLS_OK;
    }
    sifting s = {.plan = plan};
    atomic_init(&s.no_memory, false);
    mls_code code = list_candidates(&s, st);
    if (code == MLS_OK) {
        mls_pool_run(plan->job->pool, sift_task, &s, make_pieces(&s));
        code = atomic_load(&s.no_memory)
                   ? mls_fail(st, MLS_E_MEMORY, "no memory for a buffer of 256 KiB")
                   : settle(&s, st);
    }
    mls_free(s.shards);
    mls_free(s.pieces);
    mls_free(s.bits);
    return code;
}
