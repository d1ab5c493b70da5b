/* Records of whole files: headers are compared, and tensors get the checksums of blocks.
 */
#include "base/memory.h"
#include "base/size.h"
#include "checkpoint/index/file_checksums.h"
#include "checkpoint/index/index_of_files.h"
#include "safetensors/safetensors.h"
#include "support/temporary_folder.h"

static const mls_crc_kernels *const crc = &mls_crc_scalar;
static const char *const names[] = {"a.safetensors"};

static const char header[] =
    "{\"z\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
    "\"none\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[3,3]},"
    "\"m\":{\"dtype\":\"U8\",\"shape\":[1048581],\"data_offsets\":[3,1048584]}}";

enum { START = 8 + sizeof header - 1, LONG = MLS_SAFETENSORS_BLOCK + 5 };
enum { BYTES = START + 3 + LONG };

static unsigned char *content;
static uint64_t starts[] = {0, START, START + 3};
static uint32_t crcs[4];

static mls_file_checksums record_of_file(void)
{
    return (mls_file_checksums){
        .bytes = BYTES, .starts = starts, .count = 3, .crcs = crcs, .crc_count = 4};
}

static void write_content(size_t bytes)
{
    FILE *file = fopen(path_of(names[0]), "wb");
    REQUIRE(file != NULL);
    CHECK(fwrite(content, 1, bytes, file) == bytes);
    fclose(file);
}

/* Write the file, and compute its record. */
static void write_recorded(void)
{
    content = mls_alloc(BYTES, 1);
    REQUIRE(content != NULL);
    mls_store_le64(content, sizeof header - 1);
    memcpy(content + 8, header, sizeof header - 1);
    for (size_t i = START; i < BYTES; i++) {
        content[i] = (unsigned char)(i * 7);
    }
    starts[1] = START;
    starts[2] = START + 3;
    crcs[0] = crc->update(0, content, START);
    crcs[1] = crc->update(0, content + START, 3);
    crcs[2] = crc->update(0, content + START + 3, MLS_SAFETENSORS_BLOCK);
    crcs[3] = crc->update(0, content + START + 3 + MLS_SAFETENSORS_BLOCK, 5);
    write_content(BYTES);
}

static mls_code compare(const mls_file_checksums *record)
{
    size_t failed = 9;
    const mls_code code =
        mls_file_checksums_compare(record, folder, names, 1, crc, &failed, &status);
    CHECK(failed == 0);
    return code;
}

static mls_code use(const mls_file_checksums *record, mls_index *x)
{
    size_t failed = 9;
    const mls_code code = mls_index_of_files(folder, names, 1, crc, x, &failed, &status);
    if (code != MLS_OK) {
        return code;
    }
    return mls_index_use_checksums(x, record, &failed, &status);
}

TEST(tensors_get_the_checksums_of_their_blocks)
{
    mls_index x;
    write_recorded();
    const mls_file_checksums record = record_of_file();
    CHECK(compare(&record) == MLS_OK);
    REQUIRE(use(&record, &x) == MLS_OK);
    const mls_index_shard *m = &x.shards[0], *none = &x.shards[1], *z = &x.shards[2];
    CHECK(m->bytes == LONG && m->crcs[0] == crcs[2] && m->crcs[1] == crcs[3]);
    CHECK(m->crc == mls_crc_combine(crcs[2], crcs[3], 5));
    CHECK(none->bytes == 0 && z->bytes == 3 && z->crcs[0] == crcs[1] &&
          z->crc == crcs[1]);
    mls_index_fini(&x);
    mls_free(content);
}

TEST(files_without_a_record_are_unchanged)
{
    mls_index x;
    write_recorded();
    const mls_file_checksums record = {0};
    CHECK(compare(&record) == MLS_OK);
    REQUIRE(use(&record, &x) == MLS_OK);
    CHECK(x.shards[0].crcs == NULL);
    mls_index_fini(&x);
    mls_free(content);
}

TEST(records_that_do_not_fit_are_refused)
{
    mls_index x;
    write_recorded();
    mls_file_checksums record = record_of_file();
    record.crc_count = 3;
    CHECK(compare(&record) == MLS_E_FORMAT);
    record.crc_count = 5;
    CHECK(compare(&record) == MLS_E_FORMAT);
    CHECK(use(&record, &x) == MLS_E_FORMAT);
    CHECK_TEXT(status.text, "its checksums do not cover its 1048764 bytes");
    mls_index_fini(&x);
    record.crc_count = 4;
    record.bytes++; /* of the file that was recorded */
    CHECK(use(&record, &x) == MLS_E_FORMAT);
    CHECK(strstr(status.text, "and had ") != NULL);
    mls_index_fini(&x);
    record = record_of_file();
    starts[2] = BYTES;
    CHECK(compare(&record) == MLS_E_FORMAT);
    starts[2] = START;
    CHECK(compare(&record) == MLS_E_FORMAT);
    starts[2] = UINT64_MAX;
    CHECK(compare(&record) == MLS_E_FORMAT);
    starts[2] = START + 3;
    starts[0] = 1;
    CHECK(compare(&record) == MLS_E_FORMAT);
    starts[0] = 0;
    starts[2] = START + 2; /* covers the file, but a part is not the tensor */
    CHECK(compare(&record) == MLS_OK);
    CHECK_FAILS(use(&record, &x), MLS_E_FORMAT,
                "its checksums are not those of this tensor: write them again");
    mls_index_fini(&x);
    starts[1] = 20; /* the first part is not the header */
    starts[2] = START + 3;
    crcs[0] = crc->update(0, content, 20);
    CHECK_FAILS(compare(&record), MLS_E_FORMAT,
                "its checksums are not those of a header and tensors: write them again");
    mls_free(content);
}
