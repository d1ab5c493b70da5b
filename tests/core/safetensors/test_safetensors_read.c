/* Reading safetensors: headers of other writers, and the place of an error. */
#include "base/size.h"
#include "safetensors/safetensors.h"
#include "support/runner.h"

enum { ROOM = 4096 };

static const mls_crc_kernels *const crc = &mls_crc_scalar;

/* A file in memory: length, header, `payload` bytes of 0x11. */
typedef struct image {
    unsigned char bytes[ROOM];
    size_t head, all;
} image;

static image image_of(const char *header, size_t payload)
{
    image file = {.head = 8 + strlen(header)};
    file.all = file.head + payload;
    mls_store_le64(file.bytes, strlen(header));
    memcpy(file.bytes + 8, header, strlen(header));
    memset(file.bytes + file.head, 0x11, payload);
    return file;
}

static mls_code parse(const image *file, mls_safetensors *out, mls_status *st)
{
    return mls_safetensors_parse(file->bytes, file->head, file->all, crc, true, out, st);
}

#define T(name, dtype, shape, begin, end)                                                \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape                            \
    "],\"data_offsets\":[" #begin "," #end "]}"

TEST(headers_of_other_writers_are_read)
{
    /* unsorted, with a contiguous payload, an unknown field, empty and 0-d tensors */
    const image file =
        image_of("{\"__metadata__\":{\"format\":\"pt\",\"\":\"\"}," T(
                     "b", "F16", "2,1", 4,
                     8) ","
                        "\"a\":{\"more\":[{}],\"data_offsets\":[0,4],\"shape\":[],"
                        "\"dtype\":\"F32\"}," T("none", "I64", "0,9", 8, 8) "," T(
                            "c", "F8_E4M3", "3", 8, 11) "}  ",
                 11);
    mls_safetensors f;
    REQUIRE(parse(&file, &f, &status) == MLS_OK);
    CHECK(f.count == 4 && !f.has_crc && f.metadata_count == 2);
    CHECK(mls_str_is(f.metadata[0].key, "format"));
    CHECK(mls_str_is(f.metadata[0].value, "pt"));
    CHECK(mls_str_is(f.tensors[0].name, "b") && f.tensors[0].dtype == MLS_F16);
    CHECK(f.tensors[0].rank == 2 && f.tensors[0].shape[0] == 2);
    CHECK(f.tensors[0].offset == file.head + 4 && f.tensors[0].bytes == 4);
    CHECK(f.tensors[1].rank == 0 && f.tensors[1].bytes == 4);
    CHECK(f.tensors[2].bytes == 0 && f.tensors[2].shape[1] == 9);
    CHECK(f.tensors[3].dtype == MLS_F8_E4M3);
    CHECK(mls_safetensors_end(&f) == file.head + 11); /* of the last one by offset */
    mls_safetensors_fini(&f);
    mls_safetensors_fini(&f);
}

TEST(errors_name_the_tensor)
{
    static const struct {
        const char *header;
        size_t payload;
        const char *name;
    } cases[] = {
        {"{" T("a", "U8", "2", 0, 2) "," T("b", "U8", "2", 1, 3) "}", 3, "b"},
        {"{" T("a", "U8", "1", 0, 1) "," T("b", "U8", "1", 2, 3) "}", 3, "b"},
        {"{" T("a", "U8", "9223372036854775807,2,0", 0, 0) "}", 0, "a"},
        {"{\"a\":[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]}", 0, ""}, /* too deep */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const image file = image_of(cases[i].header, cases[i].payload);
        mls_safetensors f;
        CHECK(parse(&file, &f, &status) == MLS_E_FORMAT && status.has_offset);
        CHECK_TEXT(status.name, cases[i].name);
    }
}

TEST(an_opaque_tensor_is_bytes_and_reported_at_its_dtype)
{
    static const char *const headers[] = {"{" T("a", "F3_X", "8", 0, 3) "}",
                                          "{" T("a", "F4", "2,3", 0, 3) "}"};
    for (size_t i = 0; i < 2; i++) {
        const image file = image_of(headers[i], 3);
        mls_safetensors f;
        REQUIRE(parse(&file, &f, &status) == MLS_OK);
        CHECK(f.tensors[0].dtype == MLS_U8 && f.tensors[0].bytes == 3);
        CHECK(mls_safetensors_check(&f, &status) == MLS_E_FORMAT && status.has_offset);
        CHECK(status.offset == 8 + strlen("{\"a\":{\"dtype\":"));
        mls_safetensors_fini(&f);
    }
}

TEST(more_than_64_dimensions_are_refused)
{
    char header[512], shape[160] = "";
    mls_safetensors f;
    for (int rank = 1; rank <= 65; rank++) {
        strcat(shape, rank == 1 ? "1" : ",1");
        snprintf(header, sizeof header,
                 "{\"a\":{\"dtype\":\"U8\",\"shape\":[%s],\"data_offsets\":[0,1]}}",
                 shape);
        const image file = image_of(header, 1);
        const mls_code code = parse(&file, &f, &status);
        CHECK(code == (rank <= 64 ? MLS_OK : MLS_E_FORMAT));
        if (code == MLS_OK) {
            CHECK(f.tensors[0].rank == rank);
            mls_safetensors_fini(&f);
        }
    }
}
