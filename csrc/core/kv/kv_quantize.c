/* kv_quantize: checks quantized caches, divides them into tiles for threads, measures
 * their loss.
 *
 * Values are handled in tiles of whole groups of consecutive rows. If rows are packed in
 * all arrays, a kernel reads and writes the arrays of the caller. Otherwise a tile is
 * converted to floats in a buffer on the stack, so that any strides, byte order and dtype
 * need one loop only.
 */
#include "kv/kv_quantize.h"

#include "base/exact_float.h"
#include "base/size.h"
#include "kv/kv_transition.h"
#include "kv/quantize_kernels.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

enum {
    TILE = MLS_QUANTIZE_MOST_GROUP, /* most elements of a tile in a buffer, */
    PACKED_TILE = 8 * TILE,         /* and of a tile in the arrays of the caller */
    MOST_GROUPS = TILE / MLS_QUANTIZE_UNIT,
    LANES = 8 /* independent sums of add_tile_loss */
};

/* ---- checks ---- */

/* Compute the words of codes and the groups of the last axis. Check `bits` and `group`
 * before `length`, and set `*words` and `*groups` only on success. */
mls_code mls_quantized_lengths(size_t length, unsigned bits, size_t group, size_t *words,
                               size_t *groups, mls_status *st)
{
    if (bits < 2 || bits > 8 || bits == 7) {
        mls_fail(st, MLS_E_VALUE, "bits must be 2, 3, 4, 5, 6 or 8, got %u", bits);
        mls_status_expected(st, "2, 3, 4, 5, 6 or 8");
        return mls_status_got(st, "%u", bits);
    }
    const size_t unit = bits % 4 == 0 ? MLS_QUANTIZE_UNIT : MLS_QUANTIZE_ODD_UNIT;
    if (group == 0 || group % unit != 0 || group > MLS_QUANTIZE_MOST_GROUP) {
        mls_fail(st, MLS_E_VALUE,
                 "group must be a multiple of %zu up to %d for %u bits, got %zu", unit,
                 MLS_QUANTIZE_MOST_GROUP, bits, group);
        mls_status_expected(st, "a multiple of %zu up to %d", unit,
                            MLS_QUANTIZE_MOST_GROUP);
        return mls_status_got(st, "%zu", group);
    }
    if (length % group != 0) {
        mls_fail(st, MLS_E_SHAPE,
                 "the last axis has %zu elements, which are not whole groups of %zu: use "
                 "a group that divides it",
                 length, group);
        mls_status_expected(st, "a multiple of %zu", group);
        return mls_status_got(st, "%zu", length);
    }
    *groups = length / group;
    *words = *groups * (group * bits / 32); /* no overflow: less than the length */
    return MLS_OK;
}

/* Check that `view` has the dtype `dtype` and the shape of `values`, but `last` elements
 * along the last axis. `label` names the view in messages. MLS_E_SHAPE, MLS_E_DTYPE. */
static mls_code check_view(const char *label, const mls_tensor *view,
                           const mls_tensor *values, size_t last, mls_dtype dtype,
                           mls_status *st)
{
    char text[MLS_FACT_BYTES], expected_text[MLS_FACT_BYTES];
    size_t shape[MLS_MAX_RANK];
    memcpy(shape, values->shape, sizeof shape);
    shape[values->rank - 1] = last;
    if (!mls_shape_equal(view->rank, view->shape, values->rank, shape)) {
        mls_shape_text(text, sizeof text, view->rank, view->shape);
        mls_shape_text(expected_text, sizeof expected_text, values->rank, shape);
        mls_fail(st, MLS_E_SHAPE, "%s have shape %s instead of %s", label, text,
                 expected_text);
        return mls_status_differ(st, expected_text, text);
    }
    if (view->dtype != dtype) {
        const char *got = mls_dtype_of(view->dtype)->name;
        const char *expected = mls_dtype_of(dtype)->name;
        mls_fail(st, MLS_E_DTYPE, "%s are %s instead of %s", label, got, expected);
        return mls_status_differ(st, expected, got);
    }
    return MLS_OK;
}

/* Check shapes and dtypes of all four views. Check the values first, and then the codes,
 * scales and biases against them. */
mls_code mls_quantize_check(const mls_tensor *values, const mls_quantized *quantized,
                            mls_status *st)
{
    size_t words, groups;
    if (values->dtype != MLS_F16 && values->dtype != MLS_BF16 &&
        values->dtype != MLS_F32) {
        const char *name = mls_dtype_of(values->dtype)->name;
        mls_fail(st, MLS_E_DTYPE,
                 "the values are %s: only float16, bfloat16 and float32 are quantized",
                 name);
        mls_status_expected(st, "float16, bfloat16 or float32");
        return mls_status_got(st, "%s", name);
    }
    if (values->rank == 0) {
        return mls_fail(st, MLS_E_SHAPE, "the values have no axis to make groups of");
    }
    const size_t length = values->shape[values->rank - 1];
    const mls_quantized *q = quantized;
    mls_code code = mls_quantized_lengths(length, q->bits, q->group, &words, &groups, st);
    if (code == MLS_OK) {
        code = check_view("codes", &q->codes, values, words, MLS_U32, st);
    }
    if (code == MLS_OK) {
        code = check_view("scales", &q->scales, values, groups, values->dtype, st);
    }
    if (code == MLS_OK) {
        code = check_view("biases", &q->biases, values, groups, values->dtype, st);
    }
    return code;
}

/* ---- tiles ---- */

/* The work, the same for all tiles. */
typedef struct job {
    const mls_kernels *kernels;
    const mls_group_kernels *groups;
    const mls_tensor *values;
    const mls_quantized *quantized;
    bool is_packed;                 /* kernels use the arrays of the caller */
    size_t rows, columns;           /* of a tile; columns are whole groups */
    size_t row_tiles, column_tiles; /* at one index of the outer axes */
    mls_quantization_loss *loss;    /* NULL unless it is asked for */
    atomic_bool is_finite;          /* of all values so far */
} job;

/* The arrays of a tile, packed, with floats. */
typedef struct buffer {
    float values[TILE];
    unsigned char codes[TILE]; /* a string of bits */
    float scales[MOST_GROUPS], biases[MOST_GROUPS];
} buffer;

/* A tile: rows row .. row + rows - 1 and groups group .. group + groups - 1 of the last
 * two axes, at `outer`, the flat index (in C order) of all axes before them. */
typedef struct tile {
    size_t outer, row, rows, group, groups;
} tile;

/* Return a view with two axes, rows and elements, of the tile `t` in the array `full`.
 * `width` is the number of elements of `full` for each group: the group size for values,
 * 1 for scales and biases, and the words of a group for codes. */
static mls_tensor tile_view(const mls_tensor *full, const tile *t, size_t width)
{
    const int last = full->rank - 1;
    mls_tensor view = {.data = full->data,
                       .dtype = full->dtype,
                       .swapped = full->swapped,
                       .rank = 2,
                       .shape = {t->rows, t->groups * width}};
    view.strides[1] = full->strides[last];
    view.data += (ptrdiff_t)(t->group * width) * view.strides[1];
    if (last > 0) {
        view.strides[0] = full->strides[last - 1];
        view.data += (ptrdiff_t)t->row * view.strides[0];
    }
    size_t index = t->outer;
    for (int axis = last - 2; axis >= 0; axis--) {
        view.data += (ptrdiff_t)(index % full->shape[axis]) * full->strides[axis];
        index /= full->shape[axis];
    }
    return view;
}

/* Whether a view of codes in a kernel's memory needs swapped bytes: kernels write the
 * byte with the lowest bits first. */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#    define ARE_WORDS_SWAPPED true
#else
#    define ARE_WORDS_SWAPPED false
#endif

/* Return a C-contiguous view of the memory at `data`, with the shape of `like`, which has
 * two axes. Codes (`dtype` MLS_U32) have the byte order that kernels write. */
static mls_tensor packed_view(const mls_tensor *like, void *data, mls_dtype dtype)
{
    const size_t item = mls_dtype_of(dtype)->item_bytes;
    return (mls_tensor){.data = data,
                        .dtype = dtype,
                        .swapped = dtype == MLS_U32 && ARE_WORDS_SWAPPED,
                        .rank = 2,
                        .shape = {like->shape[0], like->shape[1]},
                        .strides = {(ptrdiff_t)(like->shape[1] * item), (ptrdiff_t)item}};
}

/* Copy the tile `t` of the array `full` to `packed`, which holds C-contiguous elements of
 * `dtype`; or from `packed` to the tile if `store`. `width` is as in tile_view. Values
 * are converted. */
static void copy_tile(const job *j, const mls_tensor *full, const tile *t, size_t width,
                      void *packed, mls_dtype dtype, bool store)
{
    const mls_tensor view = tile_view(full, t, width);
    const mls_tensor other = packed_view(&view, packed, dtype);
    if (store) {
        mls_copy(j->kernels, &view, &other, mls_cached());
    } else {
        mls_copy(j->kernels, &other, &view, mls_cached());
    }
}

/* Return tile number `index`. Tiles are numbered along the last axis first, then along
 * the rows, then along the outer axes. The last tiles along an axis may be smaller. */
static tile tile_at(const job *j, size_t index)
{
    const mls_tensor *values = j->values;
    const int last = values->rank - 1;
    const size_t all_rows = last > 0 ? values->shape[last - 1] : 1;
    const size_t group = j->quantized->group;
    tile t;
    const size_t column = index % j->column_tiles * j->columns;
    index /= j->column_tiles;
    t.row = index % j->row_tiles * j->rows;
    t.outer = index / j->row_tiles;
    t.rows = mls_size_least(all_rows - t.row, j->rows);
    t.group = column / group;
    t.groups = mls_size_least(values->shape[last] - column, j->columns) / group;
    return t;
}

/* Return a kernel's description of the groups of a tile, in the arrays of the caller.
 * Meaningful only if `j->is_packed`. */
static mls_group_run packed_run(const job *j, const tile *t)
{
    const mls_quantized *q = j->quantized;
    const size_t words = q->group * q->bits / 32;
    return (mls_group_run){.groups = t->rows * t->groups,
                           .size = q->group,
                           .bits = q->bits,
                           .values = tile_view(j->values, t, q->group).data,
                           .scales = tile_view(&q->scales, t, 1).data,
                           .biases = tile_view(&q->biases, t, 1).data,
                           .codes = tile_view(&q->codes, t, words).data};
}

/* Return a kernel's description of the groups of a tile, in the buffer `b`. */
static mls_group_run buffer_run(const job *j, const tile *t, buffer *b)
{
    return (mls_group_run){.groups = t->rows * t->groups,
                           .size = j->quantized->group,
                           .bits = j->quantized->bits,
                           .values = b->values,
                           .scales = b->scales,
                           .biases = b->biases,
                           .codes = b->codes};
}

/* Copy codes, scales and biases of the tile `t` from the caller's arrays to the buffer
 * `b`, or from `b` to the arrays if `store`. */
static void copy_coded(const job *j, const tile *t, buffer *b, bool store)
{
    const mls_quantized *q = j->quantized;
    copy_tile(j, &q->codes, t, q->group * q->bits / 32, b->codes, MLS_U32, store);
    copy_tile(j, &q->scales, t, 1, b->scales, MLS_F32, store);
    copy_tile(j, &q->biases, t, 1, b->biases, MLS_F32, store);
}

/* Quantize a tile by way of a buffer of float32, for arrays that kernels cannot use.
 * Returns false if a value is not finite. */
static bool quantize_buffer(const job *j, const tile *t)
{
    buffer b;
    const mls_group_run run = buffer_run(j, t, &b);
    copy_tile(j, j->values, t, j->quantized->group, b.values, MLS_F32, false);
    if (!j->groups->quantize[MLS_F32](&run)) {
        return false;
    }
    copy_coded(j, t, &b, true);
    return true;
}

/* Quantize tile number `index`, as a task for the pool; `context` is the job. Clears its
 * `is_finite` if a value is not finite. */
static void quantize_tile(void *context, size_t index)
{
    job *j = context;
    const tile t = tile_at(j, index);
    const mls_group_run run = packed_run(j, &t);
    if (j->is_packed ? !j->groups->quantize[j->values->dtype](&run)
                     : !quantize_buffer(j, &t)) {
        atomic_store_explicit(&j->is_finite, false, memory_order_relaxed);
    }
}

/* Dequantize the tile `t` into `b->values`, as floats that are not yet rounded to the
 * dtype. */
static void decode_tile(const job *j, const tile *t, buffer *b)
{
    const mls_group_run run = buffer_run(j, t, b);
    copy_coded(j, t, b, false);
    j->groups->dequantize[MLS_F32](&run);
}

/* Dequantize a tile in a buffer, then convert and copy its values to the caller's
 * array. */
static void dequantize_buffer(const job *j, const tile *t)
{
    buffer b;
    decode_tile(j, t, &b);
    copy_tile(j, j->values, t, j->quantized->group, b.values, MLS_F32, true);
}

/* Dequantize tile number `index`, as a task for the pool; `context` is the job. */
static void dequantize_tile(void *context, size_t index)
{
    const job *j = context;
    const tile t = tile_at(j, index);
    const mls_group_run run = packed_run(j, &t);
    if (j->is_packed) {
        j->groups->dequantize[j->values->dtype](&run);
    } else {
        dequantize_buffer(j, &t);
    }
}

/* Add the differences of tile number `index` to `j->loss`; `context` is the job.
 * Dequantizes the tile, rounds to the dtype of the values, and compares in double. All
 * tiles must run on one thread. */
static void add_tile_loss(void *context, size_t index)
{
    const job *j = context;
    const mls_tensor *values = j->values;
    const size_t group = j->quantized->group;
    const tile t = tile_at(j, index);
    buffer b;
    float original[TILE];
    decode_tile(j, &t, &b);
    if (values->dtype != MLS_F32) { /* round to the dtype, and read the result */
        const mls_tensor like = tile_view(values, &t, group);
        const mls_tensor exact = packed_view(&like, b.values, MLS_F32);
        const mls_tensor rounded = packed_view(&like, original, values->dtype);
        mls_copy(j->kernels, &rounded, &exact, mls_cached());
        mls_copy(j->kernels, &exact, &rounded, mls_cached());
    }
    copy_tile(j, values, &t, group, original, MLS_F32, false);
    mls_quantization_loss sums[LANES] = {{0}}; /* several, so that additions overlap */
    for (size_t i = 0; i < t.rows * t.groups * group; i++) {
        mls_quantization_loss *sum = &sums[i % LANES];
        const double value = (double)original[i];
        const double difference = fabs((double)b.values[i] - value);
        sum->largest = difference > sum->largest ? difference : sum->largest;
        sum->squares += difference * difference;
        sum->value_squares += value * value;
    }
    for (int i = 0; i < LANES; i++) {
        j->loss->largest = fmax(j->loss->largest, sums[i].largest);
        j->loss->squares += sums[i].squares;
        j->loss->value_squares += sums[i].value_squares;
    }
}

/* Return whether elements and rows (the last two axes) are adjacent in memory and the
 * byte order is `swapped`, as kernels need. Axes before them may have any strides. */
static bool has_packed_rows(const mls_tensor *t, bool swapped)
{
    const int last = t->rank - 1;
    const ptrdiff_t item = (ptrdiff_t)mls_tensor_item_bytes(t);
    const ptrdiff_t row = (ptrdiff_t)t->shape[last] * item; /* of memory that exists */
    return t->swapped == swapped && (t->shape[last] == 1 || t->strides[last] == item) &&
           (last == 0 || t->shape[last - 1] == 1 || t->strides[last - 1] == row);
}

/* Return whether kernels can use the arrays of the caller directly: all rows packed, in
 * the byte order of kernels, and a dtype with a kernel. */
static bool is_packed(const job *j)
{
    const mls_quantized *q = j->quantized;
    return j->groups->quantize[j->values->dtype] != NULL &&
           has_packed_rows(j->values, false) && has_packed_rows(&q->scales, false) &&
           has_packed_rows(&q->biases, false) &&
           has_packed_rows(&q->codes, ARE_WORDS_SWAPPED);
}

/* Divide the values into tiles and run `task` on the number of each, with the threads of
 * `pool` (may be NULL) if the values are large enough to share. Sets all members of `j`
 * that describe tiles. */
static void run_tiles(job *j, mls_pool *pool, mls_task task)
{
    const int last = j->values->rank - 1;
    const size_t length = j->values->shape[last], group = j->quantized->group;
    const size_t all_rows = last > 0 ? j->values->shape[last - 1] : 1;
    const size_t bytes = mls_kv_bytes(j->values);
    if (bytes == 0) {
        return;
    }
    j->groups = MLS_CPU_AVX2_TABLE(j->kernels->cpu, mls_group);
    j->is_packed = j->loss == NULL && is_packed(j); /* a loss always needs buffers */
    const size_t most = j->is_packed ? PACKED_TILE : TILE;
    j->columns = length < most ? length : most / group * group;
    j->rows = most / j->columns;
    j->column_tiles = length / j->columns + (length % j->columns != 0);
    j->row_tiles = all_rows / j->rows + (all_rows % j->rows != 0);
    mls_pool_run(bytes >= MLS_POOL_COPY_BYTES ? pool : NULL, task, j,
                 mls_kv_rows(j->values, last - 1) * j->row_tiles * j->column_tiles);
}

/* Quantize tile by tile. A tile with a group that has no scale clears `is_finite`, and
 * the other tiles are still processed. */
mls_code mls_quantize(const mls_kernels *kernels, mls_pool *pool,
                      const mls_quantized *dst, const mls_tensor *values, mls_status *st)
{
    job j = {.kernels = kernels, .values = values, .quantized = dst};
    atomic_init(&j.is_finite, true);
    run_tiles(&j, pool, quantize_tile);
    if (!atomic_load_explicit(&j.is_finite, memory_order_relaxed)) {
        return mls_fail(st, MLS_E_VALUE,
                        "a value is NaN or infinite, or the values of a group are too "
                        "far apart: such groups have no scale");
    }
    return MLS_OK;
}

void mls_dequantize(const mls_kernels *kernels, mls_pool *pool, const mls_tensor *values,
                    const mls_quantized *src)
{
    job j = {.kernels = kernels, .values = values, .quantized = src};
    atomic_init(&j.is_finite, true);
    run_tiles(&j, pool, dequantize_tile);
}

/* Measure the loss of a quantization. Compare on one thread, without a pool: the order of
 * additions decides the last bits of a sum. */
mls_quantization_loss mls_quantize_loss(const mls_kernels *kernels,
                                        const mls_tensor *values,
                                        const mls_quantized *quantized)
{
    mls_quantization_loss loss = {0};
    job j = {.kernels = kernels, .values = values, .quantized = quantized, .loss = &loss};
    atomic_init(&j.is_finite, true);
    run_tiles(&j, NULL, add_tile_loss);
    return loss;
}
