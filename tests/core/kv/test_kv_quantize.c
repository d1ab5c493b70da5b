#include "kv/kv_quantize.h"
#include "support/cpus.h"
#include "support/tensors.h"

#include <math.h>

static const unsigned all_bits[] = {2, 3, 4, 5, 6, 8};

enum { HEADS = 3, ROWS = 37, MOST_DIM = 4160, MOST = HEADS * ROWS * MOST_DIM };

/* Values with their codes, scales and biases, each with one guard element at the end. */
typedef struct store {
    float values[MOST + 1];
    uint32_t codes[MOST / 4 + 1];
    float scales[MOST / 8 + 1], biases[MOST / 8 + 1];
    mls_tensor t;
    mls_quantized q;
} store;

/* Make views of `heads` x `rows` x `dim` values. */
static void make(store *s, mls_dtype dtype, size_t heads, size_t rows, size_t dim,
                 unsigned bits, size_t group)
{
    mls_status st;
    size_t shape[] = {heads, rows, dim}, words = 0, groups = 0;
    s->q = (mls_quantized){.bits = bits, .group = group};
    (void)mls_quantized_lengths(dim, bits, group, &words, &groups, &st);
    s->t = tensor_of(s->values, dtype, 3, shape);
    shape[2] = words;
    s->q.codes = tensor_of(s->codes, MLS_U32, 3, shape);
    shape[2] = groups;
    s->q.scales = tensor_of(s->scales, dtype, 3, shape);
    s->q.biases = tensor_of(s->biases, dtype, 3, shape);
}

/* Read or write one element of a packed view. */
static float read(const mls_tensor *t, size_t index)
{
    return (float)read_float(t->dtype, t->data + index * mls_tensor_item_bytes(t));
}

static void write(const mls_tensor *t, size_t index, float value)
{
    write_float(t->dtype, t->data + index * mls_tensor_item_bytes(t), value);
}

/* Return the number of elements. */
static size_t count_of(const mls_tensor *t)
{
    size_t count = 0;
    (void)mls_tensor_count(t, &count);
    return count;
}

/* Fill the values with numbers between -4 and 4; every fifth group is constant, and every
 * seventh positive. */
static void fill(store *s)
{
    uint32_t seed = 11;
    for (size_t i = 0; i < count_of(&s->t); i++) {
        const size_t group = i / s->q.group;
        seed = seed * 1664525 + 1013904223;
        float value = (float)(int32_t)seed * 0x1p-29F;
        value = group % 5 == 0 ? (float)(group % 3) : value;
        write(&s->t, i, group % 7 == 0 ? fabsf(value) : value);
    }
}

/* Every dtype, width of codes, size of groups and instruction set, with tiles of many
 * rows and of parts of a row: codes and values have the bits of the scalar kernels, which
 * tests/kv compares with NumPy, and nothing is written past their end. */
TEST(every_instruction_set_gives_scalar_codes_and_values)
{
    static const size_t sizes[][2] = {
        {8, 8}, {64, 64}, {192, 32}, {4160, 64}, {4096, 4096}};
    static store scalar, got;
    const mls_kernels *scalar_kernels = mls_kernels_of(MLS_CPU_SCALAR);
    for (int dtype = MLS_F16; dtype <= MLS_F32; dtype++) {
        for (size_t kind = 0; kind < 30; kind += EVERY(7)) {
            const size_t *size = sizes[kind % 5];
            const unsigned bits = all_bits[kind / 5];
            if (bits % 4 != 0 && size[1] % MLS_QUANTIZE_ODD_UNIT != 0) {
                continue;
            }
            make(&scalar, (mls_dtype)dtype, HEADS, ROWS, size[0], bits, size[1]);
            fill(&scalar);
            REQUIRE(mls_quantize_check(&scalar.t, &scalar.q, &status) == MLS_OK);
            REQUIRE(mls_quantize(scalar_kernels, NULL, &scalar.q, &scalar.t, &status) ==
                    MLS_OK);
            mls_dequantize(scalar_kernels, NULL, &scalar.t, &scalar.q);
            EACH_CPU (cpu) {
                const mls_kernels *kernels = mls_kernels_of(cpu);
                make(&got, (mls_dtype)dtype, HEADS, ROWS, size[0], bits, size[1]);
                fill(&got);
                const size_t words = count_of(&got.q.codes);
                got.codes[words] = 0xA5A5A5A5;
                CHECK(mls_quantize(kernels, NULL, &got.q, &got.t, &status) == MLS_OK);
                CHECK(memcmp(got.codes, scalar.codes, words * 4) == 0);
                CHECK(got.codes[words] == 0xA5A5A5A5);
                const size_t item = mls_tensor_item_bytes(&got.t);
                const size_t bytes = count_of(&got.q.scales) * item;
                CHECK(memcmp(got.scales, scalar.scales, bytes) == 0);
                CHECK(memcmp(got.biases, scalar.biases, bytes) == 0);
                const size_t all = count_of(&got.t) * item;
                memset(got.values, 0xA5, all + 1);
                mls_dequantize(kernels, NULL, &got.t, &got.q);
                CHECK(memcmp(got.values, scalar.values, all) == 0);
                CHECK(got.t.data[all] == 0xA5);
            }
        }
    }
}

/* Scales and biases of a file may be any numbers; NaNs may differ in their payload. */
TEST(values_of_any_scales_are_the_same_for_every_instruction_set)
{
    static const float special[] = {NAN,    INFINITY, -INFINITY, 3e38F, -3e38F,
                                    1e-40F, 0,        -0.0F,     6e4F,  1};
    enum { COUNT = sizeof special / sizeof special[0], GROUP = 32 };
    static store scalar, got;
    for (int kind = 0; kind < 18; kind++) {
        const mls_dtype dtype = (mls_dtype)(MLS_F16 + kind % 3);
        make(&scalar, dtype, 1, COUNT * COUNT, GROUP, all_bits[kind / 3], GROUP);
        for (size_t i = 0; i < COUNT * COUNT; i++) {
            write(&scalar.q.scales, i, special[i / COUNT]);
            write(&scalar.q.biases, i, special[i % COUNT]);
        }
        for (size_t i = 0; i < count_of(&scalar.q.codes); i++) {
            scalar.codes[i] = (uint32_t)i * 2654435761U;
        }
        mls_dequantize(mls_kernels_of(MLS_CPU_SCALAR), NULL, &scalar.t, &scalar.q);
        EACH_CPU (cpu) {
            make(&got, dtype, 1, COUNT * COUNT, GROUP, all_bits[kind / 3], GROUP);
            mls_quantized source = scalar.q;
            mls_dequantize(mls_kernels_of(cpu), NULL, &got.t, &source);
            for (size_t i = 0; i < count_of(&got.t); i++) {
                const float value = read(&got.t, i), expected = read(&scalar.t, i);
                CHECK(isnan(expected) ? isnan(value)
                                      : memcmp(&value, &expected, sizeof value) == 0);
            }
        }
    }
}

TEST(values_without_a_scale_are_refused)
{
    static const float bad[][2] = {
        {NAN, 0}, {INFINITY, 0}, {-INFINITY, 0}, {3e38F, -3e38F}};
    static store s;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        EACH_CPU (cpu) {
            make(&s, MLS_F32, 1, 4, 64, 8, 32);
            fill(&s);
            s.values[100] = bad[i][0];
            s.values[101] = bad[i][1];
            CHECK_FAILS(mls_quantize(mls_kernels_of(cpu), NULL, &s.q, &s.t, &status),
                        MLS_E_VALUE,
                        "a value is NaN or infinite, or the values of a group are too "
                        "far apart: such groups have no scale");
        }
    }
}
