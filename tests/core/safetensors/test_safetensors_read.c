/* Reading safetensors: headers of other writers, and false headers. */
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

TEST(file_without_tensors_is_valid)
{
    const image bare = image_of("{}", 0),
                padded = image_of("{\"__metadata__\":{}}   ", 0);
    mls_safetensors f;
    REQUIRE(parse(&bare, &f, &status) == MLS_OK);
    CHECK(f.count == 0);
    mls_safetensors_fini(&f);
    REQUIRE(parse(&padded, &f, &status) == MLS_OK);
    mls_safetensors_fini(&f);
}

TEST(inconsistent_headers_are_refused)
{
    static const struct {
        const char *header;
        size_t payload;
        const char *name; /* the tensor that the error names */
    } cases[] = {
        {"[]", 0, ""},
        {" {}", 0, ""},
        {"{} x", 0, ""},
        {"{", 0, ""},
        {"{\"a\":1}", 0, "a"},
        {"{\"a\":{}}", 0, "a"},
        {"{" T("a", "", "1", 0, 4) "}", 4, "a"},
        {"{" T("a", "F31", "1", 0, 4) "}", 5, ""},
        {"{" T("a", "F31", "1", 4, 0) "}", 4, "a"},
        {"{" T("a", "F31", "4611686018427387905,4", 0, 4) "}", 4, "a"},
        {"{" T("a", "F4", "", 0, 1) "}", 1, "a"},
        {"{" T("a", "F4", "8", 0, 8) "}", 8, "a"},
        {"{" T("a", "F4", "3,3", 0, 5) "}", 5, "a"},
        {"{" T("a", "F4", "2,3", 0, 4) "}", 4, "a"},
        {"{" T("a", "F4", "4611686018427387904", 0, 0) "}", 0, "a"},
        {"{" T("a", "F6_E2M3", "4", 0, 4) "}", 4, "a"},
        {"{" T("a", "F6_E2M3", "2", 0, 2) "}", 2, "a"},
        {"{" T("a", "F6_E3M2", "4611686018427387904,0", 0, 0) "}", 0, "a"},
        {"{" T("a", "F32", "2", 0, 4) "}", 4, "a"},
        {"{" T("a", "F32", "1", 0, 4) "}", 3, "a"},
        {"{" T("a", "F32", "1", 0, 4) "}", 5, ""},
        {"{" T("a", "F32", "1", 4, 0) "}", 4, "a"},
        {"{" T("a", "F32", "-1", 0, 4) "}", 4, "a"},
        {"{" T("a", "F32", "1.0", 0, 4) "}", 4, "a"},
        {"{" T("a", "F32", "1e0", 0, 4) "}", 4, "a"},
        {"{" T("a", "F32", "\"1\"", 0, 4) "}", 4, "a"},
        {"{" T("a", "F32", "18446744073709551616", 0, 4) "}", 4, "a"},
        {"{" T("a", "F32", "4294967296,4294967296,4294967296", 0, 0) "}", 0, "a"},
        {"{" T("a", "F32", "4611686018427387905", 0, 4) "}", 4, "a"},
        {"{" T("a", "U8", "9223372036854775807,2,0", 0, 0) "}", 0, "a"},
        {"{" T("a", "U8", "0", 0, 18446744073709551615) "}", 0, "a"},
        {"{" T("a", "U8", "2", 0, 2) "," T("b", "U8", "2", 1, 3) "}", 3, "b"},
        {"{" T("a", "U8", "2", 0, 2) "," T("b", "U8", "2", 0, 2) "}", 2, "b"},
        {"{" T("a", "U8", "2", 0, 2) "," T("b", "U8", "1", 3, 4) "}", 4, "b"},
        {"{" T("a", "U8", "1", 1, 2) "}", 2, "a"},
        {"{" T("a", "U8", "2", 0, 2) "," T("b", "U8", "0", 1, 1) "}", 2, "b"},
        {"{" T("a", "U8", "1", 0, 1) "," T("a", "U8", "1", 1, 2) "}", 2, "a"},
        {"{\"a\":{\"dtype\":1,\"shape\":[],\"data_offsets\":[0,1]}}", 1, "a"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":{},\"data_offsets\":[0,1]}}", 1, "a"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "a"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]}}", 1, "a"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[]}}", 1, "a"},
        {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "a"},
        {"{\"__metadata__\":[]}", 0, ""},
        {"{\"__metadata__\":{\"a\":1}}", 0, ""},
        {"{\"a\":[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]}", 0, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const image file = image_of(cases[i].header, cases[i].payload);
        mls_safetensors f = {0};
        const mls_code code = parse(&file, &f, &status);
        CHECK(code == MLS_E_FORMAT && f.tensors == NULL && status.has_offset);
        CHECK_TEXT(status.name, cases[i].name);
        if (code != MLS_E_FORMAT) {
            printf("    accepted: %s\n", cases[i].header);
            mls_safetensors_fini(&f);
        }
    }
}

/* The single tensor of a file with `payload` bytes; no tensor if
 * the header is refused. */
static mls_stored parse_one(const char *header, size_t payload, size_t *shape)
{
    const image file = image_of(header, payload);
    mls_safetensors f;
    mls_stored tensor = {0};
    if (parse(&file, &f, &status) == MLS_OK) {
        tensor = f.tensors[0];
        memcpy(shape, tensor.shape, (size_t)tensor.rank * sizeof *shape);
        tensor.opaque.data = NULL; /* owned by the file */
        mls_safetensors_fini(&f);
    }
    return tensor;
}

TEST(last_axis_of_a_packed_dtype_becomes_bytes)
{
    size_t shape[MLS_MAX_RANK] = {0};
    mls_stored t = parse_one("{" T("a", "F4", "2,32", 0, 32) "}", 32, shape);
    CHECK(t.dtype == MLS_F4 && t.rank == 2 && shape[0] == 2 && shape[1] == 16);
    CHECK(t.bytes == 32 && t.opaque.length == 0);
    t = parse_one("{" T("a", "F6_E2M3", "3,8", 0, 18) "}", 18, shape);
    CHECK(t.dtype == MLS_F6_E2M3 && shape[0] == 3 && shape[1] == 6 && t.bytes == 18);
    t = parse_one("{" T("a", "F6_E3M2", "5,0", 0, 0) "}", 0, shape);
    CHECK(t.dtype == MLS_F6_E3M2 && shape[1] == 0 && t.bytes == 0 &&
          t.opaque.length == 0);
}

/* An unknown dtype, and axes that have whole bytes only together,
 * as the format allows. */
TEST(opaque_tensors_do_not_make_the_file_invalid)
{
    static const struct {
        const char *header;
        size_t bytes;
        const char *dtype;
    } cases[] = {
        {"{" T("a", "F3_X", "8", 0, 3) "}", 3, "F3_X"},
        {"{" T("a", "f32", "1", 0, 4) "}", 4, "f32"},
        {"{" T("a", "I4", "", 0, 0) "}", 0, "I4"},
        {"{" T("a", "F4", "2,3", 0, 3) "}", 3, "F4"},
        {"{" T("a", "F4", "0,3", 0, 0) "}", 0, "F4"},
        {"{" T("a", "F6_E3M2", "4,2", 0, 6) "}", 6, "F6_E3M2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t shape[MLS_MAX_RANK];
        const mls_stored t = parse_one(cases[i].header, cases[i].bytes, shape);
        CHECK(t.dtype == MLS_U8 && t.bytes == cases[i].bytes);
        CHECK(t.opaque.length == strlen(cases[i].dtype));
        const image file = image_of(cases[i].header, cases[i].bytes);
        mls_safetensors f;
        REQUIRE(parse(&file, &f, &status) == MLS_OK);
        CHECK(mls_safetensors_check(&f, &status) == MLS_E_FORMAT);
        CHECK_TEXT(status.name, "a");
        CHECK_TEXT(status.got, cases[i].dtype);
        CHECK(status.has_offset && status.offset == 8 + strlen("{\"a\":{\"dtype\":"));
        mls_safetensors_fini(&f);
    }
}

TEST(wrong_header_lengths_are_refused)
{
    image file = image_of("{" T("a", "U8", "3", 0, 3) "}", 3);
    mls_safetensors f;
    static const uint64_t wrong[] = {
        0, 1, 7, ROOM, 100000001U, (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 7};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        mls_store_le64(file.bytes, wrong[i]);
        CHECK(parse(&file, &f, &status) == MLS_E_FORMAT);
    }
    for (size_t bytes = 0; bytes < 8; bytes++) {
        CHECK(mls_safetensors_parse(file.bytes, bytes, bytes, crc, true, &f, &status) ==
              MLS_E_FORMAT);
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
