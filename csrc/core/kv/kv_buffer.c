/* kv_buffer: grows, shrinks and enlarges a cache in place: reserved memory, distance of
 * rows, zeros (KVState).
 *
 * A row is the memory of one index of the axes before the sequence: `capacity` positions.
 * Invariant: all bytes of a row beyond the length are zero. Fresh pages are zero,
 * shrinking zeroes the positions that leave the view, and moving rows apart zeroes their
 * old memory. So growing the length writes nothing, and pages that were never in the view
 * are never touched.
 */
#include "kv/kv_buffer.h"

#include <string.h>

/* Set `*out` to a view of `capacity` positions in each row of the buffer. `capacity` may
 * be one that the buffer does not have yet: the view then gives only the size and the
 * strides.
 * MLS_E_SIZE: the bytes exceed the address space. */
static mls_code view_capacity(const mls_kv_buffer *b, size_t capacity, mls_tensor *out,
                              mls_status *st)
{
    size_t shape[MLS_KV_MAX_RANK];
    memcpy(shape, b->shape, sizeof shape);
    shape[b->axis] = capacity;
    return mls_tensor_init(out, b->pages.data, b->dtype, b->rank, shape, st);
}

/* Fail with MLS_E_CAPACITY because `got`, the value that messages call `label`, exceeds
 * `most`, the value that they call `limit`. */
static mls_code fail_capacity(mls_status *st, const char *label, size_t got,
                              const char *limit, size_t most)
{
    mls_fail(st, MLS_E_CAPACITY, "%s %zu is beyond %s %zu", label, got, limit, most);
    mls_status_expected(st, "at most %zu", most);
    return mls_status_got(st, "%zu", got);
}

/* Reserve pages for `capacity` positions. New pages are zero, so the invariant of this
 * file holds for the initial length. */
mls_code mls_kv_buffer_init(mls_kv_buffer *out, int rank, const size_t *shape, int axis,
                            size_t capacity, mls_dtype dtype, mls_status *st)
{
    mls_kv_buffer b = {.dtype = dtype, .rank = rank, .axis = axis, .capacity = capacity};
    memcpy(b.shape, shape, (size_t)rank * sizeof shape[0]);
    if (shape[axis] > capacity) {
        return fail_capacity(st, "sequence length", shape[axis], "the capacity",
                             capacity);
    }
    mls_tensor view;
    mls_code code = view_capacity(&b, capacity, &view, st);
    if (code == MLS_OK) {
        code = mls_pages_init(&b.pages, mls_kv_bytes(&view), st);
    }
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

/* Return a view of positions start .. start + length - 1 in every row. */
static mls_tensor slice_positions(const mls_kv_buffer *b, size_t start, size_t length)
{
    mls_tensor full_view = {0};
    mls_status unused;
    (void)view_capacity(b, b->capacity, &full_view, &unused); /* it is reserved */
    return mls_tensor_slice(&full_view, b->axis, start, length);
}

mls_tensor mls_kv_buffer_view(const mls_kv_buffer *buffer)
{
    return slice_positions(buffer, 0, mls_kv_buffer_length(buffer));
}

/* Copy `src` into the view, and request its pages meanwhile. If length and capacity are
 * equal, rows have no gaps between them, so huge pages may span several rows. */
void mls_kv_buffer_fill(const mls_kv_buffer *buffer, const mls_kernels *kernels,
                        mls_pool *pool, const mls_tensor *src)
{
    const mls_tensor dst = mls_kv_buffer_view(buffer);
    const size_t length = mls_kv_buffer_length(buffer);
    if (length == buffer->capacity && buffer->pages.bytes > 0) {
        /* The advice splits the range. Linux joins the parts again, which
         * mls_kv_buffer_reserve needs, only if the range was written before the split. */
        buffer->pages.data[0] = 0;
        mls_advise_inner_huge_pages(buffer->pages.data, buffer->pages.bytes);
    }
    const mls_kv_request request = {
        .axis = buffer->axis, .position = (int64_t)length, .memory = MLS_KV_SPARSE};
    mls_kv_move(kernels, pool, &dst, src, &request);
}

/* Change the length: keep the first `position` positions, and zero the rest of the old
 * view. Checks both numbers before it changes memory, so the buffer is unchanged on
 * failure. */
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
        mls_fill(kernels, &dropped, zero,
                 (mls_destination){.bytes = mls_kv_bytes(&dropped)});
    }
    buffer->shape[buffer->axis] = length;
    return MLS_OK;
}

/* Move rows apart: row i moves from byte i * old_step to byte i * new_step of `data`
 * (`new_step` is at least `old_step`), and its old memory becomes zero. Only the first
 * `used` bytes of a row can be nonzero, so only those move. The last row moves first: its
 * target is beyond all rows that still have to move. */
static void spread_rows(unsigned char *data, size_t rows, size_t used, size_t old_step,
                        size_t new_step)
{
    const size_t old_total = rows * old_step;
    const bool is_dense =
        new_step - used < mls_page_bytes(); /* every page has some of a row */
    if (is_dense) { /* all new pages will be written: request them in one call */
        mls_populate_pages(data + old_total, rows * new_step - old_total);
    }
    for (size_t row = rows; row-- > 0;) {
        const size_t end = row * new_step + used;
        const size_t next = (row + 1) * new_step;
        /* zeros are needed up to the next row, or to the end of the old memory */
        const size_t zeros_end = next < old_total ? next : old_total;
        /* pages beyond the old memory were never touched */
        if (row * new_step >= old_total && !is_dense) {
            mls_advise_inner_huge_pages(data + row * new_step, used);
            mls_populate_pages(data + row * new_step, used);
        }
        memmove(data + row * new_step, data + row * old_step, used);
        if (zeros_end > end) {
            memset(data + end, 0, zeros_end - end);
        }
    }
}

/* Raise the capacity: enlarge the pages, then move the rows apart. The buffer does not
 * change before the memory is available. */
mls_code mls_kv_buffer_reserve(mls_kv_buffer *buffer, size_t capacity, mls_status *st)
{
    mls_tensor view;
    if (capacity < buffer->capacity) {
        mls_fail(st, MLS_E_CAPACITY,
                 "capacity %zu is below the present %zu, and a capacity cannot shrink",
                 capacity, buffer->capacity);
        mls_status_expected(st, "at least %zu", buffer->capacity);
        return mls_status_got(st, "%zu", capacity);
    }
    mls_code code = view_capacity(buffer, capacity, &view, st);
    if (code != MLS_OK) {
        return code;
    }
    /* the system cannot grow a range whose parts have different advice; the new pages
     * inherit this advice */
    mls_advise_pages(buffer->pages.data, buffer->pages.mapped, false /* no huge pages */);
    const size_t total = mls_kv_bytes(&view);
    code = mls_pages_grow(&buffer->pages, total, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_advise_pages(buffer->pages.data, buffer->pages.mapped,
                     false /* no huge pages */); /* if copied */
    if (total > 0) {
        const size_t step = (size_t)view.strides[buffer->axis]; /* of a position */
        spread_rows(buffer->pages.data, total / (step * capacity),
                    step * mls_kv_buffer_length(buffer), step * buffer->capacity,
                    step * capacity);
    }
    buffer->capacity = capacity;
    return MLS_OK;
}
