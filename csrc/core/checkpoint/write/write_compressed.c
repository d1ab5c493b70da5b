/* write_compressed: which shards a save compresses, by samples that must shrink by a
 * quarter; compresses them.
 *
 * Most states do not shrink much, because the low bits of floats are random. So a few
 * samples of each shard are compressed first. A chosen shard that does not shrink enough
 * is written uncompressed.
 *
 * The compressed length, and so the offset of the next tensor, is only known at the end.
 * So a compressed shard has its own file, which one thread compresses and writes.
 *
 * A frame is 1 MiB of elements, compressed independently. A shard's frames belong to its
 * new layer: all of its elements, or only the rows that this save writes. */
#include "checkpoint/write/write_plan.h"

#include "base/memory.h"

#include <pthread.h>
#include <string.h>

enum {
    LEAST = 16 << 10,   /* bytes of a shard; less is only a few disk blocks */
    SAMPLE = 128 << 10, /* bytes */
    SAMPLES = 3         /* of a shard: start, middle, end */
};

/* ---- access to elements ---- */

/* Return elements `first` .. `first + count` of the shard's new layer, which omits rows
 * that are not written: a pointer into the caller's memory, or a packed copy in
 * `buffer`. */
static const unsigned char *packed_elements(const mls_write_plan *plan,
                                            const mls_planned *planned, size_t first,
                                            size_t count, unsigned char *buffer)
{
    const mls_layer *new_layer = planned->new_layer;
    const size_t item = planned->frames->item;
    if (new_layer->row == 0) {
        return mls_planned_elements(plan->job, planned->item, first, count, buffer);
    }
    unsigned char *to = buffer;
    /* row ranges are adjacent in the layer but not in memory; strided data is packed
     * directly into place */
    size_t range_number =
        mls_row_ranges_find_at(new_layer->stored, new_layer->stored_count, first);
    for (; count > 0; range_number++) {
        const mls_row_range *row_range = &new_layer->stored[range_number];
        const size_t skip = first - row_range->at, left = row_range->count - skip;
        const size_t step = left < count ? left : count;
        const unsigned char *from = mls_planned_elements(
            plan->job, planned->item, row_range->begin + skip, step, to);
        if (from != to) {
            memcpy(to, from, step * item);
        }
        to += step * item;
        first += step;
        count -= step;
    }
    return buffer;
}

/* Return whether the compressed size saves at least a quarter. A smaller gain is not
 * worth the time for decompression at every load. */
static bool saves_enough(size_t coded, size_t bytes)
{
    return coded <= bytes - bytes / 4;
}

/* ---- samples ---- */

typedef struct sample_state {
    mls_write_plan *plan;
    const size_t *shards; /* candidates */
    pthread_mutex_t lock; /* protects the members below */
    size_t failed;        /* first shard that failed; SIZE_MAX: none */
    mls_status why;
} sample_state;

/* Prepare a shard for compression: give it frames whose `ends` are still empty, and a
 * full new layer unless it has a new layer of rows. MLS_E_MEMORY: nothing changes. */
static mls_code set_frames(const mls_write_plan *plan, mls_planned *planned,
                           const mls_index_shard *shard, mls_status *st)
{
    const size_t bytes = mls_planned_bytes(planned, shard);
    /* each is one allocation with its arrays, so that one call frees it */
    mls_compressed_frames *frames = mls_alloc(
        1, sizeof *frames + mls_compressed_frames_count(bytes) * sizeof *frames->ends);
    mls_layers *layers = planned->new_layer != NULL
                             ? NULL
                             : mls_alloc(1, sizeof *layers + sizeof(mls_layer));
    if (frames == NULL || (planned->new_layer == NULL && layers == NULL)) {
        mls_free(frames);
        mls_free(layers);
        return mls_fail(st, MLS_E_MEMORY, "no memory to code %zu bytes", bytes);
    }
    *frames = (mls_compressed_frames){.codec = plan->job->codec,
                                      .item = mls_dtype_of(shard->dtype)->item_bytes,
                                      .bytes = bytes,
                                      .ends = (size_t *)(frames + 1)};
    if (layers != NULL) {
        layers->list = (mls_layer *)(layers + 1);
        layers->count = 1;
        layers->list[0] = (mls_layer){.bytes = bytes}; /* `row` 0: a full layer */
        planned->layers = layers;
        planned->new_layer = &layers->list[0];
    }
    planned->frames = frames;
    planned->new_layer->frames = frames;
    return MLS_OK;
}

/* Undo set_frames, and restore the layer's uncompressed length: the shard is written
 * uncompressed. */
static void unset_frames(mls_planned *planned)
{
    /* a full layer exists only for the frames; a layer of rows stays */
    if (planned->new_layer->row == 0) {
        mls_planned_drop_layers(planned);
        return;
    }
    planned->new_layer->bytes = planned->frames->bytes;
    planned->new_layer->frames = NULL;
    mls_free(planned->frames);
    planned->frames = NULL;
}

/* Compress samples of a shard that has frames; `*out` tells whether they shrink by a
 * quarter. `buffer` has space for three samples: packed elements, the codec's scratch
 * space and its output. Errors of the codec. */
static mls_code test_samples(const mls_write_plan *plan, const mls_planned *planned,
                             unsigned char *buffer, bool *out, mls_status *st)
{
    const mls_shard_job *job = plan->job;
    const size_t item = planned->frames->item, bytes = planned->frames->bytes;
    const size_t length = bytes < SAMPLE ? bytes : SAMPLE, count = length / item;
    const size_t elements = bytes / item;
    size_t coded = 0, sampled = 0;
    for (int i = 0; i < (bytes < SAMPLES * SAMPLE ? 1 : SAMPLES); i++) {
        /* evenly spaced, from the first element to the last; a small shard is sampled at
         * its start only */
        const size_t first = (elements - count) / (SAMPLES - 1) * (size_t)i;
        size_t sample_coded = 0;
        const unsigned char *from = packed_elements(plan, planned, first, count, buffer);
        const mls_code code = mls_compressed_frame_encode(
            job->codecs, job->codec, item, from, length, buffer + SAMPLE,
            buffer + 2 * SAMPLE, &sample_coded, st);
        if (code != MLS_OK) {
            return code;
        }
        coded += sample_coded;
        sampled += length;
    }
    *out = saves_enough(coded, sampled);
    return MLS_OK;
}

/* Return whether a task has failed, so that no further shard is sampled. */
static bool has_failed(sample_state *s)
{
    pthread_mutex_lock(&s->lock);
    const bool failed = s->failed != SIZE_MAX;
    pthread_mutex_unlock(&s->lock);
    return failed;
}

/* Thread function: sample candidate `index`, and keep its frames if the samples shrink
 * enough. Only this task modifies the shard. The failure of the first shard in order is
 * kept. */
static void sample_task(void *context, size_t index)
{
    sample_state *s = context;
    const size_t number = s->shards[index];
    mls_planned *planned = &s->plan->planned[number];
    mls_status st;
    bool good = false;
    if (has_failed(s)) {
        return;
    }
    unsigned char *buffer = mls_realloc(NULL, 3, SAMPLE);
    mls_code code = buffer == NULL ? mls_fail(&st, MLS_E_MEMORY, "no memory for a sample")
                                   : set_frames(s->plan, planned,
                                                &s->plan->index.shards[number], &st);
    if (code == MLS_OK) {
        code = test_samples(s->plan, planned, buffer, &good, &st);
        if (code != MLS_OK || !good) {
            unset_frames(planned);
        }
    }
    mls_free(buffer);
    if (code != MLS_OK) {
        mls_status_name(&st, planned->key.data, planned->key.length);
        pthread_mutex_lock(&s->lock);
        if (number < s->failed) { /* report the first in order */
            s->failed = number;
            s->why = st;
        }
        pthread_mutex_unlock(&s->lock);
    }
}

/* Return whether shard `number` is sampled: it is written to its own file and is not
 * tiny. Shards that share a file are not compressed, since their offsets are fixed at
 * layout. */
static bool is_candidate(const mls_write_plan *plan, size_t number)
{
    const size_t bytes =
        mls_planned_bytes(&plan->planned[number], &plan->index.shards[number]);
    return bytes >= LEAST && bytes >= plan->job->pack_below;
}

/* Sample every shard that is written to its own file, in parallel. */
mls_code mls_write_plan_compress(mls_write_plan *plan, mls_status *st)
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
    sample_state s = {.plan = plan, .shards = shards, .failed = SIZE_MAX};
    pthread_mutex_init(&s.lock, NULL);
    mls_pool_run(plan->job->pool, sample_task, &s, count);
    pthread_mutex_destroy(&s.lock);
    mls_free(shards);
    if (s.failed != SIZE_MAX) {
        *st = s.why;
    }
    return s.failed != SIZE_MAX ? st->code : MLS_OK;
}

/* ---- compression ---- */

/* Report `bytes` finished bytes. MLS_E_STOPPED: the callback wants to stop. */
static mls_code report_progress(const mls_shard_job *job, size_t bytes, mls_status *st)
{
    return mls_progress_report(job->progress, bytes)
               ? MLS_OK
               : mls_fail(st, MLS_E_STOPPED, "stopped");
}

/* Compress the frames of a shard into `to` and set their `ends`; `*out` is the
 * compressed length. Stops as soon as the gain is too small, so that the output exceeds
 * three quarters by one frame at most. `buffer` has space for two frames. All bytes are
 * reported as done. MLS_E_STOPPED; errors of the codec. */
static mls_code encode_frames(const mls_write_plan *plan, mls_planned *planned,
                              unsigned char *buffer, unsigned char *to, size_t *out,
                              mls_status *st)
{
    const mls_shard_job *job = plan->job;
    mls_compressed_frames *frames = planned->frames;
    mls_code code = MLS_OK;
    size_t end = 0, first = 0;
    for (size_t i = 0; code == MLS_OK && first * frames->item < frames->bytes; i++) {
        const size_t bytes = mls_compressed_frame_bytes(frames, i),
                     count = bytes / frames->item;
        size_t coded = 0;
        const unsigned char *from = packed_elements(plan, planned, first, count, buffer);
        code = mls_compressed_frame_encode(job->codecs, frames->codec, frames->item, from,
                                           bytes, buffer + MLS_FRAME_BYTES, to + end,
                                           &coded, st);
        end += coded;
        first += count;
        frames->ends[i] = end;
        if (code == MLS_OK) {
            code = report_progress(job, bytes, st);
        }
        if (!saves_enough(end, frames->bytes)) {
            break;
        }
    }
    /* the rest is written uncompressed, but counts as done here */
    const size_t left = frames->bytes - first * frames->item;
    *out = end;
    return code == MLS_OK && left > 0 ? report_progress(job, left, st) : code;
}

/* Compress the whole shard into a new buffer of three quarters of its size plus one
 * frame; unused pages of it are never touched. */
mls_code mls_planned_encode(mls_write_plan *plan, size_t number, unsigned char **out,
                            mls_status *st)
{
    mls_planned *planned = &plan->planned[number];
    mls_index_shard *shard = &plan->index.shards[number];
    const size_t bytes = planned->frames->bytes, file = planned->new_layer->file;
    size_t coded = 0;
    unsigned char *buffer = mls_realloc(NULL, 2, MLS_FRAME_BYTES);
    unsigned char *to = mls_realloc(NULL, bytes - bytes / 4 + MLS_FRAME_BYTES, 1);
    mls_code code = buffer == NULL || to == NULL
                        ? mls_fail(st, MLS_E_MEMORY, "no memory to code %zu bytes", bytes)
                        : encode_frames(plan, planned, buffer, to, &coded, st);
    mls_free(buffer);
    if (code == MLS_OK && saves_enough(coded, bytes)) {
        /* the file is laid out after this, with the new length */
        planned->new_layer->bytes = coded;
        *out = to;
        return MLS_OK;
    }
    mls_free(to);
    if (code == MLS_OK) {
        /* the index referenced a layer, and the file belonged to that layer */
        unset_frames(planned);
        shard->layers = planned->layers;
        shard->file = planned->layers == NULL ? file : shard->file;
        *out = NULL;
    }
    return code;
}
