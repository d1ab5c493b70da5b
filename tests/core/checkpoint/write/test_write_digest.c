/* Digests that a save records: of parts of every layout, in packed and strided memory. */
#include "support/shards.h"
#include "support/tensors.h"

enum { ROWS = 300, COLUMNS = 70, PARTS = 6, BYTES = 8 * ROWS * COLUMNS };

static const size_t shape[] = {ROWS, COLUMNS};
static mls_digest_keys keys;
static unsigned char *data;

BEFORE_EACH
{
    mls_digest_keys_init(&keys);
    data = noise(BYTES);
    REQUIRE(data != NULL);
}

AFTER_EACH
{
    empty_pool();
    free(data);
}

/* The digest of the whole matrix. */
static mls_digest digest_of(const mls_tensor *matrix)
{
    const size_t starts[] = {0, 0};
    mls_digest sum = {{0}};
    const mls_digester digester = {.keys = &keys, .cpu = MLS_CPU_SCALAR};
    CHECK(mls_digest_part(&digester, matrix, shape, starts, &sum, &status) == MLS_OK);
    return sum;
}

/* Save all parts of a matrix, each in memory of its own, and set `*sum` to the digest
 * that the merged index has of it. */
static void record(mls_layout layout, mls_digest *sum)
{
    const size_t parts = parts_of(layout);
    unsigned char *memory[PARTS];
    mls_shard_item items[PARTS];
    const mls_part whole = part_at((mls_layout){0}, 2, shape, 0);
    for (size_t i = 0; i < parts; i++) {
        const mls_part part = part_at(layout, 2, shape, i);
        mls_overlap overlap;
        mls_run run;
        memory[i] = malloc(mls_part_count(&part) * 8 + 1);
        REQUIRE(memory[i] != NULL);
        mls_overlap_init(&overlap, &part, &whole);
        while (mls_overlap_next(&overlap, &run)) {
            memcpy(memory[i] + 8 * run.a, data + 8 * run.b, 8 * run.count);
        }
        items[i] = item_of("w", NULL, MLS_F64, 2, shape, memory[i]);
        items[i].layout = layout;
        items[i].part = i;
    }
    mls_shards_written written;
    mls_shard_job job = job_of(items, parts, generations[0], NULL);
    job.digest_keys = &keys;
    mls_index index = write_all(&job, &written);
    const mls_index *one = &index, *disagreeing;
    mls_merged_index merged = {0};
    CHECK(mls_merged_index_init(&merged, &one, 1, &disagreeing, &status) == MLS_OK);
    REQUIRE(merged.tensor_count == 1);
    CHECK(mls_merged_index_digest(&merged, &merged.tensors[0], sum));
    mls_merged_index_fini(&merged);
    mls_index_fini(&index);
    for (size_t i = 0; i < parts; i++) {
        free(memory[i]);
    }
    empty_pool();
}

TEST(parts_of_every_layout_add_up_to_the_whole)
{
    const mls_layout layouts[] = {{0},
                                  cut(0, 4),
                                  cut(1, 3),
                                  cut(MLS_LAYOUT_FLAT, 6),
                                  cut_twice(1, 2, MLS_LAYOUT_FLAT, 3),
                                  cut_twice(0, 2, 1, 3)};
    const mls_tensor matrix = matrix_of(data, MLS_F64, ROWS, COLUMNS);
    const mls_digest whole = digest_of(&matrix);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        mls_digest sum = {{1, 1}};
        record(layouts[i], &sum);
        CHECK(memcmp(&sum, &whole, sizeof sum) == 0);
    }
}

TEST(strided_memory_has_the_digest_of_its_elements)
{
    const mls_tensor turned = transposed_of(data, MLS_F64, ROWS, COLUMNS);
    const mls_digest whole = digest_of(&turned);
    mls_shard_item item = item_of("w", NULL, MLS_F64, 2, shape, NULL);
    mls_shards_written written;
    item.strided = &turned;
    mls_shard_job job = job_of(&item, 1, generations[0], NULL);
    job.digest_keys = &keys;
    mls_index index = write_all(&job, &written);
    REQUIRE(index.shard_count == 1);
    CHECK(index.shards[0].has_digest);
    CHECK(memcmp(&index.shards[0].digest, &whole, sizeof whole) == 0);
    mls_index_fini(&index);
}

/* A part without a recorded digest, or a missing one, leaves the tensor without. */
TEST(digest_of_an_incomplete_tensor_is_unknown)
{
    const mls_shard_item whole = item_of("w", NULL, MLS_F64, 2, shape, data);
    const mls_shard_item half = part_of(whole, 0, 2, 1);
    const mls_shard_item *const items[] = {&whole, &half};
    for (size_t i = 0; i < 2; i++) {
        mls_shards_written written;
        mls_shard_job job = job_of(items[i], 1, generations[0], NULL);
        job.digest_keys = i == 0 ? NULL : &keys;
        mls_index index = write_all(&job, &written);
        const mls_index *one = &index, *disagreeing;
        mls_merged_index merged = {0};
        mls_digest sum = {{1, 2}};
        CHECK(mls_merged_index_init(&merged, &one, 1, &disagreeing, &status) == MLS_OK);
        REQUIRE(merged.tensor_count == 1);
        CHECK(!mls_merged_index_digest(&merged, &merged.tensors[0], &sum));
        CHECK(sum.lanes[0] == 1 && sum.lanes[1] == 2);
        mls_merged_index_fini(&merged);
        mls_index_fini(&index);
        empty_pool();
    }
}
