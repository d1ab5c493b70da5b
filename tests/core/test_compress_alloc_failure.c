/* Every allocation fails once, as in test_alloc_failure.c: in compressing shards, in
 * adding compressed layers, and in reading them. */
#include "checkpoint/index/index.h"
#include "checkpoint/ranks/merged_index.h"
#include "checkpoint/ranks/requested_part.h"
#include "checkpoint/read/shard_read.h"
#include "support/failing_alloc.h"
#include "support/runner.h"
#include "support/shards.h"
#include "support/toy_codec.h"

#include <unistd.h>

static const size_t shape[] = {300000};
static unsigned char bytes[300000];
static mls_index coded;            /* the committed one: "c" */
static mls_json_writer index_text; /* of that index */
static toy codec;

/* A row of the compressed item has changed, another item is compressed now: this
 * allocates samples, frames, and the room that decodes stored frames. */
static mls_code write_coded(mls_status *st)
{
    static unsigned char changed[300000];
    const mls_shard_item items[] = {item_of("c", NULL, MLS_U8, 1, shape, changed),
                                    item_of("d", NULL, MLS_U8, 1, shape, bytes)};
    memcpy(changed, bytes, sizeof changed);
    memset(changed + 90000, 7, 20000);
    mls_shard_job job = job_of(items, 2, generations[3], &coded);
    job.pack_below = 1000;
    job.incremental = job.compress = true;
    job.codecs = &codec.codecs;
    mls_shards_written written = {.shard_count = 77};
    const mls_code code = mls_shards_write(&job, &written, st);
    const long saved_countdown = countdown;
    countdown = 0; /* the check must not fail */
    CHECK(written.shard_count == (code == MLS_OK ? 2U : 77U));
    CHECK(pool_files() == (code == MLS_OK ? 5U : 2U));
    if (code == MLS_OK) {
        mls_index index = read_index(written.path);
        CHECK(index.shard_count == 2 && index.shards[0].layers->count == 2);
        CHECK(index.shards[0].layers->list[1].frames != NULL);
        CHECK(index.shards[1].layers->list[0].frames != NULL);
        for (size_t i = 0; i < index.file_count; i++) {
            if (strstr(index.files[i].path, generations[3]) != NULL) {
                CHECK(unlinkat(pool_fd, index.files[i].path, 0) == 0);
            }
        }
        CHECK(unlinkat(pool_fd, written.path, 0) == 0);
        mls_index_fini(&index);
    }
    countdown = saved_countdown;
    return code;
}

/* From the text of the index to the bytes of the tensor. */
static mls_code read_coded(mls_status *st)
{
    static unsigned char got[300000];
    const mls_index *const indexes[] = {&coded};
    mls_merged_index merged = {0};
    mls_stored_shard stored[1];
    mls_part parts[1];
    mls_read_piece pieces[1];
    size_t count = 0, failed = 77;
    const mls_index *disagreeing;
    mls_code code = mls_merged_index_init(&merged, indexes, 1, &disagreeing, st);
    if (code == MLS_OK) {
        const mls_part part = mls_index_part(&coded.shards[0]);
        code = mls_requested_part_pieces(&merged, &merged.tensors[0], &part, got,
                                         &(mls_read_scratch){stored, parts, pieces},
                                         &count, st);
        if (code == MLS_OK) {
            code = mls_shards_read(&(mls_read_request){.folder = pool_fd,
                                                       .pieces = pieces,
                                                       .count = count,
                                                       .crc = crc,
                                                       .codecs = &codec.codecs},
                                   &failed, st);
        }
        CHECK(code != MLS_OK || memcmp(got, bytes, sizeof got) == 0);
        mls_merged_index_fini(&merged);
    }
    return code;
}

static mls_code parse_coded(mls_status *st)
{
    mls_index index = {.rank = 77};
    const mls_code code =
        mls_index_parse(index_text.data, index_text.length, &mls_crc_scalar, &index, st);
    CHECK(code == MLS_OK ? index.frames != NULL : index.rank == 77);
    if (code == MLS_OK) {
        mls_index_fini(&index);
    }
    return code;
}

TEST(compressed_checkpoints_survive_every_failure)
{
    mls_shards_written written;
    uint32_t sum;
    countdown = 0;
    use_one_thread(); /* several would allocate in any order */
    memset(bytes, 5, sizeof bytes);
    toy_begin(&codec);
    const mls_shard_item item = item_of("c", NULL, MLS_U8, 1, shape, bytes);
    mls_shard_job job = job_of(&item, 1, generations[2], NULL);
    job.compress = true;
    job.codecs = &codec.codecs;
    coded = write_all(&job, &written);
    if (coded.shard_count == 1 && coded.frames != NULL) {
        CHECK(mls_index_build(&coded, crc, &index_text, &sum, &status) == MLS_OK);
        CHECK(fail_each(parse_coded) >= 11);
        CHECK(fail_each(read_coded) >= 6);
        CHECK(fail_each(write_coded) >= 40);
        mls_json_writer_fini(&index_text);
    }
    mls_index_fini(&coded);
}
