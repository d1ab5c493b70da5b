#include "mlstate/kv.h"

#include "support/cpus.h"

#include <math.h>

enum { LAYERS = 2, HEADS = 1, LENGTH = 4, LONGER = 6, DIM = 8 };

static const int64_t shape[] = {LAYERS, HEADS, LENGTH, DIM};
static float source[LAYERS][HEADS][LENGTH][DIM];
static float target[LAYERS][HEADS][LONGER][DIM], before[LAYERS][HEADS][LONGER][DIM];
static uint32_t codes[LAYERS][HEADS][LENGTH][DIM / 4];
static float scales[LAYERS][HEADS][LENGTH][1], biases[LAYERS][HEADS][LENGTH][1];

BEFORE_EACH
{
    for (size_t i = 0; i < sizeof source / sizeof(float); i++) {
        ((float *)source)[i] = (float)i + 1;
    }
    memset(target, 0x55, sizeof target);
    memcpy(before, target, sizeof target);
}

/* Return whether the last call changed no byte of the target. */
static bool is_unchanged(void)
{
    return memcmp(before, target, sizeof target) == 0;
}

/* The arguments of a transition; each test changes one of them. */
typedef struct arguments {
    const void *source;
    void *target;
    const int64_t *shape, *source_strides, *target_strides;
    int source_dtype, target_dtype, rank, seq_axis;
    int64_t target_length, position;
    double pad;
} arguments;

static arguments valid(void)
{
    return (arguments){.source = source,
                       .target = target,
                       .shape = shape,
                       .source_dtype = MLSTATE_KV_FLOAT32,
                       .target_dtype = MLSTATE_KV_FLOAT32,
                       .rank = 4,
                       .seq_axis = -2,
                       .target_length = LONGER,
                       .position = 3,
                       .pad = 7};
}

static int expand(arguments a)
{
    return mlstate_kv_expand(a.source, a.source_dtype, a.source_strides, a.target,
                             a.target_dtype, a.target_strides, a.shape, a.rank,
                             a.seq_axis, a.target_length, a.position, a.pad);
}

static int compact(arguments a)
{
    return mlstate_kv_compact(a.source, a.source_dtype, a.source_strides, a.target,
                              a.target_dtype, a.target_strides, a.shape, a.rank,
                              a.seq_axis, a.target_length, a.position);
}

/* Run both transitions with one argument changed, and check their result. */
#define CHECK_REFUSED(change, code)                                                      \
    do {                                                                                 \
        arguments a = valid();                                                           \
        a.change;                                                                        \
        CHECK(expand(a) == (code));                                                      \
        CHECK(compact(a) == (code));                                                     \
        CHECK(is_unchanged());                                                           \
    } while (0)

TEST(version_equals_the_header)
{
    CHECK(mlstate_kv_version() == MLSTATE_KV_VERSION);
    CHECK(MLSTATE_KV_VERSION / 1000 == MLSTATE_KV_VERSION_MAJOR);
}

TEST(every_code_has_a_text)
{
    CHECK_TEXT(mlstate_kv_error_text(MLSTATE_KV_OK), "no error");
    for (int code = MLSTATE_KV_OK; code <= MLSTATE_KV_ERROR_SIZE; code++) {
        CHECK(strlen(mlstate_kv_error_text(code)) > 4);
        CHECK(strcmp(mlstate_kv_error_text(code), "unknown error") != 0);
    }
    CHECK_TEXT(mlstate_kv_error_text(MLSTATE_KV_ERROR_SIZE + 1), "unknown error");
    CHECK_TEXT(mlstate_kv_error_text(-1), "unknown error");
}

TEST(dtypes_have_their_sizes)
{
    static const size_t sizes[] = {0, 2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 1, 1, 1, 0};
    for (int dtype = 0; dtype < (int)(sizeof sizes / sizeof sizes[0]); dtype++) {
        CHECK(mlstate_kv_dtype_bytes(dtype) == sizes[dtype]);
    }
    CHECK(mlstate_kv_dtype_bytes(-1) == 0 && mlstate_kv_dtype_bytes(INT32_MAX) == 0);
}

TEST(strides_count_elements_and_may_be_negative)
{
    const int64_t backwards[] = {LENGTH * DIM, LENGTH * DIM, DIM, -1};
    arguments a = valid();
    a.source = &source[0][0][0][DIM - 1];
    a.source_strides = backwards;
    CHECK(expand(a) == MLSTATE_KV_OK);
    for (size_t i = 0; i < DIM; i++) {
        CHECK(memcmp(&target[1][0][2][i], &source[1][0][2][DIM - 1 - i], 4) == 0);
    }
}

TEST(null_pointers_are_refused)
{
    CHECK_REFUSED(source = NULL, MLSTATE_KV_ERROR_NULL);
    CHECK_REFUSED(target = NULL, MLSTATE_KV_ERROR_NULL);
    CHECK_REFUSED(shape = NULL, MLSTATE_KV_ERROR_NULL);
}

TEST(unknown_and_unfit_dtypes_are_refused)
{
    static const int unknown[] = {0, -1, 16, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        CHECK_REFUSED(source_dtype = unknown[i], MLSTATE_KV_ERROR_DTYPE);
        CHECK_REFUSED(target_dtype = unknown[i], MLSTATE_KV_ERROR_DTYPE);
    }
    CHECK_REFUSED(target_dtype = MLSTATE_KV_INT32, MLSTATE_KV_ERROR_DTYPE);
}

TEST(ranks_axes_and_lengths_are_checked)
{
    const int64_t negative[] = {LAYERS, HEADS, LENGTH, -DIM};
    const int64_t huge[] = {INT64_MAX, INT64_MAX, LENGTH, DIM};
    static const int ranks[] = {1, 0, -1, 9, INT32_MAX};
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        CHECK_REFUSED(rank = ranks[i], MLSTATE_KV_ERROR_SHAPE);
    }
    CHECK_REFUSED(seq_axis = 4, MLSTATE_KV_ERROR_SHAPE);
    CHECK_REFUSED(seq_axis = -5, MLSTATE_KV_ERROR_SHAPE);
    CHECK_REFUSED(shape = negative, MLSTATE_KV_ERROR_SHAPE);
    CHECK_REFUSED(shape = huge, MLSTATE_KV_ERROR_SIZE);
}

TEST(positions_must_fit)
{
    CHECK_REFUSED(position = -1, MLSTATE_KV_ERROR_CAPACITY);
    CHECK_REFUSED(position = LENGTH + 1, MLSTATE_KV_ERROR_CAPACITY);
    CHECK_REFUSED(position = INT64_MAX, MLSTATE_KV_ERROR_CAPACITY);
    CHECK_REFUSED(target_length = -1, MLSTATE_KV_ERROR_CAPACITY);
    CHECK_REFUSED(target_length = 2, MLSTATE_KV_ERROR_CAPACITY);
    CHECK_REFUSED(target_length = INT64_MAX, MLSTATE_KV_ERROR_SIZE);
    arguments a = valid();
    a.target_length = 3; /* fits the tokens, but is shorter than the source */
    CHECK(expand(a) == MLSTATE_KV_ERROR_CAPACITY && is_unchanged());
    CHECK(compact(a) == MLSTATE_KV_OK && !is_unchanged());
}

TEST(shared_memory_is_refused)
{
    static const int64_t repeated[] = {LONGER * DIM, 0, 0, 1};
    static const int64_t far_away[] = {INT64_MAX, 1, 1, 1};
    static const int64_t past_end[] = {INT64_MAX / 8, INT64_MAX / 8, INT64_MAX / 8, 1};
    CHECK_REFUSED(source = target, MLSTATE_KV_ERROR_OVERLAP);
    CHECK_REFUSED(source = &target[1][0][LONGER - 1][0], MLSTATE_KV_ERROR_OVERLAP);
    CHECK_REFUSED(target_strides = repeated, MLSTATE_KV_ERROR_OVERLAP);
    CHECK_REFUSED(target_strides = far_away, MLSTATE_KV_ERROR_SIZE);
    CHECK_REFUSED(source_strides = far_away, MLSTATE_KV_ERROR_SIZE);
    CHECK_REFUSED(source_strides = past_end, MLSTATE_KV_ERROR_SIZE);
}

TEST(strides_of_an_empty_array_may_be_any_numbers)
{
    static const int64_t strides[] = {INT64_MIN / 4, 0, INT64_MAX / 4, INT64_MAX / 4};
    static const int64_t empty[] = {LAYERS, HEADS, LENGTH, 0};
    arguments a = valid();
    a.shape = empty;
    a.source_strides = a.target_strides = strides;
    CHECK(expand(a) == MLSTATE_KV_OK && compact(a) == MLSTATE_KV_OK);
    CHECK(is_unchanged());
}

TEST(padding_must_fit_the_dtype)
{
    arguments a = valid();
    a.source_dtype = a.target_dtype = MLSTATE_KV_INT32;
    a.pad = 0.5;
    CHECK(expand(a) == MLSTATE_KV_ERROR_VALUE && is_unchanged());
    a.pad = -3;
    CHECK(expand(a) == MLSTATE_KV_OK);
    memcpy(target, before, sizeof target);
    a.target_dtype = a.source_dtype = MLSTATE_KV_FLOAT8_E4M3FN;
    a.pad = 1;
    CHECK(expand(a) == MLSTATE_KV_ERROR_VALUE && is_unchanged());
    a.source_dtype = MLSTATE_KV_FLOAT32;
    a.target_dtype = MLSTATE_KV_FLOAT16;
    a.pad = 65520;
    CHECK(expand(a) == MLSTATE_KV_ERROR_VALUE && is_unchanged());
}

TEST(masks_are_checked)
{
    float *rows = &target[0][0][0][0];
    enum { F32 = MLSTATE_KV_FLOAT32 };
    CHECK(mlstate_kv_mask(NULL, F32, 4, 4, 1, 0, 0, 4, -1) == MLSTATE_KV_ERROR_NULL);
    CHECK(mlstate_kv_mask(rows, 99, 4, 4, 1, 0, 0, 4, -1) == MLSTATE_KV_ERROR_DTYPE);
    CHECK(mlstate_kv_mask(rows, MLSTATE_KV_INT32, 4, 4, 1, 0, 0, 4, -1) ==
          MLSTATE_KV_ERROR_DTYPE);
    CHECK(mlstate_kv_mask(rows, F32, 3, 4, 1, 0, 0, 4, -1) == MLSTATE_KV_ERROR_OVERLAP);
    CHECK(mlstate_kv_mask(rows, F32, INT64_MAX, 4, 1, 0, 0, 4, -1) ==
          MLSTATE_KV_ERROR_SIZE);
    CHECK(mlstate_kv_mask(rows, F32, -4, 4, 1, 0, 0, 4, -1) == MLSTATE_KV_ERROR_CAPACITY);
    CHECK(mlstate_kv_mask(rows, F32, 4, -4, 1, 0, 0, 0, -1) == MLSTATE_KV_ERROR_CAPACITY);
    CHECK(mlstate_kv_mask(rows, F32, 4, 4, -1, 0, 0, 4, -1) == MLSTATE_KV_ERROR_CAPACITY);
    CHECK(mlstate_kv_mask(rows, F32, 4, 4, 1, -1, 0, 4, -1) == MLSTATE_KV_ERROR_CAPACITY);
    CHECK(mlstate_kv_mask(rows, F32, 4, 4, 1, 0, 3, 2, -1) == MLSTATE_KV_ERROR_CAPACITY);
    CHECK(mlstate_kv_mask(rows, F32, 4, 4, 1, 0, 0, 5, -1) == MLSTATE_KV_ERROR_CAPACITY);
    CHECK(mlstate_kv_mask(rows, MLSTATE_KV_FLOAT16, 4, 4, 1, 0, 0, 4, 1e9) ==
          MLSTATE_KV_ERROR_VALUE);
    CHECK(is_unchanged());
    CHECK(mlstate_kv_mask(rows, F32, 4, 4, 1, 0, 3, 4, -1) == MLSTATE_KV_OK);
    CHECK(rows[1] < 0 && rows[2] >= 0);
    CHECK(memcmp(rows + 4, (float *)before + 4, sizeof target - 16) == 0);
}

/* Rotate keys into the target, with numbers to change. */
static int rotate(int dtype, int seq_axis, const int64_t *shifts, int64_t shift_count,
                  double base, int64_t rotary_dim)
{
    return mlstate_kv_rotate(source, NULL, target, NULL, dtype, shape, 4, seq_axis,
                             shifts, shift_count, base, 1, rotary_dim, 0);
}

TEST(rotations_are_checked)
{
    const int64_t shifts[LENGTH] = {1, 2, 3, 4};
    const int64_t wide[] = {0, 4098};
    enum { F32 = MLSTATE_KV_FLOAT32 };
    CHECK(rotate(F32, -2, NULL, 1, 1e4, 0) == MLSTATE_KV_ERROR_NULL);
    CHECK(rotate(F32, -2, shifts, 2, 1e4, 0) == MLSTATE_KV_ERROR_SHAPE);
    CHECK(rotate(F32, -2, shifts, 0, 1e4, 0) == MLSTATE_KV_ERROR_SHAPE);
    CHECK(rotate(F32, -2, shifts, -1, 1e4, 0) == MLSTATE_KV_ERROR_SHAPE);
    CHECK(rotate(F32, -1, shifts, 1, 1e4, 0) == MLSTATE_KV_ERROR_SHAPE);
    CHECK(rotate(F32, -5, shifts, 1, 1e4, 0) == MLSTATE_KV_ERROR_SHAPE);
    CHECK(rotate(MLSTATE_KV_INT32, -2, shifts, 1, 1e4, 0) == MLSTATE_KV_ERROR_DTYPE);
    CHECK(rotate(0, -2, shifts, 1, 1e4, 0) == MLSTATE_KV_ERROR_DTYPE);
    CHECK(rotate(F32, -2, shifts, 1, -1, 0) == MLSTATE_KV_ERROR_VALUE);
    CHECK(rotate(F32, -2, shifts, 1, 1e4, 3) == MLSTATE_KV_ERROR_VALUE);
    CHECK(rotate(F32, -2, shifts, 1, 1e4, -2) == MLSTATE_KV_ERROR_VALUE);
    CHECK(rotate(F32, -2, shifts, 1, 1e4, INT64_MAX) == MLSTATE_KV_ERROR_VALUE);
    CHECK(rotate(F32, -2, shifts, 1, 1e4, DIM + 2) == MLSTATE_KV_ERROR_VALUE);
    CHECK(rotate(F32, -2, shifts, 1, (double)INFINITY, 0) == MLSTATE_KV_ERROR_VALUE);
    CHECK(rotate(F32, -2, shifts, 1, (double)NAN, 0) == MLSTATE_KV_ERROR_VALUE);
    CHECK(mlstate_kv_rotate(source, NULL, target, NULL, F32, shape, 4, -2, shifts, 1, 1e4,
                            0, 0, 0) == MLSTATE_KV_ERROR_VALUE); /* the scaling */
    CHECK(mlstate_kv_rotate(source, NULL, target, NULL, F32, wide, 2, 0, shifts, 1, 1e4,
                            1, 0, 0) == MLSTATE_KV_ERROR_VALUE); /* turns 4098 */
    CHECK(rotate(F32, -2, (const int64_t *)(const void *)target, 1, 1e4, 0) ==
          MLSTATE_KV_ERROR_OVERLAP);
    CHECK(mlstate_kv_rotate(&target[0][0][1][0], NULL, target, NULL, F32, shape, 4, -2,
                            shifts, 1, 1e4, 1, 0, 0) == MLSTATE_KV_ERROR_OVERLAP);
    CHECK(is_unchanged());
    CHECK(rotate(F32, -2, shifts, LENGTH, 1e4, 0) == MLSTATE_KV_OK);
}

TEST(keys_rotate_in_place)
{
    const int64_t shift = 5;
    CHECK(rotate(MLSTATE_KV_FLOAT32, 2, &shift, 1, 1e4, 0) == MLSTATE_KV_OK);
    CHECK(mlstate_kv_rotate(source, NULL, source, NULL, MLSTATE_KV_FLOAT32, shape, 4, 2,
                            &shift, 1, 1e4, 1, 0, 0) == MLSTATE_KV_OK);
    CHECK(memcmp(source, target, sizeof source) == 0);
}

/* Quantize the source, with arguments to change. */
static int quantize(const void *values, int dtype, int bits, int64_t group, void *to)
{
    return mlstate_kv_quantize(values, dtype, NULL, shape, 4, bits, group, (uint32_t *)to,
                               scales, biases);
}

TEST(quantization_is_checked)
{
    uint32_t codes_before[sizeof codes / 4];
    enum { F32 = MLSTATE_KV_FLOAT32 };
    memset(codes, 0x55, sizeof codes);
    memcpy(codes_before, codes, sizeof codes);
    CHECK(quantize(NULL, F32, 8, DIM, codes) == MLSTATE_KV_ERROR_NULL);
    CHECK(quantize(source, F32, 8, DIM, NULL) == MLSTATE_KV_ERROR_NULL);
    CHECK(quantize(source, 0, 8, DIM, codes) == MLSTATE_KV_ERROR_DTYPE);
    CHECK(quantize(source, MLSTATE_KV_INT32, 8, DIM, codes) == MLSTATE_KV_ERROR_DTYPE);
    CHECK(quantize(source, F32, 7, DIM, codes) == MLSTATE_KV_ERROR_VALUE);
    CHECK(quantize(source, F32, 5, DIM, codes) == MLSTATE_KV_ERROR_VALUE); /* not 32 */
    CHECK(quantize(source, F32, -8, DIM, codes) == MLSTATE_KV_ERROR_VALUE);
    CHECK(quantize(source, F32, 8, 0, codes) == MLSTATE_KV_ERROR_VALUE);
    CHECK(quantize(source, F32, 8, -8, codes) == MLSTATE_KV_ERROR_VALUE);
    CHECK(quantize(source, F32, 8, (INT64_C(1) << 32) + 8, codes) ==
          MLSTATE_KV_ERROR_VALUE);
    CHECK(quantize(source, F32, 8, 16, codes) == MLSTATE_KV_ERROR_SHAPE);
    CHECK(quantize(source, F32, 8, DIM, source) == MLSTATE_KV_ERROR_OVERLAP);
    CHECK(quantize(source, F32, 8, DIM, scales) == MLSTATE_KV_ERROR_OVERLAP);
    CHECK(memcmp(codes, codes_before, sizeof codes) == 0);
    CHECK(quantize(source, F32, 8, DIM, codes) == MLSTATE_KV_OK);
    CHECK(memcmp(codes, codes_before, sizeof codes) != 0);
    source[0][0][0][0] = -3e38F; /* their distance exceeds float */
    source[0][0][0][1] = 3e38F;
    CHECK(quantize(source, F32, 8, DIM, codes) == MLSTATE_KV_ERROR_VALUE);
    source[0][0][0][0] = NAN;
    CHECK(quantize(source, F32, 8, DIM, codes) == MLSTATE_KV_ERROR_VALUE);
}

TEST(dequantization_is_checked_and_reverses)
{
    static const int64_t repeated[] = {0, 0, DIM, 1};
    enum { F32 = MLSTATE_KV_FLOAT32 };
    uint32_t *words = &codes[0][0][0][0];
    CHECK(quantize(source, F32, 8, DIM, codes) == MLSTATE_KV_OK);
    CHECK(mlstate_kv_dequantize(NULL, F32, NULL, shape, 4, 8, DIM, words, scales,
                                biases) == MLSTATE_KV_ERROR_NULL);
    CHECK(mlstate_kv_dequantize(target, F32, NULL, shape, 4, 8, DIM, words, NULL,
                                biases) == MLSTATE_KV_ERROR_NULL);
    CHECK(mlstate_kv_dequantize(target, F32, repeated, shape, 4, 8, DIM, words, scales,
                                biases) == MLSTATE_KV_ERROR_OVERLAP);
    CHECK(mlstate_kv_dequantize(target, F32, NULL, shape, 4, 8, DIM, words, target,
                                biases) == MLSTATE_KV_ERROR_OVERLAP);
    CHECK(is_unchanged());
    CHECK(mlstate_kv_dequantize(target, F32, NULL, shape, 4, 8, DIM, words, scales,
                                biases) == MLSTATE_KV_OK);
    const float *result = (const float *)target, *expected = (const float *)source;
    for (size_t i = 0; i < sizeof source / sizeof(float); i++) {
        CHECK(result[i] - expected[i] < 0.05F && expected[i] - result[i] < 0.05F);
    }
}

/* A move with arguments to change, and its targets: longer codes, or longer values. */
enum { ODD_DIM = 32 };
static float odd[LAYERS][LENGTH][ODD_DIM], odd_target[LAYERS][LONGER][ODD_DIM];
static uint32_t odd_codes[LAYERS][LONGER][3], odd_before[LAYERS][LONGER][3];
static float odd_scales[LAYERS][LONGER], odd_biases[LAYERS][LONGER];

typedef struct move_arguments {
    const void *values;
    void *scales;
    const int64_t *shape;
    int dtype, rank, axis, bits;
    int64_t length, position, group;
} move_arguments;

static const int64_t odd_shape[] = {LAYERS, LENGTH, ODD_DIM};

static move_arguments valid_move(void)
{
    return (move_arguments){.values = odd,
                            .scales = odd_scales,
                            .shape = odd_shape,
                            .dtype = MLSTATE_KV_FLOAT32,
                            .rank = 3,
                            .axis = -2,
                            .bits = 3,
                            .length = LONGER,
                            .position = 3,
                            .group = ODD_DIM};
}

static int quantize_move(move_arguments a)
{
    return mlstate_kv_quantize_move(a.values, a.dtype, NULL, a.shape, a.rank, a.axis,
                                    a.length, a.position, a.bits, a.group,
                                    &odd_codes[0][0][0], a.scales, odd_biases);
}

#define CHECK_MOVE_REFUSED(change, code)                                                 \
    do {                                                                                 \
        move_arguments a = valid_move();                                                 \
        a.change;                                                                        \
        CHECK(quantize_move(a) == (code));                                               \
        CHECK(memcmp(odd_codes, odd_before, sizeof odd_codes) == 0);                     \
    } while (0)

TEST(moves_that_quantize_are_checked)
{
    static const int64_t negative[] = {LAYERS, -1, ODD_DIM};
    memset(odd_codes, 0x55, sizeof odd_codes);
    memcpy(odd_before, odd_codes, sizeof odd_codes);
    CHECK_MOVE_REFUSED(values = NULL, MLSTATE_KV_ERROR_NULL);
    CHECK_MOVE_REFUSED(scales = NULL, MLSTATE_KV_ERROR_NULL);
    CHECK_MOVE_REFUSED(shape = NULL, MLSTATE_KV_ERROR_NULL);
    CHECK_MOVE_REFUSED(shape = negative, MLSTATE_KV_ERROR_SHAPE);
    CHECK_MOVE_REFUSED(dtype = MLSTATE_KV_INT8, MLSTATE_KV_ERROR_DTYPE);
    CHECK_MOVE_REFUSED(rank = 1, MLSTATE_KV_ERROR_SHAPE);
    CHECK_MOVE_REFUSED(rank = 9, MLSTATE_KV_ERROR_SHAPE);
    CHECK_MOVE_REFUSED(axis = -1, MLSTATE_KV_ERROR_SHAPE);
    CHECK_MOVE_REFUSED(axis = 3, MLSTATE_KV_ERROR_SHAPE);
    CHECK_MOVE_REFUSED(bits = 7, MLSTATE_KV_ERROR_VALUE);
    CHECK_MOVE_REFUSED(group = 16, MLSTATE_KV_ERROR_VALUE);
    CHECK_MOVE_REFUSED(group = 64, MLSTATE_KV_ERROR_SHAPE);
    CHECK_MOVE_REFUSED(length = -1, MLSTATE_KV_ERROR_CAPACITY);
    CHECK_MOVE_REFUSED(length = 2, MLSTATE_KV_ERROR_CAPACITY);
    CHECK_MOVE_REFUSED(position = LENGTH + 1, MLSTATE_KV_ERROR_CAPACITY);
    CHECK_MOVE_REFUSED(position = -1, MLSTATE_KV_ERROR_CAPACITY);
    CHECK_MOVE_REFUSED(scales = odd, MLSTATE_KV_ERROR_OVERLAP);
}

/* mlstate_kv_dequantize_move refuses the same, and values that repeat an element. */
TEST(moves_that_dequantize_are_checked)
{
    static const int64_t repeated[] = {0, ODD_DIM, 1};
    const uint32_t *words = &odd_codes[0][0][0];
    memset(odd_target, 0, sizeof odd_target);
    CHECK(mlstate_kv_dequantize_move(odd_target, MLSTATE_KV_FLOAT32, repeated, odd_shape,
                                     3, 1, LONGER, 3, 3, ODD_DIM, words, odd_scales,
                                     odd_biases) == MLSTATE_KV_ERROR_OVERLAP);
    CHECK(mlstate_kv_dequantize_move(odd_target, MLSTATE_KV_FLOAT32, NULL, odd_shape, 3,
                                     1, 2, 3, 3, ODD_DIM, words, odd_scales,
                                     odd_biases) == MLSTATE_KV_ERROR_CAPACITY);
    CHECK(mlstate_kv_dequantize_move(odd_target, MLSTATE_KV_FLOAT32, NULL, odd_shape, 3,
                                     1, LONGER, 3, 1, ODD_DIM, words, odd_scales,
                                     odd_biases) == MLSTATE_KV_ERROR_VALUE);
    CHECK(mlstate_kv_dequantize_move(odd_target, MLSTATE_KV_FLOAT32, NULL, odd_shape, 3,
                                     1, LONGER, 3, 3, ODD_DIM, NULL, odd_scales,
                                     odd_biases) == MLSTATE_KV_ERROR_NULL);
}

TEST(lengths_of_codes_are_checked)
{
    int64_t words = -1, groups = -1;
    CHECK(mlstate_kv_quantized_lengths(64, 4, 32, &words, NULL) == MLSTATE_KV_ERROR_NULL);
    CHECK(mlstate_kv_quantized_lengths(-64, 4, 32, &words, &groups) ==
          MLSTATE_KV_ERROR_SHAPE);
    CHECK(mlstate_kv_quantized_lengths(65, 4, 32, &words, &groups) ==
          MLSTATE_KV_ERROR_SHAPE);
    CHECK(mlstate_kv_quantized_lengths(64, 0, 32, &words, &groups) ==
          MLSTATE_KV_ERROR_VALUE);
    CHECK(mlstate_kv_quantized_lengths(64, 5, 8, &words, &groups) ==
          MLSTATE_KV_ERROR_VALUE);
    CHECK(mlstate_kv_quantized_lengths(4128, 4, 4128, &words, &groups) ==
          MLSTATE_KV_ERROR_VALUE);
    CHECK(words == -1 && groups == -1);
    CHECK(mlstate_kv_quantized_lengths(64, 4, 32, &words, &groups) == MLSTATE_KV_OK);
    CHECK(words == 8 && groups == 2);
}
