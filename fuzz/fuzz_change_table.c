/* libFuzzer target: any bytes as the table of a version's changes. Accepted rows must be
 * within the table, one behind the other, and use all of it; the deltas of their streams
 * are checked and applied.
 *
 * Bytes of an input: rows, dtypes, steps of a layout (0 to 4), bytes of the names,
 * lengths of the shapes, bytes of the gaps (2); a byte for each dtype; two for each step;
 * then the numbers of the columns and the lengths, as a byte each, or as 255 and eight
 * bytes; then names, gaps and values.
 *
 * tools/fuzz.sh builds it with clang -fsanitize=fuzzer,address,undefined and all of
 * csrc/core.
 */
#include "follow/change_table.h"
#include "follow/delta.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST_BYTES = 1 << 20 }; /* of an array that a delta is applied to */

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

/* The rest of an input. */
typedef struct input {
    const uint8_t *data;
    size_t size;
} input;

static uint8_t take_byte(input *rest)
{
    if (rest->size == 0) {
        return 0;
    }
    rest->size--;
    return *rest->data++;
}

static uint64_t take_number(input *rest)
{
    const uint8_t first = take_byte(rest);
    uint64_t number = first < 255 ? first : 0;
    for (int byte = 0; first == 255 && byte < 8; byte++) {
        number |= (uint64_t)take_byte(rest) << (8 * byte);
    }
    return number;
}

static uint64_t *take_numbers(input *rest, size_t count)
{
    uint64_t *numbers = malloc(count * sizeof *numbers + 1);
    require(numbers != NULL);
    for (size_t i = 0; i < count; i++) {
        numbers[i] = take_number(rest);
    }
    return numbers;
}

/* Copy up to `count` bytes to memory of exactly their size, which ASan guards. */
static unsigned char *take_bytes(input *rest, size_t count, size_t *copied)
{
    *copied = count < rest->size ? count : rest->size;
    unsigned char *bytes = malloc(*copied);
    require(bytes != NULL || *copied == 0);
    for (size_t i = 0; i < *copied; i++) {
        bytes[i] = take_byte(rest);
    }
    return bytes;
}

/* Apply the delta of a row to an array of its size, unless it is refused or large. */
static void apply_row(const mls_change_row *row, unsigned char *gaps,
                      unsigned char *values)
{
    const size_t item = mls_dtype_of(row->dtype)->item_bytes,
                 bytes = row->elements * item;
    const mls_delta delta = {.elements = row->elements,
                             .item_bytes = item,
                             .changed = row->values_bytes / item,
                             .gap_bytes = row->unit,
                             .gaps = gaps + row->gaps_at,
                             .gaps_bytes = row->gaps_bytes,
                             .values = values + row->values_at,
                             .values_bytes = row->values_bytes};
    mls_tensor target;
    mls_status st;
    const mls_code code = mls_delta_check(&delta, &st);
    require(code == MLS_OK || (code == MLS_E_FORMAT && st.text[0] != '\0'));
    if (code == MLS_OK && bytes <= MOST_BYTES) {
        unsigned char *array = calloc(bytes + 1, 1);
        require(array != NULL &&
                mls_tensor_init(&target, array, row->dtype, 1, &row->elements, &st) ==
                    MLS_OK &&
                mls_delta_check_target(&delta, &target, &st) == MLS_OK);
        mls_delta_apply(&delta, mls_crc_of(MLS_CPU_SCALAR), &target, NULL, NULL);
        require(array[bytes] == 0);
        free(array);
    }
}

/* Check what the header of change_table promises about accepted rows. */
static void check_rows(const mls_change_table *table, const mls_change_row *rows,
                       unsigned char *gaps, unsigned char *values)
{
    size_t names = 0, shapes = 0, gaps_at = 0, values_at = 0;
    for (size_t i = 0; i < table->rows; i++) {
        const mls_change_row *row = &rows[i];
        size_t bytes;
        require(row->name.data == table->names + names);
        require(mls_utf8_valid(row->name.data, row->name.length));
        require(row->rank >= 0 && row->shape == table->shapes + shapes);
        names += row->name.length;
        shapes += (size_t)row->rank;
        require(!__builtin_mul_overflow(row->elements,
                                        mls_dtype_of(row->dtype)->item_bytes, &bytes));
        require(row->gaps_at == gaps_at && row->values_at == values_at);
        gaps_at += row->gaps_bytes;
        values_at += row->values_bytes;
        require(row->unit <= 2 && gaps_at <= table->gaps_bytes);
        require(values_at <= table->values_bytes);
        if (row->unit > 0) {
            apply_row(row, gaps, values);
        }
    }
    require(names == table->names_bytes && shapes == table->shapes_count);
    require(gaps_at == table->gaps_bytes && values_at == table->values_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input rest = {data, size};
    mls_dtype dtypes[16];
    mls_layout layouts[2] = {{0}};
    mls_status st;
    size_t parts;
    mls_change_table table = {.rows = take_byte(&rest) % 32U,
                              .dtypes = dtypes,
                              .dtype_count = take_byte(&rest) % 16U,
                              .layouts = layouts,
                              .layout_count = 1};
    const size_t steps = take_byte(&rest) % (MLS_LAYOUT_STEPS + 1U),
                 names_bytes = take_byte(&rest);
    table.shapes_count = take_byte(&rest);
    size_t gaps_bytes = take_byte(&rest);
    gaps_bytes |= (size_t)take_byte(&rest) << 8;
    for (size_t i = 0; i < table.dtype_count; i++) {
        dtypes[i] = (mls_dtype)(take_byte(&rest) % MLS_DTYPE_COUNT);
    }
    layouts[1].count = (int)steps;
    for (size_t i = 0; i < steps; i++) {
        layouts[1].steps[i].axis = take_byte(&rest) % 8 - 1; /* -1: flat */
        layouts[1].steps[i].parts = take_number(&rest);
    }
    if (steps > 0 && mls_layout_parts(&layouts[1], &parts, &st) == MLS_OK) {
        table.layout_count = 2; /* the caller has checked them */
    }
    uint64_t *columns = take_numbers(&rest, MLS_CHANGE_COLUMNS * table.rows);
    uint64_t *shapes = take_numbers(&rest, table.shapes_count);
    unsigned char *names = take_bytes(&rest, names_bytes, &table.names_bytes);
    unsigned char *gaps = take_bytes(&rest, gaps_bytes, &table.gaps_bytes);
    unsigned char *values = take_bytes(&rest, SIZE_MAX, &table.values_bytes);
    mls_change_row *rows = calloc(table.rows + 1, sizeof *rows);
    require(rows != NULL);
    table.columns = columns;
    table.shapes = shapes;
    table.names = (const char *)names;
    const mls_code code = mls_change_table_read(&table, rows, &st);
    require(code == MLS_OK || (code == MLS_E_FORMAT && st.text[0] != '\0'));
    if (code == MLS_OK) {
        check_rows(&table, rows, gaps, values);
    }
    free(columns);
    free(shapes);
    free(names);
    free(gaps);
    free(values);
    free(rows);
    return 0;
}
