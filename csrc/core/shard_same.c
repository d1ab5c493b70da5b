/* shard_same: what did not change since it was committed.
 *
 * Bytes are compared with bytes: two states of one checksum would be taken for one, once
 * in four thousand million times.  Reading stops at the first difference, which in a
 * state that was trained on is the first block.  A file that cannot be read as recorded
 * is as good as different: its shard is in memory, and is written again.
 */
#if !defined(_WIN32)

#    include "shard_plan.h"

#    include "fsio.h"
#    include "mem.h"
#    include "pack.h"

#    include <stdatomic.h>
#    include <string.h>
#    include <unistd.h>

enum {
    FIRST_STEP = 16 << 10, /* what changed, mostly changed here */
    STEP = 256 << 10,      /* stays in the cache between reading and comparing */
    BATCH = 4 << 20        /* bytes of shards that one task compares, at least */
};

/* Some shards that are compared one after the other. */
typedef struct batch {
    size_t from, to;
} batch;

typedef struct comparing {
    mls_shard_plan *plan;
    const batch *batches;
    atomic_bool no_memory, stopped;
} comparing;

/* What a task has at hand: the file that it read last stays open for the next shard,
 * since neighbours in an index mostly share a segment. */
typedef struct reading {
    int fd;
    size_t file;                  /* of the index of before */
    unsigned char *read, *packed; /* STEP bytes each */
} reading;

/* Open the file of `shard`, or go on with it; false where it is not what was recorded. */
static bool open_file(const mls_shard_plan *plan, reading *r,
                      const mls_index_shard *shard)
{
    uint64_t length;
    mls_status ignored;
    const mls_index_file *file = &plan->job->before->files[shard->file];
    if (r->fd >= 0 && r->file == shard->file) {
        return true;
    }
    if (r->fd >= 0) {
        (void)close(r->fd);
        r->fd = -1;
    }
    if (mls_file_open_at(plan->job->folder, file->path, &r->fd, &length, &ignored) !=
        MLS_OK) {
        return false;
    }
    r->file = shard->file;
    /* cut off, or another file: nothing in it is worth reading */
    if (length != file->bytes) {
        (void)close(r->fd);
        r->fd = -1;
        return false;
    }
    return true;
}

/* The item's bytes `start` .. `start + length`, where they lie or packed.  Both are
 * multiples of any item's size: steps are powers of two, and so are the sizes. */
static const unsigned char *bytes_of(const mls_shard_plan *plan,
                                     const mls_shard_item *item, size_t start,
                                     size_t length, unsigned char *packed)
{
    const size_t size = mls_dtype_of(item->dtype)->item_bytes;
    if (item->data != NULL) {
        return item->data + item->first * size + start;
    }
    mls_pack(plan->job->kernels, item->strided, item->first + start / size, length / size,
             packed);
    return packed;
}

/* Whether the shard's bytes of before are those of its item, read up to the first that is
 * not. */
static bool same_bytes(const mls_shard_plan *plan, const mls_planned *planned, reading *r)
{
    const mls_index_shard *before = planned->before;
    mls_status ignored;
    if (!open_file(plan, r, before)) {
        return false;
    }
    for (size_t done = 0; done < before->bytes;) {
        /* a small step first: the block that differs is mostly the first */
        const size_t most = done == 0 ? FIRST_STEP : STEP;
        const size_t left = before->bytes - done;
        const size_t step = left < most ? left : most;
        if (mls_file_read_at(r->fd, r->read, step, before->offset + done, &ignored) !=
                MLS_OK ||
            memcmp(r->read, bytes_of(plan, planned->item, done, step, r->packed), step) !=
                0) {
            return false;
        }
        done += step;
    }
    return true;
}

/* One batch.  What is the same is done with, and reported; what is not is reported when
 * it is written.  Tasks write to different shards of the plan, so they need no lock. */
static void compare_task(void *context, size_t index)
{
    comparing *c = context;
    const mls_progress *progress = c->plan->job->progress;
    reading r = {.fd = -1};
    if (atomic_load(&c->stopped) || atomic_load(&c->no_memory)) {
        return;
    }
    /* one block for both, so that there is one failure to think of */
    r.read = mls_alloc(2, STEP);
    if (r.read == NULL) {
        atomic_store(&c->no_memory, true);
        return;
    }
    r.packed = r.read + STEP;
    for (size_t i = c->batches[index].from; i < c->batches[index].to; i++) {
        mls_planned *planned = &c->plan->planned[i];
        if (planned->before != NULL && planned->item->version == 0) {
            planned->same = same_bytes(c->plan, planned, &r);
        } else if (planned->same) {
            /* the caller knows his bytes, but not whether the file is still there */
            planned->same = open_file(c->plan, &r, planned->before);
        }
        if (planned->same && progress != NULL &&
            !progress->report(progress->context, planned->before->bytes)) {
            atomic_store(&c->stopped, true);
            break;
        }
    }
    if (r.fd >= 0) {
        (void)close(r.fd);
    }
    mls_free(r.read);
}

/* Cut the shards into batches; returns how many.  One of a few bytes is not worth a task,
 * and one without a record of before costs nothing. */
static size_t make_batches(const mls_shard_plan *plan, batch *out)
{
    size_t count = 0, bytes = 0;
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        if (count == 0 || bytes >= BATCH) {
            out[count++] = (batch){.from = i};
            bytes = 0;
        }
        bytes += plan->planned[i].before == NULL ? 0 : plan->index.shards[i].bytes;
        out[count - 1].to = i + 1;
    }
    return count;
}

/* Whoever counts versions himself is believed, as long as he does not count back. */
static mls_code check_versions(mls_shard_plan *plan, mls_status *st)
{
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        mls_planned *planned = &plan->planned[i];
        const uint64_t version = planned->item->version;
        const uint64_t old = planned->before == NULL ? 0 : planned->before->version;
        if (version > INT64_MAX || (version != 0 && version < old)) {
            mls_fail(st, MLS_E_VALUE, "version %llu of a shard whose version is %llu",
                     (unsigned long long)version, (unsigned long long)old);
            mls_status_name(st, planned->key.data, planned->key.length);
            if (version > INT64_MAX) { /* no index can hold it */
                mls_status_expected(st, "at most %llu", (unsigned long long)INT64_MAX);
            } else {
                mls_status_expected(st, "%llu or more", (unsigned long long)old);
            }
            mls_status_got(st, "%llu", (unsigned long long)version);
            return MLS_E_VALUE;
        }
        planned->same = version != 0 && version == old;
    }
    return MLS_OK;
}

/* Versions first: they refuse before anything is read.  Without a record of before there
 * is nothing to compare with, and everything is new. */
mls_code mls_shard_plan_compare(mls_shard_plan *plan, mls_status *st)
{
    const mls_code code = check_versions(plan, st);
    if (code != MLS_OK || plan->job->before == NULL) {
        return code;
    }
    batch *batches = mls_alloc(plan->index.shard_count, sizeof *batches);
    if (batches == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to compare %zu shards",
                        plan->index.shard_count);
    }
    comparing c = {.plan = plan, .batches = batches};
    /* each task looks at both, and begins nothing once either is set */
    atomic_init(&c.no_memory, false);
    atomic_init(&c.stopped, false);
    mls_pool_run(plan->job->pool, compare_task, &c, make_batches(plan, batches));
    mls_free(batches);
    return atomic_load(&c.no_memory)
               ? mls_fail(st, MLS_E_MEMORY, "no memory for a buffer of 512 KiB")
           : atomic_load(&c.stopped) ? mls_fail(st, MLS_E_STOPPED, "stopped")
                                     : MLS_OK;
}

#endif
