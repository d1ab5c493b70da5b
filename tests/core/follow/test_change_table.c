/* The table of a version: rows of a valid one, and every wrong number with its text. */
#include "follow/change_table.h"
#include "support/runner.h"
#include "support/text.h"

enum { ROWS = 3 };

static mls_status status;

static const mls_dtype dtypes[] = {MLS_F64, MLS_U8};
static const mls_layout layouts[] = {{.count = 0}, {1, {{0, 2}}}};
static const uint64_t shapes[] = {3, 4, 5, 7};
static const uint64_t valid[MLS_CHANGE_COLUMNS * ROWS] = {
    1,  3,          0, /* bytes of the names a, b and an umlaut, and none */
    0,  1,          1, /* dtypes */
    2,  1,          1, /* ranks */
    0,  1,          0, /* layouts */
    0,  1,          0, /* parts */
    7,  UINT32_MAX, 0, /* checksums */
    2,  1,          0, /* units */
    4,  2,          0, /* bytes of gaps */
    16, 2,          0  /* bytes of values */
};

static mls_change_table table_of(const uint64_t *columns)
{
    return (mls_change_table){.rows = ROWS,
                              .columns = columns,
                              .dtypes = dtypes,
                              .dtype_count = 2,
                              .layouts = layouts,
                              .layout_count = 2,
                              .names = "ab\xC3\xA4",
                              .names_bytes = 4,
                              .shapes = shapes,
                              .shapes_count = 4,
                              .gaps_bytes = 6,
                              .values_bytes = 18};
}

TEST(a_valid_table_has_its_rows)
{
    mls_change_row rows[ROWS];
    const mls_change_table table = table_of(valid);
    CHECK(mls_change_table_read(&table, rows, &status) == MLS_OK);
    CHECK(mls_str_is(rows[0].name, "a") && mls_str_is(rows[1].name, "b\xC3\xA4"));
    CHECK(rows[0].rank == 2 && rows[0].shape == shapes && rows[0].elements == 12);
    CHECK(rows[1].rank == 1 && rows[1].shape == shapes + 2 && rows[1].elements == 2);
    CHECK(rows[1].dtype == MLS_U8 && rows[1].unit == 1 && rows[2].unit == 0);
    CHECK(rows[1].gaps_at == 4 && rows[1].gaps_bytes == 2);
    CHECK(rows[1].values_at == 16 && rows[1].values_bytes == 2);
    CHECK(rows[2].name.length == 0 && rows[2].elements == 7);
}

/* One number of the columns that is changed, and the text about it. */
static const struct {
    mls_change_column column;
    size_t row;
    uint64_t number;
    const char *name, *text;
} wrong[] = {
    {MLS_CHANGE_NAME_BYTES, 0, 5, "", "bytes of a name: 5, but at most 4"},
    {MLS_CHANGE_NAME_BYTES, 0, 3, "", "the name of row 0 is not UTF-8"},
    {MLS_CHANGE_NAME_BYTES, 1, UINT64_MAX, "",
     "bytes of a name: 18446744073709551615, but at most 3"},
    {MLS_CHANGE_NAME_BYTES, 1, 1, "",
     "3 rows use 2 of 4 bytes of names, 4 of 4 lengths, 6 of 6 bytes of gaps and 18 of "
     "18 of values"},
    {MLS_CHANGE_DTYPE, 0, 2, "a", "dtype 2 of 2 and layout 0 of 2"},
    {MLS_CHANGE_LAYOUT, 0, 2, "a", "dtype 0 of 2 and layout 2 of 2"},
    {MLS_CHANGE_RANK, 0, 17, "a", "dimensions: 17, but at most 16"},
    {MLS_CHANGE_RANK, 1, 3, "b\xC3\xA4", "lengths of a shape: 3, but at most 2"},
    {MLS_CHANGE_RANK, 2, 0, "",
     "3 rows use 4 of 4 bytes of names, 3 of 4 lengths, 6 of 6 bytes of gaps and 18 of "
     "18 of values"},
    {MLS_CHANGE_PART, 1, 2, "b\xC3\xA4", "part 2 of 2 does not exist"},
    {MLS_CHANGE_PART, 0, UINT64_MAX, "a",
     "part 18446744073709551615 of 1 does not exist"},
    {MLS_CHANGE_CRC32C, 0, UINT64_C(1) << 32, "a",
     "crc32c: 4294967296, but at most 4294967295"},
    {MLS_CHANGE_UNIT, 0, 3, "a", "bytes of a unit of the gaps: 3, but at most 2"},
    {MLS_CHANGE_UNIT, 0, 0, "a", "4 bytes of gaps and 16 of values without a unit"},
    {MLS_CHANGE_GAPS_BYTES, 0, 3, "a",
     "3 bytes of gaps in units of 2 and 16 of values in items of 8: the delta is cut"},
    {MLS_CHANGE_GAPS_BYTES, 0, 6, "b\xC3\xA4", "bytes of gaps: 2, but at most 0"},
    {MLS_CHANGE_GAPS_BYTES, 0, UINT64_MAX, "a",
     "bytes of gaps: 18446744073709551615, but at most 6"},
    {MLS_CHANGE_VALUES_BYTES, 0, 9, "a",
     "4 bytes of gaps in units of 2 and 9 of values in items of 8: the delta is cut"},
    {MLS_CHANGE_VALUES_BYTES, 1, 1, "",
     "3 rows use 4 of 4 bytes of names, 4 of 4 lengths, 6 of 6 bytes of gaps and 17 of "
     "18 of values"},
    {MLS_CHANGE_VALUES_BYTES, 1, UINT64_MAX - 15, "b\xC3\xA4",
     "bytes of values: 18446744073709551600, but at most 2"},
};

TEST(wrong_numbers_are_refused_with_text)
{
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        uint64_t columns[MLS_CHANGE_COLUMNS * ROWS];
        mls_change_row rows[ROWS];
        memcpy(columns, valid, sizeof valid);
        columns[(size_t)wrong[i].column * ROWS + wrong[i].row] = wrong[i].number;
        const mls_change_table table = table_of(columns);
        CHECK(mls_change_table_read(&table, rows, &status) == MLS_E_FORMAT);
        CHECK_TEXT(status.text, wrong[i].text);
        CHECK_TEXT(status.name, wrong[i].name);
    }
}

TEST(huge_lengths_are_refused)
{
    uint64_t huge[4] = {UINT64_C(1) << 62, 1, 5, 7};
    mls_change_row rows[ROWS];
    mls_change_table table = table_of(valid);
    table.shapes = huge; /* 2^62 elements of 8 bytes */
    CHECK(mls_change_table_read(&table, rows, &status) == MLS_E_FORMAT);
    CHECK_TEXT(status.text,
               "an array of 4611686018427387904 elements exceeds the memory");
    huge[1] = 8; /* more elements than size_t counts */
    CHECK_FAILS(mls_change_table_read(&table, rows, &status), MLS_E_FORMAT,
                "the tensor has more elements than can be counted");
    CHECK_TEXT(status.name, "a");
    huge[0] = UINT64_MAX;
    CHECK(mls_change_table_read(&table, rows, &status) == MLS_E_FORMAT);
    CHECK_TEXT(status.text, "length of an axis: 18446744073709551615, but at most "
                            "9223372036854775807");
}
