/* Reading Core ML packages: states as declared, and errors for false files. */
#include "coreml/mlpackage.h"

#include "support/temporary_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- a minimal writer of messages ---- */

typedef struct bytes {
    unsigned char data[1 << 18];
    size_t length;
} bytes;

static void put_number(bytes *to, uint64_t value)
{
    while (value >= 0x80) {
        to->data[to->length++] = (unsigned char)(value | 0x80U);
        value >>= 7;
    }
    to->data[to->length++] = (unsigned char)value;
}

static void put_varint(bytes *to, unsigned field, uint64_t value)
{
    put_number(to, (uint64_t)field << 3);
    put_number(to, value);
}

static void put_bytes(bytes *to, unsigned field, const void *data, size_t length)
{
    put_number(to, ((uint64_t)field << 3) | 2U);
    put_number(to, length);
    memcpy(to->data + to->length, data, length);
    to->length += length;
}

static void put_text(bytes *to, unsigned field, const char *text)
{
    put_bytes(to, field, text, strlen(text));
}

/* Append a state as field `number`; a dtype of 0 is omitted. */
static void put_state(bytes *to, unsigned number, const char *name, uint64_t dtype,
                      int rank, const uint64_t *shape, bool packed)
{
    static bytes array, inner, feature; /* static: too large for some stacks */
    array.length = inner.length = feature.length = 0;
    for (int i = 0; i < rank; i++) {
        if (packed) {
            put_number(&inner, shape[i]);
        } else {
            put_varint(&array, 1, shape[i]);
        }
    }
    if (packed) {
        put_bytes(&array, 1, inner.data, inner.length);
    }
    if (dtype != 0) {
        put_varint(&array, 2, dtype);
    }
    inner.length = 0;
    put_bytes(&inner, 1, array.data, array.length); /* state type -> array type */
    array.length = 0;
    put_bytes(&array, 8, inner.data, inner.length); /* feature type -> state type */
    if (name != NULL) {
        put_text(&feature, 1, name);
    }
    put_bytes(&feature, 3, array.data, array.length);
    put_bytes(to, number, feature.data, feature.length);
}

static const uint64_t kv[4] = {36, 1, 256, 256};

/* A whole specification around a description, with a program after it. */
static const bytes *spec_of(const bytes *description)
{
    static bytes spec;
    static const unsigned char program[300];
    spec.length = 0;
    put_varint(&spec, 1, 9);
    put_bytes(&spec, 2, description->data, description->length);
    put_bytes(&spec, 502, program, sizeof program);
    return &spec;
}

static bytes description; /* of the current test */

/* Describe a model with one state. */
static void describe_state(const char *name, uint64_t dtype, int rank,
                           const uint64_t *shape, bool packed)
{
    description.length = 0;
    put_state(&description, 13, name, dtype, rank, shape, packed);
}

static mls_code parse(mls_mlpackage *out)
{
    const bytes *spec = spec_of(&description);
    return mls_mlpackage_parse(spec->data, spec->length, out, &status);
}

/* The description must be refused, with `part` in the message. */
static void refuses(const char *part)
{
    mls_mlpackage package = {0};
    const mls_code code = parse(&package);
    CHECK(code == MLS_E_FORMAT);
    CHECK(package.functions == NULL && package.text == NULL);
    CHECK(status.has_offset);
    if (strstr(status.text, part) == NULL) {
        CHECK_TEXT(status.text, part);
    }
    mls_mlpackage_fini(&package);
}

/* ---- valid specifications ---- */

TEST(reads_states_of_a_model_without_functions)
{
    const uint64_t wide[2] = {4, 300};
    mls_mlpackage package = {0};
    description.length = 0;
    put_text(&description, 1, "an input, unread");
    put_state(&description, 13, "kv_cache", 65552, 4, kv, true);
    put_state(&description, 13, "\xC3\xA9tat", 131104, 2, wide, false);
    REQUIRE(parse(&package) == MLS_OK);
    CHECK(package.function_count == 1 && package.state_count == 2);
    CHECK(mls_str_is(package.functions[0].name, "main"));
    CHECK(package.default_function == 0 && package.functions[0].states == 2);
    const mls_ml_state *state = &package.states[0];
    CHECK(mls_str_is(state->name, "kv_cache") && state->dtype == MLS_F16);
    CHECK(state->rank == 4 && state->shape[0] == 36 && state->shape[2] == 256);
    CHECK(mls_str_is(state[1].name, "\xC3\xA9tat") && state[1].dtype == MLS_I32);
    CHECK(state[1].rank == 2 && state[1].shape[1] == 300);
    mls_mlpackage_fini(&package);
    CHECK(package.functions == NULL && package.states == NULL);
}

TEST(reads_a_model_without_states)
{
    mls_mlpackage package = {0};
    description.length = 0;
    REQUIRE(parse(&package) == MLS_OK);
    CHECK(package.function_count == 1 && package.state_count == 0);
    mls_mlpackage_fini(&package);
}

static void put_function(const char *name, uint64_t positions, int states)
{
    static bytes function;
    function.length = 0;
    const uint64_t shape[4] = {2, 1, positions, 32};
    if (name != NULL) {
        put_text(&function, 1, name);
    }
    for (int i = 0; i < states; i++) {
        const char text[2] = {(char)('a' + i), '\0'};
        put_state(&function, 6, text, 65552, 4, shape, true);
    }
    put_bytes(&description, 20, function.data, function.length);
}

TEST(reads_every_function)
{
    mls_mlpackage package = {0};
    description.length = 0;
    put_function("short", 256, 2);
    put_function("long", 512, 1);
    put_text(&description, 21, "long");
    REQUIRE(parse(&package) == MLS_OK);
    CHECK(package.function_count == 2 && package.default_function == 1);
    CHECK(mls_str_is(package.functions[0].name, "short"));
    CHECK(package.functions[0].first == 0 && package.functions[0].states == 2);
    CHECK(package.functions[1].first == 2 && package.functions[1].states == 1);
    CHECK(package.states[2].shape[2] == 512);
    mls_mlpackage_fini(&package);
}

TEST(has_no_default_where_the_model_names_none)
{
    mls_mlpackage package = {0};
    description.length = 0;
    put_function("short", 256, 1);
    REQUIRE(parse(&package) == MLS_OK);
    CHECK(package.default_function == 0); /* the only one */
    mls_mlpackage_fini(&package);
    put_function("long", 512, 1);
    REQUIRE(parse(&package) == MLS_OK);
    CHECK(package.default_function == 2);
    mls_mlpackage_fini(&package);
}

TEST(reads_every_data_type_of_core_ml)
{
    static const struct {
        uint64_t number;
        mls_dtype dtype;
    } types[] = {{65552, MLS_F16},
                 {65568, MLS_F32},
                 {65600, MLS_F64},
                 {131104, MLS_I32},
                 {131080, MLS_I8}};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        mls_mlpackage package = {0};
        describe_state("s", types[i].number, 4, kv, true);
        REQUIRE(parse(&package) == MLS_OK);
        CHECK(package.states[0].dtype == types[i].dtype);
        mls_mlpackage_fini(&package);
    }
}

/* ---- errors ---- */

TEST(refuses_unknown_data_types)
{
    describe_state("kv", 65553, 4, kv, true);
    refuses("state kv has the data type 65553, which is unknown");
    CHECK_TEXT(status.got, "data type 65553");
    CHECK_TEXT(status.name, "kv");
    describe_state("kv", 0, 4, kv, true);
    refuses("the data type 0");
}

TEST(refuses_impossible_shapes)
{
    static const uint64_t shapes[][4] = {
        {36, 1, 0, 256},
        {36, 1, UINT64_MAX, 256},
        {36, 1, (uint64_t)1 << 63, 256},
        {(uint64_t)1 << 40, (uint64_t)1 << 40, 2, 2},
        {(uint64_t)1 << 62, 1, 1, 1},
    };
    static const char *const texts[] = {"dimension 2 is 0", "dimension 2 is -1",
                                        "dimension 2 is -9", "exceed the address space",
                                        "exceed the address space"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        for (int packed = 0; packed < 2; packed++) {
            describe_state("kv", 65552, 4, shapes[i], packed != 0);
            refuses(texts[i]);
        }
    }
    uint64_t many[MLS_ML_MAX_RANK + 1];
    for (int i = 0; i <= MLS_ML_MAX_RANK; i++) {
        many[i] = 1;
    }
    describe_state("kv", 65552, MLS_ML_MAX_RANK + 1, many, true);
    refuses("more than 16 dimensions");
    describe_state("kv", 65552, 0, many, false);
    refuses("no shape");
}

TEST(refuses_missing_empty_invalid_and_long_names)
{
    static char huge[MLS_ML_MAX_NAME_BYTES + 2];
    memset(huge, 'x', sizeof huge - 1);
    static const char *const names[] = {NULL, "", "\xC3", "\xED\xA0\x80", huge};
    static const char *const texts[] = {"the name of a state is missing", "has 0 bytes",
                                        "not UTF-8", "not UTF-8", "has 1025 bytes"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        describe_state(names[i], 65552, 4, kv, true);
        refuses(texts[i]);
    }
    description.length = 0;
    put_function(NULL, 256, 1);
    refuses("the name of a function is missing");
}

TEST(refuses_duplicate_names)
{
    describe_state("kv", 65552, 4, kv, true);
    put_state(&description, 13, "kv", 65552, 4, kv, true);
    refuses("two states are called kv");
    description.length = 0;
    put_function("main", 256, 1);
    put_function("main", 512, 1);
    refuses("two functions are called main");
}

TEST(refuses_contradictions_about_functions)
{
    description.length = 0;
    put_function("main", 256, 1);
    put_text(&description, 21, "other");
    refuses("the default function is not among the model's functions");
    description.length = 0;
    put_function("main", 256, 1);
    put_state(&description, 13, "kv", 65552, 4, kv, true);
    refuses("a state that belongs to no function");
}

TEST(refuses_fields_of_the_wrong_type)
{
    static const unsigned numbers[] = {13, 20, 21};
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        description.length = 0;
        put_varint(&description, numbers[i], 1);
        refuses("is not of its type");
    }
    description.length = 0;
    put_bytes(&description, 13, "\x0A\x02kv", 4);
    refuses("state kv has no array type");
}

TEST(refuses_counts_above_the_limits)
{
    description.length = 0;
    for (int i = 0; i <= MLS_ML_MAX_STATES; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%d", i);
        put_state(&description, 13, name, 65552, 1, kv, true);
    }
    refuses("more than 2048 states");
    description.length = 0;
    for (int i = 0; i <= MLS_ML_MAX_FUNCTIONS; i++) {
        char name[16];
        snprintf(name, sizeof name, "f%d", i);
        put_function(name, 256, 0);
    }
    refuses("more than 1024 functions");
}

TEST(refuses_bytes_that_are_not_a_specification)
{
    static unsigned char many[2 * (MLS_ML_MAX_FIELDS + 1)];
    for (size_t i = 0; i < sizeof many; i += 2) {
        many[i] = 0x08;
    }
    mls_mlpackage package = {0};
    CHECK(mls_mlpackage_parse((const unsigned char *)"", 0, &package, &status) ==
          MLS_E_FORMAT);
    CHECK(strstr(status.text, "without a model's description") != NULL);
    CHECK(mls_mlpackage_parse(many, sizeof many, &package, &status) == MLS_E_FORMAT);
    CHECK(strstr(status.text, "more than 4096 fields") != NULL);
    CHECK(mls_mlpackage_parse((const unsigned char *)"\x12\x00\x12\x00", 4, &package,
                              &status) == MLS_E_FORMAT);
    CHECK(strstr(status.text, "appears twice") != NULL);
}

TEST(refuses_a_specification_cut_off_anywhere)
{
    description.length = 0;
    put_function("short", 256, 2);
    put_text(&description, 21, "short");
    const bytes *spec = spec_of(&description);
    /* The two fields before the program form a whole specification without one. */
    const size_t full_length = spec->length - 304;
    for (size_t length = 0; length < spec->length; length++) {
        unsigned char *copy = malloc(length + 1);
        REQUIRE(copy != NULL);
        memcpy(copy, spec->data, length);
        mls_mlpackage package = {0};
        const mls_code code = mls_mlpackage_parse(copy, length, &package, &status);
        CHECK(code == (length == full_length ? MLS_OK : MLS_E_FORMAT));
        mls_mlpackage_fini(&package);
        free(copy);
    }
}

/* ---- packages on disk ---- */

static void write_manifest(const char *inner)
{
    char text[1024];
    snprintf(text, sizeof text,
             "{\"itemInfoEntries\": {\"ID\": {\"path\": \"%s\"}}, "
             "\"rootModelIdentifier\": \"ID\"}",
             inner);
    write_text(path_of("m.mlpackage/Manifest.json"), text);
}

static void start_package(void)
{
    CHECK(mkdir(path_of("m.mlpackage"), 0700) == 0);
    CHECK(mkdir(path_of("m.mlpackage/Data"), 0700) == 0);
    describe_state("kv", 65552, 4, kv, true);
    const bytes *spec = spec_of(&description);
    write_file(path_of("m.mlpackage/Data/model.mlmodel"), spec->data, spec->length);
    write_manifest("model.mlmodel");
}

static mls_code read_named(const char *name, mls_mlpackage *out)
{
    return mls_mlpackage_read(path_of(name), out, &status);
}

TEST(reads_a_package_and_a_bare_file)
{
    static const char *const names[] = {"m.mlpackage", "m.mlpackage/",
                                        "m.mlpackage/Data/model.mlmodel"};
    start_package();
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        mls_mlpackage package = {0};
        CHECK(read_named(names[i], &package) == MLS_OK);
        CHECK(package.state_count == 1 && mls_str_is(package.states[0].name, "kv"));
        mls_mlpackage_fini(&package);
    }
}

TEST(refuses_a_manifest_that_points_outside)
{
    static const char *const paths[] = {"/etc/passwd", "../model",  "a/../../model",
                                        ".",           "a//b",      "",
                                        "a\\\\b",      "a\\u0000b", "a/"};
    start_package();
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        mls_mlpackage package = {0};
        write_manifest(paths[i]);
        CHECK(read_named("m.mlpackage", &package) == MLS_E_FORMAT);
        CHECK(strstr(status.text, "Manifest.json: byte ") == status.text);
        CHECK(strstr(status.text, "is not inside the package") != NULL);
    }
}

TEST(refuses_incomplete_manifests)
{
    static const char *const texts[] = {
        "",
        "[]",
        "{}",
        "{\"rootModelIdentifier\": \"ID\"}",
        "{\"rootModelIdentifier\": 1, \"itemInfoEntries\": {}}",
        "{\"rootModelIdentifier\": \"ID\", \"itemInfoEntries\": []}",
        "{\"rootModelIdentifier\": \"ID\", \"itemInfoEntries\": {}}",
        "{\"rootModelIdentifier\": \"ID\", \"itemInfoEntries\": {\"ID\": 1}}",
        "{\"rootModelIdentifier\": \"ID\", \"itemInfoEntries\": {\"ID\": {\"path\": 1}}}",
    };
    start_package();
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        mls_mlpackage package = {0};
        write_text(path_of("m.mlpackage/Manifest.json"), texts[i]);
        CHECK(read_named("m.mlpackage", &package) == MLS_E_FORMAT);
        CHECK(strstr(status.text, "Manifest.json: ") == status.text);
    }
}

TEST(error_names_the_missing_file)
{
    mls_mlpackage package = {0};
    start_package();
    CHECK(read_named("nothing", &package) == MLS_E_IO && status.os_error == ENOENT);
    CHECK(read_named("m.mlpackage/Data", &package) == MLS_E_FORMAT);
    CHECK(strstr(status.text, "not a .mlpackage") != NULL);
    write_manifest("other.mlmodel");
    CHECK(read_named("m.mlpackage", &package) == MLS_E_IO && status.os_error == ENOENT);
    CHECK(strstr(status.text, "Data/other.mlmodel: ") == status.text);
}

TEST(refuses_a_fifo_without_waiting)
{
    mls_mlpackage package = {0};
    start_package();
    CHECK(mkfifo(path_of("m.mlpackage/Data/fifo"), 0600) == 0);
    write_manifest("fifo");
    CHECK(read_named("m.mlpackage", &package) == MLS_E_FORMAT);
    CHECK(strstr(status.text, "regular file") != NULL);
}

/* A program of many gigabytes is skipped, not read. */
TEST(skips_a_large_program)
{
    static bytes head;
    mls_mlpackage package = {0};
    start_package();
    describe_state("kv", 65552, 4, kv, true);
    head.length = 0;
    put_bytes(&head, 2, description.data, description.length);
    put_number(&head, (502U << 3) | 2U);
    put_number(&head, (uint64_t)1 << 33);
    write_file(path_of("m.mlpackage/Data/model.mlmodel"), head.data, head.length);
    CHECK(read_named("m.mlpackage", &package) == MLS_E_FORMAT);
    CHECK(strstr(status.text, "field 502 claims 8589934592 bytes") != NULL);
    const char *path = path_of("m.mlpackage/Data/model.mlmodel");
    if (truncate(path, (off_t)(head.length + ((uint64_t)1 << 33))) == 0) { /* sparse */
        CHECK(read_named("m.mlpackage", &package) == MLS_OK);
        CHECK(package.state_count == 1);
        mls_mlpackage_fini(&package);
    }
}

TEST(long_paths_do_not_truncate_the_reason)
{
    static char name[3000];
    mls_mlpackage package = {0};
    memset(name, 'd', sizeof name - 1);
    CHECK(mls_mlpackage_read(name, &package, &status) == MLS_E_IO);
    CHECK(strncmp(status.text, "...ddd", 6) == 0 &&
          strstr(status.text, "cannot open") != NULL);
}
