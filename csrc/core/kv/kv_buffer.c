/* kv_buffer: a cache that grows and shrinks inside memory reserved for it.
 *
 * A row is what one head of one layer has room for: `capacity` positions.  The invariant
 * behind every function is that all bytes of a row beyond `length` are zero: fresh pages
 * are, shrinking zeroes what goes out of view, and moving rows apart zeroes what they
 * leave.  So a longer length finds zeros without writing any, and pages that were never
 * in view are never touched.
 */
#include "kv/kv_buffer.h"

#include "kv/kv_transition.h"
#include "base/size.h"

#include <string.h>

/* Bytes of one position (`step`) and of one row of `capacity` positions (`row`), the
 * number of rows, and the bytes of all rows (`total`). */
typedef struct extent {
    size_t step, row, rows, total;
} extent;

/* The extent of a buffer if it had this capacity; false where its bytes are too many. */
static bool extent_of(const mls_kv_buffer *b, size_t capacity, extent *out)
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

/* The failure that goes with extent_of, with the shape as users know it. */
static mls_code too_large(const mls_kv_buffer *b, size_t capacity, mls_status *st)
{
    return mls_fail(st, MLS_E_SIZE, "(%zu, %zu, %zu, %zu) of %s is larger than memory",
                    b->layers, b->heads, capacity, b->head_dim,
                    mls_dtype_of(b->dtype)->name);
}

/* MLS_E_CAPACITY: `what` is `got`, and `limit`, which is `most`, forbids it. */
static mls_code beyond(mls_status *st, const char *what, size_t got, const char *limit,
                       size_t most)
{
    mls_fail(st, MLS_E_CAPACITY, "%s %zu is beyond %s %zu", what, got, limit, most);
    mls_status_expected(st, "at most %zu", most);
    mls_status_got(st, "%zu", got);
    return MLS_E_CAPACITY;
}

/* The pages are zeros as they come, which is the invariant for every length at once. */
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
        return beyond(st, "sequence length", b.length, "the capacity", capacity);
    }
    extent e;
    if (!extent_of(&b, capacity, &e)) {
        return too_large(&b, capacity, st);
    }
    const mls_code code = mls_pages_init(&b.pages, e.total, st);
    if (code != MLS_OK) {
        return code;
    }
    /* capacity that is never used shall cost no memory: no huge pages */
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

/* Positions start .. start+length-1 of every row. */
static mls_tensor positions(const mls_kv_buffer *b, size_t start, size_t length)
{
    extent e = {0};
    (void)extent_of(b, b->capacity, &e); /* it fitted when the buffer was made */
    mls_tensor t = {.data = b->pages.data + e.step * start,
                    .dtype = b->dtype,
                    .rank = MLS_KV_RANK,
                    .shape = {b->layers, b->heads, length, b->head_dim},
                    .strides = {(ptrdiff_t)(e.row * b->heads), (ptrdiff_t)e.row,
                                (ptrdiff_t)e.step,
                                (ptrdiff_t)mls_dtype_of(b->dtype)->item_bytes}};
    return t;
}

/* What is used; the room behind it belongs to the buffer. */
mls_tensor mls_kv_buffer_view(const mls_kv_buffer *buffer)
{
    return positions(buffer, 0, buffer->length);
}

/* Rows without room for more follow each other: huge pages may span them. */
void mls_kv_buffer_fill(const mls_kv_buffer *buffer, const mls_kernels *kernels,
                        mls_pool *pool, const mls_tensor *src)
{
    const mls_tensor dst = mls_kv_buffer_view(buffer);
    if (buffer->length == buffer->capacity) {
        mls_advise_inner_huge_pages(buffer->pages.data, buffer->pages.bytes);
    }
    mls_kv_move(kernels, pool, &dst, src, buffer->length, NULL, MLS_KV_SPARSE);
}

/* Checks both numbers before it touches memory: on failure the buffer is what it was. */
mls_code mls_kv_buffer_resize(mls_kv_buffer *buffer, const mls_kernels *kernels,
                              size_t length, size_t position, const char *position_name,
                              mls_status *st)
{
    if (length > buffer->capacity) {
        return beyond(st, "sequence length", length, "the reserved capacity",
                      buffer->capacity);
    }
    const size_t shorter = length < buffer->length ? length : buffer->length;
    if (position > shorter) {
        return beyond(st, position_name, position, "the sequence length", shorter);
    }
    /* whatever leaves the view, or stays in view without a token, becomes zero */
    if (position < buffer->length) {
        const mls_tensor dropped = positions(buffer, position, buffer->length - position);
        const mls_element zero = {.size = mls_dtype_of(buffer->dtype)->item_bytes};
        size_t bytes = 0;
        (void)mls_tensor_bytes(&dropped, &bytes); /* less than the buffer has */
        mls_fill(kernels, &dropped, zero, (mls_destination){.bytes = bytes});
    }
    buffer->length = length;
    return MLS_OK;
}

/* Move rows from `old` to `now` bytes apart, and zero what they leave behind.  The last
 * row goes first: its new place is beyond all that is still to be moved.  Only `used`
 * bytes of a row can be other than zero, so only those move. */
static void spread_rows(unsigned char *data, size_t rows, size_t used, size_t old,
                        size_t now)
{
    const size_t old_total = rows * old;
    for (size_t row = rows; row-- > 0;) {
        const size_t end = row * now + used;
        const size_t next = (row + 1) * now;
        const size_t stale = next < old_total ? next : old_total;
        if (row * now >= old_total) { /* pages that were never touched */
            mls_advise_inner_huge_pages(data + row * now, used);
            mls_populate_pages(data + row * now, used);
        }
        memmove(data + row * now, data + row * old, used);
        if (stale > end) {
            memset(data + end, 0, stale - end);
        }
    }
}

/* Nothing of the buffer changes before the memory is there. */
mls_code mls_kv_buffer_reserve(mls_kv_buffer *buffer, size_t capacity, mls_status *st)
{
    extent old, now;
    if (capacity < buffer->capacity) {
        mls_fail(st, MLS_E_CAPACITY,
                 "capacity %zu is below the present %zu, which cannot be given back",
                 capacity, buffer->capacity);
        mls_status_expected(st, "at least %zu", buffer->capacity);
        mls_status_got(st, "%zu", capacity);
        return MLS_E_CAPACITY;
    }
    if (!extent_of(buffer, buffer->capacity, &old) ||
        !extent_of(buffer, capacity, &now)) {
        return too_large(buffer, capacity, st);
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
