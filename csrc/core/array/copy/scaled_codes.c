/* scaled_codes: decodes quantized weights: checks of codes and scales, code * scale in
 * float, rounding to the target.
 *
 * Tiles are decoded through a table into floats on the stack. Then the rows of the tile
 * are converted, or its columns if these are without gaps in the destination.
 *
 * The table has the value of each byte, or of each half of a byte.
 */
#include "array/copy/scaled_codes.h"

#include "array/float_convert.h"
#include "base/size.h"

#include <stdint.h>
#include <string.h>

enum {
    TILE = 4096,        /* floats: 16 KiB */
    TILE_COLUMNS = 256, /* of a tile that is written by rows */
    TILE_SIDE = 64      /* of a tile that is written by columns */
};

/* One decoding, divided into tiles so that threads can share it. */
typedef struct decode_job {
    const mls_kernels *kernels;
    const mls_tensor *values;
    const mls_scaled_codes *codes;
    bool by_columns;      /* adjacent rows of a column are adjacent in the values */
    size_t rows, columns; /* of a tile */
    size_t row_tiles, column_tiles; /* of one matrix: tiles below each other, and side by
                                       side */
    float table[256];               /* the value of each code without its scale */
} decode_job;

/* ---- checks ---- */

/* Return whether a byte has two codes. */
static bool is_packed(const mls_scaled_codes *codes)
{
    return codes->dtype == MLS_F4;
}

static bool has_code_dtype(const mls_scaled_codes *codes)
{
    return is_packed(codes) || codes->dtype == MLS_I8 ||
           mls_dtype_of(codes->dtype)->kind == MLS_KIND_FLOAT8;
}

/* Return whether adjacent indices of `axis` are adjacent in memory. True for an axis with
 * less than two indices, and for an empty view, whose strides mean nothing. */
static bool is_dense(const mls_tensor *t, int axis)
{
    size_t count;
    return t->shape[axis] < 2 ||
           t->strides[axis] == (ptrdiff_t)mls_tensor_item_bytes(t) ||
           (mls_tensor_count(t, &count) && count == 0);
}

/* Return whether an axis of `blocks` blocks, of `block` indices each, has the indices
 * first .. first + count - 1. */
static bool covers_range(size_t blocks, size_t block, size_t first, size_t count)
{
    return count == 0 ||
           (first <= SIZE_MAX - count && (first + count - 1) / block < blocks);
}

/* Return whether the view of codes has a code for each value: the same matrices and rows,
 * and enough columns behind the skipped ones. A byte has two packed codes, or one. */
static bool has_codes(const mls_tensor *values, const mls_scaled_codes *codes)
{
    const mls_tensor *bytes = &codes->codes;
    const size_t in_byte = is_packed(codes) ? 2 : 1;
    return bytes->rank == 3 && bytes->shape[0] == values->shape[0] &&
           bytes->shape[1] == values->shape[1] && is_dense(bytes, 2) &&
           covers_range(bytes->shape[2], in_byte, codes->skip, values->shape[2]);
}

/* Return whether the view of scales, if there is one, has a scale for the block of each
 * value. */
static bool has_scales(const mls_tensor *values, const mls_scaled_codes *codes)
{
    const mls_tensor *scales = &codes->scales;
    return scales->data == NULL ||
           (scales->rank == 3 && scales->shape[0] == values->shape[0] &&
            codes->block_rows > 0 && codes->block_columns > 0 &&
            covers_range(scales->shape[1], codes->block_rows, codes->first_row,
                         values->shape[1]) &&
            covers_range(scales->shape[2], codes->block_columns, codes->first_column,
                         values->shape[2]));
}

/* Check that values, codes and scales belong together. Check dtypes first (MLS_E_DTYPE),
 * then the values' memory, and at last the shapes of codes and scales (MLS_E_SHAPE). */
mls_code mls_scaled_codes_check(const mls_tensor *values, const mls_scaled_codes *codes,
                                mls_status *st)
{
    char text[96];
    if (!has_code_dtype(codes) || mls_tensor_item_bytes(&codes->codes) != 1) {
        return mls_fail(st, MLS_E_DTYPE, "codes of %s in items of %zu bytes",
                        mls_dtype_of(codes->dtype)->name,
                        mls_tensor_item_bytes(&codes->codes));
    }
    if ((int)values->dtype >= MLS_CONVERTIBLE ||
        (codes->scales.data != NULL && codes->scales.dtype != MLS_F32)) {
        return mls_fail(st, MLS_E_DTYPE, "values of %s with scales of %s",
                        mls_dtype_of(values->dtype)->name,
                        mls_dtype_of(codes->scales.dtype)->name);
    }
    if (values->rank != 3 || values->swapped || codes->scales.swapped ||
        (!is_dense(values, 2) && !is_dense(values, 1))) {
        return mls_fail(st, MLS_E_SHAPE, "the values have no dense rows or columns");
    }
    if (!has_codes(values, codes)) {
        return mls_fail(
            st, MLS_E_SHAPE, "codes of shape %s are too few for the values",
            mls_shape_text(text, sizeof text, codes->codes.rank, codes->codes.shape));
    }
    if (!has_scales(values, codes)) {
        return mls_fail(
            st, MLS_E_SHAPE, "scales of shape %s are too few for the values",
            mls_shape_text(text, sizeof text, codes->scales.rank, codes->scales.shape));
    }
    return MLS_OK;
}

/* ---- the table ---- */

/* E2M1: sign, two bits of exponent with a bias of 1, one bit of mantissa; no infinity and
 * no NaN. */
static float f32_from_e2m1(unsigned code)
{
    static const float magnitudes[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
    const float magnitude = magnitudes[code & 7U];
    return (code & 8U) != 0 ? -magnitude : magnitude;
}

#define DECODE_CASE(id, suffix, name, file_name, item, code, decode)                     \
    case MLS_##id:                                                                       \
        return (float)decode(byte);

/* Return the value of a code without its scale: of `byte` in an 8-bit format or as int8,
 * or of its low four bits for E2M1. float32 holds all of these values exactly. */
static float f32_from_code(mls_dtype dtype, uint8_t byte)
{
    switch ((int)dtype) {
        MLS_FLOAT8_DTYPES(DECODE_CASE)
    case MLS_I8:
        return (float)(byte < 128 ? byte : byte - 256);
    default:
        return f32_from_e2m1(byte);
    }
}

/* ---- tiles ---- */

/* Return the address of element i, j, k of a view with three axes. */
static const unsigned char *at_index(const mls_tensor *t, size_t i, size_t j, size_t k)
{
    return t->data + (ptrdiff_t)i * t->strides[0] + (ptrdiff_t)j * t->strides[1] +
           (ptrdiff_t)k * t->strides[2];
}

/* Decode `count` codes of the row of codes at `row`, from code number `first` on, with
 * one scale, to every `step`-th float of `out`. Two 4-bit codes share a byte; the first
 * has the lower bits. */
static void decode_run(const decode_job *j, const unsigned char *row, size_t first,
                       size_t count, float scale, float *out, size_t step)
{
    const float *table = j->table;
    if (!is_packed(j->codes)) {
        for (size_t i = 0; i < count; i++) {
            out[i * step] = table[row[first + i]] * scale;
        }
        return;
    }
    size_t i = 0;
    if (first % 2 != 0 && count > 0) { /* starts with the upper half of a byte */
        out[i++] = table[row[first / 2] >> 4] * scale;
    }
    for (; i + 1 < count; i += 2) {
        const unsigned byte = row[(first + i) / 2];
        out[i * step] = table[byte & 15U] * scale;
        out[(i + 1) * step] = table[byte >> 4] * scale;
    }
    if (i < count) {
        out[i * step] = table[row[(first + i) / 2] & 15U] * scale;
    }
}

/* Decode the columns from .. to - 1 of a row of the values, block by block of scales.
 * `row` counts from the first row of the values in `matrix`. Results are `step` floats
 * apart in `out`. */
static void decode_row(const decode_job *j, size_t matrix, size_t row, size_t from,
                       size_t to, float *out, size_t step)
{
    const mls_scaled_codes *codes = j->codes;
    const unsigned char *bytes = at_index(&codes->codes, matrix, row, 0);
    if (codes->scales.data == NULL) {
        decode_run(j, bytes, codes->skip + from, to - from, 1.0F, out, step);
        return;
    }
    const size_t block_row = (codes->first_row + row) / codes->block_rows;
    for (size_t at = from; at < to;) {
        const size_t column = codes->first_column + at;
        const size_t block = column / codes->block_columns;
        const size_t left = codes->block_columns - column % codes->block_columns;
        const size_t count = mls_size_least(left, to - at);
        float scale;
        memcpy(&scale, at_index(&codes->scales, matrix, block_row, block), sizeof scale);
        decode_run(j, bytes, codes->skip + at, count, scale, out + (at - from) * step,
                   step);
        at += count;
    }
}

/* Store `count` floats of `from`, converted to the dtype of the values, at adjacent
 * addresses from `to` on. */
static void store_run(const decode_job *j, unsigned char *to, const float *from,
                      size_t count)
{
    if (j->values->dtype == MLS_F32) {
        memcpy(to, from, count * sizeof *from);
    } else {
        j->kernels->convert[MLS_F32][j->values->dtype](to, from, count, MLS_STORE_CACHED);
    }
}

/* Decode tile number `index`, as a task for the pool; `context` is the job. Tiles are
 * numbered along columns first, then rows, then matrices. A tile is decoded row by row
 * into a buffer, and stored along the axis that is dense in the values: if that is the
 * rows' axis (`by_columns`), the buffer is transposed. */
static void decode_tile(void *context, size_t index)
{
    const decode_job *j = context;
    const mls_tensor *values = j->values;
    const size_t column_tile = index % j->column_tiles;
    const size_t row_tile = index / j->column_tiles % j->row_tiles;
    const size_t matrix = index / j->column_tiles / j->row_tiles;
    const size_t row = row_tile * j->rows, column = column_tile * j->columns;
    const size_t rows = mls_size_least(j->rows, values->shape[1] - row);
    const size_t columns = mls_size_least(j->columns, values->shape[2] - column);
    float tile[TILE];
    for (size_t r = 0; r < rows; r++) {
        float *out = j->by_columns ? tile + r : tile + r * j->columns;
        decode_row(j, matrix, row + r, column, column + columns, out,
                   j->by_columns ? j->rows : 1);
    }
    const size_t runs = j->by_columns ? columns : rows;
    for (size_t run = 0; run < runs; run++) {
        const unsigned char *to = j->by_columns
                                      ? at_index(values, matrix, row, column + run)
                                      : at_index(values, matrix, row + run, column);
        store_run(j, (unsigned char *)(uintptr_t)to,
                  tile + run * (j->by_columns ? j->rows : j->columns),
                  j->by_columns ? rows : columns);
    }
}

/* Write all values. Compute the table of all codes, then decode tile by tile. */
void mls_scaled_codes_decode(const mls_kernels *kernels, mls_pool *pool,
                             const mls_tensor *values, const mls_scaled_codes *codes)
{
    decode_job job = {.kernels = kernels, .values = values, .codes = codes};
    size_t bytes;
    if (!mls_tensor_bytes(values, &bytes) || bytes == 0) {
        return;
    }
    for (unsigned code = 0; code < (is_packed(codes) ? 16U : 256U); code++) {
        job.table[code] = f32_from_code(codes->dtype, (uint8_t)code);
    }
    job.by_columns = !is_dense(values, 2);
    job.rows = job.by_columns ? TILE_SIDE : TILE / TILE_COLUMNS;
    job.columns = job.by_columns ? TILE_SIDE : TILE_COLUMNS;
    job.row_tiles = (values->shape[1] - 1) / job.rows + 1;
    job.column_tiles = (values->shape[2] - 1) / job.columns + 1;
    mls_pool_run(bytes >= MLS_POOL_COPY_BYTES ? pool : NULL, decode_tile, &job,
                 values->shape[0] * job.row_tiles * job.column_tiles);
}
