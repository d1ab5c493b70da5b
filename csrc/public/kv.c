/* kv: the functions of include/mlstate/kv.h: check pointers, strides and overlap, then
 * call csrc/core/kv.
 *
 * Each function makes views of the caller's arrays, checks all arguments, and then runs a
 * core function that cannot fail (mls_quantize: only because of values). So a target is
 * unchanged after an error.
 */
#include "mlstate/kv.h"

#include "array/overlap.h"
#include "kv/attention_mask.h"
#include "kv/kv_quantize.h"
#include "kv/kv_transition.h"
#include "kv/rotate_keys.h"

/* The core's texts are not returned, so the names in them do not matter. */
static const mls_kv_names cache_names = {.source = "source",
                                         .target = "target",
                                         .target_length = "target_length",
                                         .position = "position",
                                         .seq_axis = "seq_axis",
                                         .if_shorter = "compact",
                                         .if_shared = "use separate memory"};
static const mls_mask_names mask_names = {.seq_length = "seq_length",
                                          .attention_size = "attention_size",
                                          .sinks = "sinks",
                                          .position = "first_row",
                                          .rows = "rows"};

int mlstate_kv_version(void)
{
    return MLSTATE_KV_VERSION;
}

/* Return a constant English text for a code, also for unknown ones. The codes index the
 * texts. */
const char *mlstate_kv_error_text(int code)
{
    static const char *const texts[] = {
        [MLSTATE_KV_OK] = "no error",
        [MLSTATE_KV_ERROR_NULL] = "a pointer is NULL",
        [MLSTATE_KV_ERROR_VALUE] = "a number is outside its range",
        [MLSTATE_KV_ERROR_SHAPE] = "the rank, the axis or the shape does not fit",
        [MLSTATE_KV_ERROR_DTYPE] = "the dtype is unknown or does not fit",
        [MLSTATE_KV_ERROR_CAPACITY] = "the tokens or the position do not fit the length",
        [MLSTATE_KV_ERROR_OVERLAP] = "arrays share memory",
        [MLSTATE_KV_ERROR_SIZE] = "the array exceeds the address space"};
    const int count = sizeof texts / sizeof texts[0];
    return code >= 0 && code < count ? texts[code] : "unknown error";
}

/* Convert a code of the core to a public one. The core's functions that are called here
 * return only these codes and MLS_E_VALUE, so all others become MLSTATE_KV_ERROR_VALUE.
 */
static int public_code(mls_code code)
{
    switch (code) {
    case MLS_OK:
        return MLSTATE_KV_OK;
    case MLS_E_SHAPE:
        return MLSTATE_KV_ERROR_SHAPE;
    case MLS_E_DTYPE:
        return MLSTATE_KV_ERROR_DTYPE;
    case MLS_E_CAPACITY:
        return MLSTATE_KV_ERROR_CAPACITY;
    case MLS_E_OVERLAP:
        return MLSTATE_KV_ERROR_OVERLAP;
    case MLS_E_SIZE:
        return MLSTATE_KV_ERROR_SIZE;
    default:
        return MLSTATE_KV_ERROR_VALUE;
    }
}

/* Set `*out` to the core's dtype for a public one; returns false if it is unknown. */
static bool find_dtype(int dtype, mls_dtype *out)
{
    static const mls_dtype dtypes[] = {[MLSTATE_KV_FLOAT16] = MLS_F16,
                                       [MLSTATE_KV_BFLOAT16] = MLS_BF16,
                                       [MLSTATE_KV_FLOAT32] = MLS_F32,
                                       [MLSTATE_KV_FLOAT64] = MLS_F64,
                                       [MLSTATE_KV_INT8] = MLS_I8,
                                       [MLSTATE_KV_INT16] = MLS_I16,
                                       [MLSTATE_KV_INT32] = MLS_I32,
                                       [MLSTATE_KV_INT64] = MLS_I64,
                                       [MLSTATE_KV_UINT8] = MLS_U8,
                                       [MLSTATE_KV_UINT16] = MLS_U16,
                                       [MLSTATE_KV_UINT32] = MLS_U32,
                                       [MLSTATE_KV_UINT64] = MLS_U64,
                                       [MLSTATE_KV_BOOL] = MLS_BOOL,
                                       [MLSTATE_KV_FLOAT8_E4M3FN] = MLS_F8_E4M3,
                                       [MLSTATE_KV_FLOAT8_E5M2] = MLS_F8_E5M2};
    if (dtype < MLSTATE_KV_FLOAT16 || dtype > MLSTATE_KV_FLOAT8_E5M2) {
        return false;
    }
    *out = dtypes[dtype];
    return true;
}

size_t mlstate_kv_dtype_bytes(int dtype)
{
    mls_dtype item_dtype;
    return find_dtype(dtype, &item_dtype) ? mls_dtype_of(item_dtype)->item_bytes : 0;
}

/* Return the fastest kernels of this machine, without choices of stores: nothing is
 * measured. */
static const mls_kernels *best_kernels(void)
{
    mls_cpu cpu = MLS_CPU_SCALAR;
    mls_status unused;
    (void)mls_cpu_choose(NULL, &cpu, &unused);
    return mls_kernels_of(cpu);
}

/* ---- views ---- */

/* Set the strides of a view, in bytes, from `strides` in elements; NULL keeps its
 * strides, of packed memory. MLSTATE_KV_ERROR_SIZE: an address is not a valid number. */
static int set_strides(mls_tensor *view, const int64_t *strides)
{
    const int64_t item = (int64_t)mls_tensor_item_bytes(view);
    for (int axis = 0; strides != NULL && axis < view->rank; axis++) {
        int64_t bytes;
        if (__builtin_mul_overflow(strides[axis], item, &bytes) || bytes < PTRDIFF_MIN ||
            bytes > PTRDIFF_MAX) {
            return MLSTATE_KV_ERROR_SIZE;
        }
        view->strides[axis] = (ptrdiff_t)bytes;
    }
    return mls_tensor_is_addressable(view) ? MLSTATE_KV_OK : MLSTATE_KV_ERROR_SIZE;
}

/* Make a view of an array that is only read; `strides` are in elements, NULL for packed.
 * Pointer, dtype, rank, shape and strides are all unchecked arguments of the caller.
 * Returns a public code; `*out` is undefined after an error. */
static int make_input_view(mls_tensor *out, const void *data, int dtype, int rank,
                           const int64_t *shape, const int64_t *strides)
{
    size_t lengths[MLS_KV_MAX_RANK];
    mls_dtype item_dtype;
    mls_status unused;
    if (data == NULL || shape == NULL) {
        return MLSTATE_KV_ERROR_NULL;
    }
    if (!find_dtype(dtype, &item_dtype)) {
        return MLSTATE_KV_ERROR_DTYPE;
    }
    if (rank < 1 || rank > MLS_KV_MAX_RANK) {
        return MLSTATE_KV_ERROR_SHAPE;
    }
    for (int axis = 0; axis < rank; axis++) {
        if (shape[axis] < 0) {
            return MLSTATE_KV_ERROR_SHAPE;
        }
        if ((uint64_t)shape[axis] > (uint64_t)PTRDIFF_MAX) {
            return MLSTATE_KV_ERROR_SIZE;
        }
        lengths[axis] = (size_t)shape[axis];
    }
    /* the core has one type of view, and does not write to a source */
    void *const memory = (void *)(uintptr_t)data;
    const mls_code code =
        mls_tensor_init(out, memory, item_dtype, rank, lengths, &unused);
    return code == MLS_OK ? set_strides(out, strides) : public_code(code);
}

/* make_input_view for an array that is written: its elements must not share memory
 * (MLSTATE_KV_ERROR_OVERLAP). */
static int make_output_view(mls_tensor *out, void *data, int dtype, int rank,
                            const int64_t *shape, const int64_t *strides)
{
    const int code = make_input_view(out, data, dtype, rank, shape, strides);
    if (code == MLSTATE_KV_OK && mls_tensor_overlaps_itself(out)) {
        return MLSTATE_KV_ERROR_OVERLAP;
    }
    return code;
}

/* Return whether two of `count` views share memory. */
static bool any_overlap(const mls_tensor *const *views, int count)
{
    for (int i = 0; i < count; i++) {
        for (int j = 0; j < i; j++) {
            if (mls_tensor_overlap(views[i], views[j])) {
                return true;
            }
        }
    }
    return false;
}

/* ---- transitions ---- */

/* Arrays of a move, as the caller passes them: strides in elements, `shape` of the
 * source. */
typedef struct move_arrays {
    const void *source;
    void *target;
    int source_dtype, target_dtype;
    const int64_t *source_strides, *target_strides, *shape;
    int rank, seq_axis;
} move_arrays;

/* Check target_length and position of `request` against the source, and complete it: the
 * names, and the axis 0 .. rank - 1 that `seq_axis` means. Returns a public code. */
static int check_request(const mls_tensor *source, int seq_axis, mls_kv_request *request)
{
    mls_status st;
    request->names = &cache_names;
    mls_code code = mls_kv_find_axis("source", source->rank, source->shape, "seq_axis",
                                     seq_axis, &request->axis, &st);
    if (code == MLS_OK) {
        code = mls_kv_check(source->rank, source->shape, *request, &st);
    }
    return public_code(code);
}

/* Check all arguments of a move, make the views, and move. The target has the
 * source's shape, but request.target_length positions; the others get `pad`. Returns
 * a public code. */
static int move_cache(const move_arrays *arrays, mls_kv_request request, double pad)
{
    int64_t shape[MLS_KV_MAX_RANK];
    mls_tensor source, target;
    mls_element element;
    mls_status st;
    int code = make_input_view(&source, arrays->source, arrays->source_dtype,
                               arrays->rank, arrays->shape, arrays->source_strides);
    if (code == MLSTATE_KV_OK) {
        code = check_request(&source, arrays->seq_axis, &request);
    }
    if (code != MLSTATE_KV_OK) {
        return code;
    }
    for (int axis = 0; axis < arrays->rank; axis++) {
        shape[axis] = axis == request.axis ? request.target_length : arrays->shape[axis];
    }
    code = make_output_view(&target, arrays->target, arrays->target_dtype, arrays->rank,
                            shape, arrays->target_strides);
    if (code == MLSTATE_KV_OK) {
        code = public_code(mls_kv_check_target(&target, &source, request, &st));
    }
    if (code == MLSTATE_KV_OK &&
        mls_element_encode(pad, &target, &element, &st) != MLS_OK) {
        code = MLSTATE_KV_ERROR_VALUE; /* for 8-bit floats the core blames the dtype */
    }
    if (code == MLSTATE_KV_OK) {
        request.pad = &element;
        mls_kv_move(best_kernels(), NULL, &target, &source, &request);
    }
    return code;
}

/* Copy the first `position` tokens to a longer cache, and fill the other positions with
 * `pad`. The declaration in the public header is the contract of this and all public
 * functions below. */
int mlstate_kv_expand(const void *source, int source_dtype, const int64_t *source_strides,
                      void *target, int target_dtype, const int64_t *target_strides,
                      const int64_t *shape, int rank, int seq_axis, int64_t target_length,
                      int64_t position, double pad)
{
    const move_arrays arrays = {source,       target,         source_dtype,
                                target_dtype, source_strides, target_strides,
                                shape,        rank,           seq_axis};
    const mls_kv_request request = {
        .kind = MLS_KV_EXPAND, .target_length = target_length, .position = position};
    return move_cache(&arrays, request, pad);
}

/* Copy the first `position` tokens to a cache that may be shorter, and zero its other
 * positions. */
int mlstate_kv_compact(const void *source, int source_dtype,
                       const int64_t *source_strides, void *target, int target_dtype,
                       const int64_t *target_strides, const int64_t *shape, int rank,
                       int seq_axis, int64_t target_length, int64_t position)
{
    const move_arrays arrays = {source,       target,         source_dtype,
                                target_dtype, source_strides, target_strides,
                                shape,        rank,           seq_axis};
    const mls_kv_request request = {
        .kind = MLS_KV_COMPACT, .target_length = target_length, .position = position};
    return move_cache(&arrays, request, 0);
}

/* ---- masks ---- */

/* Fill rows first_row .. end_row - 1 of an attention mask, as a view of two axes.
 * `row_stride` is in elements; a negative one is MLSTATE_KV_ERROR_CAPACITY, like other
 * negative numbers. */
int mlstate_kv_mask(void *mask, int dtype, int64_t row_stride, int64_t seq_length,
                    int64_t attention_size, int64_t sinks, int64_t first_row,
                    int64_t end_row, double fill)
{
    const mls_mask_request request = {.seq_length = seq_length,
                                      .attention_size = attention_size,
                                      .sinks = sinks,
                                      .first_row = first_row,
                                      .end_row = end_row};
    mls_tensor view;
    mls_element element;
    mls_status st;
    int code = public_code(mls_mask_check(&request, &mask_names, &st));
    if (code == MLSTATE_KV_OK && row_stride < 0) {
        code = MLSTATE_KV_ERROR_CAPACITY;
    }
    if (code != MLSTATE_KV_OK) {
        return code;
    }
    const int64_t shape[] = {end_row - first_row, seq_length};
    const int64_t strides[] = {row_stride, 1};
    code = make_output_view(&view, mask, dtype, 2, shape, strides);
    if (code == MLSTATE_KV_OK && (int)view.dtype >= MLS_CONVERTIBLE) {
        code = MLSTATE_KV_ERROR_DTYPE;
    }
    if (code == MLSTATE_KV_OK) {
        code = public_code(mls_element_encode(fill, &view, &element, &st));
    }
    if (code == MLSTATE_KV_OK) {
        mls_mask_rows(best_kernels(), &view, (size_t)first_row, (size_t)attention_size,
                      (size_t)sinks, element);
    }
    return code;
}

/* ---- rotation ---- */

/* Complete a rotation with the axis for `seq_axis` and with `rotary_dim` (0: the whole
 * last axis), and check it against the keys and the target. Returns a public code. */
static int check_rotation(const mls_tensor *target, const mls_tensor *keys, int seq_axis,
                          int64_t rotary_dim, mls_rotation *rotation)
{
    mls_status st;
    mls_code code = mls_kv_find_axis("keys", keys->rank, keys->shape, "seq_axis",
                                     seq_axis, &rotation->axis, &st);
    if (code != MLS_OK) {
        return public_code(code);
    }
    const size_t dim = keys->shape[keys->rank - 1];
    if (rotary_dim < 0 || (uint64_t)rotary_dim > dim) {
        return MLSTATE_KV_ERROR_VALUE;
    }
    rotation->rotary_dim = rotary_dim == 0 ? dim : (size_t)rotary_dim;
    return public_code(mls_rotate_keys_check(target, keys, rotation, &st));
}

/* Rotate keys to other positions. The target may be the keys themselves, but must not
 * overlap the shifts, which become a view for this check. */
int mlstate_kv_rotate(const void *keys, const int64_t *keys_strides, void *target,
                      const int64_t *target_strides, int dtype, const int64_t *shape,
                      int rank, int seq_axis, const int64_t *shifts, int64_t shift_count,
                      double base, double scaling, int64_t rotary_dim, int interleaved)
{
    mls_tensor from, to, shift_view;
    mls_rotation rotation = {.base = base,
                             .scaling = scaling,
                             .interleaved = interleaved != 0,
                             .shifts = shifts};
    int code = make_input_view(&from, keys, dtype, rank, shape, keys_strides);
    if (code == MLSTATE_KV_OK) {
        code = make_output_view(&to, target, dtype, rank, shape, target_strides);
    }
    if (code == MLSTATE_KV_OK) {
        code =
            make_input_view(&shift_view, shifts, MLSTATE_KV_INT64, 1, &shift_count, NULL);
    }
    if (code == MLSTATE_KV_OK) {
        rotation.shift_count = (size_t)shift_count;
        code = check_rotation(&to, &from, seq_axis, rotary_dim, &rotation);
    }
    if (code == MLSTATE_KV_OK && mls_tensor_overlap(&to, &shift_view)) {
        code = MLSTATE_KV_ERROR_OVERLAP;
    }
    if (code == MLSTATE_KV_OK) {
        mls_rotate_keys(best_kernels(), NULL, &to, &from, &rotation);
    }
    return code;
}

/* ---- quantization ---- */

/* mls_quantized_lengths for arguments of the caller: length, bits and group may be any
 * numbers. Returns a public code. */
static int quantized_lengths(int64_t length, int bits, int64_t group, size_t *words,
                             size_t *groups)
{
    mls_status st;
    if (length < 0) {
        return MLSTATE_KV_ERROR_SHAPE;
    }
    if ((uint64_t)length > (uint64_t)PTRDIFF_MAX) {
        return MLSTATE_KV_ERROR_SIZE;
    }
    /* 0 stands for an invalid size: the core refuses it */
    const size_t size = group < 0 || group > MLS_QUANTIZE_MOST_GROUP ? 0 : (size_t)group;
    return public_code(mls_quantized_lengths(
        (size_t)length, bits < 0 ? 0 : (unsigned)bits, size, words, groups, &st));
}

/* Set the lengths of the last axes of codes (`*words`) and of scales and biases
 * (`*groups`), only on success. */
int mlstate_kv_quantized_lengths(int64_t length, int bits, int64_t group, int64_t *words,
                                 int64_t *groups)
{
    size_t word_count, group_count;
    if (words == NULL || groups == NULL) {
        return MLSTATE_KV_ERROR_NULL;
    }
    const int code = quantized_lengths(length, bits, group, &word_count, &group_count);
    if (code == MLSTATE_KV_OK) {
        *words = (int64_t)word_count;
        *groups = (int64_t)group_count;
    }
    return code;
}

/* The arguments of a quantization except for the values; `dtype` is the public dtype of
 * scales and biases. */
typedef struct quantization {
    const uint32_t *codes;
    const void *scales, *biases;
    int dtype, bits;
    int64_t group;
} quantization;

/* Make views of packed codes, scales and biases in `out`, for values of `rank` axes with
 * the lengths `shape`, which are valid: the last axis has words of codes, or groups.
 * Returns a public code. */
static int make_quantized_views(const quantization *arguments, int rank,
                                const int64_t *shape, mls_quantized *out)
{
    int64_t code_shape[MLS_KV_MAX_RANK], group_shape[MLS_KV_MAX_RANK];
    size_t words, groups;
    int code = quantized_lengths(shape[rank - 1], arguments->bits, arguments->group,
                                 &words, &groups);
    if (code != MLSTATE_KV_OK) {
        return code;
    }
    for (int axis = 0; axis < rank; axis++) {
        code_shape[axis] = axis == rank - 1 ? (int64_t)words : shape[axis];
        group_shape[axis] = axis == rank - 1 ? (int64_t)groups : shape[axis];
    }
    out->bits = (unsigned)arguments->bits;
    out->group = (size_t)arguments->group;
    code = make_input_view(&out->codes, arguments->codes, MLSTATE_KV_UINT32, rank,
                           code_shape, NULL);
    if (code == MLSTATE_KV_OK) {
        code = make_input_view(&out->scales, arguments->scales, arguments->dtype, rank,
                               group_shape, NULL);
    }
    if (code == MLSTATE_KV_OK) {
        code = make_input_view(&out->biases, arguments->biases, arguments->dtype, rank,
                               group_shape, NULL);
    }
    return code;
}

/* Return MLSTATE_KV_ERROR_OVERLAP if two of the four arrays share memory. */
static int check_separate(const mls_tensor *values, const mls_quantized *q)
{
    const mls_tensor *const all[] = {values, &q->codes, &q->scales, &q->biases};
    return any_overlap(all, 4) ? MLSTATE_KV_ERROR_OVERLAP : MLSTATE_KV_OK;
}

/* Make views of codes, scales and biases in `out` for `values`, which have the lengths
 * `shape`, and check all four. Returns a public code. */
static int make_checked_views(const quantization *arguments, const mls_tensor *values,
                              const int64_t *shape, mls_quantized *out)
{
    mls_status st;
    int code = make_quantized_views(arguments, values->rank, shape, out);
    if (code == MLSTATE_KV_OK) {
        code = public_code(mls_quantize_check(values, out, &st));
    }
    return code == MLSTATE_KV_OK ? check_separate(values, out) : code;
}

/* Quantize a whole array to packed codes, scales and biases. An error after the checks
 * can only come from a value. */
int mlstate_kv_quantize(const void *values, int dtype, const int64_t *strides,
                        const int64_t *shape, int rank, int bits, int64_t group,
                        uint32_t *codes, void *scales, void *biases)
{
    const quantization arguments = {codes, scales, biases, dtype, bits, group};
    mls_tensor view;
    mls_quantized quantized;
    mls_status st;
    int code = make_input_view(&view, values, dtype, rank, shape, strides);
    if (code == MLSTATE_KV_OK) {
        code = make_checked_views(&arguments, &view, shape, &quantized);
    }
    return code == MLSTATE_KV_OK
               ? public_code(mls_quantize(best_kernels(), NULL, &quantized, &view, &st))
               : code;
}

/* Write the values of a whole quantized array to `values`, whose elements must not share
 * memory. */
int mlstate_kv_dequantize(void *values, int dtype, const int64_t *strides,
                          const int64_t *shape, int rank, int bits, int64_t group,
                          const uint32_t *codes, const void *scales, const void *biases)
{
    const quantization arguments = {codes, scales, biases, dtype, bits, group};
    mls_tensor view;
    mls_quantized quantized;
    int code = make_output_view(&view, values, dtype, rank, shape, strides);
    if (code == MLSTATE_KV_OK) {
        code = make_checked_views(&arguments, &view, shape, &quantized);
    }
    if (code == MLSTATE_KV_OK) {
        mls_dequantize(best_kernels(), NULL, &view, &quantized);
    }
    return code;
}

/* ---- quantization on the way to another length ---- */

/* A move of the first `position` tokens along `axis`, and the views of these tokens and
 * of all positions, on both sides. */
typedef struct quantized_move {
    int axis;
    size_t position;
    mls_tensor values, tokens;      /* all positions; the tokens only */
    mls_quantized whole, quantized; /* `quantized` has the tokens only */
} quantized_move;

/* Check the numbers of a move of a cache of `shape` along an axis that is not the last,
 * and write the shape of its target to `target_shape`, which has MLS_KV_MAX_RANK entries.
 * Sets the axis and the position of `out`. Returns a public code. */
static int check_move(const int64_t *shape, int rank, int seq_axis, int64_t target_length,
                      int64_t position, int64_t *target_shape, quantized_move *out)
{
    mls_kv_request request = {
        .kind = MLS_KV_COMPACT, .target_length = target_length, .position = position};
    mls_tensor source = {.rank = rank};
    if (shape == NULL) {
        return MLSTATE_KV_ERROR_NULL;
    }
    if (rank < MLS_KV_MIN_RANK || rank > MLS_KV_MAX_RANK) {
        return MLSTATE_KV_ERROR_SHAPE;
    }
    for (int axis = 0; axis < rank; axis++) {
        if (shape[axis] < 0) {
            return MLSTATE_KV_ERROR_SHAPE;
        }
        source.shape[axis] = (size_t)shape[axis];
        target_shape[axis] = shape[axis];
    }
    const int code = check_request(&source, seq_axis, &request);
    if (code != MLSTATE_KV_OK) {
        return code;
    }
    if (request.axis == rank - 1) {
        return MLSTATE_KV_ERROR_SHAPE;
    }
    target_shape[request.axis] = target_length;
    out->axis = request.axis;
    out->position = (size_t)position;
    return MLSTATE_KV_OK;
}

/* Make views of codes, scales and biases of `coded_shape`, and of the tokens in all
 * arrays, and check them. `move` has axis, position and values already. Returns a
 * public code. */
static int check_move_views(const quantization *arguments, const int64_t *coded_shape,
                            quantized_move *move)
{
    mls_status st;
    int code =
        make_quantized_views(arguments, move->values.rank, coded_shape, &move->whole);
    if (code == MLSTATE_KV_OK) {
        code = check_separate(&move->values, &move->whole);
    }
    if (code != MLSTATE_KV_OK) {
        return code;
    }
    move->tokens = mls_tensor_slice(&move->values, move->axis, 0, move->position);
    move->quantized = move->whole;
    move->quantized.codes =
        mls_tensor_slice(&move->whole.codes, move->axis, 0, move->position);
    move->quantized.scales =
        mls_tensor_slice(&move->whole.scales, move->axis, 0, move->position);
    move->quantized.biases =
        mls_tensor_slice(&move->whole.biases, move->axis, 0, move->position);
    return public_code(mls_quantize_check(&move->tokens, &move->quantized, &st));
}

/* Set the positions of `target` from move->position on, which have no token, to 0. */
static void clear_positions_without_token(const quantized_move *move,
                                          const mls_tensor *target)
{
    const size_t rest = target->shape[move->axis] - move->position;
    const mls_tensor padding = mls_tensor_slice(target, move->axis, move->position, rest);
    const mls_element zero = {.size = mls_tensor_item_bytes(target)};
    mls_fill(best_kernels(), &padding, zero, mls_cached());
}

/* Quantize the first `position` tokens into the arrays of a cache of another length, and
 * then zero the other positions of these: only a valid result is completed. */
int mlstate_kv_quantize_move(const void *values, int dtype, const int64_t *strides,
                             const int64_t *shape, int rank, int seq_axis,
                             int64_t target_length, int64_t position, int bits,
                             int64_t group, uint32_t *codes, void *scales, void *biases)
{
    const quantization arguments = {codes, scales, biases, dtype, bits, group};
    int64_t target_shape[MLS_KV_MAX_RANK];
    quantized_move move;
    mls_status st;
    int code =
        check_move(shape, rank, seq_axis, target_length, position, target_shape, &move);
    if (code == MLSTATE_KV_OK) {
        code = make_input_view(&move.values, values, dtype, rank, shape, strides);
    }
    if (code == MLSTATE_KV_OK) {
        code = check_move_views(&arguments, target_shape, &move);
    }
    if (code == MLSTATE_KV_OK) {
        code = public_code(
            mls_quantize(best_kernels(), NULL, &move.quantized, &move.tokens, &st));
    }
    if (code == MLSTATE_KV_OK) {
        clear_positions_without_token(&move, &move.whole.codes);
        clear_positions_without_token(&move, &move.whole.scales);
        clear_positions_without_token(&move, &move.whole.biases);
    }
    return code;
}

/* Write the values of the first `position` tokens to a cache of another length, and zero
 * its other positions. Codes, scales and biases are packed for `shape`; `values` has the
 * target's shape. */
int mlstate_kv_dequantize_move(void *values, int dtype, const int64_t *strides,
                               const int64_t *shape, int rank, int seq_axis,
                               int64_t target_length, int64_t position, int bits,
                               int64_t group, const uint32_t *codes, const void *scales,
                               const void *biases)
{
    const quantization arguments = {codes, scales, biases, dtype, bits, group};
    int64_t target_shape[MLS_KV_MAX_RANK];
    quantized_move move;
    int code =
        check_move(shape, rank, seq_axis, target_length, position, target_shape, &move);
    if (code == MLSTATE_KV_OK) {
        code = make_output_view(&move.values, values, dtype, rank, target_shape, strides);
    }
    if (code == MLSTATE_KV_OK) {
        code = check_move_views(&arguments, shape, &move);
    }
    if (code == MLSTATE_KV_OK) {
        mls_dequantize(best_kernels(), NULL, &move.tokens, &move.quantized);
        clear_positions_without_token(&move, &move.values);
    }
    return code;
}
