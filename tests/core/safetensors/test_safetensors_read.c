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
    CHECK(f.bytes == file.head + 11);
    mls_safetensors_fini(&f);
    mls_safetensors_fini(&f);
}

TEST(bad_headers_are_refused)
{
#define LARGER "tensor 'a': its shape is larger than memory"
    static const struct {
        const char *header;
        size_t payload;
        const char *name, *text;
    } cases[] = {
        {"{" T("a", "U8", "2", 0, 2) "," T("b", "U8", "2", 1, 3) "}", 3, "b",
         "tensor 'b' overlaps the one before it"},
        {"{" T("a", "U8", "1", 0, 1) "," T("b", "U8", "1", 2, 3) "}", 3, "b",
         "there is a gap in front of tensor 'b'"},
        {"{" T("a", "U8", "1", 0, 1) "}", 3, "",
         "2 bytes after the last tensor belong to no tensor"},
        {"{" T("a", "U8", "9223372036854775807,2,0", 0, 0) "}", 0, "a", LARGER},
        {"{" T("a", "F4", "9223372036854775807", 0, 0) "}", 0, "a", LARGER},
        {"{" T("a", "F4", "3", 0, 2) "}", 2, "a",
         "tensor 'a': its elements do not fill whole bytes"},
        {"{" T("a", "U8", "-1", 0, 1) "}", 1, "a",
         "tensor 'a': a dimension is not a whole number"},
        {"{" T("a", "U8", "2", 0, 1) "}", 1, "a",
         "tensor 'a': its shape takes 2 bytes, its offsets span 1"},
        {"{" T("a", "U8", "2", 0, 2) "}", 1, "a",
         "tensor 'a': its bytes end at 2 of 1: the file is truncated or the header is "
         "wrong"},
        {"{" T("a", "U8", "1", 1, 0) "}", 1, "a",
         "tensor 'a': \"data_offsets\" is not a pair [begin, end] of offsets"},
        {"{" T("a", "", "1", 0, 1) "}", 1, "a", "tensor 'a': its dtype is empty"},
        {"{\"a\":1}", 0, "a", "tensor 'a': its entry is not a JSON object"},
        {"{\"a\":{}}", 0, "a", "tensor 'a': the header lacks its \"dtype\""},
        {"{\"a\":{\"dtype\":1}}", 0, "a", "tensor 'a': \"dtype\" is not a string"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":1}}", 0, "a",
         "tensor 'a': \"shape\" is not a list"},
        {"{\"__metadata__\":1}", 0, "",
         "safetensors header: \"__metadata__\" is not a JSON object"},
        {"{\"__metadata__\":{\"k\":1}}", 0, "",
         "safetensors header: \"__metadata__\" has a value that is not a string"},
        {"{\"a\":[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]}", 0, "",
         "safetensors header: JSON is nested more than 16 levels deep"},
        {"[]", 0, "", "not a safetensors file: its header does not start with '{'"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const image file = image_of(cases[i].header, cases[i].payload);
        mls_safetensors f;
        CHECK_FAILS(parse(&file, &f, &status), MLS_E_FORMAT, cases[i].text);
        CHECK(status.has_offset);
        CHECK_TEXT(status.name, cases[i].name);
    }
}

TEST(lengths_that_are_false_are_refused)
{
    image file = image_of("{}", 0);
    mls_safetensors f;
    CHECK_FAILS(mls_safetensors_parse(file.bytes, 9, 10, crc, true, &f, &status),
                MLS_E_VALUE, "got only 9 bytes of the header");
    CHECK_FAILS(mls_safetensors_parse(file.bytes, 7, 7, crc, true, &f, &status),
                MLS_E_FORMAT, "not a safetensors file: 7 bytes are too few for one");
    mls_store_le64(file.bytes, 3);
    CHECK_FAILS(
        parse(&file, &f, &status), MLS_E_FORMAT,
        "the file is truncated: its header should have 3 bytes, but only 2 follow");
    mls_store_le64(file.bytes, MLS_SAFETENSORS_MAX_HEADER + 1);
    CHECK_FAILS(parse(&file, &f, &status), MLS_E_FORMAT,
                "not a safetensors file: a header of 100000001 bytes is longer than the "
                "format allows");
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
