/* An index of safetensors files: the same facts as their headers, from any writer. */
#include "base/memory.h"
#include "base/size.h"
#include "checkpoint/index/index_of_files.h"
#include "safetensors/safetensors.h"
#include "support/temporary_folder.h"
#include "support/tensors.h"

static const mls_crc_kernels *const crc = &mls_crc_scalar;
static const char *const names[] = {"a.safetensors", "b.safetensors"};

/* A file of another writer: the header, then `payload` bytes of 0x11. */
static void write_raw(const char *name, const char *header, size_t payload)
{
    unsigned char length[8];
    FILE *file = fopen(path_of(name), "wb");
    if (file != NULL) {
        mls_store_le64(length, strlen(header));
        fwrite(length, 1, sizeof length, file);
        fputs(header, file);
        for (size_t i = 0; i < payload; i++) {
            fputc(0x11, file);
        }
        fclose(file);
    }
}

/* A file of ours with `bytes` bytes in a tensor of this name. */
static void write_tensor_file(const char *name, const char *tensor, size_t bytes)
{
    mls_status st;
    unsigned char *data = mls_alloc(bytes, 1);
    REQUIRE(data != NULL);
    for (size_t i = 0; i < bytes; i++) {
        data[i] = (unsigned char)(i * 7);
    }
    const mls_tensor view = vector_of(data, MLS_U8, bytes);
    const mls_named_tensor item = {{tensor, strlen(tensor)}, &view};
    const mls_safetensors_content content = {.tensors = &item, .count = 1};
    CHECK(mls_safetensors_write(path_of(name), &content, mls_kernels_of(MLS_CPU_SCALAR),
                                crc, &st) == MLS_OK);
    mls_free(data);
}

static const char two[] =
    "{\"z\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
    "\"m\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[3,11]}}";

TEST(files_of_both_kinds_are_listed_by_name)
{
    enum { BYTES = MLS_SAFETENSORS_BLOCK + 5 };
    mls_index x;
    size_t failed;
    write_raw(names[0], two, 11);
    write_tensor_file(names[1], "n", BYTES);
    REQUIRE(mls_index_of_files(folder, names, 2, crc, &x, &failed, &status) == MLS_OK);
    REQUIRE(x.shard_count == 3 && x.file_count == 2 && x.links && x.world_size == 1);
    const mls_index_shard *m = &x.shards[0], *n = &x.shards[1], *z = &x.shards[2];
    CHECK(mls_str_is(m->id.name, "m") && mls_str_is(n->id.name, "n"));
    CHECK(mls_str_is(z->id.name, "z") && z->bytes == 3 && z->crcs == NULL);
    CHECK(m->dtype == MLS_F32 && m->rank == 2 && m->shape[0] == 2 && m->file == 0);
    CHECK(m->offset == 8 + sizeof two - 1 + 3 && m->bytes == 8 && m->version == 1);
    CHECK(m->layers == NULL && m->layout.count == 0 && m->part == 0);
    CHECK(n->file == 1 && n->bytes == BYTES && n->crcs != NULL);
    CHECK(mls_crc_combine(n->crcs[0], n->crcs[1], 5) == n->crc);
    CHECK(x.files[0].bytes == 8 + sizeof two - 1 + 11 && x.files[0].header_crc == 0);
    CHECK_TEXT(x.files[1].path, names[1]);
    mls_index_fini(&x);
}

TEST(a_file_without_tensors_is_listed)
{
    mls_index x;
    size_t failed;
    write_raw(names[0], "{}", 0);
    REQUIRE(mls_index_of_files(folder, names, 1, crc, &x, &failed, &status) == MLS_OK);
    CHECK(x.shard_count == 0 && x.file_count == 1 && x.files[0].bytes == 10);
    mls_index_fini(&x);
}

TEST(error_reports_the_failing_file)
{
    mls_index x;
    size_t failed = 9;
    write_raw(names[0], two, 11);
    CHECK(mls_index_of_files(folder, names, 2, crc, &x, &failed, &status) == MLS_E_IO);
    CHECK(failed == 1);
    write_raw(names[1], two, 10);
    CHECK_FAILS(mls_index_of_files(folder, names, 2, crc, &x, &failed, &status),
                MLS_E_FORMAT,
                "tensor 'm': its bytes end at 11 of 10: the file is truncated or the "
                "header is wrong");
    CHECK(failed == 1);
    write_tensor_file(names[1], "z", 4);
    CHECK_FAILS(mls_index_of_files(folder, names, 2, crc, &x, &failed, &status),
                MLS_E_FORMAT,
                "the tensor is in a.safetensors too, with another dtype or shape");
    CHECK_TEXT(status.name, "z");
    write_raw(names[1],
              "{\"d\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],"
              "\"data_offsets\":[0,1]}}",
              1);
    CHECK_FAILS(mls_index_of_files(folder, names, 2, crc, &x, &failed, &status),
                MLS_E_FORMAT, "17 dimensions, but at most 16 are supported");
    CHECK(failed == 1);
}
