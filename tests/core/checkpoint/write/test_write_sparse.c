/* Zero rows and changed rows: which of them are written, and which layers stay. */
#include "checkpoint/write/write_plan.h"
#include "support/saved_tensor.h"

enum { ROWS = 1000, BYTES = ROWS * ROW_BYTES };

static const size_t matrix[] = {ROWS, COLUMNS};

BEFORE_EACH
{
    begin_saves(matrix);
}

AFTER_EACH
{
    end_saves();
}

static void fill(size_t first, size_t count)
{
    memset(t.data + first * ROW_BYTES, (int)(t.saves + 1), count * ROW_BYTES);
}

/* Save; the next save compares with the state of this one. */
static const mls_index_shard *save(bool sparse, bool incremental)
{
    mls_shard_job job = next_job();
    job.sparse = sparse;
    job.incremental = incremental;
    return save_job(&job);
}

/* Whether the stored data, read layer by layer as the index describes, equal the
 * memory. */
static bool is_stored(void)
{
    const mls_index_shard *shard = &t.index.shards[0];
    unsigned char *bytes = calloc(1, BYTES);
    bool good = bytes != NULL;
    for (size_t i = 0; good && i < mls_index_place_count(shard); i++) {
        const mls_layer place = mls_index_place(shard, i);
        const mls_row_range all = {.count = BYTES / 4};
        const mls_row_range *runs = place.row == 0 ? &all : place.stored;
        size_t length;
        unsigned char *file = read_pool_file(t.index.files[place.file].path, &length);
        good = file != NULL && place.offset + place.bytes <= length &&
               crc->update(0, file + place.offset, place.bytes) == place.crc;
        for (size_t j = 0; good && j < (place.row == 0 ? 1 : place.stored_count); j++) {
            memcpy(bytes + runs[j].begin * 4, file + place.offset + runs[j].at * 4,
                   runs[j].count * 4);
        }
        mls_free(file);
    }
    good = good && memcmp(bytes, t.data, BYTES) == 0;
    free(bytes);
    return good;
}

/* ---- zeros ---- */

/* ---- rows that changed ---- */

/* Rows hidden by newer layers do not count, and a file without visible rows is
 * dropped. */
TEST(hidden_overlays_are_dropped)
{
    fill(0, ROWS);
    (void)save(false, true);
    for (size_t i = 0; i < 12; i++) { /* the same rows in every save */
        fill(100, 10);
        const mls_index_shard *shard = save(false, true);
        REQUIRE(shard != NULL && shard->layers != NULL);
        CHECK(shard->layers->count <= 3 && t.written.new_bytes == 10 * ROW_BYTES);
        CHECK(is_stored());
    }
}

/* All layers together take at most twice the size of the shard. */
TEST(overlays_never_exceed_the_shard_size)
{
    fill(0, ROWS);
    (void)save(false, true);
    fill(0, 500);
    (void)save(false, true);
    fill(250, 500);
    const mls_index_shard *shard = save(false, true);
    REQUIRE(shard != NULL && shard->layers != NULL);
    CHECK(mls_index_stored_bytes(shard) == 2 * (uint64_t)BYTES && is_stored());
    fill(400, 1);
    shard = save(false, true);
    REQUIRE(shard != NULL);
    CHECK(shard->layers == NULL && is_stored());
}

TEST(overlay_covers_omitted_rows)
{
    fill(10, 5);
    (void)save(true, true);
    fill(12, 1);
    fill(900, 2);
    const mls_index_shard *shard = save(true, true);
    REQUIRE(shard != NULL && shard->layers != NULL && shard->layers->count == 2);
    CHECK(t.written.new_bytes == 3 * ROW_BYTES && is_stored());
    memset(t.data, 0, BYTES);
    fill(3, 1); /* 7 rows became zero, 1 is filled */
    shard = save(true, true);
    REQUIRE(shard != NULL && shard->layers != NULL && shard->layers->count == 3);
    CHECK(t.written.new_bytes == 8 * ROW_BYTES && is_stored());
    shard = save(true, true); /* the new layer hides all others */
    REQUIRE(shard != NULL && shard->layers != NULL && shard->layers->count == 1);
    CHECK(t.written.new_bytes == 0 && t.index.file_count == 1 && is_stored());
}

TEST(missing_overlay_file_is_rewritten)
{
    fill(0, ROWS);
    (void)save(false, true);
    fill(10, 1);
    (void)save(false, true);
    const mls_layer *layer = &t.index.shards[0].layers->list[1];
    REQUIRE(unlinkat(pool_fd, t.index.files[layer->file].path, 0) == 0);
    t.item.version = 2; /* the caller's version is unchanged */
    const mls_index_shard *shard = save(false, true);
    REQUIRE(shard != NULL);
    CHECK(shard->layers == NULL && t.written.new_bytes == BYTES && is_stored());
}

/* The version says that a shard changed; the changed rows are found all the same. */
TEST(changed_version_still_writes_rows)
{
    fill(0, ROWS);
    t.item.version = 5;
    (void)save(false, true);
    fill(10, 1);
    t.item.version = 6;
    const mls_index_shard *shard = save(false, true);
    REQUIRE(shard != NULL);
    CHECK(t.written.new_bytes == ROW_BYTES && shard->version == 6 && is_stored());
    t.item.version = 7; /* the content did not change */
    shard = save(false, true);
    REQUIRE(shard != NULL && shard->layers != NULL);
    CHECK(t.written.new_bytes == 0 && shard->version == 7 && is_stored());
}

/* ---- many shards ---- */

enum { SMALL = 300 };

/* Small shards are stored whole or not at all; layers share segments like shards, and are
 * dropped with them. */
TEST(small_shards_and_overlays_share_files)
{
    static const size_t four[] = {4};
    static float values[SMALL][4];
    static char names[SMALL][8];
    mls_shard_item items[SMALL];
    mls_shards_written written;
    for (size_t i = 0; i < SMALL; i++) {
        snprintf(names[i], sizeof names[i], "p%03zu", i);
        values[i][0] = i % 3 == 0 ? 1.0F : 0.0F;
        items[i] = item_of(names[i], "m", MLS_F32, 1, four, values[i]);
    }
    mls_shard_job job = job_of(items, SMALL, generations[0], NULL);
    job.sparse = true;
    job.incremental = true;
    mls_index first = write_all(&job, &written);
    CHECK(written.new_shards == SMALL / 3 && written.new_bytes == SMALL / 3 * 16);
    CHECK(written.new_files == 1 && first.file_count == 1);
    values[3][0] = 0; /* was not zero, */
    values[4][0] = 2; /* was zero */
    job.generation = generations[1];
    job.before = &first;
    mls_index second = write_all(&job, &written);
    CHECK(written.new_shards == 1 && written.new_bytes == 16);
    REQUIRE(second.shard_count == SMALL);
    CHECK(second.shards[3].layers != NULL && second.shards[3].layers->count == 0);
    CHECK(second.shards[4].layers == NULL && second.shards[4].version == 2);
    mls_index_fini(&first);
    mls_index_fini(&second);
}

/* A segment of layers that is mostly dead is dropped: its live shards are written again,
 * even unchanged ones. */
TEST(mostly_dead_overlay_segments_are_rewritten)
{
    enum { COUNT = 4, TURNS = 4 };
    static const char *const names[COUNT] = {"a", "b", "c", "d"};
    static const size_t changed[TURNS] = {0, 4, 3, 0}; /* rows, the last ones */
    unsigned char *data = calloc(COUNT, BYTES);
    mls_shard_item items[COUNT];
    mls_shards_written written;
    mls_index index = {0};
    REQUIRE(data != NULL);
    for (size_t i = 0; i < COUNT; i++) {
        items[i] = item_of(names[i], NULL, MLS_F32, 2, matrix, data + i * BYTES);
    }
    for (size_t turn = 0; turn < TURNS; turn++) {
        for (size_t i = COUNT - changed[turn]; i < COUNT; i++) {
            memset(data + i * BYTES + ROW_BYTES * 5, (int)turn, ROW_BYTES);
        }
        mls_index before = index;
        mls_shard_job job =
            job_of(items, COUNT, generations[turn], turn == 0 ? NULL : &before);
        job.incremental = true;
        job.pack_below = 1000;
        index = write_all(&job, &written);
        mls_index_fini(&before);
        REQUIRE(index.shard_count == COUNT);
        CHECK(turn == 0 || turn == 3 || written.new_bytes == changed[turn] * ROW_BYTES);
        CHECK(turn == 0 || index.file_count == COUNT + turn - turn / 3 * 2);
    }
    /* after the third turn three of four layers in the second's segment are hidden */
    CHECK(index.shards[0].layers == NULL && index.shards[0].version == 2);
    CHECK(written.new_bytes == BYTES && written.new_shards == 1);
    for (size_t i = 1; i < COUNT; i++) {
        const mls_layers *layers = index.shards[i].layers;
        CHECK(layers != NULL && layers->count == 2 && index.shards[i].version == 3);
    }
    mls_index_fini(&index);
    free(data);
}

/* ---- progress ---- */

TEST(omitted_bytes_count_as_progress)
{
    watcher w = {.allowed = 1 << 30};
    const mls_progress progress = {watch, &w};
    fill(0, 10);
    mls_shard_job job = job_of(&t.item, 1, generations[0], NULL);
    job.sparse = true;
    job.progress = &progress;
    mls_index first = write_all(&job, &t.written);
    CHECK(atomic_load(&w.bytes) == BYTES);
    fill(0, 1);
    job.incremental = true;
    job.generation = generations[1];
    job.before = &first;
    atomic_store(&w.bytes, 0);
    t.index = write_all(&job, &t.written);
    CHECK(atomic_load(&w.bytes) == BYTES);
    atomic_store(&w.allowed, 0);
    fill(0, 2);
    job.generation = generations[2];
    CHECK_FAILS(mls_shards_write(&job, &t.written, &status), MLS_E_STOPPED, "stopped");
    mls_index_fini(&first);
}
