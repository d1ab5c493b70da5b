/* A header made from an index equals the one written to the file, or making it fails. */
#include "base/size.h"
#include "checkpoint/index/shard_header_rebuild.h"
#include "safetensors/safetensors.h"
#include "support/shards.h"

enum { HEADER_MOST = 1 << 20 };

static unsigned char *data; /* of the current test */
static mls_index stored;

/* A tensor with its own file, a part, a state, and small ones that share segments. */
BEFORE_EACH
{
    static const size_t large[] = {3, 100000}, small[] = {7}, rows[] = {10, 4},
                        none[] = {0};
    data = noise(3 * 100000 * 4);
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
    stored = write_all(&job, &written);
}

AFTER_EACH
{
    empty_pool();
    mls_index_fini(&stored);
    free(data);
}

/* Whether a file's header can be made, and equals the one in the file. */
static bool is_rebuilt(size_t file)
{
    mls_json_writer header = {.most = HEADER_MOST};
    mls_status st;
    size_t length = 0;
    unsigned char *written = read_pool_file(stored.files[file].path, &length);
    const mls_code code = mls_shard_header_rebuild(&stored, file, crc, &header, &st);
    const bool good = code == MLS_OK && written != NULL && header.length > 8 &&
                      header.length <= length &&
                      header.length == mls_load_le64(written) + 8 &&
                      memcmp(header.data, written, header.length) == 0;
    CHECK(good || (code == MLS_E_VALUE && header.length == 0));
    mls_json_writer_fini(&header);
    mls_free(written);
    return good;
}

TEST(rebuilt_headers_equal_written_headers)
{
    CHECK(stored.file_count == 3);
    for (size_t i = 0; i < stored.file_count; i++) {
        CHECK(is_rebuilt(i));
    }
}

TEST(file_with_unlisted_tensors_is_not_rebuilt)
{
    REQUIRE(stored.shard_count > 0);
    const size_t last = stored.shard_count - 1;
    const size_t file = stored.shards[last].file;
    stored.shards[last].version++;
    CHECK(!is_rebuilt(file));
    stored.shards[last].version--;
    CHECK(is_rebuilt(file));
    stored.shard_count--; /* the shard of its only tensor */
    CHECK(!is_rebuilt(file));
    stored.shard_count++;
    stored.files[file].header_crc ^= 1;
    CHECK(!is_rebuilt(file));
    stored.files[file].header_crc ^= 1;
    stored.files[file].bytes++;
    CHECK(!is_rebuilt(file));
}

TEST(rebuild_uses_the_index_that_lists_the_whole_file)
{
    mls_index part = stored; /* lists the same files, but not all of their tensors */
    part.shard_count = 0;
    const mls_index both[] = {part, stored};
    mls_json_writer header = {.most = HEADER_MOST};
    REQUIRE(stored.file_count > 0);
    const char *path = stored.files[0].path;
    CHECK_FAILS(mls_shard_header_rebuild_path(both, 1, path, crc, &header, &status),
                MLS_E_VALUE, "no index lists all of the file");
    CHECK(mls_shard_header_rebuild_path(both, 2, "params/none", crc, &header, &status) ==
          MLS_E_VALUE);
    CHECK(header.length == 0);
    CHECK(mls_shard_header_rebuild_path(both, 2, path, crc, &header, &status) == MLS_OK);
    CHECK(header.length > 8);
    mls_json_writer_fini(&header);
}
