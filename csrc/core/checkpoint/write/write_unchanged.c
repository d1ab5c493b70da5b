/* write_unchanged: which shards are unchanged, by version or by their stored bytes; rows
 * that an incremental save writes.
 *
 * Bytes are compared with bytes, because a 32-bit checksum would treat one of four
 * billion changes as unchanged. Reading stops at the first difference, which in a trained
 * state is usually in the first block. A damaged file counts as different even if its
 * bytes match the memory, so that its shards are written again. For that, the header and
 * the checksums of all bytes read are verified.
 *
 * If changed rows may become a new layer, reading continues to the end, or until too many
 * rows changed.
 *
 * A place is a byte range of a file that stores a committed shard or one of its layers.
 * The elements of a layer are visible unless a later layer stores them too. A row is some
 * consecutive elements, which are stored together; a block is the unit of checksums. */
#include "checkpoint/write/write_plan.h"

#include "base/memory.h"
#include "base/size.h"
#include "checkpoint/read/verify.h"
#include "io/file.h"
#include "safetensors/safetensors.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum {
    FIRST_STEP = 16 << 10, /* most changes are found here */
    STEP = 256 << 10,      /* stays in the cache between reading and comparing */
    PIECE = 8 << 20, /* bytes of a large shard that one task compares; a multiple of the
                        block size */
    BATCH = 4 << 20, /* least bytes of small shards that one task compares */
    LAYERS_MOST = 8  /* a shard with this many layers is written whole */
};

typedef struct compared_shard {
    size_t shard;
    mls_row_cut rows;
    size_t most;           /* most changed rows that may become a layer; 0: none */
    unsigned char *bits;   /* bits of changed rows; NULL: rows are not recorded */
    atomic_size_t changed; /* number of changed rows; LOST: the stored data is damaged */
    atomic_size_t left;    /* unfinished pieces */
} compared_shard;

/* More than any number of rows; other tasks may still add theirs without overflow. */
#define LOST (SIZE_MAX / 2)

/* Bytes `from` .. `to` of a place, or of the zeros of a shard. */
typedef struct piece {
    size_t shard; /* position in the compared shards */
    size_t place; /* place of the committed shard; ZEROS: elements that are not stored */
    size_t from, to;
} piece;

#define ZEROS SIZE_MAX

/* Pieces `from` .. `to`, which one task compares. */
typedef struct batch {
    size_t from, to;
} batch;

enum header_state { UNKNOWN, GOOD, BAD };

typedef struct compare_state {
    mls_write_plan *plan;
    compared_shard *shards;
    piece *pieces;
    batch *batches;
    unsigned char *bits;   /* bits of all shards */
    atomic_uchar *headers; /* header_state of each previous file */
    size_t count, piece_count, batch_count;
    size_t buffer; /* most bytes that a task reads at a time */
    atomic_bool no_memory, stopped;
} compare_state;

/* State of a task. The last file stays open, since neighbours in an index usually share a
 * segment. */
typedef struct file_reader {
    int fd;
    size_t file;                        /* position in the previous index */
    unsigned char *read, *packed;       /* `buffer` bytes each */
    mls_compressed_frame_reader frames; /* for compressed places */
} file_reader;

/* ---- bytes ---- */

/* Return whether the header of file `number` of the previous index, open as `fd`, is as
 * recorded; `end` is the offset of one of its places. The first task that opens a file
 * checks it, and the result is kept for all. */
static bool header_is_good(compare_state *c, int fd, size_t number, uint64_t end)
{
    mls_status ignored;
    const mls_shard_job *job = c->plan->job;
    unsigned char state = atomic_load(&c->headers[number]);
    if (state == UNKNOWN) {
        const mls_code code = mls_index_check_header(fd, end, &job->before->files[number],
                                                     job->crc, &ignored);
        if (code == MLS_E_MEMORY) {
            atomic_store(&c->no_memory, true);
        }
        state = code == MLS_OK ? GOOD : BAD;
        atomic_store(&c->headers[number], state);
    }
    return state == GOOD;
}

/* Open the file of a place as `r->fd`, unless this task has it open. Returns false if it
 * is missing, or its length or header differs from the record. */
static bool open_file(compare_state *c, file_reader *r, const mls_layer *place)
{
    uint64_t length;
    mls_status ignored;
    const mls_shard_job *job = c->plan->job;
    const mls_index_file *file = &job->before->files[place->file];
    if (r->fd >= 0 && r->file == place->file) {
        return true;
    }
    if (r->fd >= 0) {
        (void)close(r->fd);
        r->fd = -1;
    }
    if (mls_file_open_at(job->folder, file->path, false /* no links */, &r->fd, &length,
                         &ignored) != MLS_OK) {
        return false;
    }
    r->file = place->file;
    /* truncated, replaced or damaged: nothing in it is usable */
    if (length != file->bytes || !header_is_good(c, r->fd, place->file, place->offset)) {
        (void)close(r->fd);
        r->fd = -1;
        return false;
    }
    return true;
}

/* Compare elements `first` .. `first + count` of a shard in the caller's memory with
 * their stored bytes `before`. Changed rows are marked and counted if the shard has bits;
 * otherwise any change counts once. `r` lends its memory for packed elements. */
static void compare_elements(const compare_state *c, compared_shard *shard, size_t first,
                             size_t count, const unsigned char *before, file_reader *r)
{
    const mls_planned *planned = &c->plan->planned[shard->shard];
    /* packed memory is compared without a copy */
    const unsigned char *now =
        mls_planned_elements(c->plan->job, planned->item, first, count, r->packed);
    if (shard->bits != NULL) {
        atomic_fetch_add(
            &shard->changed,
            mls_rows_mark_changed(&shard->rows, shard->bits, first, count, now, before));
    } else if (memcmp(now, before, count * shard->rows.item) != 0) {
        atomic_fetch_add(&shard->changed, 1);
    }
}

/* Compare the visible elements in `data`, which are bytes `start` .. `start + bytes`
 * (uncompressed) of a place, with the caller's memory. Elements that later layers hide
 * are skipped. `r` lends its memory, see compare_elements. */
static void compare_read(const compare_state *c, compared_shard *shard,
                         const mls_layer *place, size_t start, size_t bytes,
                         const unsigned char *data, file_reader *r)
{
    const size_t item = shard->rows.item, from = start / item, to = from + bytes / item;
    for (size_t i = mls_row_ranges_find_at(place->visible, place->visible_count, from);
         i < place->visible_count && place->visible[i].at < to; i++) {
        const mls_row_range *range = &place->visible[i];
        const size_t end = range->at + range->count;
        const size_t first = range->at > from ? range->at : from;
        const size_t count = (end < to ? end : to) - first;
        compare_elements(c, shard, range->begin + (first - range->at), count,
                         data + (first - from) * item, r);
    }
}

/* Return whether the block of a place that ends at byte `end` has the recorded checksum;
 * `crc` is the checksum of the bytes read. A place of one block has only `place->crc`. */
static bool is_block_good(const mls_layer *place, size_t end, uint32_t crc)
{
    return crc == (place->bytes <= MLS_SAFETENSORS_BLOCK
                       ? place->crc
                       : place->crcs[(end - 1) / MLS_SAFETENSORS_BLOCK]);
}

/* Return the number of bytes to read from byte `done` of the place on, within one block
 * and the piece `p`. Without row bits the first step is small, since changed shards
 * usually differ at the start. */
static size_t next_read_size(const compared_shard *shard, const piece *p, size_t done)
{
    const size_t most = shard->bits != NULL ? (size_t)MLS_SAFETENSORS_BLOCK
                        : done == p->from   ? (size_t)FIRST_STEP
                                            : (size_t)STEP;
    const size_t block = MLS_SAFETENSORS_BLOCK - done % MLS_SAFETENSORS_BLOCK;
    const size_t left = p->to - done < block ? p->to - done : block;
    return left < most ? left : most;
}

/* Compare piece `p` of an uncompressed place with the caller's memory, until it is known
 * that too many rows changed. The checksum must match even if the bytes equal those in
 * memory: the memory may have been loaded from the damaged file. A damaged or unreadable
 * file sets `changed` to LOST. */
static void compare_stored(compare_state *c, compared_shard *shard,
                           const mls_layer *place, const piece *p, file_reader *r)
{
    mls_status ignored;
    uint32_t crc = 0; /* of the current block; a piece starts at a block boundary */
    if (!open_file(c, r, place)) {
        atomic_store(&shard->changed, LOST);
        return;
    }
    for (size_t done = p->from;
         done < p->to && atomic_load(&shard->changed) <= shard->most;) {
        const size_t step = next_read_size(shard, p, done);
        if (mls_file_read_at(r->fd, r->read, step, place->offset + done, &ignored) !=
            MLS_OK) {
            atomic_store(&shard->changed, LOST);
            return;
        }
        crc = c->plan->job->crc->update(crc, r->read, step);
        compare_read(c, shard, place, done, step, r->read, r);
        done += step;
        if (done % MLS_SAFETENSORS_BLOCK == 0 || done == p->to) {
            if (!is_block_good(place, done, crc)) {
                atomic_store(&shard->changed, LOST);
                return;
            }
            crc = 0;
        }
    }
}

/* Compare a piece of a compressed place, frame by frame, until too many rows have
 * changed. `p->from` and `p->to` are uncompressed bytes of the place, in whole frames. A
 * file that cannot be read makes the shard LOST: it is written again. */
static void compare_compressed(compare_state *c, compared_shard *shard,
                               const mls_layer *place, const piece *p, file_reader *r)
{
    mls_status st;
    const unsigned char *data;
    if (!open_file(c, r, place)) {
        atomic_store(&shard->changed, LOST);
        return;
    }
    const mls_coded coded = {.source = {.fd = r->fd},
                             .offset = place->offset,
                             .bytes = place->bytes,
                             .crcs = place->crcs,
                             .frames = place->frames,
                             .crc = c->plan->job->crc,
                             .codecs = c->plan->job->codecs};
    for (size_t start = p->from; start < p->to; start += MLS_FRAME_BYTES) {
        const size_t number = start / MLS_FRAME_BYTES;
        const size_t bytes = mls_compressed_frame_bytes(place->frames, number);
        const mls_code code =
            mls_compressed_frame_read(&r->frames, &coded, number, &data, &st);
        if (code != MLS_OK) {
            /* other codec errors mean a damaged file; these two stop the whole save */
            atomic_store(&shard->changed, LOST);
            if (code == MLS_E_STOPPED) {
                atomic_store(&c->stopped, true);
            } else if (code == MLS_E_MEMORY) {
                atomic_store(&c->no_memory, true);
            }
            return;
        }
        for (size_t done = 0; done < bytes;) {
            const size_t step = bytes - done < c->buffer ? bytes - done : c->buffer;
            if (atomic_load(&shard->changed) > shard->most) {
                return;
            }
            compare_read(c, shard, place, start + done, step, data + done, r);
            done += step;
        }
    }
}

/* Compare the elements in piece `p` that no layer stores (`layers->zeros`) with zero. The
 * piece is in bytes of the shard, not of a place. Nothing is read from files: `r` lends
 * its memory for zeros. */
static void compare_zeros(const compare_state *c, compared_shard *shard,
                          const mls_layers *layers, const piece *p, file_reader *r)
{
    const size_t item = shard->rows.item, from = p->from / item, to = p->to / item;
    memset(r->read, 0, c->buffer);
    for (size_t i = mls_row_ranges_find(layers->zeros, layers->zero_count, from);
         i < layers->zero_count && layers->zeros[i].begin < to; i++) {
        const mls_row_range *range = &layers->zeros[i];
        const size_t last = range->begin + range->count;
        const size_t end = last < to ? last : to, most = c->buffer / item;
        for (size_t element = range->begin > from ? range->begin : from; element < end;) {
            const size_t step = end - element < most ? end - element : most;
            if (atomic_load(&shard->changed) > shard->most) {
                return;
            }
            compare_elements(c, shard, element, step, r->read, r);
            element += step;
        }
    }
}

/* Compare piece `p`: of a layer, of a plain shard (one place, completely visible), or of
 * the shard's zeros. */
static void compare_piece(compare_state *c, const piece *p, file_reader *r)
{
    compared_shard *shard = &c->shards[p->shard];
    const mls_index_shard *before = c->plan->planned[shard->shard].before;
    const mls_row_range all = {.count = shard->rows.elements};
    if (p->place == ZEROS) {
        compare_zeros(c, shard, before->layers, p, r);
        return;
    }
    mls_layer place = mls_index_place(before, p->place);
    if (before->layers == NULL) {
        place.visible = &all;
        place.visible_count = 1;
    }
    if (place.frames != NULL) {
        compare_compressed(c, shard, &place, p, r);
    } else {
        compare_stored(c, shard, &place, p, r);
    }
}

/* Return whether the save has failed, so that no further piece is compared. */
static bool has_stopped(const compare_state *c)
{
    return atomic_load(&c->stopped) || atomic_load(&c->no_memory);
}

/* Thread function: compare the pieces of batch `index`. The task that finishes the last
 * piece of an unchanged shard reports the shard's bytes; changed shards are reported when
 * they are written. */
static void compare_task(void *context, size_t index)
{
    compare_state *c = context;
    file_reader r = {.fd = -1};
    if (has_stopped(c)) {
        return;
    }
    /* one allocation for both buffers */
    r.read = mls_alloc(2, c->buffer);
    if (r.read == NULL) {
        atomic_store(&c->no_memory, true);
        return;
    }
    r.packed = r.read + c->buffer;
    for (size_t i = c->batches[index].from; i < c->batches[index].to && !has_stopped(c);
         i++) {
        compared_shard *shard = &c->shards[c->pieces[i].shard];
        compare_piece(c, &c->pieces[i], &r);
        if (atomic_fetch_sub(&shard->left, 1) == 1 && atomic_load(&shard->changed) == 0 &&
            !mls_progress_report(c->plan->job->progress,
                                 c->plan->planned[shard->shard].before->bytes)) {
            atomic_store(&c->stopped, true);
        }
    }
    if (r.fd >= 0) {
        (void)close(r.fd);
    }
    mls_compressed_frame_reader_fini(&r.frames);
    mls_free(r.read);
}

/* ---- choose what to compare ---- */

/* Return how many rows of a shard may change so that they still become a layer, instead
 * of the whole shard: at most half of the shard, and all layers together at most twice
 * the shard. 0: any change writes it whole. */
static size_t most_changed_rows(const mls_write_plan *plan, const mls_planned *planned,
                                const mls_row_cut *rows)
{
    const mls_index_shard *before = planned->before;
    size_t places = 0, stored = 0;
    if (!plan->job->incremental || before->bytes < plan->job->pack_below) {
        return 0;
    }
    for (size_t i = 0; i < mls_index_place_count(before); i++) {
        const mls_layer place = mls_index_place(before, i);
        if (before->layers == NULL || place.visible_count > 0) {
            places++;
            if (!mls_size_add(stored, place.bytes, &stored)) {
                return 0;
            }
        }
    }
    /* another layer would slow down reading, or exceed twice the plain size */
    if (places + 1 > LAYERS_MOST || stored / 2 >= before->bytes) {
        return 0;
    }
    const size_t room = 2 * before->bytes - stored, half = before->bytes / 2;
    return (room < half ? room : half) / (rows->row * rows->item);
}

/* Divide shard `number` into rows, and return how many of them may change before it is
 * written whole. 0: any change does that, or its version shows that nothing changed. */
static size_t divide_rows(const mls_write_plan *plan, size_t number, mls_row_cut *rows)
{
    const mls_index_shard *shard = &plan->index.shards[number];
    const mls_planned *planned = &plan->planned[number];
    *rows = (mls_row_cut){.row = 1, .item = mls_dtype_of(shard->dtype)->item_bytes};
    if (shard->bytes == 0) {
        return 0; /* no rows */
    }
    const mls_part part = mls_index_part(shard);
    *rows = mls_rows_of(&part, rows->item);
    return planned->is_unchanged ? 0 : most_changed_rows(plan, planned, rows);
}

/* Return whether shard `number` is compared with its stored bytes, or only its files are
 * checked. If its version shows a change, only a shard that may become a layer is
 * compared. */
static bool is_candidate(const mls_write_plan *plan, size_t number)
{
    const mls_planned *planned = &plan->planned[number];
    mls_row_cut ignored;
    return planned->before != NULL &&
           (planned->item->version == 0 || planned->is_unchanged ||
            (plan->job->incremental && divide_rows(plan, number, &ignored) > 0));
}

/* List the pieces of shard `number` in `out`, in whole blocks or frames, and return their
 * number; `out` NULL only counts. They refer to compared shard `c->count`, which the
 * caller appends next. A place without bytes to compare still gets one piece,
 * which checks that its file is good. */
static size_t list_shard_pieces(const compare_state *c, size_t number, piece *out)
{
    const mls_planned *planned = &c->plan->planned[number];
    const mls_index_shard *before = planned->before;
    size_t count = 0;
    for (size_t i = 0; i < mls_index_place_count(before); i++) {
        const mls_layer place = mls_index_place(before, i);
        if (before->layers != NULL && place.visible_count == 0) {
            continue; /* hidden: it is dropped in any case */
        }
        /* the version proves that the bytes are equal, but not that the file exists */
        const size_t bytes = planned->is_unchanged  ? 0
                             : place.frames == NULL ? place.bytes
                                                    : place.frames->bytes;
        size_t from = 0;
        do {
            const size_t to = bytes - from < PIECE ? bytes : from + PIECE;
            if (out != NULL) {
                out[count] = (piece){c->count, i, from, to};
            }
            count++;
            from = to;
        } while (from < bytes);
    }
    const bool zeros = before->layers != NULL && before->layers->zero_count > 0 &&
                       !planned->is_unchanged;
    for (size_t from = 0; zeros && from < before->bytes; count++) {
        const size_t to = before->bytes - from < PIECE ? before->bytes : from + PIECE;
        if (out != NULL) {
            out[count] = (piece){c->count, ZEROS, from, to};
        }
        from = to;
    }
    if (count == 0) { /* nothing is stored, but progress must be reported */
        if (out != NULL) {
            out[0] = (piece){.shard = c->count, .place = ZEROS};
        }
        count = 1;
    }
    return count;
}

/* Count the candidates and their pieces, and allocate all arrays. If any shard is
 * compared by row, read buffers have the size of a block, the unit of checksums;
 * otherwise they are smaller and stay in the cache. MLS_E_MEMORY: the caller frees the
 * arrays. */
static mls_code allocate_arrays(compare_state *c, mls_status *st)
{
    const mls_write_plan *plan = c->plan;
    size_t shards = 0, pieces = 0, bits = 0;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        if (is_candidate(plan, i)) {
            mls_row_cut rows;
            const bool by_row = divide_rows(plan, i, &rows) > 0;
            shards++;
            pieces += list_shard_pieces(c, i, NULL);
            bits += by_row ? mls_rows_bitmap_bytes(&rows) : 0;
        }
    }
    c->shards = mls_alloc(shards, sizeof *c->shards);
    c->pieces = mls_alloc(pieces, sizeof *c->pieces);
    c->batches = mls_alloc(pieces, sizeof *c->batches);
    c->bits = mls_alloc(bits, 1);
    c->headers = mls_alloc(plan->job->before->file_count, sizeof *c->headers);
    c->buffer = bits > 0 ? MLS_SAFETENSORS_BLOCK : STEP;
    return c->shards == NULL || c->pieces == NULL || c->batches == NULL ||
                   c->bits == NULL || c->headers == NULL
               ? mls_fail(st, MLS_E_MEMORY, "no memory to compare %zu shards", shards)
               : MLS_OK;
}

/* List all candidates and their pieces in the order of the index, so that places in one
 * file are read in sequence. */
static void list_pieces(compare_state *c)
{
    unsigned char *bits = c->bits;
    for (size_t i = 0; i < c->plan->index.shard_count; i++) {
        if (!is_candidate(c->plan, i)) {
            continue;
        }
        compared_shard *shard = &c->shards[c->count];
        const size_t pieces = list_shard_pieces(c, i, c->pieces + c->piece_count);
        shard->shard = i;
        shard->most = divide_rows(c->plan, i, &shard->rows);
        if (shard->most > 0) {
            shard->bits = bits;
            bits += mls_rows_bitmap_bytes(&shard->rows);
        }
        atomic_init(&shard->changed, 0);
        atomic_init(&shard->left, pieces);
        c->piece_count += pieces;
        c->count++;
    }
}

/* Group consecutive pieces into batches of at least BATCH bytes; each batch is one
 * task. */
static void make_batches(compare_state *c)
{
    size_t bytes = 0;
    for (size_t i = 0; i < c->piece_count; i++) {
        if (c->batch_count == 0 || bytes >= BATCH) {
            c->batches[c->batch_count++] = (batch){.from = i}; /* `to` follows */
            bytes = 0;
        }
        bytes += c->pieces[i].to - c->pieces[i].from;
        c->batches[c->batch_count - 1].to = i + 1;
    }
}

/* ---- results ---- */

/* Set `is_unchanged` of each compared shard, and give a shard with few changed rows a new
 * layer of these rows. Its other bytes are not written, and are reported as done.
 * MLS_E_MEMORY, MLS_E_STOPPED. */
static mls_code apply_results(const compare_state *c, mls_status *st)
{
    mls_code code = MLS_OK;
    for (size_t i = 0; code == MLS_OK && i < c->count; i++) {
        compared_shard *shard = &c->shards[i];
        mls_planned *planned = &c->plan->planned[shard->shard];
        const size_t changed = atomic_load(&shard->changed);
        /* also if its version increased without a change */
        planned->is_unchanged = changed == 0;
        if (changed > 0 && changed <= shard->most) {
            code = mls_planned_set_layers(planned, true /* committed layers too */,
                                          &shard->rows, shard->bits, st);
            if (code == MLS_OK && !mls_progress_report(c->plan->job->progress,
                                                       planned->before->bytes -
                                                           planned->new_layer->bytes)) {
                code = mls_fail(st, MLS_E_STOPPED, "stopped");
            }
        }
    }
    return code;
}

/* Set `is_unchanged` of the shards whose version equals the committed one; version 0
 * means that the caller gave none. A caller's version is trusted, but must not decrease:
 * MLS_E_VALUE. */
static mls_code check_versions(mls_write_plan *plan, mls_status *st)
{
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        mls_planned *planned = &plan->planned[i];
        const uint64_t version = planned->item->version;
        const uint64_t old = planned->before == NULL ? 0 : planned->before->version;
        if (version > INT64_MAX || (version != 0 && version < old)) {
            mls_fail(st, MLS_E_VALUE,
                     "version %llu is not allowed: the stored version "
                     "of the shard is %llu",
                     (unsigned long long)version, (unsigned long long)old);
            mls_status_name(st, planned->key.data, planned->key.length);
            if (version > INT64_MAX) { /* an index cannot store it */
                mls_status_expected(st, "at most %llu", (unsigned long long)INT64_MAX);
            } else {
                mls_status_expected(st, "%llu or more", (unsigned long long)old);
            }
            return mls_status_got(st, "%llu", (unsigned long long)version);
        }
        planned->is_unchanged = version != 0 && version == old;
    }
    return MLS_OK;
}

/* Check the versions before anything is read, then compare with several threads. Without
 * a previous index everything is new. */
mls_code mls_write_plan_unchanged(mls_write_plan *plan, mls_status *st)
{
    mls_code code = check_versions(plan, st);
    if (code != MLS_OK || plan->job->before == NULL) {
        return code;
    }
    compare_state c = {.plan = plan};
    /* each task checks both before it starts a piece */
    atomic_init(&c.no_memory, false);
    atomic_init(&c.stopped, false);
    code = allocate_arrays(&c, st);
    if (code == MLS_OK) {
        list_pieces(&c);
        make_batches(&c);
        mls_pool_run(plan->job->pool, compare_task, &c, c.batch_count);
        code = atomic_load(&c.no_memory)
                   ? mls_fail(st, MLS_E_MEMORY, "no memory for a buffer of %zu KiB",
                              2 * c.buffer >> 10)
               : atomic_load(&c.stopped) ? mls_fail(st, MLS_E_STOPPED, "stopped")
                                         : apply_results(&c, st);
    }
    mls_free(c.shards);
    mls_free(c.pieces);
    mls_free(c.batches);
    mls_free(c.bits);
    mls_free(c.headers);
    return code;
}
