#include "kv/rotate_keys.h"
#include "support/cpus.h"
#include "support/tensors.h"

enum { HEADS = 2, POSITIONS = 37, MOST_DIM = 42, MOST = HEADS * POSITIONS * MOST_DIM };

/* Keys of HEADS x POSITIONS x dim in memory of any dtype. */
typedef struct cache {
    double memory[MOST + 1];
    mls_tensor t;
} cache;

/* View the memory, with the positions innermost if `by_pair`. */
static void make(cache *c, mls_dtype dtype, size_t dim, bool by_pair, size_t offset)
{
    const size_t shape[] = {HEADS, POSITIONS, dim};
    c->t = tensor_of((unsigned char *)c->memory + offset, dtype, 3, shape);
    if (by_pair) {
        c->t.strides[2] = c->t.strides[1] / (ptrdiff_t)dim * POSITIONS;
        c->t.strides[1] = c->t.strides[1] / (ptrdiff_t)dim;
    }
}

/* Fill the keys with numbers between -4 and 4. */
static void fill(cache *c)
{
    uint32_t seed = 7;
    const size_t dim = c->t.shape[2];
    for (size_t i = 0; i < HEADS * POSITIONS * dim; i++) {
        seed = seed * 1664525 + 1013904223;
        write_float(c->t.dtype, c->t.data + i * mls_tensor_item_bytes(&c->t),
                    (float)(int32_t)seed * 0x1p-29F);
    }
}

/* Every dtype, layout, order of pairs and instruction set agrees bit for bit with the
 * scalar kernels, which tests/kv compares with NumPy. */
TEST(every_instruction_set_rotates_like_scalar)
{
    static const size_t dims[][2] = {{2, 2}, {10, 6}, {16, 16}, {42, 42}, {40, 32}};
    static cache keys, scalar, got;
    int64_t shifts[POSITIONS];
    for (int64_t i = 0; i < POSITIONS; i++) {
        shifts[i] = i < 4 ? 0 : i < 9 ? -100 : i * 31 - 500;
    }
    /* bits: dtype (2), interleaved, by pair, one shift, unaligned, which dimensions */
    for (size_t kind = 0; kind < 64 * 5; kind += EVERY(3)) {
        const mls_dtype dtype = (mls_dtype)(kind & 3);
        const size_t *dim = dims[kind / 64];
        const mls_rotation r = {.base = 500.0,
                                .scaling = 2.0,
                                .rotary_dim = dim[1],
                                .interleaved = (kind & 4) != 0,
                                .axis = 1,
                                .shifts = (kind & 16) != 0 ? &shifts[20] : shifts,
                                .shift_count = (kind & 16) != 0 ? 1 : POSITIONS};
        const size_t offset = (kind & 32) != 0 ? 1 : 0;
        make(&keys, dtype, dim[0], (kind & 8) != 0, offset);
        make(&scalar, dtype, dim[0], (kind & 8) != 0, 0);
        make(&got, dtype, dim[0], (kind & 8) != 0, offset);
        fill(&keys);
        REQUIRE(mls_rotate_keys_check(&got.t, &keys.t, &r, &status) == MLS_OK);
        mls_rotate_keys(mls_kernels_of(MLS_CPU_SCALAR), NULL, &scalar.t, &keys.t, &r);
        const size_t bytes = HEADS * POSITIONS * dim[0] * mls_tensor_item_bytes(&keys.t);
        EACH_CPU (cpu) {
            const mls_kernels *kernels = mls_kernels_of(cpu);
            memset(got.memory, 0xA5, sizeof got.memory);
            mls_rotate_keys(kernels, NULL, &got.t, &keys.t, &r);
            CHECK(memcmp(got.t.data, scalar.t.data, bytes) == 0);
            CHECK(got.t.data[bytes] == 0xA5); /* nothing is written past the end */
            fill(&got);
            mls_rotate_keys(kernels, NULL, &got.t, &got.t, &r); /* in place */
            CHECK(memcmp(got.t.data, scalar.t.data, bytes) == 0);
        }
    }
}

TEST(keys_that_do_not_rotate_are_refused)
{
    static cache keys;
    const int64_t shifts[POSITIONS] = {0};
    mls_rotation r = {.base = 1, .scaling = 1, .rotary_dim = 2, .axis = 1};
    r.shifts = shifts;
    r.shift_count = POSITIONS - 1;
    make(&keys, MLS_F32, 2, false, 0);
    CHECK_FAILS(
        mls_rotate_keys_check(&keys.t, &keys.t, &r, &status), MLS_E_SHAPE,
        "shift has 36 entries for 37 positions: pass one for each, or one number");
    r.rotary_dim = 0;
    CHECK_FAILS(mls_rotate_keys_check(&keys.t, &keys.t, &r, &status), MLS_E_VALUE,
                "rotary_dim 0 must be even, at least 2 and at most 2 (head dimension 2)");
    r.rotary_dim = 4;
    CHECK_FAILS(mls_rotate_keys_check(&keys.t, &keys.t, &r, &status), MLS_E_VALUE,
                "rotary_dim 4 must be even, at least 2 and at most 2 (head dimension 2)");
    keys.t.dtype = MLS_I32;
    CHECK_FAILS(mls_rotate_keys_check(&keys.t, &keys.t, &r, &status), MLS_E_DTYPE,
                "keys are int32: only float16, bfloat16, float32 and float64 rotate");
    keys.t.rank = 1;
    CHECK_FAILS(mls_rotate_keys_check(&keys.t, &keys.t, &r, &status), MLS_E_SHAPE,
                "keys must have 2 to 8 dimensions, such as (layers, heads, sequence, "
                "head_dim), got 1: shape (2,)");
}
