/* kv_buffer: a key-value cache that grows and shrinks within reserved memory.
 *
 * A row is the memory of one index of the axes before the sequence: `capacity` positions.
 * Invariant: all bytes of a row beyond the length are zero. Fresh pages are zero,
 * shrinking zeroes the positions that leave the view, and moving rows apart zeroes their
 * old memory. So growing the length writes nothing, and pages that were never in the view
 * are never touched.
 */
#include "kv/kv_buffer.h"

#include "base/size.h"

#include <string.h>

/* Bytes of one position (`step`) and of one row of `capacity` positions (`row`), the
 * number of rows, and the bytes of all rows (`total`). */
typedef struct extent {
    size_t step, row, rows, total;
} extent;

/* Multiply `*total` by the lengths of axes first .. last-1. Returns false on overflow. */
static bool multiply_lengths(const mls_kv_buffer *b, int first, int last, size_t *total)
{
    for (int axis = first; axis < last; axis++) {
        if (!mls_size_mul(*total, b->shape[axis], total)) {
            return false;
        }
    }
    return true;
}

/* Compute the extent of the buffer for a capacity. Returns false if its bytes overflow.
 */
static bool compute_extent(const mls_kv_buffer *b, size_t capacity, extent *out)
{
    extent e = {.step = mls_dtype_of(b->dtype)->item_bytes, .rows = 1};
    if (!multiply_lengths(b, b->axis + 1, b->rank, &e.step) ||
        !mls_size_mul(e.step, capacity, &e.row) ||
        !multiply_lengths(b, 0, b->axis, &e.rows) ||
        !mls_size_mul(e.row, e.rows, &e.total) || e.total > PTRDIFF_MAX) {
        return false;
    }
    *out = e;
    return true;
}

/* Fail because compute_extent overflowed; the message has the shape at that capacity. */
static mls_code fail_too_large(const mls_kv_buffer *b, size_t capacity, mls_status *st)
{
    size_t shape[MLS_KV_MAX_RANK];
    char text[MLS_FACT_BYTES];
    memcpy(shape, b->shape, sizeof shape);
    shape[b->axis] = capacity;
    return mls_fail(st, MLS_E_SIZE, "%s of %s is larger than memory",
                    mls_shape_text(text, sizeof text, b->rank, shape),
                    mls_dtype_of(b->dtype)->name);
}

/* Fail with MLS_E_CAPACITY: `what` is `got`, but at most `most`, the value of `limit`. */
static mls_code fail_capacity(mls_status *st, const char *what, size_t got,
                              const char *limit, size_t most)
{
    mls_fail(st, MLS_E_CAPACITY, "%s %zu is beyond %s %zu", what, got, limit, most);
    mls_status_expected(st, "at most %zu", most);
    return mls_status_got(st, "%zu", got);
}

/* New pages are zero, so the invariant holds for every length. */
mls_code mls_kv_buffer_init(mls_kv_buffer *out, int rank, const size_t *shape, int axis,
                            size_t capacity, mls_dtype dtype, mls_status *st)
{
    mls_kv_buffer b = {.dtype = dtype, .rank = rank, .axis = axis, .capacity = capacity};
    memcpy(b.shape, shape, (size_t)rank * sizeof shape[0]);
    if (shape[axis] > capacity) {
        return fail_capacity(st, "sequence length", shape[axis], "the capacity",
                             capacity);
    }
    extent e;
    if (!compute_extent(&b, capacity, &e)) {
        return fail_too_large(&b, capacity, st);
    }
    const mls_code code = mls_pages_init(&b.pages, e.total, st);
    if (code != MLS_OK) {
        return code;
    }
    /* no huge pages, so that unused capacity costs no memory */
    mls_advise_pages(b.pages.data, b.pages.mapped, false);
    *out = b;
    return MLS_OK;
}

/* A zeroed buffer has no pages, so this may be called twice. */
void mls_kv_buffer_fini(mls_kv_buffer *buffer)
{
    mls_pages_fini(&buffer->pages);
    *buffer = (mls_kv_buffer){0};
}

/* Return positions start .. start+length-1 of every row. */
static mls_tensor slice_positions(const mls_kv_buffer *b, size_t start, size_t length)
{
    mls_tensor t = {.data = b->pages.data, .dtype = b->dtype, .rank = b->rank};
    size_t stride = mls_dtype_of(b->dtype)->item_bytes;
    for (int axis = b->rank - 1; axis >= 0; axis--) {
        const bool is_sequence = axis == b->axis;
        t.shape[axis] = is_sequence ? length : b->shape[axis];
        t.strides[axis] = (ptrdiff_t)stride;
        if (is_sequence) {
            t.data += start * stride;
        }
        /* if the buffer is empty, its strides are unused and may wrap */
        stride *= is_sequence ? b->capacity : b->shape[axis];
    }
    return t;
}

mls_tensor mls_kv_buffer_view(const mls_kv_buffer *buffer)
{
    return slice_positions(buffer, 0, mls_kv_buffer_length(buffer));
}

/* If length and capacity are equal, rows are adjacent and huge pages may span them. */
void mls_kv_buffer_fill(const mls_kv_buffer *buffer, const mls_kernels *kernels,
                        mls_pool *pool, const mls_tensor *src)
{
    const mls_tensor dst = mls_kv_buffer_view(buffer);
    const size_t length = mls_kv_buffer_length(buffer);
    if (length == buffer->capacity && buffer->pages.bytes > 0) {
        /* A range that was written before it is split can be joined again: see reserve.
         */
        buffer->pages.data[0] = 0;
        mls_advise_inner_huge_pages(buffer->pages.data, buffer->pages.bytes);
    }
    mls_kv_move(kernels, pool, &dst, src, buffer->axis, length, NULL, MLS_KV_SPARSE);
}

/* Checks both numbers before it changes memory, so the buffer is unchanged on failure. */
mls_code mls_kv_buffer_resize(mls_kv_buffer *buffer, const mls_kernels *kernels,
                              size_t length, size_t position, const char *position_name,
                              mls_status *st)
{
    const size_t before = mls_kv_buffer_length(buffer);
    if (length > buffer->capacity) {
        return fail_capacity(st, "sequence length", length, "the reserved capacity",
                             buffer->capacity);
    }
    const size_t shorter = length < before ? length : before;
    if (position > shorter) {
        return fail_capacity(st, position_name, position, "the sequence length", shorter);
    }
    /* positions that leave the view, or stay in it without a token, become zero */
    if (position < before) {
        const mls_tensor dropped = slice_positions(buffer, position, before - position);
        const mls_element zero = {.size = mls_dtype_of(buffer->dtype)->item_bytes};
        size_t bytes = 0;
        (void)mls_tensor_bytes(
            &dropped, &bytes); /* smaller than the buffer, so it cannot overflow */
        mls_fill(kernels, &dropped, zero, (mls_destination){.bytes = bytes});
    }
    buffer->shape[buffer->axis] = length;
    return MLS_OK;
}

/* Move rows from `old` to `now` bytes apart, and zero their old memory. The last row
 * moves first: its new place is beyond all rows that are still to be moved. Only the
 * `used` first bytes of a row can be nonzero, so only those move. */
static void spread_rows(unsigned char *data, size_t rows, size_t used, size_t old,
                        size_t now)
{
    const size_t old_total = rows * old;
    const bool is_dense =
        now - used < mls_page_bytes(); /* every page has some of a row */
    if (is_dense) {
        mls_populate_pages(data + old_total, rows * now - old_total);
    }
    for (size_t row = rows; row-- > 0;) {
        const size_t end = row * now + used;
        const size_t next = (row + 1) * now;
        const size_t stale = next < old_total ? next : old_total;
        if (row * now >= old_total && !is_dense) { /* these pages were never touched */
            mls_advise_inner_huge_pages(data + row * now, used);
            mls_populate_pages(data + row * now, used);
        }
        memmove(data + row * now, data + row * old, used);
        if (stale > end) {
            memset(data + end, 0, stale - end);
        }
    }
}

/* The buffer does not change before the memory is available. */
mls_code mls_kv_buffer_reserve(mls_kv_buffer *buffer, size_t capacity, mls_status *st)
{
    extent old, now;
    if (capacity < buffer->capacity) {
        mls_fail(st, MLS_E_CAPACITY,
                 "capacity %zu is below the present %zu, and a capacity cannot shrink",
                 capacity, buffer->capacity);
        mls_status_expected(st, "at least %zu", buffer->capacity);
        return mls_status_got(st, "%zu", capacity);
    }
    if (!compute_extent(buffer, buffer->capacity, &old) ||
        !compute_extent(buffer, capacity, &now)) {
        return fail_too_large(buffer, capacity, st);
    }
    /* the system cannot grow a range whose parts have different advice; the new pages
     * inherit this advice */
    mls_advise_pages(buffer->pages.data, buffer->pages.mapped, false);
    const mls_code code = mls_pages_grow(&buffer->pages, now.total, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_advise_pages(buffer->pages.data, buffer->pages.mapped, false); /* if copied */
    spread_rows(buffer->pages.data, now.rows, mls_kv_buffer_length(buffer) * old.step,
                old.row, now.row);
    buffer->capacity = capacity;
    return MLS_OK;
}
