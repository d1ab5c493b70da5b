/* A header made from an index equals the one written to the file, or making it fails. */
#include "base/size.h"
#include "checkpoint/index/shard_header_rebuild.h"
#include "safetensors/safetensors.h"
#include "support/shards.h"

enum { HEADER_MOST = 1 << 20 };

/* A tensor with its own file, a part, a state, and small ones that share segments. */
static mls_index store(unsigned char *data)
{
    static const size_t large[] = {3, 100000}, small[] = {7}, rows[] = {10, 4},
                        none[] = {0};
    const mls_shard_item items[] = {
        item_of("large", NULL, MLS_F32, 2, large, data),
        item_of("small", NULL, MLS_U8, 1, small, data),
        item_of("empty", NULL, MLS_F64, 1, none, data),
        item_of("scalar", NULL, MLS_F64, 0, NULL, data),
        part_of(item_of("rows", NULL, MLS_U16, 2, rows, data), 0, 3, 1),
        part_of(item_of("flat", NULL, MLS_U16, 2, rows, data), MLS_LAYOUT_FLAT, 7, 2),
        item_of("small", "m", MLS_F32, 1, small, data),
    };
    mls_shards_written written;
    const mls_shard_job job =
        job_of(items, sizeof items / sizeof *items, generations[0], NULL);
    return write_all(&job, &written);
}

static void drop(mls_index *index, unsigned char *data)
{
    empty_pool();
    mls_index_fini(index);
    free(data);
}

/* Whether a file's header can be made, and equals the one in the file. */
static bool is_made(const mls_index *index, size_t file)
{
    mls_json_writer made = {.most = HEADER_MOST};
    mls_status st;
    size_t length = 0;
    unsigned char *written = read_pool_file(index->files[file].path, &length);
    const mls_code code = mls_shard_header_rebuild(index, file, crc, &made, &st);
    const bool good = code == MLS_OK && written != NULL && made.length > 8 &&
                      made.length <= length &&
                      made.length == mls_load_le64(written) + 8 &&
                      memcmp(made.data, written, made.length) == 0;
    CHECK(good || (code == MLS_E_VALUE && made.length == 0));
    mls_json_writer_fini(&made);
    mls_free(written);
    return good;
}

TEST(every_header_is_what_was_written)
{
    unsigned char *data = noise(3 * 100000 * 4);
    mls_index index = store(data);
    CHECK(index.file_count == 3);
    for (size_t i = 0; i < index.file_count; i++) {
        CHECK(is_made(&index, i));
    }
    drop(&index, data);
}

TEST(a_file_with_tensors_that_are_not_listed_has_none)
{
    unsigned char *data = noise(3 * 100000 * 4);
    mls_index index = store(data);
    REQUIRE(index.shard_count > 0);
    const size_t last = index.shard_count - 1;
    const size_t file = index.shards[last].file;
    index.shards[last].version++;
    CHECK(!is_made(&index, file));
    index.shards[last].version--;
    CHECK(is_made(&index, file));
    index.shard_count--; /* the shard of its only tensor */
    CHECK(!is_made(&index, file));
    index.shard_count++;
    index.files[file].header_crc ^= 1;
    CHECK(!is_made(&index, file));
    index.files[file].header_crc ^= 1;
    index.files[file].bytes++;
    CHECK(!is_made(&index, file));
    drop(&index, data);
}

TEST(the_index_that_lists_all_of_a_file_is_found)
{
    unsigned char *data = noise(2400000);
    REQUIRE(data != NULL);
    mls_index index = store(data);
    mls_index part = index; /* lists the same files, but not all of their tensors */
    part.shard_count = 0;
    const mls_index both[] = {part, index};
    mls_json_writer made = {.most = HEADER_MOST};
    REQUIRE(index.file_count > 0);
    const char *path = index.files[0].path;
    CHECK(mls_shard_header_rebuild_path(both, 1, path, crc, &made, &status) ==
          MLS_E_VALUE);
    CHECK(mls_shard_header_rebuild_path(both, 2, "params/none", crc, &made, &status) ==
          MLS_E_VALUE);
    CHECK(made.length == 0);
    CHECK(mls_shard_header_rebuild_path(both, 2, path, crc, &made, &status) == MLS_OK);
    CHECK(made.length > 8);
    mls_json_writer_fini(&made);
    drop(&index, data);
}
