/* Codes with scales, compared with one element at a time. */
#include "array/copy/scaled_codes.h"
#include "array/float_convert.h"
#include "support/cpus.h"
#include "support/random_bytes.h"
#include "support/runner.h"

#include <stdlib.h>

enum { MATRICES = 2, ROWS = 70, COLUMNS = 530, COUNT = MATRICES * ROWS * COLUMNS };

static unsigned char codes[COUNT];
static float scales[COUNT];
static float result[COUNT];
static uint16_t halves[COUNT];

static mls_tensor view(void *data, mls_dtype dtype, size_t a, size_t b, size_t c)
{
    const size_t shape[] = {a, b, c};
    mls_tensor out;
    mls_status st;
    CHECK(mls_tensor_init(&out, data, dtype, 3, shape, &st) == MLS_OK);
    return out;
}

static void swap_axes(mls_tensor *t)
{
    const size_t length = t->shape[1];
    const ptrdiff_t stride = t->strides[1];
    t->shape[1] = t->shape[2];
    t->strides[1] = t->strides[2];
    t->shape[2] = length;
    t->strides[2] = stride;
}

static float e2m1(unsigned code)
{
    static const float values[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
    return (code & 8U) != 0 ? -values[code & 7U] : values[code & 7U];
}

/* The value at a position, from the definition. */
static float expected(const mls_scaled_codes *s, size_t matrix, size_t row, size_t column)
{
    const size_t at = s->skip + column;
    const size_t bytes = s->codes.shape[2];
    const unsigned char *line = codes + (matrix * s->codes.shape[1] + row) * bytes;
    float value;
    if (s->dtype == MLS_F4) {
        value = e2m1((line[at / 2] >> (at % 2 * 4)) & 15U);
    } else if (s->dtype == MLS_I8) {
        value = (float)(line[at] < 128 ? line[at] : line[at] - 256);
    } else {
        value = (float)mls_f64_from_e4m3(line[at]);
    }
    if (s->scales.data == NULL) {
        return value;
    }
    const size_t i = (s->first_row + row) / s->block_rows;
    const size_t j = (s->first_column + column) / s->block_columns;
    return value * scales[(matrix * s->scales.shape[1] + i) * s->scales.shape[2] + j];
}

static bool same(float a, float b)
{
    return mls_f32_bits(a) == mls_f32_bits(b) || (a != a && b != b);
}

static void check_all(const mls_kernels *k, const mls_scaled_codes *s, size_t rows,
                      size_t columns, bool by_columns)
{
    mls_tensor floats = by_columns ? view(result, MLS_F32, MATRICES, columns, rows)
                                   : view(result, MLS_F32, MATRICES, rows, columns);
    mls_tensor shorts = by_columns ? view(halves, MLS_BF16, MATRICES, columns, rows)
                                   : view(halves, MLS_BF16, MATRICES, rows, columns);
    mls_status st;
    if (by_columns) {
        swap_axes(&floats);
        swap_axes(&shorts);
    }
    CHECK(mls_scaled_codes_check(&floats, s, &st) == MLS_OK);
    mls_scaled_codes_decode(k, NULL, &floats, s);
    mls_scaled_codes_decode(k, NULL, &shorts, s);
    for (size_t m = 0; m < MATRICES; m++) {
        for (size_t i = 0; i < rows; i++) {
            for (size_t j = 0; j < columns; j++) {
                const size_t at = by_columns ? (m * columns + j) * rows + i
                                             : (m * rows + i) * columns + j;
                const float value = expected(s, m, i, j);
                CHECK(same(result[at], value));
                CHECK(value != value || halves[at] == mls_bf16_from_f32(value));
            }
        }
    }
}

static void fill_inputs(void)
{
    fill_random(codes, sizeof codes, 5);
    for (size_t i = 0; i < COUNT; i++) {
        scales[i] = 0.01F * (float)(i % 97 + 1);
    }
}

static void check_bytes(mls_dtype dtype)
{
    fill_inputs();
    EACH_CPU (cpu) {
        for (size_t first = 0; first < 130; first += 43) {
            const size_t rows = ROWS - 5, columns = COLUMNS - 60;
            const mls_scaled_codes s = {
                .dtype = dtype,
                .codes = view(codes, MLS_U8, MATRICES, rows, COLUMNS - 57),
                .scales = view(scales, MLS_F32, MATRICES, 6, 9),
                .skip = first % 3,
                .block_rows = 64,
                .block_columns = 100,
                .first_row = first,
                .first_column = first};
            check_all(mls_kernels_of(cpu), &s, rows, columns, false);
            check_all(mls_kernels_of(cpu), &s, rows, columns, true);
        }
    }
}

TEST(bytes_with_blocks_match_the_definition)
{
    check_bytes(MLS_F8_E4M3);
}

TEST(int8_with_blocks_match_the_definition)
{
    check_bytes(MLS_I8);
}

TEST(pairs_of_4_bits_match_the_definition)
{
    fill_inputs();
    EACH_CPU (cpu) {
        for (size_t first = 0; first < 34; first++) {
            const mls_scaled_codes s = {.dtype = MLS_F4,
                                        .codes = view(codes, MLS_U8, MATRICES, 66, 96),
                                        .scales = view(scales, MLS_F32, MATRICES, 66, 7),
                                        .skip = first,
                                        .block_rows = 1,
                                        .block_columns = 32,
                                        .first_column = first};
            check_all(mls_kernels_of(cpu), &s, 66, 192 - first - first % 5, false);
            check_all(mls_kernels_of(cpu), &s, 66, 192 - first - first % 5, true);
        }
    }
}

TEST(codes_without_scales_are_their_values)
{
    fill_inputs();
    const mls_scaled_codes s = {.dtype = MLS_F8_E4M3,
                                .codes = view(codes, MLS_U8, MATRICES, 1, 300)};
    check_all(mls_kernels_of(best_cpu()), &s, 1, 300, false);
    check_all(mls_kernels_of(best_cpu()), &s, 1, 0, false);
}

/* Checks one change of valid arguments. */
#define REFUSES(expected_code, text, ...)                                                \
    do {                                                                                 \
        mls_tensor values = view(result, MLS_F32, MATRICES, 4, 64);                      \
        mls_scaled_codes s = {.dtype = MLS_F8_E4M3,                                      \
                              .codes = view(codes, MLS_U8, MATRICES, 4, 64),             \
                              .scales = view(scales, MLS_F32, MATRICES, 2, 2),           \
                              .block_rows = 2,                                           \
                              .block_columns = 32};                                      \
        CHECK(mls_scaled_codes_check(&values, &s, &status) == MLS_OK);                   \
        __VA_ARGS__;                                                                     \
        CHECK_FAILS(mls_scaled_codes_check(&values, &s, &status), expected_code, text);  \
    } while (0)

TEST(views_that_do_not_fit_are_refused)
{
#define DENSE         "the values have no dense rows or columns"
#define CODES(shape)  "codes of shape " shape " are too few for the values"
#define SCALES(shape) "scales of shape " shape " are too few for the values"
    REFUSES(MLS_E_DTYPE, "codes of uint8 in items of 1 bytes", s.dtype = MLS_U8);
    REFUSES(MLS_E_DTYPE, "codes of float6_e2m3fn_x4 in items of 1 bytes",
            s.dtype = MLS_F6_E2M3);
    REFUSES(MLS_E_DTYPE, "codes of float8_e4m3fn in items of 2 bytes",
            s.codes.dtype = MLS_U16);
    REFUSES(MLS_E_DTYPE, "values of int32 with scales of float32",
            values.dtype = MLS_I32);
    REFUSES(MLS_E_DTYPE, "values of float32 with scales of float16",
            s.scales.dtype = MLS_F16);
    REFUSES(MLS_E_SHAPE, DENSE, values.rank = 2);
    REFUSES(MLS_E_SHAPE, DENSE, values.swapped = true);
    REFUSES(MLS_E_SHAPE, DENSE, values.strides[2] = 8);
    REFUSES(MLS_E_SHAPE, DENSE, s.scales.swapped = true);
    REFUSES(MLS_E_SHAPE, CODES("(2, 4)"), s.codes.rank = 2);
    REFUSES(MLS_E_SHAPE, CODES("(1, 4, 64)"), s.codes.shape[0] = 1);
    REFUSES(MLS_E_SHAPE, CODES("(2, 5, 64)"), s.codes.shape[1] = 5);
    REFUSES(MLS_E_SHAPE, CODES("(2, 4, 63)"), s.codes.shape[2] = 63);
    REFUSES(MLS_E_SHAPE, CODES("(2, 4, 64)"), s.codes.strides[2] = 2);
    REFUSES(MLS_E_SHAPE, CODES("(2, 4, 64)"), s.skip = 1);
    REFUSES(MLS_E_SHAPE, CODES("(2, 4, 64)"), s.skip = SIZE_MAX);
    REFUSES(MLS_E_SHAPE, SCALES("(2, 2)"), s.scales.rank = 2);
    REFUSES(MLS_E_SHAPE, SCALES("(1, 2, 2)"), s.scales.shape[0] = 1);
    REFUSES(MLS_E_SHAPE, SCALES("(2, 1, 2)"), s.scales.shape[1] = 1);
    REFUSES(MLS_E_SHAPE, SCALES("(2, 2, 1)"), s.scales.shape[2] = 1);
    REFUSES(MLS_E_SHAPE, SCALES("(2, 2, 2)"), s.block_rows = 0);
    REFUSES(MLS_E_SHAPE, SCALES("(2, 2, 2)"), s.block_columns = 0);
    REFUSES(MLS_E_SHAPE, SCALES("(2, 2, 2)"), s.first_row = 1);
    REFUSES(MLS_E_SHAPE, SCALES("(2, 2, 2)"), s.first_column = SIZE_MAX);
}
