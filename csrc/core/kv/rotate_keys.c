/* rotate_keys: rotates keys to other positions (RoPE): angles, pairs, rotated dimensions,
 * tiles; checks.
 *
 * Keys are handled in tiles of consecutive positions of one head: a tile is converted to
 * a buffer on the stack, rotated there and converted back, so that any strides, byte
 * order and dtype need one arithmetic loop only. Functions for an instruction set
 * (rotate_kernels.h) rotate packed rows without the buffer, with the same result.
 *
 * Sines and cosines of a tile are used for all heads.
 */
#include "kv/rotate_keys.h"

#include "array/overlap.h"
#include "array/strided_iter.h"
#include "base/exact_float.h"
#include "base/size.h"
#include "kv/kv_transition.h"
#include "kv/rotate_kernels.h"

#include <math.h>
#include <string.h>

enum {
    TILE = MLS_ROTATE_MOST_DIM, /* elements of a tile */
    MOST_PAIRS = TILE / 2,
    BLOCK = 8 /* a constant number of steps, so that the compiler makes vectors */
};

/* ---- checks ---- */

/* Check `keys` against the rotation `r`: the number of axes, the sequence axis, which is
 * not negative, the dtype, rotary_dim, and the number of shifts. MLS_E_SHAPE,
 * MLS_E_DTYPE, MLS_E_VALUE. */
static mls_code check_keys(const mls_tensor *keys, const mls_rotation *r, mls_status *st)
{
    int checked_axis;
    const mls_code code = mls_kv_find_axis(
        "keys", keys->rank, keys->shape, "the sequence axis", r->axis, &checked_axis, st);
    if (code != MLS_OK) {
        return code;
    }
    if (r->axis == keys->rank - 1) {
        return mls_fail(
            st, MLS_E_SHAPE,
            "the sequence axis of keys is the last one, which must be the head "
            "dimension: pass a view with other axes, such as "
            "keys.swapaxes(-1, -2)");
    }
    if ((int)keys->dtype >= MLS_CONVERTIBLE) {
        mls_fail(st, MLS_E_DTYPE,
                 "keys are %s: only float16, bfloat16, float32 and float64 rotate",
                 mls_dtype_of(keys->dtype)->name);
        return mls_status_got(st, "%s", mls_dtype_of(keys->dtype)->name);
    }
    const size_t dim = keys->shape[keys->rank - 1];
    const size_t most = mls_size_least(dim, MLS_ROTATE_MOST_DIM);
    if (r->rotary_dim < 2 || r->rotary_dim % 2 != 0 || r->rotary_dim > most) {
        mls_fail(
            st, MLS_E_VALUE,
            "rotary_dim %zu must be even, at least 2 and at most %zu (head dimension "
            "%zu)",
            r->rotary_dim, most, dim);
        mls_status_expected(st, "even, 2..%zu", most);
        return mls_status_got(st, "%zu", r->rotary_dim);
    }
    const size_t positions = keys->shape[r->axis];
    if (r->shift_count != 1 && r->shift_count != positions) {
        mls_fail(
            st, MLS_E_SHAPE,
            "shift has %zu entries for %zu positions: pass one for each, or one number",
            r->shift_count, positions);
        mls_status_expected(st, "%zu", positions);
        return mls_status_got(st, "%zu", r->shift_count);
    }
    return MLS_OK;
}

/* Fail with MLS_E_VALUE unless `value`, which messages call `name`, is finite and above
 * 0. */
static mls_code check_positive(const char *name, double value, mls_status *st)
{
    if (isfinite(value) && value > 0) {
        return MLS_OK;
    }
    mls_fail(st, MLS_E_VALUE, "%s must be finite and above 0, got %g", name, value);
    return mls_status_got(st, "%g", value);
}

/* Check all arguments of mls_rotate_keys. Check the keys and the rotation first, then the
 * target against the keys. */
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
        return mls_status_differ(st, mls_dtype_of(keys->dtype)->name,
                                 mls_dtype_of(dst->dtype)->name);
    }
    if (mls_tensor_overlap(dst, keys) &&
        !(dst->swapped == keys->swapped && mls_tensor_same_view(dst, keys))) {
        return mls_fail(
            st, MLS_E_OVERLAP,
            "the target shares memory with keys, but is another view: pass keys "
            "themselves or separate memory");
    }
    return MLS_OK;
}

/* ---- arithmetic ---- */

/* Functions that rotate `count` pairs of the type `real` in memory: rotate_run for pairs
 * (x[i], y[i]), rotate_pairs for pairs (x[2i], x[2i + 1]). `cosine` and `sine` have an
 * entry for each pair. */
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

/* Cosines and sines of the pairs of a tile, position by position. */
typedef union angles {
    struct {
        float cosine[MOST_PAIRS], sine[MOST_PAIRS];
    } single;
    struct {
        double cosine[MOST_PAIRS], sine[MOST_PAIRS];
    } wide;
} angles;

/* One rotation, divided into tiles so that threads can share it. */
typedef struct job {
    const mls_kernels *kernels;
    mls_tensor dst, keys; /* the rotated elements of the last axis */
    const mls_rotation *rotation;
    size_t pairs;              /* of each position */
    size_t positions;          /* of a tile; the last tile may have fewer */
    bool by_pair;              /* a tile has one pair; if false, it has all */
    bool is_wide;              /* double arithmetic */
    mls_rotate_rows_run fused; /* rotates without a buffer, or NULL */
    const double *frequencies; /* angle of each pair for one position */
    const angles *constant;    /* of one position if all tiles have one shift, or NULL */
} job;

/* A tile: `count` positions from `start` on, of `pairs` pairs from `pair` on (all or
 * one). */
typedef struct tile {
    size_t start, count;
    size_t pair, pairs;
    const angles *angles;
    size_t angle_step; /* between the angles of two positions */
    bool interleaved;  /* the two elements of a pair are adjacent in the buffer */
    numbers *buffer;
} tile;

/* Store a cosine and a sine as entry `index` of `out`, in the precision of the job. */
static void store_angle(const job *j, angles *out, size_t index, double cosine,
                        double sine)
{
    if (j->is_wide) {
        out->wide.cosine[index] = cosine;
        out->wide.sine[index] = sine;
    } else {
        out->single.cosine[index] = (float)cosine;
        out->single.sine[index] = (float)sine;
    }
}

/* Compute cosine and sine of the angles of `count` positions and the pairs of the tile
 * `t`, and store them position by position in `out`. Position i has the shift shifts[i *
 * step]: `step` is 0 if all positions have one shift, else 1. Consecutive equal shifts
 * share the computation. */
static void fill_angles(const job *j, angles *out, const tile *t, const int64_t *shifts,
                        size_t step, size_t count)
{
    for (size_t pair = 0; pair < t->pairs; pair++) {
        double cosine = 0, sine = 0;
        for (size_t i = 0; i < count; i++) {
            const int64_t shift = shifts[i * step];
            if (i == 0 || shift != shifts[(i - 1) * step]) {
                const double angle =
                    (double)shift * j->frequencies[t->pair + pair] / j->rotation->scaling;
                cosine = cos(angle);
                sine = sin(angle);
            }
            store_angle(j, out, i * t->pairs + pair, cosine, sine);
        }
    }
}

/* Rotate `count` pairs of the tile's buffer. `first`, `second` and `angle` are indices:
 * of the first elements of the pairs, of their second ones (unused if these are
 * interleaved), and of their angles. */
static void rotate_span(const job *j, const tile *t, size_t first, size_t second,
                        size_t angle, size_t count)
{
    const angles *a = t->angles;
    if (j->is_wide && t->interleaved) {
        rotate_pairs_double(t->buffer->wide + first, a->wide.cosine + angle,
                            a->wide.sine + angle, count);
    } else if (j->is_wide) {
        rotate_run_double(t->buffer->wide + first, t->buffer->wide + second,
                          a->wide.cosine + angle, a->wide.sine + angle, count);
    } else if (t->interleaved) {
        rotate_pairs_float(t->buffer->single + first, a->single.cosine + angle,
                           a->single.sine + angle, count);
    } else {
        rotate_run_float(t->buffer->single + first, t->buffer->single + second,
                         a->single.cosine + angle, a->single.sine + angle, count);
    }
}

/* Rotate the pairs of a tile in its buffer. If `by_pair`, the buffer has the first
 * elements of all positions, then the second ones; otherwise one row for each
 * position. */
static void rotate_buffer(const job *j, const tile *t)
{
    if (j->by_pair) {
        rotate_span(j, t, 0, t->count, 0, t->count);
        return;
    }
    for (size_t i = 0; i < t->count; i++) {
        const size_t first = i * 2 * t->pairs;
        rotate_span(j, t, first, first + t->pairs, i * t->angle_step, t->pairs);
    }
}

/* Return a view with two axes, positions and elements, of the tile `t` of one head in the
 * array `full`. The caller sets its data to the tile's first element in a head. */
static mls_tensor tile_view(const job *j, const tile *t, const mls_tensor *full)
{
    mls_tensor view = {.dtype = full->dtype, .swapped = full->swapped, .rank = 2};
    view.shape[0] = t->count;
    view.shape[1] = 2 * t->pairs;
    view.strides[0] = full->strides[j->rotation->axis];
    view.strides[1] = full->strides[full->rank - 1];
    if (j->by_pair && !j->rotation->interleaved) { /* pair i: elements i and i + pairs */
        view.strides[1] *= (ptrdiff_t)j->pairs;
    }
    return view;
}

/* Return a view with two axes, positions and elements, of the packed buffer of the tile
 * `t`. In memory it has position after position or, if `by_pair`, the first elements of
 * all positions before the second ones. */
static mls_tensor buffer_view(const job *j, const tile *t)
{
    const ptrdiff_t item = j->is_wide ? sizeof(double) : sizeof(float);
    mls_tensor view = {.data = (unsigned char *)t->buffer,
                       .dtype = j->is_wide ? MLS_F64 : MLS_F32,
                       .rank = 2};
    view.shape[0] = t->count;
    view.shape[1] = 2 * t->pairs;
    view.strides[0] = j->by_pair ? item : item * (ptrdiff_t)(2 * t->pairs);
    view.strides[1] = j->by_pair ? item * (ptrdiff_t)t->count : item;
    return view;
}

/* Describe the rows of the tile `t` for the fused function; `to` and `from` are its views
 * in target and source. The caller sets the addresses of each head. If `by_pair`, the
 * positions form a single row. */
static mls_rotate_rows rows_of(const job *j, const tile *t, const mls_tensor *to,
                               const mls_tensor *from)
{
    mls_rotate_rows rows = {.dst_step = to->strides[0],
                            .src_step = from->strides[0],
                            .dst_second = to->strides[1] * (ptrdiff_t)j->pairs,
                            .src_second = from->strides[1] * (ptrdiff_t)j->pairs,
                            .cosine = t->angles->single.cosine,
                            .sine = t->angles->single.sine,
                            .angle_step = t->angle_step,
                            .rows = t->count,
                            .pairs = t->pairs};
    if (j->by_pair) {
        rows.rows = 1;
        rows.pairs = t->count;
        rows.dst_second = to->strides[1];
        rows.src_second = from->strides[1];
    }
    return rows;
}

/* Rotate the tile `t` in every head: at each index of all axes other than the sequence
 * and the last one. */
static void rotate_heads(const job *j, const tile *t)
{
    const int axis = j->rotation->axis, last = j->keys.rank - 1;
    const size_t first = j->rotation->interleaved ? 2 * t->pair : t->pair;
    mls_tensor to = tile_view(j, t, &j->dst), from = tile_view(j, t, &j->keys);
    const mls_tensor buffer = buffer_view(j, t);
    mls_rotate_rows rows = rows_of(j, t, &to, &from);
    /* the first element of the tile in each head */
    mls_tensor targets = mls_tensor_slice(&j->dst, axis, t->start, 1);
    mls_tensor sources = mls_tensor_slice(&j->keys, axis, t->start, 1);
    targets = mls_tensor_slice(&targets, last, first, 1);
    sources = mls_tensor_slice(&sources, last, first, 1);
    mls_strided_iter iter;
    ptrdiff_t to_at = 0, from_at = 0;
    (void)mls_strided_iter_init(&iter, &targets,
                                &sources); /* mls_rotate_keys: not empty */
    do {
        for (size_t i = 0; i < iter.length; i++) {
            to.data = targets.data + to_at + iter.a_step * (ptrdiff_t)i;
            from.data = sources.data + from_at + iter.b_step * (ptrdiff_t)i;
            if (j->fused != NULL) {
                rows.dst = to.data;
                rows.src = from.data;
                j->fused(&rows);
                continue;
            }
            mls_copy(j->kernels, &buffer, &from, mls_cached());
            rotate_buffer(j, t);
            mls_copy(j->kernels, &to, &buffer, mls_cached());
        }
    } while (mls_strided_iter_next(&iter, &to_at, &from_at));
}

/* Rotate tile number `index`, as a task for the pool; `context` is the job. */
static void rotate_tile(void *context, size_t index)
{
    const job *j = context;
    const mls_rotation *r = j->rotation;
    numbers buffer;
    angles tile_angles;
    tile t = {.pairs = j->pairs,
              .angles = j->constant,
              .interleaved = r->interleaved && !j->by_pair,
              .buffer = &buffer};
    if (j->by_pair) {
        t.pairs = 1;
        t.pair = index % j->pairs;
        index /= j->pairs;
    }
    t.start = index * j->positions;
    t.count = mls_size_least(j->keys.shape[r->axis] - t.start, j->positions);
    if (t.angles == NULL) {
        const size_t step = r->shift_count == 1 ? 0 : 1;
        fill_angles(j, &tile_angles, &t, r->shifts + t.start * step, step, t.count);
        t.angles = &tile_angles;
        t.angle_step = t.pairs;
    }
    rotate_heads(j, &t);
}

/* ---- the whole rotation ---- */

/* without fused functions: all rows are rotated in the buffer */
const mls_rotate_kernels mls_rotate_scalar = {{{NULL}}};

/* Return the fused function for the job, or NULL if it needs a buffer: elements must be
 * packed along the inner axis of a tile and in this machine's byte order on both sides,
 * and the instruction set must have a function for the dtype. */
static mls_rotate_rows_run choose_fused(const job *j)
{
    const int inner = j->by_pair ? j->rotation->axis : j->keys.rank - 1;
    const ptrdiff_t item = (ptrdiff_t)mls_tensor_item_bytes(&j->keys);
    const bool is_packed =
        j->keys.strides[inner] == item && j->dst.strides[inner] == item;
    const bool is_interleaved = j->rotation->interleaved && !j->by_pair;
    const mls_rotate_kernels *kernels = MLS_CPU_AVX2_TABLE(j->kernels->cpu, mls_rotate);
    return is_packed && !j->keys.swapped && !j->dst.swapped
               ? kernels->run[j->keys.dtype][is_interleaved]
               : NULL;
}

/* Copy the elements of the last axis that do not rotate, from index `rotary_dim` on. Does
 * nothing if `dst` is `keys`. */
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

/* Divide the positions into tiles, and rotate them. If the positions of one element are
 * adjacent in memory, a tile has one pair of many positions (`by_pair`), so that its rows
 * are long. */
void mls_rotate_keys(const mls_kernels *kernels, mls_pool *pool, const mls_tensor *dst,
                     const mls_tensor *keys, const mls_rotation *rotation)
{
    const int last = keys->rank - 1;
    const size_t dim = rotation->rotary_dim;
    const size_t positions = keys->shape[rotation->axis];
    const ptrdiff_t item = (ptrdiff_t)mls_tensor_item_bytes(keys);
    const size_t bytes = mls_kv_bytes(keys);
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
             .pairs = dim / 2,
             .by_pair =
                 keys->strides[rotation->axis] == item && keys->strides[last] != item,
             .is_wide = keys->dtype == MLS_F64,
             .frequencies = frequencies};
    j.positions = j.by_pair ? MOST_PAIRS : TILE / dim;
    j.fused = choose_fused(&j);
    angles shared;
    if (rotation->shift_count == 1 && !j.by_pair) {
        const tile t = {.pairs = j.pairs};
        fill_angles(&j, &shared, &t, rotation->shifts, 0, 1);
        j.constant = &shared;
    }
    const size_t position_tiles =
        positions / j.positions + (positions % j.positions != 0);
    copy_rest(kernels, dst, keys, dim);
    mls_pool_run(bytes >= MLS_POOL_COPY_BYTES ? pool : NULL, rotate_tile, &j,
                 j.by_pair ? position_tiles * j.pairs : position_tiles);
}
