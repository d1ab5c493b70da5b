/* saved_tensor: one float32 matrix, saved again and again; for the tests of what a save
 * writes. */
#ifndef MLS_SAVED_TENSOR_H
#define MLS_SAVED_TENSOR_H

#include "support/shards.h"

enum { COLUMNS = 64, ROW_BYTES = 4 * COLUMNS };

/* The memory of the tensor and its committed state. */
typedef struct saved_tensor {
    unsigned char *data;
    mls_shard_item item;
    mls_index index; /* as committed last */
    mls_shards_written written;
    size_t saves;
    char generation[MLS_GENERATION_DIGITS + 1]; /* of the next save */
} saved_tensor;

static saved_tensor t; /* of the current test */

static inline void begin_saves(const size_t *shape)
{
    t = (saved_tensor){.data = calloc(shape[0], ROW_BYTES)};
    REQUIRE(t.data != NULL);
    t.item = item_of("w", "m", MLS_F32, 2, shape, t.data);
}

static inline void end_saves(void)
{
    mls_index_fini(&t.index);
    empty_pool();
    free(t.data);
}

/* A save that compares with the last one. */
static inline mls_shard_job next_job(void)
{
    snprintf(t.generation, sizeof t.generation, "%016zx", ++t.saves);
    mls_shard_job job =
        job_of(&t.item, 1, t.generation, t.index.shard_count == 0 ? NULL : &t.index);
    job.pack_below = 1000;
    return job;
}

/* Save; the next save compares with the state of this one. */
static inline const mls_index_shard *save_job(const mls_shard_job *job)
{
    mls_index after = write_all(job, &t.written);
    mls_index_fini(&t.index);
    t.index = after;
    return after.shard_count == 1 ? &t.index.shards[0] : NULL;
}

#endif
