/* kv_buffer: a key-value cache that grows and shrinks within reserved memory.
 *
 * A row is the memory of one head of one layer: `capacity` positions. Invariant: all
 * bytes of a row beyond `length` are zero. Fresh pages are zero, shrinking zeroes the
 * positions that leave the view, and moving rows apart zeroes their old memory. So
 * growing the length writes nothing, and pages that were never in the view are never
 * touched.
 */
#include "kv/kv_buffer.h"

#include "base/size.h"
#include "kv/kv_transition.h"

#include <string.h>

/* Bytes of one position (`step`) and of one row of `capacity` positions (`row`), the
 * number of rows, and the bytes of all rows (`total`). */
typedef struct extent {
    size_t step, row, rows, total;
} extent;

/* Compute the extent of the buffer for a capacity. Returns false if its bytes overflow.
 */
static bool compute_extent(const mls_kv_buffer *b, size_t capacity, extent *out)
{
    extent e;
    if (!mls_size_mul(b->head_dim, mls_dtype_of(b->dtype)->item_bytes, &e.step) ||
        !mls_size_mul(e.step, capacity, &e.row) ||
        !mls_size_mul(b->layers, b->heads, &e.rows) ||
        !mls_size_mul(e.row, e.rows, &e.total) || e.total > PTRDIFF_MAX) {
        return false;
    }
    *out = e;
    return true;
}

/* Fail because compute_extent overflowed; the message has the user's shape. */
static mls_code fail_too_large(const mls_kv_buffer *b, size_t capacity, mls_status *st)
{
    return mls_fail(st, MLS_E_SIZE, "(%zu, %zu, %zu, %zu) of %s is larger than memory",
                    b->layers, b->heads, capacity, b->head_dim,
                    mls_dtype_of(b->dtype)->name);
}

/* Fail with MLS_E_CAPACITY: `what` is `got`, but at most `most`, the value of `limit`. */
static mls_code fail_capacity(mls_status *st, const char *what, size_t got,
                              const char *limit, size_t most)
{
    mls_fail(st, MLS_E_CAPACITY, "%s %zu is beyond %s %zu", what, got, limit, most);
    mls_status_expected(st, "at most %zu", most);
    mls_status_got(st, "%zu", got);
    return MLS_E_CAPACITY;
}

/* New pages are zero, so the invariant holds for every length. */
mls_code mls_kv_buffer_init(mls_kv_buffer *out, const size_t *shape, size_t capacity,
                            mls_dtype dtype, mls_status *st)
{
    mls_kv_buffer b = {.dtype = dtype,
                       .layers = shape[0],
                       .heads = shape[1],
                       .length = shape[MLS_KV_AXIS],
                       .head_dim = shape[3],
                       .capacity = capacity};
    if (b.length > capacity) {
        return fail_capacity(st, "sequence length", b.length, "the capacity", capacity);
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
    extent e = {0};
    (void)compute_extent(b, b->capacity, &e); /* did not overflow before */
    mls_tensor t = {.data = b->pages.data + e.step * start,
                    .dtype = b->dtype,
                    .rank = MLS_KV_RANK,
                    .shape = {b->layers, b->heads, length, b->head_dim},
                    .strides = {(ptrdiff_t)(e.row * b->heads), (ptrdiff_t)e.row,
                                (ptrdiff_t)e.step,
                                (ptrdiff_t)mls_dtype_of(b->dtype)->item_bytes}};
    return t;
}

mls_tensor mls_kv_buffer_view(const mls_kv_buffer *buffer)
{
    return slice_positions(buffer, 0, buffer->length);
}

/* If length and capacity are equal, rows are adjacent and huge pages may span them. */
void mls_kv_buffer_fill(const mls_kv_buffer *buffer, const mls_kernels *kernels,
                        mls_pool *pool, const mls_tensor *src)
{
    const mls_tensor dst = mls_kv_buffer_view(buffer);
    if (buffer->length == buffer->capacity) {
        mls_advise_inner_huge_pages(buffer->pages.data, buffer->pages.bytes);
    }
    mls_kv_move(kernels, pool, &dst, src, buffer->length, NULL, MLS_KV_SPARSE);
}

/* Checks both numbers before it changes memory, so the buffer is unchanged on failure. */
mls_code mls_kv_buffer_resize(mls_kv_buffer *buffer, const mls_kernels *kernels,
                              size_t length, size_t position, const char *position_name,
                              mls_status *st)
{
    if (length > buffer->capacity) {
        return fail_capacity(st, "sequence length", length, "the reserved capacity",
                             buffer->capacity);
    }
    const size_t shorter = length < buffer->length ? length : buffer->length;
    if (position > shorter) {
        return fail_capacity(st, position_name, position, "the sequence length", shorter);
    }
    /* positions that leave the view, or stay in it without a token, become zero */
    if (position < buffer->length) {
        const mls_tensor dropped =
            slice_positions(buffer, position, buffer->length - position);
        const mls_element zero = {.size = mls_dtype_of(buffer->dtype)->item_bytes};
        size_t bytes = 0;
        (void)mls_tensor_bytes(
            &dropped, &bytes); /* smaller than the buffer, so it cannot overflow */
        mls_fill(kernels, &dropped, zero, (mls_destination){.bytes = bytes});
    }
    buffer->length = length;
    return MLS_OK;
}

/* Move rows from `old` to `now` bytes apart, and zero their old memory. The last row
 * moves first: its new place is beyond all rows that are still to be moved. Only the
 * `used` first bytes of a row can be nonzero, so only those move. */
static void spread_rows(unsigned char *data, size_t rows, size_t used, size_t old,
                        size_t now)
{
    const size_t old_total = rows * old;
    for (size_t row = rows; row-- > 0;) {
        const size_t end = row * now + used;
        const size_t next = (row + 1) * now;
        const size_t stale = next < old_total ? next : old_total;
        if (row * now >= old_total) { /* these pages were never touched */
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
        mls_status_got(st, "%zu", capacity);
        return MLS_E_CAPACITY;
    }
    if (!compute_extent(buffer, buffer->capacity, &old) ||
        !compute_extent(buffer, capacity, &now)) {
        return fail_too_large(buffer, capacity, st);
    }
    const mls_code code = mls_pages_grow(&buffer->pages, now.total, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_advise_pages(buffer->pages.data, buffer->pages.mapped, false);
    spread_rows(buffer->pages.data, now.rows, buffer->length * old.step, old.row,
                now.row);
    buffer->capacity = capacity;
    return MLS_OK;
}
