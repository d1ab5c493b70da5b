/* Indexes of four ranks, made without files, and their merged index. */
#ifndef MLS_TEST_RANK_INDEXES_H
#define MLS_TEST_RANK_INDEXES_H

#include "checkpoint/ranks/merged_index.h"
#include "support/parts.h"
#include "support/text.h"

#include <stdint.h>

enum { RANKS = 4, MOST = 6, PAYLOAD = 4096 };

static const size_t matrix[] = {8, 6}, hundred[] = {100};

/* The shards that one rank stored, added in order. */
typedef struct rank {
    mls_index index;
    mls_index_file file;
    mls_index_shard shards[MOST];
} rank;

static rank rank_of(uint64_t number)
{
    rank r = {.index = {.rank = number, .world_size = RANKS, .file_count = 1}};
    snprintf(r.file.path, sizeof r.file.path, "params/%d.safetensors", (int)number);
    r.file.bytes = PAYLOAD;
    return r;
}

static void add(rank *r, const char *name, mls_dtype dtype, int dims, const size_t *shape,
                mls_layout layout, size_t part)
{
    mls_index_shard *shard = &r->shards[r->index.shard_count++];
    *shard = (mls_index_shard){.id = {.name = text(name)},
                               .dtype = dtype,
                               .rank = dims,
                               .shape = shape,
                               .layout = layout,
                               .part = part,
                               .version = 1,
                               .offset = r->file.bytes};
    const mls_part full_part = mls_index_part(shard);
    shard->bytes = mls_part_count(&full_part) * mls_dtype_of(dtype)->item_bytes;
    r->file.bytes += shard->bytes;
}

/* The index of a rank, which must not move. */
static const mls_index *index_of(rank *r)
{
    r->index.files = &r->file;
    r->index.shards = r->shards;
    return &r->index;
}

static mls_tensor_id id_of(const char *name)
{
    return (mls_tensor_id){.name = text(name)};
}

/* Four ranks, each with a row part of "w"; "only.0" .. "only.3" are on one rank each. */
static rank ranks[RANKS];
static const mls_index *indexes[RANKS];
static mls_merged_index merged;
static const mls_index *failed; /* by the last mls_merged_index_init */

BEFORE_EACH
{
    static const char *const names[] = {"only.0", "only.1", "only.2", "only.3"};
    for (size_t i = 0; i < RANKS; i++) {
        ranks[i] = rank_of(i);
        add(&ranks[i], names[i], MLS_U8, 1, hundred, (mls_layout){0}, 0);
        add(&ranks[i], "w", MLS_F32, 2, matrix, cut(0, 4), i);
        indexes[i] = index_of(&ranks[i]);
    }
}

AFTER_EACH
{
    mls_merged_index_fini(&merged);
}

#endif
