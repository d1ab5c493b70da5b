/* mlpackage: the states that a Core ML model declares, read from its package.
 *
 * These messages are read, by field number (Core ML's Model.proto and related files):
 *
 *   Model             2 description
 *   description      13 state*, 20 function*, 21 name of the default function
 *   function          1 name, 6 state*
 *   state             1 name, 3 type -> 8 state type -> 1 array type
 *   array type        1 shape* (packed or one by one), 2 data type
 *
 * All other fields are skipped, including the program (field 502) and all inputs and
 * outputs, so newer converters may add fields.
 *
 * The functions are ordered from the inside out: array type -> state -> function ->
 * description -> specification (in memory or in a file) -> package. Each level has one
 * reader, which takes the message of that level, so the nesting of calls is fixed and a
 * file cannot increase it.
 *
 * If a field that must be unique is repeated, protobuf merges the messages or uses the
 * last name. This reader refuses such a file: no converter writes one.
 */
#include "coreml/mlpackage.h"

#include "base/memory.h"
#include "base/size.h"
#include "coreml/protobuf_reader.h"
#include "io/file.h"
#include "io/json_reader.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* FIELD_X_Y is the number of field Y in message X. */
enum {
    FIELD_MODEL_DESCRIPTION = 2,
    FIELD_DESCRIPTION_STATE = 13,
    FIELD_DESCRIPTION_FUNCTION = 20,
    FIELD_DESCRIPTION_DEFAULT = 21,
    FIELD_FUNCTION_NAME = 1,
    FIELD_FUNCTION_STATE = 6,
    FIELD_FEATURE_NAME = 1,
    FIELD_FEATURE_TYPE = 3,
    FIELD_TYPE_STATE = 8,
    FIELD_STATE_ARRAY = 1,
    FIELD_ARRAY_SHAPE = 1,
    FIELD_ARRAY_DTYPE = 2
};

/* Values of ArrayFeatureType.ArrayDataType: the kind in the upper half, the bits of an
 * item in the lower half. Converters write float16 states only. The format allows the
 * others, but Core ML may not run them. */
static const struct {
    uint64_t number;
    mls_dtype dtype;
} data_types[] = {
    {65552, MLS_F16},  {65568, MLS_F32}, {65600, MLS_F64},
    {131104, MLS_I32}, {131080, MLS_I8},
};

/* ---- names ---- */

/* Find the name of a function or state, field `number` of its message. A missing name is
 * an error: nothing could refer to its owner. `what` is for errors. */
static mls_code find_name(mls_protobuf message, uint32_t number, const char *label,
                          mls_str *out, mls_status *st)
{
    mls_protobuf bytes = {0};
    bool is_present;
    const mls_code code =
        mls_protobuf_only(message, number, label, &bytes, &is_present, st);
    if (code != MLS_OK) {
        return code;
    }
    if (!is_present) {
        return mls_protobuf_fail(st, mls_protobuf_offset(&message), "%s is missing",
                                 label);
    }
    const mls_str name = {(const char *)bytes.data, bytes.length};
    const uint64_t at = mls_protobuf_offset(&bytes);
    if (name.length == 0 || name.length > MLS_ML_MAX_NAME_BYTES) {
        return mls_protobuf_fail(st, at, "%s has %zu bytes, expected 1 to %d", label,
                                 name.length, MLS_ML_MAX_NAME_BYTES);
    }
    /* a NUL would truncate the name in code that uses C strings */
    if (!mls_utf8_valid(name.data, name.length) ||
        memchr(name.data, 0, name.length) != NULL) {
        return mls_protobuf_fail(st, at, "%s is not UTF-8 text", label);
    }
    *out = name;
    return MLS_OK;
}

/* A name as arguments for %.*s, truncated for messages. If this splits a character, the
 * message shows it escaped. */
#define NAME_ARGS(name) (int)((name).length < 80 ? (name).length : 80), (name).data

/* ---- a state ---- */

/* Append a dimension. The format's type is signed, so -1, which means "any" in other
 * places, arrives as a 64-bit number. */
static mls_code add_dimension(mls_ml_state *state, uint64_t value, uint64_t offset,
                              mls_status *st)
{
    if (state->rank == MLS_ML_MAX_RANK) {
        return mls_protobuf_fail(st, offset, "state %.*s has more than %d dimensions",
                                 NAME_ARGS(state->name), MLS_ML_MAX_RANK);
    }
    size_t dimension = 0;
    if (value == 0 || value > INT64_MAX || !mls_size_from_u64(value, &dimension)) {
        mls_protobuf_fail(
            st, offset,
            "state %.*s: dimension %d is %lld; a state's dimensions are fixed "
            "and positive",
            NAME_ARGS(state->name), state->rank, (long long)value);
        mls_status_expected(st, "a positive dimension");
        return mls_status_got(st, "%lld", (long long)value);
    }
    state->shape[state->rank++] = dimension;
    return MLS_OK;
}

/* Read a repeated number. Writers may pack it into one field or not, or mix both forms;
 * all dimensions are appended in order. */
static mls_code read_shape(mls_protobuf_field field, mls_ml_state *state, mls_status *st)
{
    if (field.wire_type == MLS_PROTOBUF_VARINT) {
        return add_dimension(state, field.value, field.offset, st);
    }
    mls_protobuf packed = field.bytes;
    if (field.wire_type != MLS_PROTOBUF_BYTES) {
        return mls_protobuf_fail(st, field.offset,
                                 "state %.*s: its shape has wire type %d",
                                 NAME_ARGS(state->name), (int)field.wire_type);
    }
    while (!mls_protobuf_done(&packed)) {
        const uint64_t offset = mls_protobuf_offset(&packed);
        uint64_t value;
        mls_code code = mls_protobuf_varint(&packed, &value, st);
        if (code == MLS_OK) {
            code = add_dimension(state, value, offset, st);
        }
        if (code != MLS_OK) {
            return code;
        }
    }
    return MLS_OK;
}

/* Convert ArrayDataType to a dtype; 0, also the value of a missing field, is invalid. */
static mls_code read_dtype(uint64_t number, uint64_t offset, mls_ml_state *state,
                           mls_status *st)
{
    for (size_t i = 0; i < sizeof data_types / sizeof data_types[0]; i++) {
        if (data_types[i].number == number) {
            state->dtype = data_types[i].dtype;
            return MLS_OK;
        }
    }
    mls_protobuf_fail(
        st, offset,
        "state %.*s has the data type %llu, which is unknown; known are float16 "
        "65552, float32 65568, float64 65600, int32 131104, int8 131080",
        NAME_ARGS(state->name), (unsigned long long)number);
    mls_status_expected(st, "a known data type");
    return mls_status_got(st, "data type %llu", (unsigned long long)number);
}

/* Check that the state's bytes fit a signed size, as array libraries use it: every caller
 * that allocates a state computes them. */
static mls_code check_array(const mls_ml_state *state, uint64_t offset, mls_status *st)
{
    size_t bytes = mls_dtype_of(state->dtype)->item_bytes;
    bool fits = state->rank > 0;
    for (int i = 0; fits && i < state->rank; i++) {
        fits = mls_size_mul(bytes, state->shape[i], &bytes) && bytes <= PTRDIFF_MAX;
    }
    if (fits) {
        return MLS_OK;
    }
    return mls_protobuf_fail(
        st, offset, "state %.*s has %s", NAME_ARGS(state->name),
        state->rank == 0 ? "no shape" : "a shape whose bytes exceed the address space");
}

/* Read dtype and shape from ArrayFeatureType. Its flexible shapes (ranges, enumerations)
 * are ignored: Core ML does not allow them for states. */
static mls_code read_array(mls_protobuf array, mls_ml_state *state, mls_status *st)
{
    const uint64_t start = mls_protobuf_offset(&array);
    uint64_t number = 0;
    uint64_t offset = start;
    while (!mls_protobuf_done(&array)) {
        mls_protobuf_field field;
        mls_code code = mls_protobuf_next(&array, &field, st);
        if (code == MLS_OK && field.number == FIELD_ARRAY_SHAPE) {
            code = read_shape(field, state, st);
        }
        if (code != MLS_OK) {
            return code;
        }
        if (field.number == FIELD_ARRAY_DTYPE) {
            number = field.wire_type == MLS_PROTOBUF_VARINT ? field.value : 0;
            offset = field.offset;
        }
    }
    const mls_code code = read_dtype(number, offset, state, st);
    return code != MLS_OK ? code : check_array(state, start, st);
}

/* Open FeatureType.stateType.arrayType, two levels down. */
static mls_code open_array(mls_protobuf type, mls_protobuf *out, bool *is_present,
                           mls_status *st)
{
    mls_protobuf state_type;
    mls_code code = mls_protobuf_only(type, FIELD_TYPE_STATE, "a state type", &state_type,
                                      is_present, st);
    if (code == MLS_OK && *is_present) {
        code = mls_protobuf_only(state_type, FIELD_STATE_ARRAY, "an array type", out,
                                 is_present, st);
    }
    return code;
}

/* Read a state from FeatureDescription. The name is read first, wherever it is in the
 * message, so that later errors can include it. `out` is untouched on failure. */
static mls_code read_state(mls_protobuf feature, mls_ml_state *out, mls_status *st)
{
    mls_ml_state state = {.rank = 0};
    mls_protobuf bytes = {0};
    bool is_present;
    mls_code code =
        find_name(feature, FIELD_FEATURE_NAME, "the name of a state", &state.name, st);
    if (code != MLS_OK) {
        return code;
    }
    code =
        mls_protobuf_only(feature, FIELD_FEATURE_TYPE, "a type", &bytes, &is_present, st);
    if (code == MLS_OK && is_present) {
        code = open_array(bytes, &bytes, &is_present, st);
    }
    if (code == MLS_OK) {
        code = is_present ? read_array(bytes, &state, st)
                          : mls_protobuf_fail(st, mls_protobuf_offset(&feature),
                                              "state %.*s has no array type",
                                              NAME_ARGS(state.name));
    }
    if (code != MLS_OK) {
        return mls_status_name(st, state.name.data, state.name.length);
    }
    *out = state;
    return MLS_OK;
}

/* ---- lists that grow, up to a limit ---- */

/* Make room for one more item of `size` bytes in `*items`, which holds `count`. Grows if
 * the count is a power of two, so the block is at most twice as large as needed. */
static mls_code make_room(void **items, size_t count, size_t size, mls_status *st)
{
    if ((count & (count - 1)) != 0) {
        return MLS_OK;
    }
    void *grown = mls_realloc(*items, count == 0 ? 1 : 2 * count, size);
    if (grown == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the model's states");
    }
    *items = grown;
    return MLS_OK;
}

/* Append the state in `feature` to the last function of the package. The search for
 * duplicate names is quadratic, but the limits bound it to about 16 million comparisons
 * of lengths. */
static mls_code add_state(mls_mlpackage *package, mls_protobuf feature, mls_status *st)
{
    mls_ml_function *function = &package->functions[package->function_count - 1];
    const uint64_t at = mls_protobuf_offset(&feature);
    if (function->states == MLS_ML_MAX_STATES ||
        package->state_count == MLS_ML_MAX_ALL_STATES) {
        return mls_protobuf_fail(st, at, "more than %zu states", package->state_count);
    }
    mls_ml_state state;
    mls_code code = read_state(feature, &state, st);
    if (code != MLS_OK) {
        return code;
    }
    for (size_t i = 0; i < function->states; i++) {
        if (mls_str_equal(package->states[function->first + i].name, state.name)) {
            mls_protobuf_fail(st, at, "two states are called %.*s",
                              NAME_ARGS(state.name));
            return mls_status_name(st, state.name.data, state.name.length);
        }
    }
    void *states = package->states;
    code = make_room(&states, package->state_count, sizeof state, st);
    if (code == MLS_OK) {
        package->states = states;
        package->states[package->state_count++] = state;
        function->states++;
    }
    return code;
}

/* Append a function without states; the next states are added to it. Errors have
 * `offset`. */
static mls_code add_function(mls_mlpackage *package, mls_str name, uint64_t offset,
                             mls_status *st)
{
    if (package->function_count == MLS_ML_MAX_FUNCTIONS) {
        return mls_protobuf_fail(st, offset, "more than %d functions",
                                 MLS_ML_MAX_FUNCTIONS);
    }
    for (size_t i = 0; i < package->function_count; i++) {
        if (mls_str_equal(package->functions[i].name, name)) {
            return mls_protobuf_fail(st, offset, "two functions are called %.*s",
                                     NAME_ARGS(name));
        }
    }
    void *functions = package->functions;
    const mls_code code =
        make_room(&functions, package->function_count, sizeof *package->functions, st);
    if (code == MLS_OK) {
        package->functions = functions;
        package->functions[package->function_count++] =
            (mls_ml_function){.name = name, .first = package->state_count};
    }
    return code;
}

/* ---- the description ---- */

/* Processes one sub-message. A visitor may only add to the package. */
typedef mls_code (*visitor)(mls_mlpackage *package, mls_protobuf message, mls_status *st);

/* Visit every field `number` of a message in order; `what` names it in errors. Other
 * fields are skipped after a check of their bounds. */
static mls_code visit_each(mls_mlpackage *package, mls_protobuf message, uint32_t number,
                           const char *label, visitor visit, mls_status *st)
{
    while (!mls_protobuf_done(&message)) {
        mls_protobuf_field field;
        mls_code code = mls_protobuf_next(&message, &field, st);
        if (code == MLS_OK && field.number == number) {
            code =
                field.wire_type == MLS_PROTOBUF_BYTES
                    ? visit(package, field.bytes, st)
                    : mls_protobuf_fail(st, field.offset, "%s is not of its type", label);
        }
        if (code != MLS_OK) {
            return code;
        }
    }
    return MLS_OK;
}

/* Read FunctionDescription. The name comes first, wherever it is in the message, since
 * states are added to an existing function. */
static mls_code read_function(mls_mlpackage *package, mls_protobuf function,
                              mls_status *st)
{
    mls_str name = {0};
    mls_code code =
        find_name(function, FIELD_FUNCTION_NAME, "the name of a function", &name, st);
    if (code == MLS_OK) {
        code = add_function(package, name, mls_protobuf_offset(&function), st);
    }
    return code != MLS_OK ? code
                          : visit_each(package, function, FIELD_FUNCTION_STATE, "a state",
                                       add_state, st);
}

/* Choose the function that Core ML runs by default. A single function is the default
 * without being named. Several functions without a default are accepted. */
static mls_code choose_default(mls_mlpackage *package, mls_protobuf description,
                               mls_status *st)
{
    package->default_function = package->function_count;
    mls_protobuf bytes = {0};
    bool is_present;
    const mls_code code =
        mls_protobuf_only(description, FIELD_DESCRIPTION_DEFAULT,
                          "the default function's name", &bytes, &is_present, st);
    if (code != MLS_OK) {
        return code;
    }
    if (!is_present || bytes.length == 0) {
        package->default_function =
            package->function_count == 1 ? 0 : package->function_count;
        return MLS_OK;
    }
    const mls_str default_name = {(const char *)bytes.data, bytes.length};
    for (size_t i = 0; i < package->function_count; i++) {
        if (mls_str_equal(package->functions[i].name, default_name)) {
            package->default_function = i;
            return MLS_OK;
        }
    }
    return mls_protobuf_fail(st, mls_protobuf_offset(&bytes),
                             "the default function is not among the model's functions");
}

/* Visitor that refuses states outside of functions. */
static mls_code refuse_state(mls_mlpackage *package, mls_protobuf feature, mls_status *st)
{
    (void)package;
    return mls_protobuf_fail(
        st, mls_protobuf_offset(&feature),
        "a state that belongs to no function, in a model with functions");
}

/* Read ModelDescription. The first pass reads the functions. If there are none, the
 * states of the description belong to the only function, which Core ML and its converters
 * call "main". */
static mls_code read_description(mls_mlpackage *package, mls_protobuf description,
                                 mls_status *st)
{
    static const mls_str main_name = {"main", 4};
    /* states outside of functions are an error unless the model has no functions */
    visitor visit = refuse_state;
    mls_code code = visit_each(package, description, FIELD_DESCRIPTION_FUNCTION,
                               "a function", read_function, st);
    if (code == MLS_OK && package->function_count == 0) {
        code = add_function(package, main_name, mls_protobuf_offset(&description), st);
        visit = add_state;
    }
    if (code == MLS_OK) {
        code = visit_each(package, description, FIELD_DESCRIPTION_STATE, "a state", visit,
                          st);
    }
    return code != MLS_OK ? code : choose_default(package, description, st);
}

/* The names point into `text`, so they become invalid. */
void mls_mlpackage_fini(mls_mlpackage *package)
{
    mls_free(package->functions);
    mls_free(package->states);
    mls_free(package->text);
    *package = (mls_mlpackage){0};
}

/* ---- the specification, in memory or in a file ---- */

/* A specification in memory or in a file. `read` reads exactly `bytes` from `offset`; the
 * range must be inside `size`. */
typedef struct source {
    mls_code (*read)(const struct source *from, uint64_t offset, unsigned char *out,
                     size_t bytes, mls_status *st);
    const unsigned char *data; /* in memory, or NULL */
    int file;                  /* a descriptor, or -1 */
    uint64_t size;
} source;

/* `read` for a specification in memory. */
static mls_code read_memory(const source *from, uint64_t offset, unsigned char *out,
                            size_t bytes, mls_status *st)
{
    (void)st;
    memcpy(out, from->data + offset, bytes);
    return MLS_OK;
}

/* Read the header of the field at `offset` only, check that its payload is inside the
 * source, and set `*payload` to its offset. */
static mls_code peek_field(const source *from, uint64_t offset, mls_protobuf_field *field,
                           uint64_t *payload, mls_status *st)
{
    unsigned char header[MLS_PROTOBUF_HEADER_BYTES];
    const uint64_t left = from->size - offset;
    const size_t bytes = left < sizeof header ? (size_t)left : sizeof header;
    mls_code code = from->read(from, offset, header, bytes, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_protobuf message = mls_protobuf_init(header, bytes, offset);
    code = mls_protobuf_header(&message, field, st);
    if (code != MLS_OK) {
        return code;
    }
    *payload = mls_protobuf_offset(&message);
    if (field->wire_type == MLS_PROTOBUF_BYTES && field->value > from->size - *payload) {
        const unsigned long long rest = from->size - *payload;
        mls_protobuf_fail(st, offset,
                          "field %u claims %llu bytes, but the file has %llu more; it is "
                          "damaged or not a Core ML specification",
                          (unsigned)field->number, (unsigned long long)field->value,
                          rest);
        mls_status_expected(st, "at most %llu bytes", rest);
        return mls_status_got(st, "%llu bytes", (unsigned long long)field->value);
    }
    return MLS_OK;
}

/* Find the only description among the top-level fields and set its `*start` and
 * `*length`. Continues to the end, so that a file truncated in its program fails here and
 * not in Core ML later. One small read for each field; their number is limited. */
static mls_code find_description(const source *from, uint64_t *start, uint64_t *length,
                                 mls_status *st)
{
    bool is_present = false;
    uint64_t offset = 0;
    for (int i = 0; offset < from->size; i++) {
        mls_protobuf_field field;
        uint64_t payload;
        if (i == MLS_ML_MAX_FIELDS) {
            return mls_protobuf_fail(
                st, offset, "more than %d fields: not a Core ML specification", i);
        }
        const mls_code code = peek_field(from, offset, &field, &payload, st);
        if (code != MLS_OK) {
            return code;
        }
        const bool bytes = field.wire_type == MLS_PROTOBUF_BYTES;
        if (field.number == FIELD_MODEL_DESCRIPTION) {
            if (is_present || !bytes) {
                return mls_protobuf_fail(st, offset, "the model's description %s",
                                         is_present ? "appears twice"
                                                    : "is not of its type");
            }
            is_present = true;
            *start = payload;
            *length = field.value;
        }
        offset = payload + (bytes ? field.value : 0);
    }
    return is_present ? MLS_OK
                      : mls_protobuf_fail(
                            st, from->size,
                            "the file ends without a model's description; it is not a "
                            "Core ML specification");
}

/* Read and parse the description only. Its bytes are kept, because the names point into
 * them. */
static mls_code parse_source(const source *from, mls_mlpackage *out, mls_status *st)
{
    mls_mlpackage package = {0};
    uint64_t start = 0;
    uint64_t length = 0;
    mls_code code = find_description(from, &start, &length, st);
    if (code != MLS_OK) {
        return code;
    }
    /* the file is at least this long, but a sparse file can claim any length */
    if (length > MLS_ML_MAX_DESCRIPTION) {
        return mls_protobuf_fail(st, start,
                                 "a description of %llu bytes, expected at most %d",
                                 (unsigned long long)length, MLS_ML_MAX_DESCRIPTION);
    }
    /* the package owns the text from here on, and mls_mlpackage_fini frees it on failure
     */
    package.text = mls_alloc((size_t)length, 1);
    if (package.text == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a description of %llu bytes",
                        (unsigned long long)length);
    }
    code = from->read(from, start, package.text, (size_t)length, st);
    if (code == MLS_OK) {
        const mls_protobuf description =
            mls_protobuf_init(package.text, (size_t)length, start);
        code = read_description(&package, description, st);
    }
    if (code != MLS_OK) {
        mls_mlpackage_fini(&package);
        return code;
    }
    *out = package;
    return MLS_OK;
}

/* The description is copied as from a file, so that both cases differ in `read` only. */
mls_code mls_mlpackage_parse(const unsigned char *spec, size_t length, mls_mlpackage *out,
                             mls_status *st)
{
    const source from = {.read = read_memory, .data = spec, .file = -1, .size = length};
    return parse_source(&from, out, st);
}

/* ---- files ---- */

/* Limits far above real manifests, which name a few items. */
enum { MANIFEST_BYTES = 1 << 20, MANIFEST_DEPTH = 16, MANIFEST_NODES = 1 << 16 };

/* `read` for a specification in an open file. */
static mls_code read_descriptor(const source *from, uint64_t offset, unsigned char *out,
                                size_t bytes, mls_status *st)
{
    return mls_file_read_at(from->file, out, bytes, offset, st);
}

/* Put the file's name before the text of a failure. A long name is truncated to its end,
 * so that the reason still fits. */
static mls_code prepend_file_name(mls_status *st, const char *name)
{
    enum { NAME_ROOM = 96 };
    char text[MLS_TEXT_BYTES];
    memcpy(text, st->text, sizeof text);
    const size_t length = strlen(name);
    const bool cut = length > NAME_ROOM;
    snprintf(st->text, sizeof st->text, "%s%s: %.*s", cut ? "..." : "",
             cut ? name + (length - NAME_ROOM) : name, (int)sizeof text - NAME_ROOM - 8,
             text);
    return st->code;
}

/* Read the specification in the regular file `path`. */
static mls_code read_spec_file(const char *path, mls_mlpackage *out, mls_status *st)
{
    source from = {.read = read_descriptor, .file = -1};
    mls_code code = mls_file_open(path, &from.file, &from.size, st);
    if (code == MLS_OK) {
        code = parse_source(&from, out, st);
        (void)close(from.file);
    }
    return code;
}

/* Return whether `part` is allowed as a component of a path in a package: not empty, not
 * "." or "..", without a backslash (a separator on Windows) and without a NUL (the end of
 * a C string). */
static bool is_path_component(const char *part, size_t length)
{
    return length > 0 && !(length == 1 && part[0] == '.') &&
           !(length == 2 && part[0] == '.' && part[1] == '.') &&
           memchr(part, '\\', length) == NULL && memchr(part, '\0', length) == NULL;
}

/* Return whether a manifest's path stays inside its package: relative, with allowed
 * components. */
static bool path_is_safe(mls_str path)
{
    if (path.length > MLS_ML_MAX_NAME_BYTES) {
        return false;
    }
    size_t start = 0;
    for (size_t i = 0; i <= path.length; i++) {
        /* each slash, and the end, ends a component; a leading slash ends an empty one */
        if (i == path.length || path.data[i] == '/') {
            if (!is_path_component(path.data + start, i - start)) {
                return false;
            }
            start = i + 1;
        }
    }
    return true;
}

/* Return member `key` of an object if it has the given type, else MLS_JSON_NONE. */
static mls_json_node find_typed_member(const mls_json *doc, mls_json_node object,
                                       const char *key, mls_json_type type)
{
    const mls_json_node node =
        object == MLS_JSON_NONE ? MLS_JSON_NONE : mls_json_find(doc, object, key);
    return node != MLS_JSON_NONE && mls_json_type_of(doc, node) == type ? node
                                                                        : MLS_JSON_NONE;
}

/* Return the member of `items` whose key is the text of `root`, or MLS_JSON_NONE. */
static mls_json_node find_item(const mls_json *doc, mls_json_node items,
                               mls_json_node root)
{
    mls_json_node item = mls_json_first(doc, items);
    while (item != MLS_JSON_NONE &&
           !mls_str_equal(mls_json_key(doc, item), mls_json_text(doc, root))) {
        item = mls_json_next(doc, item);
    }
    return item;
}

/* Find itemInfoEntries[rootModelIdentifier].path; `*out` is borrowed from the document.
 */
static mls_code find_root(const mls_json *doc, mls_str *out, mls_status *st)
{
    const mls_json_node root =
        find_typed_member(doc, 0, "rootModelIdentifier", MLS_JSON_STRING);
    const mls_json_node items =
        find_typed_member(doc, 0, "itemInfoEntries", MLS_JSON_OBJECT);
    if (root == MLS_JSON_NONE || items == MLS_JSON_NONE) {
        return mls_protobuf_fail(st, 0,
                                 "no rootModelIdentifier or no itemInfoEntries: not the "
                                 "manifest of a Core ML package");
    }
    const mls_json_node path =
        find_typed_member(doc, find_item(doc, items, root), "path", MLS_JSON_STRING);
    if (path == MLS_JSON_NONE) {
        return mls_protobuf_fail(st, mls_json_offset(doc, root),
                                 "the root model has no entry with a path");
    }
    const mls_str text = mls_json_text(doc, path);
    if (!path_is_safe(text)) {
        mls_protobuf_fail(st, mls_json_offset(doc, path),
                          "the root model's path is not inside the package");
        mls_status_expected(st, "a relative path without . or ..");
        return mls_status_got(st, "%.*s", NAME_ARGS(text));
    }
    *out = text;
    return MLS_OK;
}

/* Return "folder/middle" + `last` as a new string, or NULL. The caller frees it with
 * mls_free. If the folder ends in a slash, the path has two, which is harmless. The sum
 * cannot overflow: all three are in memory. */
static char *join_path(const char *folder, const char *middle, mls_str last)
{
    const size_t bytes = strlen(folder) + strlen(middle) + last.length + 2;
    char *path = mls_alloc(bytes, 1);
    if (path != NULL) {
        snprintf(path, bytes, "%s/%s%.*s", folder, middle, (int)last.length, last.data);
    }
    return path;
}

/* Read the manifest of a package, and the specification that it names. Every package has
 * a manifest; a folder without one is probably a compiled model. */
static mls_code read_package(const char *folder, mls_mlpackage *out, mls_status *st)
{
    const mls_json_limits limits = {.depth = MANIFEST_DEPTH, .nodes = MANIFEST_NODES};
    unsigned char *data = NULL;
    size_t length = 0;
    mls_json *doc = NULL;
    mls_str root = {0};
    char *spec = NULL;
    const char *file = "Manifest.json"; /* in errors */
    char *manifest = join_path(folder, file, (mls_str){"", 0});
    mls_code code = manifest == NULL
                        ? mls_fail(st, MLS_E_MEMORY, "no memory for a path")
                        : mls_file_read(manifest, MANIFEST_BYTES, &data, &length, st);
    if (code == MLS_E_IO && st->os_error == ENOENT) {
        code = mls_fail(st, MLS_E_FORMAT,
                        "missing: this folder is not a .mlpackage (a compiled .mlmodelc "
                        "cannot be read without its metadata.json; use the package that "
                        "it was made from)");
    }
    if (code == MLS_OK) {
        code = mls_json_parse((const char *)data, length, limits, &doc, st);
    }
    if (code == MLS_OK) {
        code = find_root(doc, &root, st);
    }
    if (code == MLS_OK) {
        spec = join_path(folder, "Data/", root);
        code = spec == NULL ? mls_fail(st, MLS_E_MEMORY, "no memory for a path") : MLS_OK;
    }
    if (code == MLS_OK) {
        file = spec + strlen(folder) + 1;
        code = read_spec_file(spec, out, st);
    }
    if (code != MLS_OK) {
        prepend_file_name(st, file);
    }
    mls_json_free(doc);
    mls_free(data);
    mls_free(manifest);
    mls_free(spec);
    return code;
}

/* A folder is a package and anything else a specification; names and extensions are
 * ignored. */
mls_code mls_mlpackage_read(const char *path, mls_mlpackage *out, mls_status *st)
{
    struct stat facts;
    if (stat(path, &facts) != 0) {
        mls_fail_os(st, errno, "cannot open");
        return prepend_file_name(st, path);
    }
    if (S_ISDIR(facts.st_mode)) {
        return read_package(path, out, st);
    }
    const mls_code code = read_spec_file(path, out, st);
    return code == MLS_OK ? code : prepend_file_name(st, path);
}
