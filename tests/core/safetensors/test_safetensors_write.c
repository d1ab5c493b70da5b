/* Writing safetensors: round trips, and detection of damage. */
#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"
#include "safetensors/safetensors.h"
#include "support/temporary_folder.h"
#include "support/tensors.h"
#include "support/text.h"
#include "support/whole_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

enum { ROOM = 4096 };

static const mls_crc_kernels *const crc = &mls_crc_scalar;

/* Read one tensor of a file, as if it were the only one. */
static mls_code read_one(int fd, const mls_stored *tensor, bool has_crc,
                         const mls_crc_kernels *kernels, void *data, mls_status *st)
{
    mls_stored copy = *tensor;
    const mls_safetensors only = {.tensors = &copy, .count = 1, .has_crc = has_crc};
    return mls_safetensors_read(fd, &only, &data, kernels, NULL, st);
}

static mls_code save(const mls_named_tensor *tensors, size_t count,
                     const mls_str_pair *pairs, size_t pair_count, mls_status *st)
{
    const mls_safetensors_content content = {.tensors = tensors,
                                             .count = count,
                                             .metadata = pairs,
                                             .metadata_count = pair_count};
    return mls_safetensors_write(file_path, &content, mls_kernels_of(MLS_CPU_SCALAR), crc,
                                 st);
}

/* Read tensor `index` of the file at `file_path` and compare it with `expected`. */
static bool stored_is(size_t index, const char *name, const void *expected, size_t bytes)
{
    int fd = -1;
    mls_safetensors f = {0};
    mls_status st;
    bool same = false;
    unsigned char *data = mls_alloc(bytes, 1);
    if (data != NULL &&
        mls_safetensors_open(file_path, crc, true, &fd, &f, &st) == MLS_OK) {
        const mls_stored *t = &f.tensors[index];
        same = index < f.count && f.has_crc && mls_str_is(t->name, name) &&
               t->bytes == bytes && t->offset % mls_dtype_of(t->dtype)->item_bytes == 0 &&
               read_one(fd, t, true, crc, data, &st) == MLS_OK &&
               memcmp(data, expected, bytes) == 0;
        close(fd);
    }
    mls_safetensors_fini(&f);
    mls_free(data);
    return same;
}

TEST(written_tensors_read_back_in_order)
{
    float floats[6] = {0, 1, 2, 3, 4, 5};
    uint16_t halves[3] = {7, 8, 9};
    unsigned char bytes[5] = {1, 2, 3, 4, 5};
    double number = 2.5;
    const mls_tensor f = matrix_of(floats, MLS_F32, 2, 3),
                     h = vector_of(halves, MLS_BF16, 3),
                     b = vector_of(bytes, MLS_BOOL, 5),
                     d = tensor_of(&number, MLS_F64, 0, NULL),
                     none = matrix_of(NULL, MLS_F32, 0, 3);
    const mls_named_tensor tensors[] = {{text("h"), &h},
                                        {text("b\"\\\n\xC3\xA9"), &b},
                                        {text("f2"), &f},
                                        {text("f1"), &none},
                                        {text(""), &d}};
    const mls_str_pair pairs[] = {{text("z"), text("last")}, {text("a"), text("\x01\"")}};
    REQUIRE(save(tensors, 5, pairs, 2, &status) == MLS_OK);
    CHECK(stored_is(0, "", &number, 8));
    CHECK(stored_is(1, "f1", "", 0));
    CHECK(stored_is(2, "f2", floats, sizeof floats));
    CHECK(stored_is(3, "h", halves, sizeof halves));
    CHECK(stored_is(4, "b\"\\\n\xC3\xA9", bytes, sizeof bytes));
    int fd;
    mls_safetensors file;
    REQUIRE(mls_safetensors_open(file_path, crc, true, &fd, &file, &status) == MLS_OK);
    CHECK(file.tensors[0].offset % 64 == 0);
    CHECK(file.metadata_count == 2 && mls_str_is(file.metadata[0].key, "a"));
    CHECK(mls_str_is(file.metadata[0].value, "\x01\""));
    mls_safetensors_fini(&file);
    close(fd);
}

TEST(the_order_of_the_arguments_does_not_matter)
{
    unsigned char data[4] = {1, 2, 3, 4};
    const mls_tensor t = vector_of(data, MLS_U8, 4);
    mls_named_tensor tensors[] = {{text("a"), &t}, {text("b"), &t}, {text("ab"), &t}};
    size_t first_bytes = 0, second_bytes = 0;
    REQUIRE(save(tensors, 3, NULL, 0, &status) == MLS_OK);
    unsigned char *first = read_file(file_path, &first_bytes);
    REQUIRE(first != NULL);
    const mls_named_tensor swapped = tensors[0];
    tensors[0] = tensors[2];
    tensors[2] = swapped;
    CHECK(save(tensors, 3, NULL, 0, &status) == MLS_OK);
    unsigned char *second = read_file(file_path, &second_bytes);
    REQUIRE(second != NULL);
    CHECK(first_bytes == second_bytes && memcmp(first, second, first_bytes) == 0);
    mls_free(first);
    mls_free(second);
}

/* The same numbers through strided views, compared with a packed copy. */
TEST(strided_and_swapped_tensors_are_packed)
{
    enum { ROWS = 700, COLUMNS = 900 }; /* more than the buffer holds */
    uint32_t *numbers = malloc(4 * ROWS * COLUMNS), *packed = malloc(4 * ROWS * COLUMNS);
    REQUIRE(numbers != NULL && packed != NULL);
    for (size_t i = 0; i < ROWS * COLUMNS; i++) {
        numbers[i] = (uint32_t)i * 2654435761U;
    }
    const mls_tensor t = transposed_of(numbers, MLS_U32, COLUMNS, ROWS);
    mls_tensor back = matrix_of(numbers, MLS_U32, ROWS, COLUMNS);
    /* rows in reverse, byte-swapped */
    back.data += 4 * COLUMNS * (ROWS - 1);
    back.strides[0] = -4 * COLUMNS;
    back.swapped = true;
    const mls_named_tensor tensors[] = {{text("b"), &back}, {text("t"), &t}};
    REQUIRE(save(tensors, 2, NULL, 0, &status) == MLS_OK);
    for (size_t i = 0; i < ROWS * COLUMNS; i++) {
        packed[i] =
            __builtin_bswap32(numbers[(ROWS - 1 - i / COLUMNS) * COLUMNS + i % COLUMNS]);
    }
    CHECK(stored_is(0, "b", packed, 4 * ROWS * COLUMNS));
    for (size_t i = 0; i < ROWS * COLUMNS; i++) {
        packed[i] = numbers[(i % ROWS) * COLUMNS + i / ROWS];
    }
    CHECK(stored_is(1, "t", packed, 4 * ROWS * COLUMNS));
    free(numbers);
    free(packed);
}

TEST(one_swapped_number_without_dimensions_is_packed)
{
    uint32_t number = 0x01020304;
    mls_tensor t = tensor_of(&number, MLS_F32, 0, NULL);
    t.swapped = true;
    const mls_named_tensor tensors[] = {{text("x"), &t}};
    REQUIRE(save(tensors, 1, NULL, 0, &status) == MLS_OK);
    CHECK(stored_is(0, "x", "\1\2\3\4", 4));
}

TEST(unstorable_names_are_refused)
{
    unsigned char byte = 1;
    const mls_tensor t = tensor_of(&byte, MLS_U8, 0, NULL);
    const mls_named_tensor good = {text("a"), &t};
    const mls_named_tensor twice[] = {good, {text("b"), &t}, good};
    const mls_named_tensor reserved = {text("__metadata__"), &t};
    const mls_named_tensor broken = {text("\xFF"), &t};
    const mls_str_pair reserved_key = {text("mlstate.x"), text("")};
    const mls_str_pair broken_key = {text("\xC3"), text("")};
    const mls_str_pair broken_value = {text("k"), text("\xED\xA0\x80")};
    const mls_str_pair same[] = {{text("k"), text("1")}, {text("k"), text("2")}};
    CHECK(save(twice, 3, NULL, 0, &status) == MLS_E_VALUE);
    CHECK_TEXT(status.name, "a");
    CHECK(save(&reserved, 1, NULL, 0, &status) == MLS_E_VALUE);
    CHECK(save(&broken, 1, NULL, 0, &status) == MLS_E_VALUE);
    CHECK(save(&good, 1, &reserved_key, 1, &status) == MLS_E_VALUE);
    CHECK(save(&good, 1, &broken_key, 1, &status) == MLS_E_VALUE);
    CHECK(save(&good, 1, &broken_value, 1, &status) == MLS_E_VALUE);
    CHECK(save(&good, 1, same, 2, &status) == MLS_E_VALUE);
    CHECK(access(file_path, F_OK) != 0);
}

TEST(a_header_over_100_megabytes_is_refused)
{
    const size_t bytes = 100000001;
    char *long_text = malloc(bytes);
    REQUIRE(long_text != NULL);
    memset(long_text, 'x', bytes);
    const mls_str_pair pair = {text("k"), {.data = long_text, .length = bytes}};
    CHECK(save(NULL, 0, &pair, 1, &status) == MLS_E_SIZE);
    CHECK(access(file_path, F_OK) != 0);
    free(long_text);
}

/* Parse a whole file after one of its bytes was changed. */
static mls_code parse_all(const unsigned char *data, size_t length, bool verify,
                          mls_status *st)
{
    mls_safetensors f = {0};
    const mls_code code =
        mls_safetensors_parse(data, length, length, crc, verify, &f, st);
    mls_safetensors_fini(&f);
    return code;
}

TEST(header_changes_and_truncation_are_detected)
{
    float floats[4] = {1, 2, 3, 4};
    const mls_tensor t = matrix_of(floats, MLS_F32, 2, 2);
    const mls_named_tensor tensors[] = {{text("weight"), &t}, {text("x"), &t}};
    const mls_str_pair pair = {text("key"), text("value")};
    size_t length = 0;
    REQUIRE(save(tensors, 2, &pair, 1, &status) == MLS_OK);
    unsigned char *data = read_file(file_path, &length);
    REQUIRE(data != NULL);
    CHECK(parse_all(data, length, true, &status) == MLS_OK);
    const size_t header = 8 + (size_t)mls_load_le64(data);
    for (size_t i = 0; i < header; i++) {
        for (unsigned flip = 1; flip < 256; flip++) {
            data[i] ^= (unsigned char)flip;
            const mls_code code = parse_all(data, length, true, &status);
            CHECK(code == MLS_E_FORMAT || code == MLS_E_CHECKSUM);
            data[i] ^= (unsigned char)flip;
        }
    }
    for (size_t cut = 0; cut < length; cut++) {
        CHECK(parse_all(data, cut, true, &status) == MLS_E_FORMAT);
    }
    mls_free(data);
}

TEST(changed_tensor_is_detected_only_with_verification)
{
    float floats[4] = {1, 2, 3, 4};
    float read_back[4];
    const mls_tensor t = vector_of(floats, MLS_F32, 4);
    const mls_named_tensor tensors[] = {{text("weight"), &t}};
    mls_safetensors f = {0};
    int fd = -1;
    REQUIRE(save(tensors, 1, NULL, 0, &status) == MLS_OK);
    REQUIRE(mls_safetensors_open(file_path, crc, true, &fd, &f, &status) == MLS_OK);
    const mls_stored *stored = &f.tensors[0];
    CHECK(read_one(fd, stored, f.has_crc, crc, read_back, &status) == MLS_OK);
    FILE *file = fopen(file_path, "r+b");
    REQUIRE(file != NULL);
    fseek(file, (long)stored->offset + 5, SEEK_SET);
    fputc(0x55, file);
    fclose(file);
    CHECK(read_one(fd, stored, f.has_crc, crc, read_back, &status) == MLS_E_CHECKSUM);
    CHECK_TEXT(status.name, "weight");
    CHECK(status.has_offset && status.offset == stored->offset);
    CHECK(read_one(fd, stored, f.has_crc, NULL, read_back, &status) == MLS_OK);
    CHECK(truncate(file_path, (off_t)stored->offset + 3) == 0);
    CHECK(read_one(fd, stored, f.has_crc, crc, read_back, &status) == MLS_E_FORMAT);
    close(fd);
    mls_safetensors_fini(&f);
}

TEST(first_damage_is_reported_for_any_thread_count)
{
    enum { COUNT = 3 << 20, ITEMS = 4 };
    mls_tensor views[ITEMS];
    mls_named_tensor named[ITEMS];
    static const char *const names[ITEMS] = {"a", "b", "c", "d"};
    float *data = mls_alloc(COUNT, sizeof *data);
    for (size_t i = 0; i < ITEMS; i++) {
        views[i] = vector_of(data, MLS_F32, COUNT);
        named[i] = (mls_named_tensor){.name = {names[i], 1}, .tensor = &views[i]};
    }
    CHECK(save(named, ITEMS, NULL, 0, &status) == MLS_OK);
    int fd = -1;
    mls_safetensors file = {0};
    REQUIRE(mls_safetensors_open(file_path, crc, true, &fd, &file, &status) == MLS_OK);
    const int damage = open(file_path, O_WRONLY);
    for (size_t i = 1; i < ITEMS; i++) { /* in all but the first, near the end */
        const uint64_t at = file.tensors[i].offset + file.tensors[i].bytes - 9;
        CHECK(pwrite(damage, "x", 1, (off_t)at) == 1);
    }
    (void)close(damage);
    void *places[ITEMS];
    for (size_t i = 0; i < ITEMS; i++) {
        places[i] = mls_alloc(COUNT, sizeof *data);
    }
    for (size_t threads = 1; threads <= 4; threads += EVERY(3)) {
        mls_pool *pool = NULL;
        CHECK(mls_pool_new(threads, &pool, &status) == MLS_OK);
        CHECK(mls_safetensors_read(fd, &file, places, crc, pool, &status) ==
              MLS_E_CHECKSUM);
        CHECK(strcmp(status.name, "b") == 0);
        CHECK(status.offset == file.tensors[1].offset + ((COUNT * 4 - 9) >> 20 << 20));
        CHECK(mls_safetensors_read(fd, &file, places, NULL, pool, &status) == MLS_OK);
        CHECK(memcmp(places[0], data, COUNT * sizeof *data) == 0);
        CHECK(((char *)places[3])[COUNT * 4 - 9] == 'x');
        mls_pool_free(pool);
    }
    for (size_t i = 0; i < ITEMS; i++) {
        mls_free(places[i]);
    }
    (void)close(fd);
    mls_safetensors_fini(&file);
    mls_free(data);
}
