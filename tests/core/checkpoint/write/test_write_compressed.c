/* Compressed writes with a toy codec: compressible data are compressed, other data are
 * stored unchanged, and failures leave no file. */
#include "checkpoint/ranks/requested_part.h"
#include "checkpoint/write/write_plan.h"
#include "support/random_bytes.h"
#include "support/saved_tensor.h"
#include "support/toy_codec.h"

enum {
    MIB = 1 << 20,
    ROWS = 20000,
    BYTES = ROWS * ROW_BYTES /* 4.9 MiB */
};

static const size_t matrix[] = {ROWS, COLUMNS};

static toy codec; /* of the current test */

static void begin(void)
{
    begin_saves(matrix);
    toy_begin(&codec);
    for (size_t i = 0; i < BYTES; i++) {
        t.data[i] = (unsigned char)(i / 4096); /* runs */
    }
}

BEFORE_EACH
{
    begin();
}

AFTER_EACH
{
    end_saves();
}

/* For the next case of a test. */
static void begin_again(void)
{
    end_saves();
    begin();
}

static void fill_noise(unsigned char *to, size_t bytes)
{
    fill_random(to, bytes, bytes);
}

/* A save that compresses, and compares with the last one. */
static mls_shard_job next_coded_job(void)
{
    mls_shard_job job = next_job();
    job.compress = true;
    job.codec = MLS_ZSTD;
    job.codecs = &codec.codecs;
    return job;
}

static const mls_index_shard *save(bool compress, bool sparse, bool incremental)
{
    mls_shard_job job = next_coded_job();
    job.compress = compress;
    job.sparse = sparse;
    job.incremental = incremental;
    return save_job(&job);
}

static bool is_stored(void)
{
    return reads_back(&t.index, &t.item, t.data, &codec.codecs);
}

static const mls_layer *layer_of(const mls_index_shard *shard, size_t number)
{
    return shard == NULL || shard->layers == NULL || number >= shard->layers->count
               ? NULL
               : &shard->layers->list[number];
}

/* ---- the decision to compress ---- */

TEST(incompressible_shards_are_stored_raw)
{
    fill_noise(t.data, BYTES);
    const mls_index_shard *shard = save(true, false, false);
    REQUIRE(shard != NULL && shard->layers == NULL);
    CHECK(t.written.new_bytes == BYTES && is_stored());
    CHECK(atomic_load(&codec.encoded) == 3); /* only samples were encoded */
}

/* The first, middle and last 128 KiB, which are sampled, differ from the rest. */
static void fill_behind_samples(void)
{
    const size_t half = BYTES / 2, room = 100 << 10;
    fill_noise(t.data + 2 * room, half - 4 * room);
    fill_noise(t.data + half + 2 * room, half - 4 * room);
}

TEST(shard_is_stored_raw_if_samples_mispredict)
{
    watcher w = {.allowed = 1 << 30};
    const mls_progress progress = {watch, &w};
    fill_behind_samples();
    mls_shard_job job = next_coded_job();
    job.progress = &progress;
    const mls_index_shard *shard = save_job(&job);
    REQUIRE(shard != NULL && shard->layers == NULL);
    CHECK(t.written.new_bytes == BYTES && t.written.new_files == 1 && is_stored());
    CHECK(t.index.file_count == 1 && shard->file == 0);
    CHECK(atomic_load(&codec.encoded) > 3); /* compression was tried, */
    CHECK(atomic_load(&w.bytes) == BYTES);  /* and progress counts the bytes once */
}

/* The same for a layer of rows: rows left out stay left out. */
TEST(incompressible_rows_become_a_raw_overlay)
{
    memset(t.data, 0x77, BYTES);
    const size_t held_bytes = ROWS / 4 * ROW_BYTES; /* 1.2 MiB */
    fill_noise(t.data + (150 << 10), 380 << 10);    /* between the samples */
    fill_noise(t.data + (720 << 10), 360 << 10);
    memset(t.data + held_bytes, 0, BYTES - held_bytes);
    const mls_index_shard *shard = save(true, true, false);
    const mls_layer *layer = layer_of(shard, 0);
    REQUIRE(layer != NULL && shard->layers->count == 1);
    CHECK(atomic_load(&codec.encoded) > 3);
    CHECK(layer->frames == NULL && layer->row == COLUMNS && layer->bytes == held_bytes);
    CHECK(t.written.new_bytes == held_bytes && is_stored() && mls_index_is_sparse(shard));
}

TEST(non_zero_rows_are_compressed)
{
    for (size_t i = 0; i < ROWS; i++) {
        memset(t.data + i * ROW_BYTES, i % 7 < 4 ? 0 : (int)(1 + i % 250), ROW_BYTES);
    }
    const mls_index_shard *shard = save(true, true, false);
    const mls_layer *layer = layer_of(shard, 0);
    REQUIRE(layer != NULL && layer->frames != NULL && shard->layers->count == 1);
    const size_t held_bytes =
        (ROWS / 7 * 3 + (ROWS % 7 > 4 ? ROWS % 7 - 4 : 0)) * ROW_BYTES;
    CHECK(layer->row == COLUMNS && layer->frames->bytes == held_bytes &&
          layer->bytes < held_bytes / 4);
    CHECK(mls_index_is_sparse(shard) && is_stored());
}

/* Sizes on both sides of every limit. */
TEST(small_shards_are_not_compressed)
{
    static const size_t sizes[] = {
        (16 << 10) - 1,  16 << 10, (16 << 10) + 1, 3 * (128 << 10) - 1,
        3 * (128 << 10), MIB,      MIB + 1};
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    static const char *const names[COUNT] = {"a", "b", "c", "d", "e", "f", "g"};
    unsigned char *data = malloc(2 * MIB);
    mls_shard_item items[COUNT];
    mls_shards_written written;
    REQUIRE(data != NULL);
    memset(data, 5, 2 * MIB);
    for (size_t below = 0; below <= MIB; below += MIB) {
        for (size_t i = 0; i < COUNT; i++) {
            items[i] = item_of(names[i], NULL, MLS_U8, 1, &sizes[i], data);
        }
        mls_shard_job job = job_of(items, COUNT, generations[0], NULL);
        job.pack_below = below;
        job.compress = true;
        job.codecs = &codec.codecs;
        mls_index index = write_all(&job, &written);
        REQUIRE(index.shard_count == COUNT);
        for (size_t i = 0; i < COUNT; i++) {
            const bool coded = sizes[i] >= (below > 0 ? below : 16 << 10);
            const mls_layer *layer = layer_of(&index.shards[i], 0);
            CHECK(coded ? layer != NULL && layer->frames != NULL : layer == NULL);
            CHECK(layer == NULL || layer->frames->codec == MLS_ZLIB);
            CHECK(reads_back(&index, &items[i], data, &codec.codecs));
        }
        mls_index_fini(&index);
        empty_pool();
    }
    free(data);
}

/* ---- repeated saves ---- */

TEST(without_codecs_compressed_shards_are_rewritten)
{
    (void)save(true, false, false);
    for (int incremental = 0; incremental < 2; incremental++) {
        mls_shard_job job = next_coded_job();
        job.compress = false;
        job.codecs = NULL;
        job.incremental = incremental != 0;
        mls_index after = write_all(&job, &t.written);
        REQUIRE(after.shard_count == 1);
        CHECK(after.shards[0].layers == NULL && t.written.new_bytes == BYTES);
        CHECK(reads_back(&after, &t.item, t.data, NULL));
        mls_index_fini(&after);
    }
    /* if the caller's version is unchanged, the codec is not called */
    t.item.version = 1;
    mls_shard_job job = next_coded_job();
    job.codecs = NULL;
    job.compress = false;
    mls_index after = write_all(&job, &t.written);
    CHECK(t.written.new_bytes == 0 && layer_of(after.shards, 0) != NULL);
    mls_index_fini(&after);
}

TEST(damaged_base_is_rewritten_without_overlay)
{
    for (int how = 0; how < 3; how++) {
        fill_noise(t.data + MIB, MIB); /* a frame that is stored uncompressed */
        const mls_index_shard *shard = save(true, false, false);
        const mls_layer *layer = layer_of(shard, 0);
        REQUIRE(layer != NULL && layer->frames != NULL);
        const char *path = t.index.files[layer->file].path;
        if (how == 0) { /* a byte of a row that changes anyway */
            const uint64_t at = layer->offset + layer->frames->ends[0] + 700 * ROW_BYTES;
            CHECK(flip(path, at, 1));
            memset(t.data + MIB + 690 * ROW_BYTES, 0x44, 20 * ROW_BYTES);
        } else if (how == 1) {
            CHECK(set_length(path, layer->offset + layer->bytes - 1));
        } else {
            CHECK(unlinkat(pool_fd, path, 0) == 0);
        }
        shard = save(false, false, true);
        REQUIRE(shard != NULL);
        CHECK(shard->layers == NULL && t.written.new_bytes == BYTES && is_stored());
        begin_again();
    }
}

/* ---- failures ---- */

static const mls_code codes[] = {MLS_E_FORMAT, MLS_E_MEMORY, MLS_E_VALUE, MLS_E_STOPPED};

/* Errors in the first sample, the last one, the first frame, the last one. */
TEST(codec_errors_abort_the_save)
{
    static const int calls[] = {1, 3, 4, 8};
    for (size_t i = 0; i < 16; i++) {
        const mls_shard_job job = next_coded_job();
        toy_begin(&codec);
        codec.failure = codes[i % 4];
        codec.encode_fails_at = calls[i / 4];
        t.written.shard_count = 77;
        CHECK(mls_shards_write(&job, &t.written, &status) == codes[i % 4]);
        CHECK_TEXT(status.text, "zstd is broken");
        CHECK_TEXT(status.name, "w.m");
        CHECK(pool_files() == 0 && t.written.shard_count == 77);
        CHECK(atomic_load(&codec.encoded) == calls[i / 4]);
    }
    toy_begin(&codec);
    CHECK(save(true, false, false) != NULL && is_stored()); /* all 8 calls */
    CHECK(atomic_load(&codec.encoded) == 8);
}

/* If the codec finds an error in stored bytes, they count as changed; a stop or a lack of
 * memory is no such error. */
TEST(read_errors_while_comparing_are_reported)
{
    for (size_t i = 0; i < 8; i += EVERY(3)) {
        const bool ends = codes[i % 4] == MLS_E_MEMORY || codes[i % 4] == MLS_E_STOPPED;
        (void)save(true, false, false);
        mls_shard_job job = next_coded_job();
        job.incremental = i / 4 == 1;
        codec.failure = codes[i % 4];
        codec.decode_fails_at = 2;
        const mls_code code = mls_shards_write(&job, &t.written, &status);
        codec.decode_fails_at = 0;
        CHECK(code == (ends ? codes[i % 4] : MLS_OK));
        CHECK(pool_files() == (ends ? 2 : 4));
        if (code == MLS_OK) {
            mls_index after = read_index(t.written.path);
            CHECK(after.shard_count == 1 && after.shards[0].version == 2);
            CHECK(reads_back(&after, &t.item, t.data, &codec.codecs));
            mls_index_fini(&after);
        }
        CHECK(is_stored()); /* the previous state */
        begin_again();
    }
}

TEST(read_errors_while_compressing_are_reported)
{
    const mls_part to = part_at((mls_layout){0}, 2, matrix, 0);
    const mls_index *const index = &t.index, *disagreeing;
    unsigned char *got = malloc(BYTES);
    mls_merged_index merged;
    mls_stored_shard stored[1];
    mls_part parts[1];
    mls_read_piece pieces[1];
    size_t count = 0, failed;
    REQUIRE(t.data != NULL && got != NULL);
    REQUIRE(save(true, false, false) != NULL);
    REQUIRE(mls_merged_index_init(&merged, &index, 1, &disagreeing, &status) == MLS_OK);
    REQUIRE(mls_requested_part_pieces(&merged, &merged.tensors[0], &to, got,
                                      &(mls_read_scratch){stored, parts, pieces}, &count,
                                      &status) == MLS_OK);
    mls_read_request request = {.folder = pool_fd,
                                .pieces = pieces,
                                .count = count,
                                .crc = crc,
                                .codecs = &codec.codecs,
                                .pool = four_threads};
    for (size_t i = 0; i < 8; i++) {
        toy_begin(&codec);
        codec.failure = codes[i % 4];
        codec.decode_fails_at = i / 4 == 0 ? 1 : 4;
        failed = 77;
        CHECK(mls_shards_read(&request, &failed, &status) == codes[i % 4]);
        CHECK(failed == 0);
        CHECK_TEXT(status.name, "w.m");
        CHECK(status.has_offset == (codes[i % 4] == MLS_E_FORMAT));
        CHECK(strstr(status.text, "tensor 'w.m', file 'optim_state/") == status.text);
        CHECK(codes[i % 4] == MLS_E_STOPPED ||
              strstr(status.text, "zstd is broken") != NULL);
    }
    request.codecs = NULL;
    CHECK(mls_shards_read(&request, &failed, &status) == MLS_E_VALUE);
    CHECK(strstr(status.text, "no decoder for zstd is available") != NULL);
    mls_merged_index_fini(&merged);
    free(got);
}

TEST(progress_stops_the_coding)
{
    for (int allowed = 0; allowed < 8; allowed++) {
        watcher w = {.allowed = allowed};
        const mls_progress progress = {watch, &w};
        mls_shard_job job = next_coded_job();
        job.progress = &progress;
        const mls_code code = mls_shards_write(&job, &t.written, &status);
        CHECK(code == (allowed > 5 ? MLS_OK : MLS_E_STOPPED)); /* of five frames each */
        CHECK(allowed < 6 || atomic_load(&w.bytes) == BYTES);
        CHECK(pool_files() == (allowed > 5 ? 2 : 0));
        empty_pool();
    }
}

/* ---- many ---- */

enum { MANY = 40 };

/* Any number of threads writes the same files, byte for byte, as one thread. */
TEST(thread_count_does_not_change_the_files)
{
    static char names[MANY][8];
    static size_t sizes[MANY];
    unsigned char *data = malloc(3 * MIB);
    mls_shard_item items[MANY];
    uint32_t sums[2] = {0};
    REQUIRE(data != NULL);
    fill_noise(data, 3 * MIB);
    memset(data, 9, 2 * MIB);
    for (size_t i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof names[i], "%02zu", i);
        sizes[i] = (100 << 10) + 7000 * i + (i % 8 == 0 ? MIB : 0);
        items[i] = item_of(names[i], i % 2 ? "m" : NULL, MLS_U8, 1, &sizes[i],
                           data + i * 70000 % (2 * MIB - 200000));
    }
    for (size_t turn = 0; turn < 2; turn++) {
        mls_shards_written written;
        mls_shard_job job = job_of(items, MANY, generations[0], NULL);
        job.pack_below = 128 << 10;
        job.compress = true;
        job.codecs = &codec.codecs;
        job.pool = turn == 0 ? four_threads : NULL;
        mls_index index = write_all(&job, &written);
        REQUIRE(index.shard_count == MANY);
        size_t coded = 0;
        for (size_t i = 0; i < MANY; i++) {
            const mls_layer *layer = layer_of(&index.shards[i], 0);
            coded += layer != NULL && layer->frames != NULL;
        }
        CHECK(coded > MANY / 2 && coded < MANY);
        for (size_t i = 0; i < MANY; i++) {
            CHECK(reads_back(&index, &items[i], items[i].data, &codec.codecs));
        }
        sums[turn] = written.crc; /* of the index, which contains all checksums */
        mls_index_fini(&index);
        empty_pool();
    }
    CHECK(sums[0] == sums[1]);
    free(data);
}
