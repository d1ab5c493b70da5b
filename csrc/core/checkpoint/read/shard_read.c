/* shard_read: reads shards to their destinations: refuses changed files, compares
 * checksums, decompresses, fills zeros.
 *
 * A place is a byte range of a file that stores a shard or one of its layers, or zeros
 * that are not stored. A piece is what a requested part of the tensor needs of one place.
 * A span is a byte range of a piece's place, and a task is some neighbouring spans. A run
 * is contiguous in the place and in the destination. A block is the unit of checksums.
 *
 * Each byte takes the shortest path. A long run is read from the system's cache directly
 * into its destination. Small shards that are adjacent in a file are read directly too,
 * several in one call. Short runs of a shard with small gaps are read together into a
 * buffer, gaps included, and copied from there. Verified data is read block by block, in
 * steps that are still in the processor's cache when the checksum is computed. A read for
 * which `copies_slowly` is true goes through a buffer. */
#include "checkpoint/read/shard_read.h"

#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"
#include "runtime/work_stealing.h"
#include "safetensors/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    STEP = 256 << 10,  /* stays in the cache between reading and use */
    DIRECT = 64 << 10, /* runs of this length are read directly */
    GAP = 4 << 10,   /* reading a gap of this length takes no longer than a system call */
    PARTS = 64,      /* most neighbours that one call reads */
    ALIAS = 4 << 10, /* processors compare addresses up to this bit, see copies_slowly */
    LINE = 64,       /* cache line of the processor */
    SHARED_BYTES = 8 << 20 /* the calling thread reads less than this alone */
};

typedef struct read_state {
    mls_read_request request;
    mls_read_plan plan;
    mls_work_queues queues; /* of the plan's tasks */
    atomic_size_t failed;   /* first span that failed so far, else SIZE_MAX */
    atomic_bool stopped;
    _Atomic(uint64_t) read; /* bytes that reached their destination */
    pthread_mutex_t lock;   /* protects `status` */
    mls_status status;      /* why `failed` failed, or that the read was stopped */
    mls_ready_counter
        ready; /* number of pieces that have their `data`, if there is a maker */
    bool maker_failed;
} read_state;

typedef struct read_worker {
    read_state *shared;
    const char *file;  /* name of the open file, or NULL */
    mls_source source; /* of that file */
    uint64_t file_bytes;
    unsigned char *buffer; /* STEP + ALIAS bytes; NULL until needed */
    mls_compressed_frame_reader frames;
    uint64_t done; /* bytes of the current task that reached their destination */
} read_worker;

/* ---- runs of a span, in bytes ---- */

/* `left` bytes of the shard from `at` on, with destination `to`; `left` is 0 after the
 * last run. */
typedef struct run {
    size_t at, left;
    unsigned char *to;
} run;

typedef struct run_reader {
    run current;
    const mls_read_span *span;
    mls_stored_runs runs;
    size_t filled; /* byte of the destination up to which runs and zeros are delivered */
    size_t zeros;  /* number of zero bytes written between runs */
} run_reader;

/* Fill the destination with zeros from the end of the last run (`r->filled`) to byte
 * `end`, and count them. */
static void fill_zeros_to(run_reader *r, size_t end)
{
    if (r->filled < end) {
        memset(r->span->piece->data + r->filled, 0, end - r->filled);
        r->zeros += end - r->filled;
    }
}

/* Make `next` the current run, and fill the zeros before it if the span fills any. A
 * piece that writes nothing has no destination (NULL). */
static void set_run(run_reader *r, const mls_stored_run *next)
{
    unsigned char *data = r->span->piece->data;
    r->current.at = next->at;
    r->current.left = next->count;
    r->current.to = data == NULL ? NULL : data + next->to;
    if (r->filled < r->span->zeros_end) {
        fill_zeros_to(r, next->to);
        r->filled = next->to + next->count;
    }
}

/* Make the next run of the span current. After the last one, fill the zeros behind it;
 * nothing is left then. A span with `to` has a single run. */
static void next_run(run_reader *r)
{
    mls_stored_run next;
    if (r->span->to == SIZE_MAX && mls_stored_runs_next(&r->runs, &next)) {
        set_run(r, &next);
    } else {
        r->current.left = 0;
        fill_zeros_to(r, r->span->zeros_end);
    }
}

/* Start at the first run of a span. A span of a single run (`to` is set) needs no
 * iterator; otherwise the iterator is limited to the span. */
static void start_runs(run_reader *r, const mls_read_span *s)
{
    r->span = s;
    r->filled = s->zeros_from;
    r->zeros = 0;
    if (s->to != SIZE_MAX) {
        set_run(r, &(mls_stored_run){s->from, s->end - s->from, s->to});
    } else {
        mls_stored_runs_init(&r->runs, s->piece->shard, s->piece->to, s->from, s->end);
        next_run(r);
    }
}

/* Move forward by `bytes` bytes, at most those left of the current run. At its end the
 * next run becomes the current one. */
static void advance_run(run_reader *r, size_t bytes)
{
    r->current.at += bytes;
    r->current.to = r->current.to == NULL ? NULL : r->current.to + bytes;
    r->current.left -= bytes;
    if (r->current.left == 0) {
        next_run(r);
    }
}

/* ---- files ---- */

/* Report that a file is of the kind `file_kind`. Returns MLS_E_FORMAT. */
static mls_code fail_not_regular(const char *file_kind, mls_status *st)
{
    mls_fail(st, MLS_E_FORMAT, "not a regular file but %s", file_kind);
    mls_status_expected(st, "a regular file");
    return mls_status_got(st, "%s", file_kind);
}

/* Report a failed openat, by its errno `reason`. If `links` is false, symbolic links
 * were refused: our own folders contain none. Returns MLS_E_FORMAT if the file is not a
 * regular one, else MLS_E_IO. */
static mls_code fail_open(int reason, bool links, mls_status *st)
{
    if (!links && (reason == ELOOP || reason == EMLINK)) {
        return fail_not_regular("a symbolic link", st);
    }
    return reason == ENXIO ? fail_not_regular("a socket", st)
                           : mls_fail_os(st, reason, "cannot open the file");
}

/* Close the thread's open file, if any. Files in memory have no descriptor. */
static void close_file(read_worker *w)
{
    if (w->file != NULL && !w->shared->request.in_memory) {
        (void)close(w->source.fd);
        w->file = NULL;
    }
}

/* For reads from memory: select the loaded range that contains the start of span `s`.
 * Returns false if there is none: another call reads the span. Zeros, which have no file,
 * belong to the call without ranges. */
static bool find_range(read_worker *w, const mls_read_span *s)
{
    const char *file = s->piece->shard->file;
    if (file == NULL) {
        return w->source.range_count == 0;
    }
    w->source.file = file;
    const mls_file_range *range = mls_source_range(&w->source, s->at);
    if (range == NULL) {
        return false;
    }
    w->file = file;
    w->file_bytes = range->file_bytes;
    return true;
}

/* Make `name` the thread's open file, and close the previous one. Only a regular file is
 * accepted. Errors: MLS_E_IO, MLS_E_FORMAT. */
static mls_code open_file(read_worker *w, const char *name, mls_status *st)
{
    struct stat info;
    if (w->file != NULL && (w->file == name || strcmp(w->file, name) == 0)) {
        return MLS_OK;
    }
    close_file(w);
    /* O_NONBLOCK: opening a FIFO without a writer must not block */
    const bool links = w->shared->request.links;
    const int fd = openat(w->shared->request.folder, name,
                          O_RDONLY | O_CLOEXEC | O_NONBLOCK | (links ? 0 : O_NOFOLLOW));
    if (fd < 0) {
        return fail_open(errno, links, st);
    }
    if (fstat(fd, &info) != 0) {
        mls_fail_os(st, errno, "cannot examine the file");
    } else if (!S_ISREG(info.st_mode) || info.st_size < 0) {
        fail_not_regular(S_ISDIR(info.st_mode) ? "a folder" : "a FIFO or device", st);
    } else {
        w->source.fd = fd;
        w->file = name;
        w->file_bytes = (uint64_t)info.st_size;
        return MLS_OK;
    }
    (void)close(fd);
    return st->code;
}

/* Open the file of a shard. MLS_E_FORMAT: it has another length than recorded, so it is
 * not the file that was written, and it is not read. */
static mls_code open_shard(read_worker *w, const mls_stored_shard *shard, mls_status *st)
{
    const mls_code code = open_file(w, shard->file, st);
    if (code != MLS_OK || w->file_bytes == shard->file_bytes) {
        return code;
    }
    mls_fail_at(st, w->file_bytes < shard->file_bytes ? w->file_bytes : shard->file_bytes,
                "it is %llu bytes long, but %llu were written: it was truncated or "
                "replaced",
                (unsigned long long)w->file_bytes, (unsigned long long)shard->file_bytes);
    mls_status_expected(st, "%llu bytes", (unsigned long long)shard->file_bytes);
    return mls_status_got(st, "%llu bytes", (unsigned long long)w->file_bytes);
}

/* Return whether the system copies bytes at `offset` of a file to `to` slowly. Linux
 * copies with `rep movsb`, which AMD processors run at a fifth of its speed if the
 * destination is less than a cache line ahead of the source modulo 4 KiB (glibc bug
 * 30994). Large blocks of glibc start 16 bytes behind a page boundary, and large shards
 * start at a page of their file. */
static bool copies_slowly(const unsigned char *to, uint64_t offset)
{
    const uint64_t ahead = ((uintptr_t)to - offset) % ALIAS;
    return ahead > 0 && ahead < LINE;
}

/* Return in `*out` STEP bytes of the thread's buffer for bytes at `offset` of a file. The
 * address is half of ALIAS away from the offset, modulo ALIAS, so that copies into and
 * out of the buffer are fast. MLS_E_MEMORY. */
static mls_code borrow_buffer(read_worker *w, uint64_t offset, unsigned char **out,
                              mls_status *st)
{
    if (w->buffer == NULL) {
        w->buffer = mls_realloc(NULL, STEP + ALIAS, 1);
    }
    if (w->buffer == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a buffer of %d bytes",
                        (int)(STEP + ALIAS));
    }
    *out = w->buffer + (offset + ALIAS / 2 - (uintptr_t)w->buffer) % ALIAS;
    return MLS_OK;
}

/* ---- from a buffer to destinations ---- */

/* Copy the requested bytes of a buffer to their destinations, if any, run by run, and
 * advance the runs. `data` contains bytes `at` .. `at + bytes` of the place. */
static void scatter_bytes(read_worker *w, run_reader *r, const unsigned char *data,
                          size_t at, size_t bytes)
{
    while (r->current.left > 0 && r->current.at < at + bytes) {
        const size_t room = at + bytes - r->current.at;
        const size_t length = r->current.left < room ? r->current.left : room;
        if (r->current.to != NULL) {
            memcpy(r->current.to, data + (r->current.at - at), length);
        }
        w->done += length;
        advance_run(r, length);
    }
}

/* ---- unverified: only the requested bytes ---- */

/* Return the byte of the place at which the runs to read together end: the current run,
 * and after it short runs with small gaps, in at most STEP bytes. */
static size_t find_group_end(const run_reader *r)
{
    run_reader ahead = *r;
    const size_t start = r->current.at;
    size_t end;
    /* the copy looks ahead only: it must fill no zeros */
    ahead.filled = SIZE_MAX;
    do {
        end = ahead.current.at + ahead.current.left;
        advance_run(&ahead, ahead.current.left);
    } while (ahead.current.left > 0 && ahead.current.left < DIRECT &&
             ahead.current.at - end <= GAP &&
             ahead.current.at + ahead.current.left - start <= STEP);
    return end;
}

/* Read all runs of a span without verification: long runs directly, short runs together
 * through a buffer that stays in the cache. Long runs are read in steps, because systems
 * read ahead further, and into larger pages, for many short calls than for one long
 * call. MLS_E_IO, MLS_E_FORMAT (the file became shorter), MLS_E_MEMORY. */
static mls_code read_unverified(read_worker *w, run_reader *r, mls_status *st)
{
    mls_code code = MLS_OK;
    while (code == MLS_OK && r->current.left > 0) {
        const size_t at = r->current.at;
        const uint64_t offset = r->span->piece->shard->offset + at;
        const size_t run_end = at + (r->current.left < STEP ? r->current.left : STEP);
        const size_t end = r->current.left < DIRECT ? find_group_end(r) : run_end;
        const bool is_unbuffered =
            end == run_end && !copies_slowly(r->current.to, offset);
        unsigned char *to = r->current.to;
        code = is_unbuffered ? MLS_OK : borrow_buffer(w, offset, &to, st);
        if (code == MLS_OK) {
            code = mls_source_read_at(&w->source, to, end - at, offset, st);
        }
        if (code == MLS_OK && is_unbuffered) {
            w->done += end - at;
            advance_run(r, end - at);
        } else if (code == MLS_OK) {
            scatter_bytes(w, r, to, at, end - at);
        }
    }
    return code;
}

/* ---- verified: whole blocks ---- */

/* Return whether the checksums of a shard are compared. Files of other programs may have
 * none. */
static bool is_verified(const read_state *shared, const mls_stored_shard *shard)
{
    return shared->request.crc != NULL && shard->crcs != NULL;
}

/* Read `bytes` bytes of a block, from byte `at` of the place, and deliver the requested
 * ones: directly if one run needs them all. `*crc` is the block's checksum so far.
 * MLS_E_IO, MLS_E_FORMAT (the file became shorter), MLS_E_MEMORY. */
static mls_code read_step(read_worker *w, run_reader *r, size_t at, size_t bytes,
                          uint32_t *crc, mls_status *st)
{
    const uint64_t offset = r->span->piece->shard->offset + at;
    const bool is_unbuffered = r->current.to != NULL && r->current.at == at &&
                               r->current.left >= bytes &&
                               !copies_slowly(r->current.to, offset);
    unsigned char *to = r->current.to;
    mls_code code = is_unbuffered ? MLS_OK : borrow_buffer(w, offset, &to, st);
    if (code == MLS_OK) {
        code = mls_source_read_at(&w->source, to, bytes, offset, st);
    }
    if (code != MLS_OK) {
        return code;
    }
    *crc = w->shared->request.crc->update(*crc, to, bytes);
    if (is_unbuffered) {
        w->done += bytes;
        advance_run(r, bytes);
    } else {
        scatter_bytes(w, r, to, at, bytes);
    }
    return MLS_OK;
}

/* Read all blocks of a span that contain requested bytes, and compare their checksums.
 * MLS_E_CHECKSUM: a block is damaged; its bytes were delivered already. */
static mls_code read_verified(read_worker *w, run_reader *r, mls_status *st)
{
    const mls_stored_shard *shard = r->span->piece->shard;
    size_t bytes = 0;
    (void)mls_stored_bytes(shard, &bytes); /* cannot fail: checked by the plan */
    while (r->current.left > 0) {
        const size_t block = r->current.at / MLS_SAFETENSORS_BLOCK;
        const size_t start = block * MLS_SAFETENSORS_BLOCK;
        const size_t left = bytes - start;
        const size_t length = left < MLS_SAFETENSORS_BLOCK ? left : MLS_SAFETENSORS_BLOCK;
        uint32_t checksum = 0;
        for (size_t done = 0; done < length; done += STEP) {
            const size_t step = length - done < STEP ? length - done : STEP;
            const mls_code code = read_step(w, r, start + done, step, &checksum, st);
            if (code != MLS_OK) {
                return code;
            }
        }
        if (checksum != shard->crcs[block]) {
            return mls_block_changed(shard->offset + start, length, checksum,
                                     shard->crcs[block], st);
        }
    }
    return MLS_OK;
}

/* ---- compressed: whole frames ---- */

/* Read all runs of a span from a compressed place, frame by frame; frames without
 * requested bytes are skipped. Errors of mls_compressed_frame_read. */
static mls_code read_compressed(read_worker *w, run_reader *r, mls_status *st)
{
    const mls_stored_shard *shard = r->span->piece->shard;
    const size_t last = mls_compressed_frames_count(shard->frames->bytes) - 1;
    const mls_coded coded = {.source = w->source,
                             .offset = shard->offset,
                             .bytes = shard->frames->ends[last],
                             .crcs = shard->crcs,
                             .frames = shard->frames,
                             .crc = w->shared->request.crc,
                             .codecs = w->shared->request.codecs};
    while (r->current.left > 0) {
        const size_t number = r->current.at / MLS_FRAME_BYTES;
        const unsigned char *data;
        const mls_code code =
            mls_compressed_frame_read(&w->frames, &coded, number, &data, st);
        if (code != MLS_OK) {
            return code;
        }
        scatter_bytes(w, r, data, number * MLS_FRAME_BYTES,
                      mls_compressed_frame_bytes(shard->frames, number));
    }
    return MLS_OK;
}

/* ---- zeros that were not stored ---- */

/* Write the zeros of a place that has no file. Memory that is zero already (destination
 * NULL) is skipped, but its bytes count as done. */
static void read_zeros(read_worker *w, run_reader *r)
{
    while (r->current.left > 0) {
        if (r->current.to != NULL) {
            memset(r->current.to, 0, r->current.left);
        }
        w->done += r->current.left;
        advance_run(r, r->current.left);
    }
}

/* ---- tasks ----
 *
 * If several spans fail, the first one in the order of the pieces is reported,
 * independent of the number of threads. So spans before a failed one are still read. */

/* Record the failure `st` of span `s` in the shared state, unless an earlier span failed
 * or the read was stopped. The earliest span in the caller's order is reported. */
static void record_failure(read_state *shared, const mls_read_span *s,
                           const mls_status *st)
{
    const size_t index = (size_t)(s - shared->plan.spans);
    pthread_mutex_lock(&shared->lock);
    if (index < atomic_load(&shared->failed) && !atomic_load(&shared->stopped)) {
        shared->status = *st;
        atomic_store(&shared->failed, index);
    }
    pthread_mutex_unlock(&shared->lock);
}

/* Record that the caller stopped the read, at span `s`: MLS_E_STOPPED. It replaces any
 * failure; later stops are ignored. */
static void record_stop(read_state *shared, const mls_read_span *s)
{
    pthread_mutex_lock(&shared->lock);
    if (!atomic_load(&shared->stopped)) {
        mls_fail(&shared->status, MLS_E_STOPPED, "cancelled by the caller");
        (void)mls_stored_blame(s->piece->shard, &shared->status);
        atomic_store(&shared->failed, (size_t)(s - shared->plan.spans));
        atomic_store(&shared->stopped, true);
    }
    pthread_mutex_unlock(&shared->lock);
}

/* Read span `s`, and record a failure in the shared state. In memory, only a span in the
 * loaded range is read. */
static void read_span(read_worker *w, const mls_read_span *s)
{
    mls_status st;
    run_reader r;
    if (w->shared->request.in_memory && !find_range(w, s)) {
        return;
    }
    start_runs(&r, s);
    if (r.current.left == 0) {
        w->done += r.zeros;
        return; /* between the first and last run of a shard, a span may contain only a
                   gap */
    }
    if (s->piece->shard->file == NULL) {
        read_zeros(w, &r);
        return;
    }
    mls_code code = open_shard(w, s->piece->shard, &st);
    if (code == MLS_OK) {
        code = s->piece->shard->frames != NULL           ? read_compressed(w, &r, &st)
               : is_verified(w->shared, s->piece->shard) ? read_verified(w, &r, &st)
                                                         : read_unverified(w, &r, &st);
    }
    w->done += r.zeros;
    if (code == MLS_E_STOPPED) {
        record_stop(w->shared, s); /* a codec was interrupted, so the whole read stops */
    } else if (code != MLS_OK) {
        (void)mls_stored_blame(s->piece->shard, &st);
        record_failure(w->shared, s, &st);
    }
}

/* Return whether neighbours may be read together with this span, directly into its
 * destination: it has a file and a destination, is a single run (`to` is set) without
 * compression or zeros to fill, and is short or at an address to which the system copies
 * fast. If `verified`, it must also be a whole place of at most one block. */
static bool is_direct(const mls_read_span *s, bool verified)
{
    const mls_stored_shard *shard = s->piece->shard;
    size_t bytes;
    if (s->piece->data == NULL || s->to == SIZE_MAX || s->zeros_end > s->zeros_from ||
        shard->file == NULL || shard->frames != NULL ||
        (s->end - s->from > GAP && copies_slowly(s->piece->data + s->to, s->at))) {
        return false;
    }
    return !verified || (s->from == 0 && s->end <= MLS_SAFETENSORS_BLOCK &&
                         mls_stored_bytes(shard, &bytes) && bytes == s->end);
}

/* Return how many spans of the plan, from `order[first]` on and before `order[end]`, are
 * adjacent in their file and short enough for one call. 0 or 1: read the first span
 * alone. */
static size_t count_neighbours(const read_state *shared, size_t first, size_t end)
{
    const char *file = shared->plan.order[first]->file;
    uint64_t at = shared->plan.order[first]->at;
    size_t count = 0;
    for (size_t left = STEP; first + count < end && count < PARTS; count++) {
        const mls_read_span *s = shared->plan.order[first + count];
        const size_t length = s->end - s->from;
        if (s->at != at || length > left ||
            !is_direct(s, is_verified(shared, s->piece->shard)) ||
            (s->file != file && strcmp(s->file, file) != 0)) {
            break;
        }
        at += length;
        left -= length;
    }
    return count;
}

/* Read `count` adjacent spans with one call, and verify them. Returns false after any
 * failure, which is not recorded: the caller then reads each span alone, which reports
 * the failing one. */
static bool read_neighbours(read_worker *w, const mls_read_span *const *spans,
                            size_t count)
{
    struct iovec parts[PARTS];
    const mls_crc_kernels *crc = w->shared->request.crc;
    mls_status ignored;
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        const mls_read_span *s = spans[i];
        if (open_shard(w, s->piece->shard, &ignored) != MLS_OK) {
            return false;
        }
        parts[i] = (struct iovec){s->piece->data + s->to, s->end - s->from};
        bytes += parts[i].iov_len;
    }
    /* a short read (truncated file, or a signal) is rare; reading each span separately
     * handles it */
    if (preadv(w->source.fd, parts, (int)count, (off_t)spans[0]->at) != (ssize_t)bytes) {
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        if (is_verified(w->shared, spans[i]->piece->shard) &&
            crc->update(0, parts[i].iov_base, parts[i].iov_len) !=
                spans[i]->piece->shard->crcs[0]) {
            return false;
        }
    }
    w->done += bytes;
    return true;
}

/* Return whether a span must still be read: not after a stop, and not behind a failed
 * span. */
static bool is_pending(const read_state *shared, const mls_read_span *s)
{
    return (size_t)(s - shared->plan.spans) <
               atomic_load_explicit(&shared->failed, memory_order_relaxed) &&
           !atomic_load_explicit(&shared->stopped, memory_order_relaxed);
}

/* Run the maker, on the calling thread, while other threads read into the buffers that
 * already exist. If the maker fails, the read stops. */
static void make_destinations(void *context)
{
    read_state *shared = context;
    if (shared->request.maker == NULL) {
        return;
    }
    shared->maker_failed =
        !shared->request.maker->make(shared->request.maker->context, &shared->ready);
    if (shared->maker_failed && shared->plan.count > 0) {
        record_stop(shared, shared->plan.spans);
    }
    /* also after a failure: no thread may wait any longer */
    mls_ready_counter_advance(&shared->ready, SIZE_MAX);
}

/* Wait until the maker has allocated the destinations of the spans `order[first]` ..
 * `order[end - 1]`. Pieces get destinations in order, so the last of their pieces
 * decides. */
static void wait_for_destinations(read_state *shared, size_t first, size_t end)
{
    size_t last = 0;
    for (size_t i = first; i < end; i++) {
        const size_t piece =
            (size_t)(shared->plan.order[i]->piece - shared->request.pieces);
        last = piece > last ? piece : last;
    }
    mls_ready_counter_wait(&shared->ready, last + 1);
}

/* Read all spans of task `index`, adjacent ones with one call if possible. If that call
 * fails, each of them is read alone, so that the failure names its piece. Progress is
 * reported once for each task. */
static void read_task(read_worker *w, size_t index)
{
    read_state *shared = w->shared;
    const size_t end = shared->plan.tasks[index + 1];
    if (shared->request.maker != NULL) {
        wait_for_destinations(shared, shared->plan.tasks[index], end);
    }
    for (size_t i = shared->plan.tasks[index]; i < end;) {
        const mls_read_span *const *spans = shared->plan.order + i;
        const size_t count =
            shared->request.in_memory ? 1 : count_neighbours(shared, i, end);
        const size_t group = count < 1 ? 1 : count; /* a span that must be read alone */
        if (count < 2 || !is_pending(shared, *spans) ||
            !read_neighbours(w, spans, count)) {
            for (size_t j = 0; j < group; j++) {
                if (is_pending(shared, spans[j])) {
                    read_span(w, spans[j]);
                }
            }
        }
        i += group;
    }
    if (w->done > 0 && !mls_progress_report(shared->request.progress, w->done)) {
        record_stop(shared, shared->plan.order[end - 1]);
    }
    atomic_fetch_add_explicit(&shared->read, w->done, memory_order_relaxed);
    w->done = 0;
}

/* Thread function of the read `context`: run tasks from the queues until none are left;
 * `index` is not needed. Errors are kept in the context. The file stays open between
 * tasks, since the system keeps its read-ahead state for each open file. */
static void read_tasks(void *context, size_t index)
{
    read_state *shared = context;
    const mls_read_request *request = &shared->request;
    read_worker w = {.shared = shared,
                     .source = {-1, NULL, request->ranges, request->range_count}};
    size_t queue = SIZE_MAX, task;
    (void)index;
    while (mls_work_queues_take(&shared->queues, &queue, &task)) {
        read_task(&w, task);
    }
    close_file(&w);
    mls_free(w.buffer);
    mls_compressed_frame_reader_fini(&w.frames);
}

/* Free everything of a read except the caller's memory. */
static void reading_fini(read_state *shared)
{
    mls_work_queues_fini(&shared->queues);
    mls_read_plan_fini(&shared->plan);
    mls_ready_counter_fini(&shared->ready);
    pthread_mutex_destroy(&shared->lock);
}

/* Plan the pieces, then read them with the threads of the pool. The pieces before an
 * invalid one are still read: the first failing piece is reported, and it may be one that
 * only fails when it is read. */
mls_code mls_shards_read(const mls_read_request *request, size_t *failed, mls_status *st)
{
    size_t failed_piece; /* until the spans are read: the number of valid pieces */
    read_state shared = {.request = *request};
    mls_pool *pool = request->pool;
    mls_ready_counter_init(&shared.ready);
    pthread_mutex_init(&shared.lock, NULL);
    atomic_init(&shared.failed, SIZE_MAX);
    atomic_init(&shared.stopped, false);
    atomic_init(&shared.read, 0);
    mls_code code = mls_read_plan_make(&shared.plan, request->pieces, request->count,
                                       &failed_piece, st);
    const mls_read_plan *plan = &shared.plan;
    if (code != MLS_E_MEMORY &&
        !mls_work_queues_init(&shared.queues, plan->queues, plan->queue_count)) {
        failed_piece = 0;
        code = mls_fail(st, MLS_E_MEMORY, "no memory to read %zu parts", plan->count);
    }
    if (code != MLS_E_MEMORY) {
        const bool alone = pool == NULL || plan->cost < SHARED_BYTES;
        const size_t threads = alone ? 1 : mls_pool_threads(pool);
        mls_pool_run_helped(alone ? NULL : pool, make_destinations, read_tasks, &shared,
                            threads < plan->task_count ? threads : plan->task_count);
    }
    const size_t first = atomic_load(&shared.failed);
    if (first != SIZE_MAX) {
        failed_piece = (size_t)(shared.plan.spans[first].piece - request->pieces);
        *st = shared.status;
        code = st->code;
    } else if (shared.maker_failed) {
        code = mls_fail(st, MLS_E_STOPPED, "cancelled by the caller");
    }
    if (code != MLS_OK) {
        *failed = failed_piece;
    }
    if (request->read != NULL) {
        *request->read = atomic_load(&shared.read);
    }
    reading_fini(&shared);
    return code;
}
