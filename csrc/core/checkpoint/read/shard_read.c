/* Reading parts of shards: tasks that follow a plan (read_plan.h).
 *
 * Each byte takes the shortest way that there is.  A run of bytes that is long enough
 * goes from the system's cache straight to its place, and so do small shards that lie one
 * behind the other, several with one call; short runs of a shard that lie close together
 * are read as one, gaps included, and spread from there.  What is verified is read block
 * by block instead, in steps that are still in the processor's cache when the checksum is
 * taken.  A read that would meet `copies_slowly` takes the way through a buffer.
 */
#if !defined(_WIN32)

#    include "checkpoint/read/shard_read.h"

#    include "io/file.h"
#    include "base/memory.h"
#    include "safetensors/safetensors.h"
#    include "base/size.h"
#    include "runtime/work_stealing.h"

#    include <errno.h>
#    include <fcntl.h>
#    include <pthread.h>
#    include <stdatomic.h>
#    include <string.h>
#    include <sys/stat.h>
#    include <sys/uio.h>
#    include <unistd.h>

enum {
    STEP = 256 << 10,      /* stays in the cache between reading and use */
    DIRECT = 64 << 10,     /* so long a run is read by itself */
    GAP = 4 << 10,         /* reading it takes no longer than a system call */
    PARTS = 64,            /* of neighbours that are read by one call */
    ALIAS = 4 << 10,       /* processors compare addresses up to this bit, see below */
    LINE = 64,             /* of the processor's cache */
    SHARED_BYTES = 8 << 20 /* less is read by the calling thread */
};

/* What the threads share. */
typedef struct reading {
    mls_read_request request;
    mls_read_plan plan;
    mls_stretches stretches; /* of the plan's tasks */
    atomic_size_t failed;    /* the first span that failed so far, else SIZE_MAX */
    atomic_bool stopped;
    pthread_mutex_t lock; /* of `status` */
    mls_status status;    /* why `failed` failed, or that all was stopped */
    mls_gate made;        /* pieces that have their `data`, if there is a maker */
    bool unmade;          /* the maker failed */
} reading;

/* One thread at work: its open file, its buffers. */
typedef struct worker {
    reading *shared;
    const char *file; /* the open one's, or NULL */
    int fd;
    uint64_t file_bytes;
    unsigned char *buffer; /* STEP + ALIAS bytes; NULL until they are needed */
    mls_frame_room frames;
    uint64_t done; /* bytes of a task that went to their places */
} worker;

/* ---- runs of a span, in bytes ---- */

/* `left` bytes of the shard from `at` on that go to `to`; 0 behind the last run. */
typedef struct run {
    size_t at, left;
    unsigned char *to;
} run;

/* All runs of a span, one after the other. */
typedef struct run_reader {
    run now;
    const mls_read_span *span;
    mls_stored_runs runs;
    size_t filled, zeros; /* where zeros are to go on; how many there were */
} run_reader;

/* Zeros up to the byte `end` of what is wanted. */
static void fill_up_to(run_reader *r, size_t end)
{
    if (r->filled < end) {
        memset(r->span->piece->data + r->filled, 0, end - r->filled);
        r->zeros += end - r->filled;
    }
}

/* A run becomes the present one.  Zeros that are there already go nowhere. */
static void take_run(run_reader *r, const mls_stored_run *next)
{
    unsigned char *data = r->span->piece->data;
    r->now.at = next->at;
    r->now.left = next->count;
    r->now.to = data == NULL ? NULL : data + next->to;
    if (r->filled < r->span->zeros_end) {
        fill_up_to(r, next->to);
        r->filled = next->to + next->count;
    }
}

/* The next run, or the end of the span. */
static void next_run(run_reader *r)
{
    mls_stored_run next;
    if (r->span->to == SIZE_MAX && mls_stored_runs_next(&r->runs, &next)) {
        take_run(r, &next);
    } else {
        r->now.left = 0;
        fill_up_to(r, r->span->zeros_end);
    }
}

/* Only what the span touches is walked; one run needs no walk. */
static void start_runs(run_reader *r, const mls_read_span *s)
{
    r->span = s;
    r->filled = s->zeros_from;
    r->zeros = 0;
    if (s->to != SIZE_MAX) {
        take_run(r, &(mls_stored_run){s->from, s->end - s->from, s->to});
    } else {
        mls_stored_runs_init(&r->runs, s->piece->shard, s->piece->to, s->from, s->end);
        next_run(r);
    }
}

/* `bytes` of the present run are done; the next one follows when all are. */
static void advance(run_reader *r, size_t bytes)
{
    r->now.at += bytes;
    r->now.to = r->now.to == NULL ? NULL : r->now.to + bytes;
    r->now.left -= bytes;
    if (r->now.left == 0) {
        next_run(r);
    }
}

/* ---- files ---- */

/* The one answer to what is there but holds no bytes to read. */
static mls_code not_regular(const char *what, mls_status *st)
{
    mls_fail(st, MLS_E_FORMAT, "not a regular file but %s", what);
    mls_status_expected(st, "a regular file");
    mls_status_got(st, "%s", what);
    return MLS_E_FORMAT;
}

/* Why openat said no.  Links are not followed: shards are files of this very folder. */
static mls_code cannot_open(int reason, mls_status *st)
{
    if (reason == ELOOP || reason == EMLINK) {
        return not_regular("a symbolic link", st);
    }
    return reason == ENXIO ? not_regular("a socket", st)
                           : mls_fail_os(st, reason, "cannot open the file");
}

/* Close the open file, if there is one. */
static void close_file(worker *w)
{
    if (w->file != NULL) {
        (void)close(w->fd);
        w->file = NULL;
    }
}

/* Make `name` the open file; nothing to do where it is that already. */
static mls_code open_file(worker *w, const char *name, mls_status *st)
{
    struct stat info;
    if (w->file != NULL && (w->file == name || strcmp(w->file, name) == 0)) {
        return MLS_OK;
    }
    close_file(w);
    /* O_NONBLOCK: opening a FIFO that nobody writes to must not wait */
    const int fd = openat(w->shared->request.folder, name,
                          O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) {
        return cannot_open(errno, st);
    }
    if (fstat(fd, &info) != 0) {
        mls_fail_os(st, errno, "cannot examine the file");
    } else if (!S_ISREG(info.st_mode) || info.st_size < 0) {
        not_regular(S_ISDIR(info.st_mode) ? "a folder" : "a FIFO or device", st);
    } else {
        w->fd = fd;
        w->file = name;
        w->file_bytes = (uint64_t)info.st_size;
        return MLS_OK;
    }
    (void)close(fd);
    return st->code;
}

/* A file of another length is not the one that was written: refused before anything of it
 * is believed. */
static mls_code open_shard(worker *w, const mls_stored_shard *shard, mls_status *st)
{
    const mls_code code = open_file(w, shard->file, st);
    if (code != MLS_OK || w->file_bytes == shard->file_bytes) {
        return code;
    }
    mls_fail_at(st, w->file_bytes < shard->file_bytes ? w->file_bytes : shard->file_bytes,
                "it is %llu bytes long, but %llu were written: it was cut off or "
                "replaced",
                (unsigned long long)w->file_bytes, (unsigned long long)shard->file_bytes);
    mls_status_expected(st, "%llu bytes", (unsigned long long)shard->file_bytes);
    mls_status_got(st, "%llu bytes", (unsigned long long)w->file_bytes);
    return MLS_E_FORMAT;
}

/* Whether the system copies bytes at `offset` of a file to `to` slowly.  Linux copies
 * with `rep movsb`, which AMD's processors run at a fifth of its speed if the destination
 * is less than a line ahead of the source modulo 4 KiB (glibc bug 30994).  Large blocks
 * of glibc begin 16 bytes behind a page, and large shards with a page of their file. */
static bool copies_slowly(const unsigned char *to, uint64_t offset)
{
    const uint64_t ahead = ((uintptr_t)to - offset) % ALIAS;
    return ahead > 0 && ahead < LINE;
}

/* STEP bytes of the thread's buffer for bytes from `offset` of a file: half of ALIAS
 * away from these, so that neither the copy to them nor the one from them is slow. */
static mls_code borrow(worker *w, uint64_t offset, unsigned char **out, mls_status *st)
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

/* ---- from a buffer to places ---- */

/* Bytes `at` .. `at + bytes` of the shard lie in `data`: bring what is wanted of them to
 * its places. */
static void scatter(worker *w, run_reader *r, const unsigned char *data, size_t at,
                    size_t bytes)
{
    while (r->now.left > 0 && r->now.at < at + bytes) {
        const size_t room = at + bytes - r->now.at;
        const size_t length = r->now.left < room ? r->now.left : room;
        memcpy(r->now.to, data + (r->now.at - at), length);
        w->done += length;
        advance(r, length);
    }
}

/* ---- unverified: only what is needed ---- */

/* Where runs end that are better read together with the present one, itself included:
 * short ones with small gaps.  They are walked ahead, and no zeros are filled in: those
 * go to memory right before what stands behind them. */
static size_t end_together(const run_reader *r)
{
    run_reader ahead = *r;
    const size_t start = r->now.at;
    size_t end;
    ahead.filled = SIZE_MAX;
    do {
        end = ahead.now.at + ahead.now.left;
        advance(&ahead, ahead.now.left);
    } while (ahead.now.left > 0 && ahead.now.left < DIRECT && ahead.now.at - end <= GAP &&
             ahead.now.at + ahead.now.left - start <= STEP);
    return end;
}

/* All runs of a span, without looking at checksums: a long one into its place, short ones
 * together into a buffer that stays in the cache.  Long ones go step by step: systems
 * read ahead of many short calls further, and into larger pages, than of a single one. */
static mls_code read_plain(worker *w, run_reader *r, mls_status *st)
{
    mls_code code = MLS_OK;
    while (code == MLS_OK && r->now.left > 0) {
        const size_t at = r->now.at;
        const uint64_t offset = r->span->piece->shard->offset + at;
        const size_t alone = at + (r->now.left < STEP ? r->now.left : STEP);
        const size_t end = r->now.left < DIRECT ? end_together(r) : alone;
        const bool straight = end == alone && !copies_slowly(r->now.to, offset);
        unsigned char *to = r->now.to;
        code = straight ? MLS_OK : borrow(w, offset, &to, st);
        if (code == MLS_OK) {
            code = mls_file_read_at(w->fd, to, end - at, offset, st);
        }
        if (code == MLS_OK && straight) {
            w->done += end - at;
            advance(r, end - at);
        } else if (code == MLS_OK) {
            scatter(w, r, to, at, end - at);
        }
    }
    return code;
}

/* ---- verified: whole blocks ---- */

/* Read `bytes` of a block, add them to its checksum and bring them where they are wanted:
 * at once where all of them go on in one run. */
static mls_code read_step(worker *w, run_reader *r, size_t at, size_t bytes,
                          uint32_t *crc, mls_status *st)
{
    const uint64_t offset = r->span->piece->shard->offset + at;
    const bool straight =
        r->now.at == at && r->now.left >= bytes && !copies_slowly(r->now.to, offset);
    unsigned char *to = r->now.to;
    mls_code code = straight ? MLS_OK : borrow(w, offset, &to, st);
    if (code == MLS_OK) {
        code = mls_file_read_at(w->fd, to, bytes, offset, st);
    }
    if (code != MLS_OK) {
        return code;
    }
    *crc = w->shared->request.crc->update(*crc, to, bytes);
    if (straight) {
        w->done += bytes;
        advance(r, bytes);
    } else {
        scatter(w, r, to, at, bytes);
    }
    return MLS_OK;
}

/* All blocks of a span that hold a run's bytes; those between them are passed over. */
static mls_code read_verified(worker *w, run_reader *r, mls_status *st)
{
    const mls_stored_shard *shard = r->span->piece->shard;
    size_t bytes = 0;
    (void)mls_stored_bytes(shard, &bytes); /* they were counted when this was planned */
    while (r->now.left > 0) {
        const size_t block = r->now.at / MLS_SAFETENSORS_BLOCK;
        const size_t start = block * MLS_SAFETENSORS_BLOCK;
        const size_t left = bytes - start;
        const size_t length = left < MLS_SAFETENSORS_BLOCK ? left : MLS_SAFETENSORS_BLOCK;
        uint32_t found = 0;
        for (size_t done = 0; done < length; done += STEP) {
            const size_t step = length - done < STEP ? length - done : STEP;
            const mls_code code = read_step(w, r, start + done, step, &found, st);
            if (code != MLS_OK) {
                return code;
            }
        }
        if (found != shard->crcs[block]) {
            return mls_block_changed(shard->offset, start, length, found,
                                     shard->crcs[block], st);
        }
    }
    return MLS_OK;
}

/* ---- coded: whole frames ---- */

/* All runs of a span, frame by frame; those between them are passed over. */
static mls_code read_coded(worker *w, run_reader *r, mls_status *st)
{
    const mls_stored_shard *shard = r->span->piece->shard;
    const size_t last = mls_frames_count(shard->frames->bytes) - 1;
    const mls_coded coded = {.fd = w->fd,
                             .offset = shard->offset,
                             .bytes = shard->frames->ends[last],
                             .crcs = shard->crcs,
                             .frames = shard->frames,
                             .crc = w->shared->request.crc,
                             .codecs = w->shared->request.codecs};
    while (r->now.left > 0) {
        const size_t number = r->now.at / MLS_FRAME_BYTES;
        const unsigned char *data;
        const mls_code code = mls_frame_read(&w->frames, &coded, number, &data, st);
        if (code != MLS_OK) {
            return code;
        }
        scatter(w, r, data, number * MLS_FRAME_BYTES,
                mls_frame_bytes(shard->frames, number));
    }
    return MLS_OK;
}

/* ---- what was never stored ---- */

/* All runs of a span of zeros. */
static void fill_zeros(worker *w, run_reader *r)
{
    while (r->now.left > 0) {
        if (r->now.to != NULL) {
            memset(r->now.to, 0, r->now.left);
        }
        w->done += r->now.left;
        advance(r, r->now.left);
    }
}

/* ---- tasks ----
 *
 * The first span that fails, in the order of the pieces, is what the caller hears of,
 * however many threads there are: spans in front of a failed one are still read.
 */

/* Keep the failure of a span, unless one in front of it failed or all was stopped. */
static void record(reading *shared, const mls_read_span *s, const mls_status *st)
{
    const size_t index = (size_t)(s - shared->plan.spans);
    pthread_mutex_lock(&shared->lock);
    if (index < atomic_load(&shared->failed) && !atomic_load(&shared->stopped)) {
        shared->status = *st;
        atomic_store(&shared->failed, index);
    }
    pthread_mutex_unlock(&shared->lock);
}

/* The caller's wish goes before any failure: whoever asked knows why. */
static void record_stop(reading *shared, const mls_read_span *s)
{
    pthread_mutex_lock(&shared->lock);
    if (!atomic_load(&shared->stopped)) {
        mls_fail(&shared->status, MLS_E_STOPPED, "stopped as the caller asked");
        (void)mls_stored_blame(s->piece->shard, &shared->status);
        atomic_store(&shared->failed, (size_t)(s - shared->plan.spans));
        atomic_store(&shared->stopped, true);
    }
    pthread_mutex_unlock(&shared->lock);
}

/* One span of a task. */
static void read_span(worker *w, const mls_read_span *s)
{
    mls_status st;
    run_reader r;
    start_runs(&r, s);
    if (r.now.left == 0) {
        w->done += r.zeros;
        return; /* what the shard has between its first and its last run may be a gap */
    }
    if (s->piece->shard->file == NULL) {
        fill_zeros(w, &r);
        return;
    }
    mls_code code = open_shard(w, s->piece->shard, &st);
    if (code == MLS_OK) {
        code = s->piece->shard->frames != NULL  ? read_coded(w, &r, &st)
               : w->shared->request.crc == NULL ? read_plain(w, &r, &st)
                                                : read_verified(w, &r, &st);
    }
    w->done += r.zeros;
    if (code == MLS_E_STOPPED) {
        record_stop(w->shared, s); /* a codec was interrupted: so is everything */
    } else if (code != MLS_OK) {
        (void)mls_stored_blame(s->piece->shard, &st);
        record(w->shared, s, &st);
    }
}

/* Whether a span is one run of bytes that go straight to their place, and not slowly if
 * they are many; where they are verified, all of a shard that is no longer than a block.
 */
static bool goes_straight(const mls_read_span *s, bool verified)
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

/* How many spans from `order[first]` on, before `order[end]`, lie one behind the other in
 * their file and are short enough for one call and the cache. */
static size_t neighbours(const reading *shared, size_t first, size_t end)
{
    const char *file = shared->plan.order[first]->file;
    uint64_t at = shared->plan.order[first]->at;
    size_t count = 0;
    for (size_t left = STEP; first + count < end && count < PARTS; count++) {
        const mls_read_span *s = shared->plan.order[first + count];
        const size_t length = s->end - s->from;
        if (s->at != at || length > left ||
            !goes_straight(s, shared->request.crc != NULL) ||
            (s->file != file && strcmp(s->file, file) != 0)) {
            break;
        }
        at += length;
        left -= length;
    }
    return count;
}

/* Read that many with one call, and verify them.  False where anything is not as it
 * should be: then each is read by itself, and the one that fails is told by its name. */
static bool read_neighbours(worker *w, const mls_read_span *const *spans, size_t count)
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
    /* a short read is not gone on with: the file was cut off, or a signal came; either is
     * rare, and reading one by one knows what to do */
    if (preadv(w->fd, parts, (int)count, (off_t)spans[0]->at) != (ssize_t)bytes) {
        return false;
    }
    for (size_t i = 0; crc != NULL && i < count; i++) {
        if (crc->update(0, parts[i].iov_base, parts[i].iov_len) !=
            spans[i]->piece->shard->crcs[0]) {
            return false;
        }
    }
    w->done += bytes;
    return true;
}

/* Whether a span is still to be read: none behind one that failed is. */
static bool is_wanted(const reading *shared, const mls_read_span *s)
{
    return (size_t)(s - shared->plan.spans) <
               atomic_load_explicit(&shared->failed, memory_order_relaxed) &&
           !atomic_load_explicit(&shared->stopped, memory_order_relaxed);
}

/* Make the places, while others read to those that there are.  In the end nobody waits
 * any more, also where one could not be made: then nothing is read that was not begun. */
static void make_places(void *context)
{
    reading *shared = context;
    if (shared->request.maker == NULL) {
        return;
    }
    shared->unmade =
        !shared->request.maker->make(shared->request.maker->context, &shared->made);
    if (shared->unmade && shared->plan.count > 0) {
        record_stop(shared, shared->plan.spans);
    }
    mls_gate_open(&shared->made, SIZE_MAX);
}

/* Wait until the spans `first` .. `end` have places to go to. */
static void wait_for_places(reading *shared, size_t first, size_t end)
{
    size_t last = 0;
    for (size_t i = first; i < end; i++) {
        const size_t piece =
            (size_t)(shared->plan.order[i]->piece - shared->request.pieces);
        last = piece > last ? piece : last;
    }
    mls_gate_wait(&shared->made, last + 1);
}

/* All spans of a task, neighbours together. */
static void read_task(worker *w, size_t index)
{
    reading *shared = w->shared;
    const size_t end = shared->plan.tasks[index + 1];
    if (shared->request.maker != NULL) {
        wait_for_places(shared, shared->plan.tasks[index], end);
    }
    for (size_t i = shared->plan.tasks[index]; i < end;) {
        const mls_read_span *const *spans = shared->plan.order + i;
        const size_t count = neighbours(shared, i, end), all = count < 1 ? 1 : count;
        if (count < 2 || !is_wanted(shared, *spans) ||
            !read_neighbours(w, spans, count)) {
            for (size_t j = 0; j < all; j++) {
                if (is_wanted(shared, spans[j])) {
                    read_span(w, spans[j]);
                }
            }
        }
        i += all;
    }
    const mls_progress *progress = shared->request.progress;
    if (progress != NULL && w->done > 0 &&
        !progress->report(progress->context, w->done)) {
        record_stop(shared, shared->plan.order[end - 1]);
    }
    w->done = 0;
}

/* What one thread does: tasks as long as there are any.  A file stays open from one to
 * the next, since the system remembers by it what it has read ahead. */
static void read_along(void *context, size_t index)
{
    reading *shared = context;
    worker w = {.shared = shared, .fd = -1};
    size_t stretch = SIZE_MAX, task;
    (void)index;
    while (mls_stretches_take(&shared->stretches, &stretch, &task)) {
        read_task(&w, task);
    }
    close_file(&w);
    mls_free(w.buffer);
    mls_frame_room_fini(&w.frames);
}

/* Release what the threads shared. */
static void reading_fini(reading *shared)
{
    mls_stretches_fini(&shared->stretches);
    mls_read_plan_fini(&shared->plan);
    mls_gate_fini(&shared->made);
    pthread_mutex_destroy(&shared->lock);
}

/* The pieces before a refused one are read all the same: of several failures that of the
 * first piece counts, and it may be one that only reading finds. */
mls_code mls_shards_read(const mls_read_request *request, size_t *failed, mls_status *st)
{
    size_t planned;
    reading shared = {.request = *request};
    mls_pool *pool = request->pool;
    mls_gate_init(&shared.made);
    pthread_mutex_init(&shared.lock, NULL);
    atomic_init(&shared.failed, SIZE_MAX);
    atomic_init(&shared.stopped, false);
    mls_code code =
        mls_read_plan_make(&shared.plan, request->pieces, request->count, &planned, st);
    const mls_read_plan *plan = &shared.plan;
    if (code != MLS_E_MEMORY &&
        !mls_stretches_init(&shared.stretches, plan->stretches, plan->stretch_count)) {
        planned = 0;
        code = mls_fail(st, MLS_E_MEMORY, "no memory to read %zu parts", plan->count);
    }
    if (code != MLS_E_MEMORY) {
        const bool alone = pool == NULL || plan->cost < SHARED_BYTES;
        const size_t threads = alone ? 1 : mls_pool_threads(pool);
        mls_pool_run_beside(alone ? NULL : pool, make_places, read_along, &shared,
                            threads < plan->task_count ? threads : plan->task_count);
    }
    const size_t first = atomic_load(&shared.failed);
    if (first != SIZE_MAX) {
        planned = (size_t)(shared.plan.spans[first].piece - request->pieces);
        *st = shared.status;
        code = st->code;
    } else if (shared.unmade) {
        code = mls_fail(st, MLS_E_STOPPED, "stopped as the caller asked");
    }
    if (code != MLS_OK) {
        *failed = planned;
    }
    reading_fini(&shared);
    return code;
}

#endif
