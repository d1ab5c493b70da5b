/* rotate_keys: move keys with rotary position embeddings (RoPE) to other positions.
 *
 * Keys are handled in tiles of consecutive positions of one head: a tile is converted to
 * a buffer on the stack, rotated there and converted back, so that any strides, byte
 * order and dtype need one arithmetic loop only. Either the elements of a position or the
 * positions of an element are adjacent in the buffer, as they are in memory.
 *
 * Sines and cosines of a tile are used for all heads.
 */
#include "kv/rotate_keys.h"

#include "array/strided_iter.h"

#include <math.h>
#include <string.h>

enum {
    TILE = MLS_ROTATE_MOST_DIM, /* elements of a tile */
    MOST_PAIRS = TILE / 2,
    BLOCK = 8 /* a constant number of steps, so that the compiler makes vectors */
};

/* ---- checks ---- */

/* MLS_E_SHAPE, MLS_E_DTYPE or MLS_E_VALUE if the keys do not fit the rotation. */
static mls_code check_keys(const mls_tensor *keys, const mls_rotation *r, mls_status *st)
{
    char text[MLS_FACT_BYTES];
    mls_shape_text(text, sizeof text, keys->rank, keys->shape);
    if (keys->rank < MLS_ROTATE_LEAST_RANK || keys->rank > MLS_ROTATE_MOST_RANK) {
        mls_fail(st, MLS_E_SHAPE, "keys must have %d to %d dimensions, got %d: shape %s",
                 MLS_ROTATE_LEAST_RANK, MLS_ROTATE_MOST_RANK, keys->rank, text);
        mls_status_expected(st, "%d to %d dimensions", MLS_ROTATE_LEAST_RANK,
                            MLS_ROTATE_MOST_RANK);
        mls_status_got(st, "%s", text);
        return MLS_E_SHAPE;
    }
    if (r->axis == keys->rank - 1) {
        return mls_fail(st, MLS_E_SHAPE,
                        "the sequence axis of keys is the last one, which must be the head "
                        "dimension: pass a view with other axes, such as "
                        "keys.swapaxes(-1, -2)");
    }
    if ((int)keys->dtype >= MLS_CONVERTIBLE) {
        mls_fail(st, MLS_E_DTYPE,
                 "keys are %s: only float16, bfloat16, float32 and float64 rotate",
                 mls_dtype_of(keys->dtype)->name);
        mls_status_got(st, "%s", mls_dtype_of(keys->dtype)->name);
        return MLS_E_DTYPE;
    }
    const size_t dim = keys->shape[keys->rank - 1];
    const size_t most = dim < MLS_ROTATE_MOST_DIM ? dim : MLS_ROTATE_MOST_DIM;
    if (r->rotary_dim < 2 || r->rotary_dim % 2 != 0 || r->rotary_dim > most) {
        mls_fail(st, MLS_E_VALUE,
                 "rotary_dim %zu must be even, at least 2 and at most %zu (head dimension "
                 "%zu)",
                 r->rotary_dim, most, dim);
        mls_status_expected(st, "even, 2..%zu", most);
        mls_status_got(st, "%zu", r->rotary_dim);
        return MLS_E_VALUE;
    }
    const size_t positions = keys->shape[r->axis];
    if (r->shift_count != 1 && r->shift_count != positions) {
        mls_fail(st, MLS_E_SHAPE,
                 "shift has %zu entries for %zu positions: pass one for each, or one number",
                 r->shift_count, positions);
        mls_status_expected(st, "%zu", positions);
        mls_status_got(st, "%zu", r->shift_count);
        return MLS_E_SHAPE;
    }
    return MLS_OK;
}

/* MLS_E_VALUE unless `value` is finite and positive. */
static mls_code check_positive(const char *name, double value, mls_status *st)
{
    if (isfinite(value) && value > 0) {
        return MLS_OK;
    }
    mls_fail(st, MLS_E_VALUE, "%s must be finite and above 0, got %g", name, value);
    mls_status_got(st, "%g", value);
    return MLS_E_VALUE;
}

/* Return whether two views of equal shape have the same elements in the same order. */
static bool is_same_view(const mls_tensor *a, const mls_tensor *b)
{
    bool same = a->data == b->data && a->swapped == b->swapped;
    for (int axis = 0; same && axis < a->rank; axis++) {
        same = a->strides[axis] == b->strides[axis] || a->shape[axis] <= 1;
    }
    return same;
}

mls_code mls_rotate_keys_check(const mls_tensor *dst, const mls_tensor *keys,
                               const mls_rotation *rotation, mls_status *st)
{
    mls_code code = check_keys(keys, rotation, st);
    if (code == MLS_OK) {
        code = check_positive("base", rotation->base, st);
    }
    if (code == MLS_OK) {
        code = check_positive("scaling", rotation->scaling, st);
    }
    if (code == MLS_OK) {
        code = mls_copy_check(dst, keys, "rotated keys", st);
    }
    if (code != MLS_OK) {
        return code;
    }
    if (dst->dtype != keys->dtype) {
        mls_fail(st, MLS_E_DTYPE, "keys are %s, the target is %s: pass equal dtypes",
                 mls_dtype_of(keys->dtype)->name, mls_dtype_of(dst->dtype)->name);
        mls_status_expected(st, "%s", mls_dtype_of(keys->dtype)->name);
        mls_status_got(st, "%s", mls_dtype_of(dst->dtype)->name);
        return MLS_E_DTYPE;
    }
    if (mls_tensor_overlap(dst, keys) && !is_same_view(dst, keys)) {
        return mls_fail(st, MLS_E_OVERLAP,
                        "the target shares memory with keys, but is another view: pass keys "
                        "themselves or separate memory");
    }
    return MLS_OK;
}

/* ---- arithmetic ---- */

/* Functions for one type: rotate_run for pairs (x[i], y[i]), rotate_pairs for pairs
 * (x[2i], x[2i + 1]). `cosine` and `sine` have an entry for each pair. */
#define DEFINE_ROTATE(real)                                                              \
    static void rotate_run_##real(real *restrict x, real *restrict y,                    \
                                  const real *restrict cosine,                           \
                                  const real *restrict sine, size_t count)               \
    {                                                                                    \
        size_t i = 0;                                                                    \
        for (; i + BLOCK <= count; i += BLOCK) {                                         \
            real turned[BLOCK];                                                          \
            for (size_t k = 0; k < BLOCK; k++) {                                         \
                turned[k] = x[i + k] * cosine[i + k] - y[i + k] * sine[i + k];           \
            }                                                                            \
            for (size_t k = 0; k < BLOCK; k++) {                                         \
                y[i + k] = y[i + k] * cosine[i + k] + x[i + k] * sine[i + k];            \
            }                                                                            \
            memcpy(x + i, turned, sizeof turned);                                        \
        }                                                                                \
        for (; i < count; i++) {                                                         \
            const real first = x[i], second = y[i];                                      \
            x[i] = first * cosine[i] - second * sine[i];                                 \
            y[i] = second * cosine[i] + first * sine[i];                                 \
        }                                                                                \
    }                                                                                    \
                                                                                         \
    static void rotate_pairs_##real(real *restrict x, const real *restrict cosine,       \
                                    const real *restrict sine, size_t count)             \
    {                                                                                    \
        for (size_t i = 0; i < count; i++) {                                             \
            const real first = x[2 * i], second = x[2 * i + 1];                          \
            x[2 * i] = first * cosine[i] - second * sine[i];                             \
            x[2 * i + 1] = second * cosine[i] + first * sine[i];                         \
        }                                                                                \
    }

DEFINE_ROTATE(float)
DEFINE_ROTATE(double)

/* ---- tiles ---- */

/* A buffer for numbers of either type. */
typedef union numbers {
    float single[TILE];
    double wide[TILE];
} numbers;

/* Cosines and sines of the pairs of a tile, in the order of the tile. */
typedef union angles {
    struct {
        float cosine[MOST_PAIRS], sine[MOST_PAIRS];
    } single;
    struct {
        double cosine[MOST_PAIRS], sine[MOST_PAIRS];
    } wide;
} angles;

/* One rotation, divided into tiles of positions so that threads can share it. */
typedef struct job {
    const mls_kernels *kernels;
    mls_tensor dst, keys; /* the rotated elements of the last axis */
    const mls_rotation *rotation;
    size_t positions; /* of a tile; the last tile may have fewer */
    bool is_wide;     /* double arithmetic */
    bool by_element;  /* a span of a tile is an element of all positions, not a position */
    const double *frequencies; /* angle of each pair for one position */
    const angles *constant;    /* of all tiles if there is one shift, else NULL */
    size_t angle_step;         /* between the angles of two spans of a tile */
} job;

/* Store one cosine and sine. */
static void store_angle(const job *j, angles *out, size_t at, double cosine, double sine)
{
    if (j->is_wide) {
        out->wide.cosine[at] = cosine;
        out->wide.sine[at] = sine;
    } else {
        out->single.cosine[at] = (float)cosine;
        out->single.sine[at] = (float)sine;
    }
}

/* Compute the cosines and sines of `count` positions with the given shifts; one shift for
 * all if `step` is 0. Consecutive positions with equal shifts share the computation. */
static void fill_angles(const job *j, angles *out, const int64_t *shifts, size_t step,
                        size_t count)
{
    const size_t pairs = j->rotation->rotary_dim / 2;
    for (size_t pair = 0; pair < pairs; pair++) {
        double cosine = 0, sine = 0;
        for (size_t i = 0; i < count; i++) {
            const int64_t shift = shifts[i * step];
            if (i == 0 || shift != shifts[(i - 1) * step]) {
                const double angle =
                    (double)shift * j->frequencies[pair] / j->rotation->scaling;
                cosine = cos(angle);
                sine = sin(angle);
            }
            store_angle(j, out, j->by_element ? pair * j->positions + i : i * pairs + pair,
                        cosine, sine);
        }
    }
}

/* Rotate `count` pairs whose first elements start at `first` and whose second ones start
 * at `second`; the pairs are interleaved if `second` is first + 1. Cosines start at
 * `angle`. */
static void rotate_span(const job *j, numbers *tile, const angles *a, size_t first,
                        size_t second, size_t angle, size_t count, bool interleaved)
{
    if (j->is_wide && interleaved) {
        rotate_pairs_double(tile->wide + first, a->wide.cosine + angle,
                            a->wide.sine + angle, count);
    } else if (j->is_wide) {
        rotate_run_double(tile->wide + first, tile->wide + second,
                          a->wide.cosine + angle, a->wide.sine + angle, count);
    } else if (interleaved) {
        rotate_pairs_float(tile->single + first, a->single.cosine + angle,
                           a->single.sine + angle, count);
    } else {
        rotate_run_float(tile->single + first, tile->single + second,
                         a->single.cosine + angle, a->single.sine + angle, count);
    }
}

/* Rotate a tile of `count` positions, span by span. */
static void rotate_tile(const job *j, numbers *tile, const angles *a, size_t count)
{
    const bool interleaved = j->rotation->interleaved;
    const size_t dim = j->rotation->rotary_dim, pairs = dim / 2;
    if (j->by_element) {
        for (size_t pair = 0; pair < pairs; pair++) {
            const size_t first = interleaved ? 2 * pair : pair;
            const size_t second = interleaved ? first + 1 : pair + pairs;
            rotate_span(j, tile, a, first * count, second * count,
                        pair * j->angle_step, count, false);
        }
        return;
    }
    for (size_t i = 0; i < count; i++) {
        rotate_span(j, tile, a, i * dim, i * dim + pairs, i * j->angle_step, pairs,
                    interleaved);
    }
}

/* Return a view of the positions of one head in a tile; its data is set later. */
static mls_tensor tile_of(const mls_tensor *t, int axis, size_t count)
{
    const int last = t->rank - 1;
    mls_tensor tile = {.dtype = t->dtype, .swapped = t->swapped, .rank = 2};
    tile.shape[0] = count;
    tile.shape[1] = t->shape[last];
    tile.strides[0] = t->strides[axis];
    tile.strides[1] = t->strides[last];
    return tile;
}

/* Return a packed view of a buffer. */
static mls_tensor buffer_of(const job *j, numbers *tile, size_t count)
{
    const size_t dim = j->rotation->rotary_dim;
    const ptrdiff_t item = j->is_wide ? sizeof(double) : sizeof(float);
    mls_tensor t = {.data = (unsigned char *)tile,
                    .dtype = j->is_wide ? MLS_F64 : MLS_F32,
                    .rank = 2};
    t.shape[0] = count;
    t.shape[1] = dim;
    t.strides[0] = j->by_element ? item : item * (ptrdiff_t)dim;
    t.strides[1] = j->by_element ? item * (ptrdiff_t)count : item;
    return t;
}

/* Rotate a tile of positions of every head, as a task for the pool. */
static void rotate_positions(void *context, size_t index)
{
    const job *j = context;
    const mls_rotation *r = j->rotation;
    const size_t start = index * j->positions, all = j->keys.shape[r->axis];
    const size_t count = all - start < j->positions ? all - start : j->positions;
    numbers tile;
    angles own;
    const angles *a = j->constant;
    if (a == NULL) {
        fill_angles(j, &own, r->shifts + start, 1, count);
        a = &own;
    }
    mls_tensor from = tile_of(&j->keys, r->axis, count);
    mls_tensor to = tile_of(&j->dst, r->axis, count);
    const mls_tensor buffer = buffer_of(j, &tile, count);
    /* the first element of each head's tile */
    mls_tensor heads = mls_tensor_slice(&j->dst, r->axis, start, 1);
    mls_tensor sources = mls_tensor_slice(&j->keys, r->axis, start, 1);
    heads.shape[heads.rank - 1] = sources.shape[sources.rank - 1] = 1;
    mls_strided_iter w;
    ptrdiff_t to_at = 0, from_at = 0;
    (void)mls_strided_iter_init(&w, &heads, &sources); /* not empty: see the caller */
    do {
        for (size_t i = 0; i < w.length; i++) {
            to.data = heads.data + to_at + w.a_step * (ptrdiff_t)i;
            from.data = sources.data + from_at + w.b_step * (ptrdiff_t)i;
            mls_copy(j->kernels, &buffer, &from, mls_cached());
            rotate_tile(j, &tile, a, count);
            mls_copy(j->kernels, &to, &buffer, mls_cached());
        }
    } while (mls_strided_iter_next(&w, &to_at, &from_at));
}

/* Copy the elements of the last axis that do not rotate. */
static void copy_rest(const mls_kernels *kernels, const mls_tensor *dst,
                      const mls_tensor *keys, size_t rotary_dim)
{
    const int last = keys->rank - 1;
    const size_t rest = keys->shape[last] - rotary_dim;
    if (rest > 0 && dst->data != keys->data) { /* else dst is keys: see the check */
        const mls_tensor to = mls_tensor_slice(dst, last, rotary_dim, rest);
        const mls_tensor from = mls_tensor_slice(keys, last, rotary_dim, rest);
        mls_copy(kernels, &to, &from, mls_cached());
    }
}

void mls_rotate_keys(const mls_kernels *kernels, mls_pool *pool, const mls_tensor *dst,
                     const mls_tensor *keys, const mls_rotation *rotation)
{
    const int last = keys->rank - 1;
    const size_t dim = rotation->rotary_dim, all = keys->shape[rotation->axis];
    size_t bytes = 0;
    (void)mls_tensor_bytes(keys, &bytes); /* the view exists, so it does not overflow */
    if (bytes == 0) {
        return;
    }
    double frequencies[MOST_PAIRS];
    for (size_t pair = 0; pair < dim / 2; pair++) {
        frequencies[pair] = pow(rotation->base, -2.0 * (double)pair / (double)dim);
    }
    job j = {.kernels = kernels,
             .dst = mls_tensor_slice(dst, last, 0, dim),
             .keys = mls_tensor_slice(keys, last, 0, dim),
             .rotation = rotation,
             .positions = all < TILE / dim ? all : TILE / dim,
             .is_wide = keys->dtype == MLS_F64,
             .frequencies = frequencies};
    const ptrdiff_t item = (ptrdiff_t)mls_tensor_item_bytes(keys);
    j.by_element = keys->strides[rotation->axis] == item && keys->strides[last] != item;
    j.angle_step = j.by_element ? j.positions : dim / 2;
    angles shared;
    if (rotation->shift_count == 1) {
        fill_angles(&j, &shared, rotation->shifts, 0, j.by_element ? j.positions : 1);
        j.constant = &shared;
        j.angle_step = j.by_element ? j.positions : 0;
    }
    copy_rest(kernels, dst, keys, dim);
    mls_pool_run(bytes >= MLS_POOL_COPY_BYTES ? pool : NULL, rotate_positions, &j,
                 (all + j.positions - 1) / j.positions);
}
