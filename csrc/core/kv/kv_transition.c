/* kv_transition: moves a key-value cache to another sequence length: refuses tokens that
 * do not fit, copies, pads.
 *
 * Checks and move are separate: a binding checks first, allocates the target only if the
 * request is valid, and then moves, which cannot fail. Messages are shown to users
 * unchanged, so the request contains the users' parameter names.
 *
 * A row is the part of a cache at one index of the axes before the sequence. Its
 * positions are usually contiguous, so its tokens are one run to copy and its padding,
 * right after them, is one run to fill. The move divides a cache into parts: several
 * short rows (with the sequence innermost), one row, or some positions of a long row.
 */
#include "kv/kv_transition.h"

#include "array/overlap.h"
#include "base/memory.h"
#include "base/size.h"

#include <inttypes.h>
#include <stdio.h>

/* The usual layout, whose axes have names in messages. */
enum { NAMED_RANK = 4, NAMED_AXIS = 2 };

static const char *const axis_names[NAMED_RANK] = {"layers", "heads", "sequence length",
                                                   "head_dim"};

/* Return MLS_E_SHAPE unless a cache may have `rank` axes; `label` names the argument. */
static mls_code check_rank(const char *label, int rank, const size_t *shape,
                           mls_status *st)
{
    if (rank >= MLS_KV_MIN_RANK && rank <= MLS_KV_MAX_RANK) {
        return MLS_OK;
    }
    char text[MLS_FACT_BYTES];
    mls_shape_text(text, sizeof text, rank, shape);
    mls_fail(st, MLS_E_SHAPE,
             "%s must have %d to %d dimensions, such as (layers, heads, sequence, "
             "head_dim), got %d: shape %s",
             label, MLS_KV_MIN_RANK, MLS_KV_MAX_RANK, rank, text);
    mls_status_expected(st, "%d to %d dimensions", MLS_KV_MIN_RANK, MLS_KV_MAX_RANK);
    return mls_status_got(st, "%s", text);
}

/* Check the rank and the sequence axis, and convert the axis to 0 .. rank - 1. Check the
 * rank before the axis: the range of valid axes follows from it. */
mls_code mls_kv_find_axis(const char *label, int rank, const size_t *shape,
                          const char *axis_name, int64_t seq_axis, int *axis,
                          mls_status *st)
{
    const mls_code code = check_rank(label, rank, shape, st);
    if (code != MLS_OK) {
        return code;
    }
    if (seq_axis < -rank || seq_axis >= rank) {
        char text[MLS_FACT_BYTES];
        mls_fail(st, MLS_E_SHAPE,
                 "%s %" PRId64 " is outside %d..%d: %s has %d dimensions, shape %s",
                 axis_name, seq_axis, -rank, rank - 1, label, rank,
                 mls_shape_text(text, sizeof text, rank, shape));
        mls_status_expected(st, "%d..%d", -rank, rank - 1);
        return mls_status_got(st, "%" PRId64, seq_axis);
    }
    *axis = (int)(seq_axis < 0 ? seq_axis + rank : seq_axis);
    return MLS_OK;
}

enum { NOTE_BYTES = 2 * MLS_FACT_BYTES };

/* Write a note for the end of a message to `text` (NOTE_BYTES bytes): the sequence axis
 * and the shape, or nothing for the usual layout, whose axes have names. Returns
 * `text`. */
static const char *axis_note(char *text, int rank, const size_t *shape, int axis)
{
    char dimensions[MLS_FACT_BYTES];
    text[0] = '\0';
    if (rank != NAMED_RANK || axis != NAMED_AXIS) {
        snprintf(text, NOTE_BYTES, " (sequence axis %d of shape %s)", axis,
                 mls_shape_text(dimensions, sizeof dimensions, rank, shape));
    }
    return text;
}

/* Add the expected range 0 .. `limit` and the actual value `got` to `st`, which has its
 * message. Returns the code of `st`. */
static mls_code add_capacity_range(mls_status *st, int64_t limit, int64_t got)
{
    mls_status_expected(st, "0..%" PRId64, limit);
    return mls_status_got(st, "%" PRId64, got);
}

/* Check the numbers of a request. Check the target's length against the source's, then
 * the tokens against both. The order matters: the message is about the number that the
 * user should correct first. */
mls_code mls_kv_check(int rank, const size_t *shape, mls_kv_request request,
                      mls_status *st)
{
    const mls_kv_names *names = request.names;
    const int64_t length = (int64_t)shape[request.axis];
    char note[NOTE_BYTES];
    axis_note(note, rank, shape, request.axis);
    const int64_t target = request.target_length;
    if (target < 0) {
        return mls_fail(st, MLS_E_CAPACITY, "%s %" PRId64 " is negative",
                        names->target_length, target);
    }
    /* expanding keeps all positions, with or without a token */
    if (request.kind == MLS_KV_EXPAND && target < length) {
        mls_fail(st, MLS_E_CAPACITY,
                 "%s %" PRId64 " is smaller than the source's %" PRId64 "%s: %s",
                 names->target_length, target, length, note, names->if_shorter);
        mls_status_expected(st, "at least %" PRId64, length);
        return mls_status_got(st, "%" PRId64, target);
    }
    if (request.position < 0 || request.position > length) {
        mls_fail(st, MLS_E_CAPACITY,
                 "%s %" PRId64 " is outside 0..%" PRId64
                 ", the source's sequence length%s",
                 names->position, request.position, length, note);
        return add_capacity_range(st, length, request.position);
    }
    if (request.position > target) {
        mls_fail(st, MLS_E_CAPACITY,
                 "%" PRId64 " tokens do not fit into %" PRId64
                 " positions: pass a %s of at least %" PRId64,
                 request.position, target, names->target_length, request.position);
        return add_capacity_range(st, target, request.position);
    }
    return MLS_OK;
}

/* Fail with MLS_E_SHAPE because two caches differ in the property `label` (the lengths of
 * one axis, or the number of axes): it is `source` in one and `target` in the other.
 * `note` follows in the message. */
static mls_code fail_difference(const char *label, size_t source, size_t target,
                                const char *note, mls_status *st)
{
    mls_fail(st, MLS_E_SHAPE,
             "%s differ: the source has %zu, the target %zu%s; these two states do not "
             "belong to the same model",
             label, source, target, note);
    mls_status_expected(st, "%zu", source);
    return mls_status_got(st, "%zu", target);
}

/* Check that a cache can expand to another shape. Compare the number of axes, the lengths
 * of all axes except the sequence, which belong to the model, and then the sequence
 * lengths. */
mls_code mls_kv_check_shapes(int source_rank, const size_t *source, int target_rank,
                             const size_t *target, const char *axis_name,
                             int64_t seq_axis, mls_status *st)
{
    int axis = 0;
    mls_code code = mls_kv_find_axis("the source state", source_rank, source, axis_name,
                                     seq_axis, &axis, st);
    if (code == MLS_OK) {
        code = check_rank("the target state", target_rank, target, st);
    }
    if (code != MLS_OK) {
        return code;
    }
    char note[NOTE_BYTES];
    axis_note(note, source_rank, source, axis);
    if (source_rank != target_rank) {
        return fail_difference("dimensions", (size_t)source_rank, (size_t)target_rank, "",
                               st);
    }
    for (int i = 0; i < source_rank; i++) {
        if (i != axis && source[i] != target[i]) {
            char numbered[32];
            snprintf(numbered, sizeof numbered, "lengths of axis %d", i);
            const bool is_named = note[0] == '\0';
            return fail_difference(is_named ? axis_names[i] : numbered, source[i],
                                   target[i], note, st);
        }
    }
    if (target[axis] < source[axis]) {
        mls_fail(st, MLS_E_CAPACITY,
                 "the target's sequence length %zu is smaller than the source's %zu%s: "
                 "compact instead of expanding",
                 target[axis], source[axis], note);
        mls_status_expected(st, "at least %zu", source[axis]);
        return mls_status_got(st, "%zu", target[axis]);
    }
    return MLS_OK;
}

/* Check an existing output. The source's shape with the target's length is the expected
 * shape; any other difference is a mismatch. */
mls_code mls_kv_check_target(const mls_tensor *dst, const mls_tensor *src,
                             mls_kv_request request, mls_status *st)
{
    const mls_kv_names *names = request.names;
    mls_tensor expected = *src;
    expected.shape[request.axis] = (size_t)request.target_length;
    const mls_code code = mls_copy_check(dst, &expected, names->target, st);
    if (code != MLS_OK) {
        return code;
    }
    if (mls_tensor_overlap(dst, src)) {
        return mls_fail(st, MLS_E_OVERLAP, "%s shares memory with %s: %s", names->target,
                        names->source, names->if_shared);
    }
    return MLS_OK;
}

/* ---- moving ---- */

enum {
    PART_BYTES = 128 << 10, /* short rows move together, so many bytes at a time */
    STAGE_BYTES = 64 << 10, /* the same for rows that are assembled in a buffer */
    TASK_BYTES = 4 << 20,   /* a thread takes at most so much at a time, ... */
    TASKS = 16,             /* ... and less of a small cache, so that there are so many */
    /* The system keeps a record for each range of pages with its own advice, and allows
     * 65,530 of them in a process. */
    MOST_ADVISED = 4096
};

/* Division of a target into parts: one index of each axis before `axis`, `step` indices
 * of `axis`, all of the axes after it. */
typedef struct division {
    int axis;
    size_t step;
    size_t slices; /* parts along `axis` */
    size_t parts;  /* parts of the whole target */
} division;

/* One transition. The threads only read it. */
typedef struct job {
    const mls_kernels *kernels;
    const mls_tensor *dst, *src;
    int axis;               /* the sequence */
    size_t position;        /* tokens */
    const mls_element *pad; /* NULL: the padding is already correct */
    mls_destination destination;
    division division;
    size_t parts_per_task;
    bool has_kernel;      /* a kernel can move the rows of a part to memory */
    bool requests_pages;  /* request the pages of a row before it is copied */
    bool uses_huge_pages; /* use huge pages where tokens fill them */
} job;

/* Divide the target `t` of `bytes` bytes, more than 0, into parts of about
 * `most_row_bytes` or `most_part_bytes` bytes. Rows longer than `most_row_bytes` bytes,
 * and a cache without an axis before the sequence, are divided by positions; shorter rows
 * stay whole, and parts have up to `most_part_bytes` bytes of them. No product here
 * exceeds `bytes`. */
static division divide_rows(const mls_tensor *t, int seq_axis, size_t bytes,
                            size_t most_row_bytes, size_t most_part_bytes)
{
    const size_t row = bytes / mls_kv_rows(t, seq_axis);
    const bool by_position = seq_axis == 0 || row > most_row_bytes;
    const size_t most = by_position ? most_row_bytes : most_part_bytes;
    int axis = by_position ? seq_axis : seq_axis - 1;
    size_t unit = by_position ? row / t->shape[seq_axis] : row; /* bytes of an index */
    /* find the outermost axis so that all indices of the axes after it fit into a part */
    while (!by_position && axis > 0 && unit * t->shape[axis] <= most) {
        unit *= t->shape[axis];
        axis--;
    }
    division d = {.axis = axis, .step = t->shape[axis], .parts = 1};
    if (most / unit < d.step) {
        d.step = most / unit > 0 ? most / unit : 1;
    }
    d.slices = (t->shape[axis] + d.step - 1) / d.step;
    d.parts = mls_kv_rows(t, axis) * d.slices;
    return d;
}

/* Reduce the view `t` to `length` indices of `axis`, from index `start` on. */
static void narrow_axis(mls_tensor *t, int axis, size_t start, size_t length)
{
    t->data += (ptrdiff_t)start * t->strides[axis];
    t->shape[axis] = length;
}

/* Request the pages of `tokens`, the tokens of some rows in the target, ahead of their
 * copy. Rows that are less than a page apart are one range: every page between them has
 * tokens. */
static void populate_rows(const job *j, const mls_tensor *tokens)
{
    size_t rows = mls_kv_rows(tokens, j->axis), bytes = mls_kv_bytes(tokens) / rows;
    size_t distance = 0; /* between two rows */
    for (int axis = j->axis - 1; axis >= 0 && distance == 0; axis--) {
        distance = tokens->shape[axis] > 1 ? (size_t)tokens->strides[axis] : 0;
    }
    if (distance < mls_page_bytes()) {
        bytes += (rows - 1) * distance;
        rows = 1;
    }
    for (size_t row = rows; row-- > 0;) { /* from the end: see part_at */
        unsigned char *const data = tokens->data + row * distance;
        if (j->uses_huge_pages) {
            mls_advise_inner_huge_pages(data, bytes);
        }
        mls_populate_pages(data, bytes);
    }
}

/* Narrow the views `to` and `from` to part number `part`, except along the sequence.
 * Returns the first position of the part and sets `*positions` to the number of its
 * positions. */
static size_t select_part(const job *j, size_t part, mls_tensor *to, mls_tensor *from,
                          size_t *positions)
{
    const division *d = &j->division;
    const size_t first = part % d->slices * d->step;
    const size_t rest = to->shape[d->axis] - first;
    const size_t count = rest < d->step ? rest : d->step;
    size_t outer = part / d->slices;
    for (int axis = d->axis - 1; axis >= 0; axis--) {
        const size_t index = outer % to->shape[axis];
        outer /= to->shape[axis];
        narrow_axis(to, axis, index, 1);
        narrow_axis(from, axis, index, 1);
    }
    if (d->axis == j->axis) {
        *positions = count;
        return first;
    }
    narrow_axis(to, d->axis, first, count);
    narrow_axis(from, d->axis, first, count);
    *positions = to->shape[j->axis];
    return 0;
}

/* Move part number `part`: copy its tokens from the source, and fill its other positions
 * with the pad. */
static void move_part(const job *j, size_t part)
{
    mls_tensor to = *j->dst, from = *j->src;
    size_t positions;
    const size_t low = select_part(j, part, &to, &from, &positions);
    /* tokens from the first position of this part on, perhaps more than the part has */
    const size_t after = j->position > low ? j->position - low : 0;
    const size_t used = after < positions ? after : positions;
    if (used > 0) {
        mls_tensor tokens = to;
        narrow_axis(&tokens, j->axis, low, used);
        narrow_axis(&from, j->axis, low, used);
        if (j->requests_pages) {
            populate_rows(j, &tokens);
        }
        mls_copy(j->kernels, &tokens, &from, j->destination);
    }
    if (j->pad != NULL && used < positions) {
        narrow_axis(&to, j->axis, low + used, positions - used);
        mls_fill(j->kernels, &to, *j->pad, j->destination);
    }
}

/* Return the end of the turns (consecutive numbers of moves of a part) of task number
 * `task`: one more than its last turn. */
static size_t end_of_task(const job *j, size_t task)
{
    const size_t end = (task + 1) * j->parts_per_task;
    return end < j->division.parts ? end : j->division.parts;
}

/* Return the number of the part to move at `turn`. Fresh memory is written from its end:
 * the first store to a huge page makes the system clear it in ascending order, so that
 * its end is cached and its beginning is not. */
static size_t part_at(const job *j, size_t turn)
{
    return j->destination.is_fresh ? j->division.parts - 1 - turn : turn;
}

/* Move the parts of task number `task`, for the pool; `context` is the job. */
static void move_parts(void *context, size_t task)
{
    const job *j = context;
    const size_t end = end_of_task(j, task);
    for (size_t turn = task * j->parts_per_task; turn < end; turn++) {
        move_part(j, part_at(j, turn));
    }
}

/* Return whether the kernel pad_rows can move the rows of this job, of `row` bytes each
 * in the target. It needs a packed source, no conversion, and rows of the target that
 * start at multiples of 16 bytes. */
static bool has_row_kernel(const job *j, size_t row)
{
    return j->kernels->pad_rows != NULL && j->dst->dtype == j->src->dtype &&
           j->dst->swapped == j->src->swapped && mls_tensor_is_contiguous(j->src) &&
           row % 16 == 0 && (uintptr_t)j->dst->data % 16 == 0;
}

/* Move the rows of a part (`to` in the target, `bytes` bytes; `from` in the source) with
 * the kernel, which also fills the rest of each row with the pad. `step` is the bytes of
 * one position. The kernel stores past the cache or not, as the trials of copies have
 * decided. If they have not decided yet, move nothing and return false; the trial begun
 * here is dropped unmeasured. The caller then moves the part through its buffer, and the
 * copy from there is measured. */
static bool move_rows(const job *j, const mls_tensor *to, const mls_tensor *from,
                      size_t bytes)
{
    const size_t rows = mls_kv_rows(to, j->axis);
    const size_t row = bytes / rows, step = row / to->shape[j->axis];
    const mls_store_trial trial =
        mls_store_begin(j->kernels->choices, MLS_STORING_COPY, j->kernels->variants,
                        j->destination, bytes);
    if (trial.choice != NULL) {
        return false;
    }
    j->kernels->pad_rows(to->data, from->data, step * j->src->shape[j->axis],
                         step * j->position, row, rows,
                         j->pad == NULL ? 0 : mls_element_pattern(*j->pad), trial.store);
    return true;
}

/* Fill the positions of `padding` that have no token with the pad. `padding` is a view of
 * the whole buffer that move_staged_parts assembles rows in. */
static void pad_stage(const job *j, mls_tensor padding)
{
    const size_t length = padding.shape[j->axis];
    if (j->position < length) {
        narrow_axis(&padding, j->axis, j->position, length - j->position);
        mls_fill(j->kernels, &padding, *j->pad, mls_cached());
    }
}

/* Move the short rows of task number `task`, with the kernel if there is one; `context`
 * is the job. Otherwise assemble the rows of a part in a buffer, which has their padding
 * already, and copy it in one run. A copy past the cache ends with a fence, which takes
 * longer than a short row: with one fence for each row, innermost sequences took 2.5 to
 * 10 times as long as others (AMD EPYC family 25 model 17). */
static void move_staged_parts(void *context, size_t task)
{
    const job *j = context;
    const size_t end = end_of_task(j, task);
    unsigned char buffer[STAGE_BYTES];
    mls_tensor stage = {0};
    mls_status unused;
    /* cannot fail: the target has the same shape */
    (void)mls_tensor_init(&stage, buffer, j->dst->dtype, j->dst->rank, j->dst->shape,
                          &unused);
    stage.swapped = j->dst->swapped;
    for (int axis = 0; axis <= j->division.axis; axis++) {
        stage.shape[axis] = axis < j->division.axis ? 1 : j->division.step;
    }
    const mls_tensor full_stage = stage;
    bool is_padded = false;
    for (size_t turn = task * j->parts_per_task; turn < end; turn++) {
        mls_tensor to = *j->dst, from = *j->src;
        size_t positions;
        (void)select_part(j, part_at(j, turn), &to, &from, &positions);
        const size_t bytes = mls_kv_bytes(&to);
        if (j->has_kernel && move_rows(j, &to, &from, bytes)) {
            continue;
        }
        if (!is_padded) { /* once: copies of tokens never reach the padding */
            pad_stage(j, full_stage);
            is_padded = true;
        }
        stage.shape[j->division.axis] = to.shape[j->division.axis];
        stage.shape[j->axis] = j->position;
        from.shape[j->axis] = j->position;
        mls_copy(j->kernels, &stage, &from, mls_cached());
        mls_copy_bytes(j->kernels, to.data, buffer, bytes, j->destination);
    }
}

/* Return whether move_staged_parts is faster than move_parts for a target of `bytes`
 * bytes: rows are short, and the rows of both sides do not form one run. If the result
 * stays in the level 2 cache, only the kernel is faster. */
static bool are_rows_staged(const job *j, size_t bytes)
{
    const mls_store_choices *choices = j->kernels->choices;
    const size_t length = j->dst->shape[j->axis];
    const bool is_written = j->pad != NULL || j->position == length;
    const bool is_one_run =
        j->position == length && j->position == j->src->shape[j->axis];
    return is_written && !is_one_run && j->axis > 0 && choices != NULL &&
           (bytes >= choices->least[MLS_STORING_WITHIN] || j->has_kernel) &&
           bytes / mls_kv_rows(j->dst, j->axis) <= STAGE_BYTES / 4 &&
           mls_tensor_is_contiguous(j->dst);
}

/* Copy the tokens and fill the padding. Threads share parts, and positions of a row if
 * there are only a few rows. The rows of sparse memory stay whole, because a huge page
 * must fit into a part. */
void mls_kv_move(const mls_kernels *kernels, mls_pool *pool, const mls_tensor *dst,
                 const mls_tensor *src, const mls_kv_request *request)
{
    const int axis = request->axis;
    const mls_kv_memory memory = request->memory;
    const size_t bytes = mls_kv_bytes(dst);
    if (bytes == 0) {
        return;
    }
    mls_pool *shared = bytes >= MLS_POOL_COPY_BYTES ? pool : NULL;
    size_t task_bytes = bytes / TASKS < TASK_BYTES ? bytes / TASKS : TASK_BYTES;
    job j = {.kernels = kernels,
             .dst = dst,
             .src = src,
             .axis = axis,
             .position = (size_t)request->position,
             .pad = request->pad,
             .destination = {.bytes = bytes, .is_fresh = memory != MLS_KV_TOUCHED},
             .requests_pages = memory == MLS_KV_SPARSE,
             .uses_huge_pages = mls_kv_rows(dst, axis) <= MOST_ADVISED};
    j.has_kernel = has_row_kernel(&j, bytes / mls_kv_rows(dst, axis));
    const bool is_staged = are_rows_staged(&j, bytes);
    const bool rows_stay_whole = shared == NULL || memory == MLS_KV_SPARSE;
    j.division = divide_rows(dst, axis, bytes, rows_stay_whole ? SIZE_MAX : task_bytes,
                             is_staged ? STAGE_BYTES : PART_BYTES);
    const size_t parts = j.division.parts;
    const size_t part_bytes = bytes / parts;
    j.parts_per_task = part_bytes < task_bytes ? task_bytes / part_bytes : 1;
    mls_pool_run(shared, is_staged ? move_staged_parts : move_parts, &j,
                 (parts + j.parts_per_task - 1) / j.parts_per_task);
}
