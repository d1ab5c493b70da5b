/* shard_compress: which new files are coded, and the coding.
 *
 * Most states do not get much smaller: random digits of floats do not.  So a few samples
 * of each shard are coded before it is decided, and a shard that was to be coded and did
 * not get smaller is written as it is after all.
 *
 * How long coded bytes are is known when all of them are there, and where the next tensor
 * begins with it: a coded shard has a file of its own, which one thread codes and writes.
 */
#if !defined(_WIN32)

#    include "checkpoint/write/write_plan.h"

#    include "base/memory.h"

#    include <pthread.h>
#    include <string.h>

enum {
    LEAST = 16 << 10, /* of a shard: less would not even fill a few blocks of the disk */
    SAMPLE = 128 << 10, /* bytes */
    SAMPLES = 3         /* of a shard: its start, its middle, its end */
};

/* ---- what is to be coded ---- */

/* By halves: the run that has an element of the layer. */
static size_t find_run(const mls_layer *layer, size_t at)
{
    size_t low = 0, high = layer->run_count;
    while (high - low > 1) {
        const size_t middle = low + (high - low) / 2;
        if (layer->runs[middle].at <= at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Elements `first` .. `first + count` of what is written of a shard: where they lie, or
 * one after the other in `room`. */
static const unsigned char *packed(const mls_shard_plan *plan, const mls_planned *planned,
                                   size_t first, size_t count, unsigned char *room)
{
    const mls_layer *fresh = planned->fresh;
    const size_t item = planned->frames->item;
    if (fresh->row == 0) {
        return mls_planned_elements(plan->job, planned->item, first, count, room);
    }
    unsigned char *to = room;
    /* runs follow one another without a gap in the layer, but not in memory; what is
     * strided is packed to its place at once */
    for (size_t run = find_run(fresh, first); count > 0; run++) {
        const mls_extent *here = &fresh->runs[run];
        const size_t skip = first - here->at, left = here->count - skip;
        const size_t step = left < count ? left : count;
        const unsigned char *from =
            mls_planned_elements(plan->job, planned->item, here->begin + skip, step, to);
        if (from != to) {
            memcpy(to, from, step * item);
        }
        to += step * item;
        first += step;
        count -= step;
    }
    return room;
}

/* Whether what is coded is shorter by a quarter: less is not worth the time that reading
 * it takes for ever after. */
static bool pays(size_t coded, size_t bytes)
{
    return coded <= bytes - bytes / 4;
}

/* ---- samples ---- */

/* What the tasks share. */
typedef struct sampling {
    mls_shard_plan *plan;
    const size_t *shards; /* the candidates */
    pthread_mutex_t lock; /* round what follows */
    size_t failed;        /* the first shard that failed, SIZE_MAX: none */
    mls_status why;
} sampling;

/* Give a planned shard frames, and a layer where it has none that is new. */
static mls_code set_frames(const mls_shard_plan *plan, mls_planned *planned,
                           const mls_index_shard *shard, mls_status *st)
{
    const size_t bytes = mls_planned_bytes(planned, shard);
    /* each is one block with what it points to, so that one call frees it */
    mls_frames *frames =
        mls_alloc(1, sizeof *frames + mls_frames_count(bytes) * sizeof *frames->ends);
    mls_layers *layers =
        planned->fresh != NULL ? NULL : mls_alloc(1, sizeof *layers + sizeof(mls_layer));
    if (frames == NULL || (planned->fresh == NULL && layers == NULL)) {
        mls_free(frames);
        mls_free(layers);
        return mls_fail(st, MLS_E_MEMORY, "no memory to code %zu bytes", bytes);
    }
    *frames = (mls_frames){.codec = plan->job->codec,
                           .item = mls_dtype_of(shard->dtype)->item_bytes,
                           .bytes = bytes,
                           .ends = (size_t *)(frames + 1)};
    if (layers != NULL) {
        layers->list = (mls_layer *)(layers + 1);
        layers->count = 1;
        layers->list[0] = (mls_layer){.bytes = bytes};
        planned->layers = layers;
        planned->fresh = &layers->list[0];
    }
    planned->frames = frames;
    planned->fresh->frames = frames;
    return MLS_OK;
}

/* Undo it: the shard is what it would have been. */
static void unset_frames(mls_planned *planned)
{
    /* a full layer was made for the frames alone; one of rows stays, as it is */
    if (planned->fresh->row == 0) {
        mls_planned_drop_layers(planned);
        return;
    }
    planned->fresh->bytes = planned->frames->bytes;
    planned->fresh->frames = NULL;
    mls_free(planned->frames);
    planned->frames = NULL;
}

/* Code the samples of a shard; `room` is for three of them. */
static mls_code sample(const mls_shard_plan *plan, const mls_planned *planned,
                       unsigned char *room, bool *out, mls_status *st)
{
    const mls_shard_job *job = plan->job;
    const size_t item = planned->frames->item, bytes = planned->frames->bytes;
    const size_t length = bytes < SAMPLE ? bytes : SAMPLE, count = length / item;
    const size_t all = bytes / item;
    size_t coded = 0, sampled = 0;
    for (int i = 0; i < (bytes < SAMPLES * SAMPLE ? 1 : SAMPLES); i++) {
        /* from the first element to the last; the only one of a small shard is its start
         */
        const size_t first = (all - count) / (SAMPLES - 1) * (size_t)i;
        size_t more = 0;
        const unsigned char *from = packed(plan, planned, first, count, room);
        const mls_code code =
            mls_frame_encode(job->codecs, job->codec, item, from, length, room + SAMPLE,
                             room + 2 * SAMPLE, &more, st);
        if (code != MLS_OK) {
            return code;
        }
        coded += more;
        sampled += length;
    }
    *out = pays(coded, sampled);
    return MLS_OK;
}

/* After a failure nothing more is begun. */
static bool has_failed(sampling *s)
{
    pthread_mutex_lock(&s->lock);
    const bool failed = s->failed != SIZE_MAX;
    pthread_mutex_unlock(&s->lock);
    return failed;
}

/* One shard, for the pool: each is looked at by one task, which alone changes it. */
static void sample_task(void *context, size_t index)
{
    sampling *s = context;
    const size_t number = s->shards[index];
    mls_planned *planned = &s->plan->planned[number];
    mls_status st;
    bool good = false;
    if (has_failed(s)) {
        return;
    }
    unsigned char *room = mls_realloc(NULL, 3, SAMPLE);
    mls_code code =
        room == NULL ? mls_fail(&st, MLS_E_MEMORY, "no memory for a sample")
                     : set_frames(s->plan, planned, &s->plan->index.shards[number], &st);
    if (code == MLS_OK) {
        code = sample(s->plan, planned, room, &good, &st);
        if (code != MLS_OK || !good) {
            unset_frames(planned);
        }
    }
    mls_free(room);
    if (code != MLS_OK) {
        mls_status_name(&st, planned->key.data, planned->key.length);
        pthread_mutex_lock(&s->lock);
        if (number < s->failed) { /* the same one however many threads there are */
            s->failed = number;
            s->why = st;
        }
        pthread_mutex_unlock(&s->lock);
    }
}

/* What shares a file with others is not coded: files of many small shards are written in
 * the order in which they were laid out. */
static bool is_candidate(const mls_shard_plan *plan, size_t number)
{
    const size_t bytes =
        mls_planned_bytes(&plan->planned[number], &plan->index.shards[number]);
    return bytes >= LEAST && bytes >= plan->job->pack_below;
}

/* Everything that is written as a file of its own is sampled. */
mls_code mls_shard_plan_compress(mls_shard_plan *plan, mls_status *st)
{
    size_t count = 0;
    if (!plan->job->compress) {
        return MLS_OK;
    }
    size_t *shards = mls_alloc(plan->index.shard_count, sizeof *shards);
    if (shards == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to save %zu shards",
                        plan->index.shard_count);
    }
    for (size_t i = 0; i < plan->index.shard_count; i++) {
        if (is_candidate(plan, i)) {
            shards[count++] = i;
        }
    }
    sampling s = {.plan = plan, .shards = shards, .failed = SIZE_MAX};
    pthread_mutex_init(&s.lock, NULL);
    mls_pool_run(plan->job->pool, sample_task, &s, count);
    pthread_mutex_destroy(&s.lock);
    mls_free(shards);
    if (s.failed != SIZE_MAX) {
        *st = s.why;
    }
    return s.failed != SIZE_MAX ? st->code : MLS_OK;
}

/* ---- coding ---- */

/* Tell whoever waits, who may want to stop. */
static mls_code report(const mls_shard_job *job, size_t bytes, mls_status *st)
{
    const mls_progress *progress = job->progress;
    return progress == NULL || progress->report(progress->context, bytes)
               ? MLS_OK
               : mls_fail(st, MLS_E_STOPPED, "stopped");
}

/* All frames, one after the other; none any more when it is known that it does not pay.
 * So there is never more than that and one frame. */
static mls_code encode_frames(const mls_shard_plan *plan, mls_planned *planned,
                              unsigned char *room, unsigned char *to, size_t *out,
                              mls_status *st)
{
    const mls_shard_job *job = plan->job;
    mls_frames *frames = planned->frames;
    mls_code code = MLS_OK;
    size_t end = 0, first = 0;
    for (size_t i = 0; code == MLS_OK && first * frames->item < frames->bytes; i++) {
        const size_t bytes = mls_frame_bytes(frames, i), count = bytes / frames->item;
        size_t coded = 0;
        const unsigned char *from = packed(plan, planned, first, count, room);
        code = mls_frame_encode(job->codecs, frames->codec, frames->item, from, bytes,
                                room + MLS_FRAME_BYTES, to + end, &coded, st);
        end += coded;
        first += count;
        frames->ends[i] = end;
        if (code == MLS_OK) {
            code = report(job, bytes, st);
        }
        if (!pays(end, frames->bytes)) {
            break;
        }
    }
    /* what is written as it is after all counts as done by then */
    const size_t left = frames->bytes - first * frames->item;
    *out = end;
    return code == MLS_OK && left > 0 ? report(job, left, st) : code;
}

/* The memory is as large as what pays may become, and a frame; what is not used of it is
 * never touched. */
mls_code mls_planned_encode(mls_shard_plan *plan, size_t number, unsigned char **out,
                            mls_status *st)
{
    mls_planned *planned = &plan->planned[number];
    mls_index_shard *shard = &plan->index.shards[number];
    const size_t bytes = planned->frames->bytes, file = planned->fresh->file;
    size_t coded = 0;
    unsigned char *room = mls_realloc(NULL, 2, MLS_FRAME_BYTES);
    unsigned char *to = mls_realloc(NULL, bytes - bytes / 4 + MLS_FRAME_BYTES, 1);
    mls_code code = room == NULL || to == NULL
                        ? mls_fail(st, MLS_E_MEMORY, "no memory to code %zu bytes", bytes)
                        : encode_frames(plan, planned, room, to, &coded, st);
    mls_free(room);
    if (code == MLS_OK && pays(coded, bytes)) {
        /* the file is not laid out yet: it will be as long as this makes it */
        planned->fresh->bytes = coded;
        *out = to;
        return MLS_OK;
    }
    mls_free(to);
    if (code == MLS_OK) {
        /* the index was told of a layer; the file, too, was the layer's */
        unset_frames(planned);
        shard->layers = planned->layers;
        shard->file = planned->layers == NULL ? file : shard->file;
        *out = NULL;
    }
    return code;
}

#endif
