/* index_read_values: reads the members and columns of an index, and makes the errors
 * about missing or invalid values. */
#include "checkpoint/index/index_read_values.h"

#include "io/json_checksum.h"

enum {
    SHOWN_NAME = 100, /* bytes of a name or value in a message */
    SHOWN_VALUE = 24, /* bytes of a number or checksum in a message */
    SURE_DIGITS = 19  /* any number of 19 digits is below 2**64 */
};

static const char out_of_range[] = "is not a whole number in its range";

/* ---- errors ---- */

/* Report the `problem` of the member `key` at byte `offset` of the text, with the name of
 * the current shard (`in->name`) if one is known. Returns MLS_E_FORMAT. */
static mls_code fail_at(const mls_index_source *in, size_t offset, const char *key,
                        const char *problem)
{
    if (in->name.data == NULL) {
        return mls_fail_at(in->st, offset, "\"%s\" %s", key, problem);
    }
    const int width = (int)(in->name.length < SHOWN_NAME ? in->name.length : SHOWN_NAME);
    mls_fail_at(in->st, offset, "shard of '%.*s': \"%s\" %s", width, in->name.data, key,
                problem);
    return mls_status_name(in->st, in->name.data, in->name.length);
}

/* Report the problem of a value, and show the value itself, or its type if it is not a
 * string or number. */
mls_code mls_index_fail_value(const mls_index_source *in, mls_json_node node,
                              const char *key, const char *problem)
{
    static const char *const words[] = {[MLS_JSON_NULL] = "null",
                                        [MLS_JSON_FALSE] = "false",
                                        [MLS_JSON_TRUE] = "true",
                                        [MLS_JSON_ARRAY] = "an array",
                                        [MLS_JSON_OBJECT] = "an object"};
    const mls_json_type type = mls_json_type_of(in->json, node);
    const mls_str text = mls_json_text(in->json, node);
    const int width = (int)(text.length < SHOWN_NAME ? text.length : SHOWN_NAME);
    fail_at(in, mls_json_offset(in->json, node), key, problem);
    if (type == MLS_JSON_STRING || type == MLS_JSON_NUMBER) {
        mls_status_got(in->st, type == MLS_JSON_STRING ? "\"%.*s\"" : "%.*s", width,
                       text.data);
    } else {
        mls_status_got(in->st, "%s", words[type]);
    }
    return MLS_E_FORMAT;
}

/* Add the range `least` to `most`, both included, to an error that is already in the
 * status. Returns the error's code. */
static mls_code expect_range(const mls_index_source *in, uint64_t least, uint64_t most)
{
    return mls_status_expected(in->st, "%llu to %llu", (unsigned long long)least,
                               (unsigned long long)most);
}

/* Report that the value `node` of the member `key` does not have the required type.
 * Returns MLS_E_FORMAT. */
static mls_code fail_type(const mls_index_source *in, mls_json_node node, const char *key,
                          mls_json_type type)
{
    return mls_index_fail_value(in, node, key,
                                type == MLS_JSON_STRING   ? "is not a string"
                                : type == MLS_JSON_ARRAY  ? "is not an array"
                                : type == MLS_JSON_OBJECT ? "is not an object"
                                                          : "is not a number");
}

/* ---- values ---- */

/* Fill in `node` of the `count` members in `table`. MLS_E_FORMAT: a needed member is
 * missing, or a member has another type than its entry; the first such entry is reported.
 * An absent optional member gets MLS_JSON_NONE. */
mls_code mls_index_find_members(const mls_index_source *in, mls_json_node object,
                                mls_json_member *table, size_t count)
{
    const size_t bad = mls_json_members(in->json, object, table, count);
    if (bad == count) {
        return MLS_OK;
    }
    const mls_json_member *m = &table[bad];
    return m->node == MLS_JSON_NONE
               ? fail_at(in, mls_json_offset(in->json, object), m->key, "is missing")
               : fail_type(in, m->node, m->key, m->type);
}

/* Read the member `m` as a whole number from `least` to `most`, both included. */
mls_code mls_index_read_number(const mls_index_source *in, const mls_json_member *m,
                               uint64_t least, uint64_t most, uint64_t *out)
{
    uint64_t value;
    if (!mls_json_u64(in->json, m->node, &value) || value < least || value > most) {
        mls_index_fail_value(in, m->node, m->key, out_of_range);
        return expect_range(in, least, most);
    }
    *out = value;
    return MLS_OK;
}

/* Read the string `node`, the value of `key`, into `*out`. It may contain any valid
 * UTF-8; its bytes stay in the document. */
mls_code mls_index_read_text(const mls_index_source *in, mls_json_node node,
                             const char *key, mls_str *out)
{
    if (mls_json_type_of(in->json, node) != MLS_JSON_STRING) {
        return fail_type(in, node, key, MLS_JSON_STRING);
    }
    *out = mls_json_text(in->json, node);
    return MLS_OK;
}

/* Search the names in order; a failure leaves `*out` at `count`, or at 0 if the value is
 * not a string. */
mls_code mls_index_read_word(const mls_index_source *in, mls_json_node node,
                             const char *key, const char *(*name_of)(int), int count,
                             const char *problem, int *out)
{
    mls_str text;
    const mls_code code = mls_index_read_text(in, node, key, &text);
    int i = 0;
    while (code == MLS_OK && i < count && !mls_str_is(text, name_of(i))) {
        i++;
    }
    *out = i;
    return code == MLS_OK && i == count ? mls_index_fail_value(in, node, key, problem)
                                        : code;
}

/* ---- columns ---- */

/* Return a cursor at the first value of a column; its text is NULL if the column is
 * absent. The offset points behind the opening quote. */
mls_index_column mls_index_open_column(const mls_index_source *in,
                                       const mls_json_member *m)
{
    return m->node == MLS_JSON_NONE
               ? (mls_index_column){.key = m->key}
               : (mls_index_column){.key = m->key,
                                    .offset = mls_json_offset(in->json, m->node) + 1,
                                    .rest = mls_json_text(in->json, m->node)};
}

/* Check that the array `m` has `rows` values. `*out` receives its first value, or
 * MLS_JSON_NONE if the array is absent or empty. */
mls_code mls_index_open_array(const mls_index_source *in, const mls_json_member *m,
                              size_t rows, mls_json_node *out)
{
    *out = MLS_JSON_NONE;
    if (m->node == MLS_JSON_NONE) {
        return MLS_OK;
    }
    const size_t count = mls_json_size(in->json, m->node);
    if (count != rows) {
        fail_at(in, mls_json_offset(in->json, m->node), m->key,
                "must have one value for each row of its table");
        mls_status_expected(in->st, "%zu", rows);
        return mls_status_got(in->st, "%zu", count);
    }
    *out = mls_json_first(in->json, m->node);
    return MLS_OK;
}

/* Report the problem of the value at the cursor, and show the value: up to the comma
 * behind it, or at most SHOWN_VALUE bytes, since checksums have no separator. */
mls_code mls_index_fail_column(const mls_index_source *in, const mls_index_column *column,
                               const char *problem)
{
    const mls_str rest = column->rest;
    size_t length = 0;
    while (length < rest.length && length < SHOWN_VALUE && rest.data[length] != ',') {
        length++;
    }
    fail_at(in, column->offset, column->key, problem);
    return mls_status_got(in->st, "%.*s", (int)length, length > 0 ? rest.data : "");
}

/* Move the cursor `length` bytes forward in its text. */
static void advance_column(mls_index_column *column, size_t length)
{
    column->offset += length;
    column->rest.data += length;
    column->rest.length -= length;
}

/* Read the number at the cursor, and move the cursor behind it and its comma. On failure
 * the cursor stays at the invalid value, so that the message shows it. */
mls_code mls_index_next_number(const mls_index_source *in, mls_index_column *column,
                               uint64_t least, uint64_t most, uint64_t *out)
{
    const char *digits = column->rest.data;
    const size_t length = column->rest.length;
    size_t used = 0;
    uint64_t value = 0;
    while (used < length && used <= SURE_DIGITS && digits[used] >= '0' &&
           digits[used] <= '9') {
        value = 10 * value + (uint64_t)(digits[used++] - '0');
    }
    /* the text has ended: the column is absent or too short */
    if (used == 0 && length == 0) {
        return mls_index_fail_column(in, column,
                                     "must have one value for each row of its table");
    }
    if (used == 0 || used > SURE_DIGITS || (digits[0] == '0' && used > 1) ||
        (used < length && digits[used] != ',') || value < least || value > most) {
        mls_index_fail_column(in, column, out_of_range);
        return expect_range(in, least, most);
    }
    /* a comma behind the last number is left in place, and reported as an extra value */
    advance_column(column, used + (used + 1 < length ? 1 : 0));
    *out = value;
    return MLS_OK;
}

/* Read the next checksum: 8 hexadecimal digits, without a separator. On failure the
 * cursor stays at the invalid value. */
mls_code mls_index_next_crc(const mls_index_source *in, mls_index_column *column,
                            uint32_t *out)
{
    if (column->rest.length < MLS_CRC_DIGITS) {
        return mls_index_fail_column(in, column,
                                     "must have 8 digits for each of its values");
    }
    if (!mls_crc_from_digits(column->rest.data, out)) {
        mls_index_fail_column(in, column,
                              "must have 8 hexadecimal digits for each value");
        return mls_status_got(in->st, "%.*s", (int)MLS_CRC_DIGITS, column->rest.data);
    }
    advance_column(column, MLS_CRC_DIGITS);
    return MLS_OK;
}

/* Check that no column has values left. The order is fixed, so that the same fault is
 * always reported first. */
mls_code mls_index_end_columns(const mls_index_source *in,
                               const mls_index_column *columns, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (columns[i].rest.length > 0) {
            return mls_index_fail_column(in, &columns[i],
                                         "has more values than its table has rows");
        }
    }
    return MLS_OK;
}
