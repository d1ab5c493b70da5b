/* Compressed writes with a toy codec: compressible data are compressed, other data are
 * stored unchanged, and failures leave no file. */
#include "checkpoint/write/write_plan.h"
#include "support/shards.h"
#include "support/tensors.h"
#include "support/toy_codec.h"

enum {
    MIB = 1 << 20,
    ROWS = 20000,
    COLUMNS = 64, /* float32: rows of 256 bytes */
    ROW_BYTES = 4 * COLUMNS,
    BYTES = ROWS * ROW_BYTES /* 4.9 MiB */
};

static const size_t matrix[] = {ROWS, COLUMNS};

/* One tensor of ROWS x COLUMNS float32, and its committed state. */
typedef struct table {
    toy codec;
    unsigned char *data; /* BYTES */
    mls_shard_item item;
    mls_index index; /* as committed last */
    mls_shards_written written;
    size_t saves;
} table;

static table t; /* of the current test */

static void begin(void)
{
    t = (table){.data = malloc(BYTES)};
    REQUIRE(t.data != NULL);
    toy_begin(&t.codec);
    t.item = item_of("w", "m", MLS_F32, 2, matrix, t.data);
    for (size_t i = 0; i < BYTES; i++) {
        t.data[i] = (unsigned char)(i / 4096); /* runs */
    }
}

static void drop(void)
{
    mls_index_fini(&t.index);
    empty_pool();
    free(t.data);
}

BEFORE_EACH
{
    begin();
}

AFTER_EACH
{
    drop();
}

/* Write noise into `bytes` bytes. */
static void fill_noise(unsigned char *to, size_t bytes)
{
    unsigned char *random = noise(bytes);
    if (random != NULL) {
        memcpy(to, random, bytes);
    }
    free(random);
}

static mls_shard_job next_job(char generation[MLS_GENERATION_DIGITS + 1])
{
    snprintf(generation, MLS_GENERATION_DIGITS + 1, "%016zx", ++t.saves);
    mls_shard_job job =
        job_of(&t.item, 1, generation, t.index.shard_count == 0 ? NULL : &t.index);
    job.pack_below = 1000;
    job.compress = true;
    job.codec = MLS_ZSTD;
    job.codecs = &t.codec.codecs;
    return job;
}

/* Save; the next save compares with the state of this one. */
static const mls_index_shard *save(bool compress, bool sparse, bool incremental)
{
    char generation[MLS_GENERATION_DIGITS + 1];
    mls_shard_job job = next_job(generation);
    job.compress = compress;
    job.sparse = sparse;
    job.incremental = incremental;
    mls_index after = write_all(&job, &t.written);
    mls_index_fini(&t.index);
    t.index = after;
    return after.shard_count == 1 ? &t.index.shards[0] : NULL;
}

static bool is_stored(void)
{
    return reads_back(&t.index, &t.item, t.data, &t.codec.codecs);
}

static const mls_layer *layer_of(const mls_index_shard *shard, size_t number)
{
    return shard == NULL || shard->layers == NULL || number >= shard->layers->count
               ? NULL
               : &shard->layers->list[number];
}

/* ---- the decision to compress ---- */

TEST(what_gets_smaller_is_coded)
{
    const mls_index_shard *shard = save(true, false, false);
    const mls_layer *layer = layer_of(shard, 0);
    REQUIRE(layer != NULL && layer->frames != NULL && shard->layers->count == 1);
    CHECK(layer->row == 0 && layer->frames->codec == MLS_ZSTD &&
          layer->frames->item == 4);
    CHECK(layer->frames->bytes == BYTES && layer->bytes <= BYTES / 4 &&
          layer->offset == 4096);
    CHECK(shard->bytes == BYTES && shard->version == 1 && !mls_index_is_sparse(shard));
    CHECK(t.written.new_bytes == layer->bytes && t.written.data_bytes == BYTES);
    CHECK(t.written.new_shards == 1 && t.written.new_files == 1 &&
          t.index.file_count == 1);
    CHECK(t.index.files[0].bytes == 4096 + layer->bytes);
    CHECK(mls_index_stored_bytes(shard) == layer->bytes && is_stored());
    /* other readers of its file see a row of bytes */
    size_t length;
    char *file = (char *)read_pool_file(t.index.files[0].path, &length);
    REQUIRE(file != NULL && length > 4096);
    file[4095] = '\0';
    CHECK(strstr(file + 8, "\"dtype\":\"U8\"") != NULL);
    CHECK(strstr(file + 8, "\\\"codec\\\":\\\"zstd\\\",\\\"frames\\\":\\\"") != NULL);
    mls_free(file);
}

TEST(what_does_not_pay_is_stored_as_it_is)
{
    fill_noise(t.data, BYTES);
    const mls_index_shard *shard = save(true, false, false);
    REQUIRE(shard != NULL && shard->layers == NULL);
    CHECK(t.written.new_bytes == BYTES && is_stored());
    CHECK(atomic_load(&t.codec.encoded) == 3); /* only samples were encoded */
}

/* The first, middle and last 128 KiB, which are sampled, differ from the rest. */
static void fill_behind_samples(void)
{
    const size_t half = BYTES / 2, room = 100 << 10;
    fill_noise(t.data + 2 * room, half - 4 * room);
    fill_noise(t.data + half + 2 * room, half - 4 * room);
}

TEST(samples_may_promise_too_much)
{
    watcher w = {.allowed = 1 << 30};
    const mls_progress progress = {watch, &w};
    char generation[MLS_GENERATION_DIGITS + 1];
    fill_behind_samples();
    mls_shard_job job = next_job(generation);
    job.progress = &progress;
    t.index = write_all(&job, &t.written);
    REQUIRE(t.index.shard_count == 1 && t.index.shards[0].layers == NULL);
    CHECK(t.written.new_bytes == BYTES && t.written.new_files == 1 && is_stored());
    CHECK(t.index.file_count == 1 && t.index.shards[0].file == 0);
    CHECK(atomic_load(&t.codec.encoded) > 3); /* compression was tried, */
    CHECK(atomic_load(&w.bytes) == BYTES);    /* and progress counts the bytes once */
}

/* The same for a layer of rows: rows left out stay left out. */
TEST(rows_that_do_not_get_smaller_are_a_plain_layer)
{
    memset(t.data, 0x77, BYTES);
    const size_t held = ROWS / 4 * ROW_BYTES;    /* 1.2 MiB */
    fill_noise(t.data + (150 << 10), 380 << 10); /* between the samples */
    fill_noise(t.data + (720 << 10), 360 << 10);
    memset(t.data + held, 0, BYTES - held);
    const mls_index_shard *shard = save(true, true, false);
    const mls_layer *layer = layer_of(shard, 0);
    REQUIRE(layer != NULL && shard->layers->count == 1);
    CHECK(atomic_load(&t.codec.encoded) > 3);
    CHECK(layer->frames == NULL && layer->row == COLUMNS && layer->bytes == held);
    CHECK(t.written.new_bytes == held && is_stored() && mls_index_is_sparse(shard));
}

TEST(rows_that_hold_anything_are_coded)
{
    for (size_t i = 0; i < ROWS; i++) {
        memset(t.data + i * ROW_BYTES, i % 7 < 4 ? 0 : (int)(1 + i % 250), ROW_BYTES);
    }
    const mls_index_shard *shard = save(true, true, false);
    const mls_layer *layer = layer_of(shard, 0);
    REQUIRE(layer != NULL && layer->frames != NULL && shard->layers->count == 1);
    const size_t held = (ROWS / 7 * 3 + (ROWS % 7 > 4 ? ROWS % 7 - 4 : 0)) * ROW_BYTES;
    CHECK(layer->row == COLUMNS && layer->frames->bytes == held &&
          layer->bytes < held / 4);
    CHECK(mls_index_is_sparse(shard) && is_stored());
}

/* Sizes on both sides of every limit. */
TEST(small_shards_are_left_alone)
{
    static const size_t sizes[] = {
        (16 << 10) - 1,  16 << 10, (16 << 10) + 1, 3 * (128 << 10) - 1,
        3 * (128 << 10), MIB,      MIB + 1};
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    static const char *const names[COUNT] = {"a", "b", "c", "d", "e", "f", "g"};
    unsigned char *data = malloc(2 * MIB);
    mls_shard_item items[COUNT];
    mls_shards_written written;
    toy codec;
    REQUIRE(data != NULL);
    toy_begin(&codec);
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

/* Elements of all sizes, and memory that is not packed. */
TEST(memory_of_any_kind)
{
    static const mls_dtype dtypes[] = {MLS_U8, MLS_I16, MLS_F32, MLS_F64};
    static const size_t shape[] = {700, 300};
    unsigned char *data = malloc(700 * 300 * 16), *other = malloc(700 * 300 * 16);
    toy codec;
    REQUIRE(data != NULL && other != NULL);
    toy_begin(&codec);
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        const size_t item = mls_dtype_of(dtypes[d])->item_bytes;
        const mls_tensor transposed = transposed_of(other, dtypes[d], 700, 300);
        mls_shards_written written;
        for (size_t i = 0; i < 700 * 300 * item; i++) {
            data[i] = (unsigned char)(i % item == 0 ? i / item / 300 : 3);
        }
        for (size_t i = 0; i < 700 * 300; i++) {
            memcpy(other + (i % 300 * 700 + i / 300) * item, data + i * item, item);
        }
        for (int strided = 0; strided < 2; strided++) {
            mls_shard_item whole = item_of("w", NULL, dtypes[d], 2, shape, data);
            whole.data = strided ? NULL : data;
            whole.strided = strided ? &transposed : NULL;
            mls_shard_job job = job_of(&whole, 1, generations[strided], NULL);
            job.pack_below = 0;
            job.compress = true;
            job.codecs = &codec.codecs;
            mls_index index = write_all(&job, &written);
            const mls_layer *layer = layer_of(index.shards, 0);
            REQUIRE(layer != NULL && layer->frames != NULL &&
                    layer->frames->item == item);
            CHECK(written.new_bytes < 700 * 300 * item / 10);
            CHECK(reads_back(&index, &whole, data, &codec.codecs));
            mls_index_fini(&index);
        }
        empty_pool();
    }
    free(data);
    free(other);
}

/* ---- repeated saves ---- */

TEST(what_did_not_change_stays_coded)
{
    (void)save(true, false, false);
    const int encoded = atomic_load(&t.codec.encoded);
    for (int compress = 0; compress < 2; compress++) {
        const mls_index_shard *shard = save(compress, false, false);
        const mls_layer *layer = layer_of(shard, 0);
        REQUIRE(layer != NULL && layer->frames != NULL);
        CHECK(shard->version == 1 && t.written.new_bytes == 0 && is_stored());
        CHECK(atomic_load(&t.codec.encoded) == encoded);
    }
    /* one bit, in the last element */
    t.data[BYTES - 1] ^= 1;
    const mls_index_shard *shard = save(false, false, false);
    REQUIRE(shard != NULL && shard->layers == NULL);
    CHECK(shard->version == 2 && t.written.new_bytes == BYTES && is_stored());
    shard = save(true, false, false); /* nothing changed: it stays plain */
    CHECK(shard != NULL && shard->layers == NULL && t.written.new_bytes == 0);
}

TEST(rows_that_changed_lie_over_what_is_coded)
{
    (void)save(true, false, true);
    memset(t.data + 300 * ROW_BYTES, 0x11, 300 * ROW_BYTES); /* a compressible layer */
    const mls_index_shard *shard = save(true, false, true);
    REQUIRE(layer_of(shard, 1) != NULL && shard->layers->count == 2);
    CHECK(layer_of(shard, 0)->frames != NULL && layer_of(shard, 1)->frames != NULL);
    CHECK(layer_of(shard, 1)->frames->bytes == 300 * ROW_BYTES && is_stored());
    CHECK(t.written.new_bytes == layer_of(shard, 1)->bytes && shard->version == 2);
    fill_noise(t.data + 5000 * ROW_BYTES, 200 * ROW_BYTES); /* an incompressible one */
    shard = save(true, false, true);
    REQUIRE(layer_of(shard, 2) != NULL && shard->layers->count == 3);
    CHECK(layer_of(shard, 2)->frames == NULL && is_stored());
    CHECK(t.written.new_bytes == 200 * ROW_BYTES);
    memset(t.data + (ROWS - 90) * ROW_BYTES, 0x22, 90 * ROW_BYTES); /* not compressed */
    shard = save(false, false, true);
    REQUIRE(layer_of(shard, 3) != NULL && shard->layers->count == 4);
    CHECK(layer_of(shard, 0)->frames != NULL && layer_of(shard, 3)->frames == NULL);
    CHECK(is_stored());
    shard = save(true, true, true); /* nothing changed */
    REQUIRE(layer_of(shard, 3) != NULL);
    CHECK(t.written.new_bytes == 0 && shard->version == 4 && is_stored());
}

/* The codec may change from one save to the next. */
TEST(codecs_may_change_between_saves)
{
    (void)save(true, false, false);
    memset(t.data, 0x33, 100 * ROW_BYTES);
    char generation[MLS_GENERATION_DIGITS + 1];
    mls_shard_job job = next_job(generation);
    job.codec = MLS_ZLIB;
    job.incremental = true;
    mls_index after = write_all(&job, &t.written);
    mls_index_fini(&t.index);
    t.index = after;
    REQUIRE(t.index.shard_count == 1 && layer_of(t.index.shards, 1) != NULL);
    CHECK(layer_of(t.index.shards, 0)->frames->codec == MLS_ZSTD);
    CHECK(layer_of(t.index.shards, 1)->frames->codec == MLS_ZLIB && is_stored());
}

TEST(without_codecs_what_was_coded_is_written_again)
{
    (void)save(true, false, false);
    for (int incremental = 0; incremental < 2; incremental++) {
        char generation[MLS_GENERATION_DIGITS + 1];
        mls_shard_job job = next_job(generation);
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
    char generation[MLS_GENERATION_DIGITS + 1];
    mls_shard_job job = next_job(generation);
    job.codecs = NULL;
    job.compress = false;
    mls_index after = write_all(&job, &t.written);
    CHECK(t.written.new_bytes == 0 && layer_of(after.shards, 0) != NULL);
    mls_index_fini(&after);
}

TEST(nothing_is_laid_over_what_is_damaged)
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
        drop();
        begin();
    }
}

/* ---- failures ---- */

static const mls_code codes[] = {MLS_E_FORMAT, MLS_E_MEMORY, MLS_E_VALUE, MLS_E_STOPPED};

/* Errors in the first sample, the last one, the first frame, the last one. */
TEST(errors_of_codecs_end_the_save)
{
    static const int calls[] = {1, 3, 4, 8};
    for (size_t i = 0; i < 16; i++) {
        char generation[MLS_GENERATION_DIGITS + 1];
        const mls_shard_job job = next_job(generation);
        toy_begin(&t.codec);
        t.codec.failure = codes[i % 4];
        t.codec.encode_fails_at = calls[i / 4];
        t.written.shard_count = 77;
        CHECK(mls_shards_write(&job, &t.written, &status) == codes[i % 4]);
        CHECK_TEXT(status.text, "zstd is broken");
        CHECK_TEXT(status.name, "w.m");
        CHECK(pool_files() == 0 && t.written.shard_count == 77);
        CHECK(atomic_load(&t.codec.encoded) == calls[i / 4]);
    }
    toy_begin(&t.codec);
    CHECK(save(true, false, false) != NULL && is_stored()); /* all 8 calls */
    CHECK(atomic_load(&t.codec.encoded) == 8);
}

/* If the codec finds an error in stored bytes, they count as changed; a stop or a lack of
 * memory is no such error. */
TEST(errors_while_comparing)
{
    for (size_t i = 0; i < 8; i++) {
        const bool ends = codes[i % 4] == MLS_E_MEMORY || codes[i % 4] == MLS_E_STOPPED;
        char generation[MLS_GENERATION_DIGITS + 1];
        (void)save(true, false, false);
        mls_shard_job job = next_job(generation);
        job.incremental = i / 4 == 1;
        t.codec.failure = codes[i % 4];
        t.codec.decode_fails_at = 2;
        const mls_code code = mls_shards_write(&job, &t.written, &status);
        t.codec.decode_fails_at = 0;
        CHECK(code == (ends ? codes[i % 4] : MLS_OK));
        CHECK(pool_files() == (ends ? 2 : 4));
        if (code == MLS_OK) {
            mls_index after = read_index(t.written.path);
            CHECK(after.shard_count == 1 && after.shards[0].version == 2);
            CHECK(reads_back(&after, &t.item, t.data, &t.codec.codecs));
            mls_index_fini(&after);
        }
        CHECK(is_stored()); /* the previous state */
        drop();
        begin();
    }
}

TEST(errors_while_reading)
{
    const mls_layout whole = {0};
    const mls_index *indexes[1];
    unsigned char *got = malloc(BYTES);
    mls_merged_index merged;
    mls_stored_shard stored[1];
    mls_part parts[1];
    mls_read_range pieces[1];
    mls_part to;
    size_t count = 0, failed;
    REQUIRE(t.data != NULL && got != NULL);
    REQUIRE(save(true, false, false) != NULL);
    indexes[0] = &t.index;
    REQUIRE(mls_merged_index_init(&merged, indexes, 1, &status) == MLS_OK);
    REQUIRE(mls_layout_part(&whole, 2, matrix, 0, &to, &status) == MLS_OK);
    REQUIRE(mls_merged_index_pieces(&merged, &merged.tensors[0], &to, got,
                                    &(mls_read_scratch){stored, parts, pieces}, &count,
                                    &status) == MLS_OK);
    for (size_t i = 0; i < 8; i++) {
        toy_begin(&t.codec);
        t.codec.failure = codes[i % 4];
        t.codec.decode_fails_at = i / 4 == 0 ? 1 : 4;
        failed = 77;
        CHECK(mls_shards_read(&(mls_read_request){.folder = pool_fd,
                                                  .pieces = pieces,
                                                  .count = count,
                                                  .crc = crc,
                                                  .codecs = &t.codec.codecs,
                                                  .pool = four_threads},
                              &failed, &status) == codes[i % 4]);
        CHECK(failed == 0);
        CHECK_TEXT(status.name, "w");
        CHECK(status.has_offset == (codes[i % 4] == MLS_E_FORMAT));
        CHECK(strstr(status.text, "tensor 'w', file 'optim_state/") == status.text);
        CHECK(codes[i % 4] == MLS_E_STOPPED ||
              strstr(status.text, "zstd is broken") != NULL);
    }
    CHECK(mls_shards_read(&(mls_read_request){.folder = pool_fd,
                                              .pieces = pieces,
                                              .count = count,
                                              .crc = crc,
                                              .pool = four_threads},
                          &failed, &status) == MLS_E_VALUE);
    CHECK(strstr(status.text, "no decoder for zstd is available") != NULL);
    mls_merged_index_fini(&merged);
    free(got);
}

TEST(progress_stops_the_coding)
{
    for (int allowed = 0; allowed < 8; allowed++) {
        watcher w = {.allowed = allowed};
        const mls_progress progress = {watch, &w};
        char generation[MLS_GENERATION_DIGITS + 1];
        mls_shard_job job = next_job(generation);
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
TEST(threads_do_not_matter)
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
        toy codec;
        mls_shards_written written;
        toy_begin(&codec);
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
