/* staging: which arrays an asynchronous save copies within its budget; the copies; the
 * memory of the writer itself.
 *
 * Copies are packed without alignment, because the writer reads bytes. So a budget of
 * exactly the state's size holds all of it. */
#include "checkpoint/write/staging.h"

#include "array/copy/pack_range.h"
#include "base/memory.h"
#include "base/search.h"
#include "base/size.h"
#include "checkpoint/storage/compressed_frames.h"
#include "sharding/layout.h"

#include <stdlib.h>
#include <string.h>

enum {
    PIECE_BYTES = 2 << 20,   /* bytes of one task; a multiple of every element size */
    RECORD_BYTES = 512,      /* memory for each item during a save */
    THREAD_BYTES = 64 << 10, /* memory of a thread besides its buffer: touched stack */
    SAVE_BYTES = 1 << 20     /* memory of a save: lists, names, messages between ranks */
};

typedef struct staged_item {
    size_t bytes;
    size_t number; /* index of the item */
    size_t place;  /* offset in the memory; other values while omit_items chooses */
} staged_item;

typedef struct copy_state {
    const mls_staging *to;
    mls_shard_item *items;
    const staged_item *order;
    size_t count;
    size_t bytes; /* total of all copies */
} copy_state;

/* ---- sizes ---- */

/* Set `*out` to the packed bytes of an item's part, and check its layout and shape.
 * Errors of mls_layout_part, with the tensor's name; MLS_E_SIZE. */
static mls_code item_bytes(const mls_shard_item *item, size_t *out, mls_status *st)
{
    mls_part part;
    mls_code code =
        mls_layout_part(&item->layout, item->rank, item->shape, item->part, &part, st);
    if (code == MLS_OK && !mls_size_mul(mls_part_count(&part),
                                        mls_dtype_of(item->dtype)->item_bytes, out)) {
        code = mls_fail(st, MLS_E_SIZE, "the shard has more bytes than can be stored");
    }
    if (code != MLS_OK) {
        mls_status_name(st, item->id.name.data, item->id.name.length);
    }
    return code;
}

/* Add up the bytes of all items. The items are in memory, so the sum can only overflow if
 * they share memory. */
mls_code mls_staging_need(const mls_shard_item *items, size_t count, size_t *out,
                          mls_status *st)
{
    size_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        size_t bytes = 0;
        const mls_code code = item_bytes(&items[i], &bytes, st);
        if (code != MLS_OK) {
            return code;
        }
        if (!mls_size_add(sum, bytes, &sum)) {
            return mls_fail(st, MLS_E_SIZE,
                            "the state has more bytes than can be stored");
        }
    }
    *out = sum;
    return MLS_OK;
}

/* Estimate the memory that the writer itself takes, from above; the constants were
 * measured with 150 and 20,000 items. With `compress` each thread holds one compressed
 * shard, at most three quarters of its size, and three frames. */
mls_code mls_staging_overhead(const mls_shard_item *items, size_t count, size_t threads,
                              bool compress, size_t *out, mls_status *st)
{
    size_t sum = count * RECORD_BYTES + SAVE_BYTES; /* cannot overflow */
    size_t largest = 0;
    for (size_t i = 0; compress && i < count; i++) {
        size_t bytes = 0;
        const mls_code code = item_bytes(&items[i], &bytes, st);
        if (code != MLS_OK) {
            return code;
        }
        largest = bytes > largest ? bytes : largest;
    }
    const size_t coded = compress ? largest - largest / 4 + 3 * MLS_FRAME_BYTES : 0;
    for (size_t i = 0; i < threads; i++) {
        if (!mls_size_add(sum, MLS_WRITE_BUFFER + THREAD_BYTES, &sum) ||
            !mls_size_add(sum, coded, &sum)) {
            return mls_fail(st, MLS_E_SIZE,
                            "compression needs more bytes than memory can have");
        }
    }
    *out = sum;
    return MLS_OK;
}

/* ---- choose items ---- */

/* For qsort, by size, then index, so that the choice is the same on every machine. */
static int compare_chosen(const void *a, const void *b)
{
    const staged_item *x = a, *y = b;
    return x->bytes != y->bytes ? (x->bytes < y->bytes ? -1 : 1)
                                : (x->number < y->number ? -1 : x->number > y->number);
}

/* Return the position in `order` (`count` items, sorted by ascending size) of the first
 * item with at least `bytes` bytes; `count` if there is none. */
static size_t find_item_of_size(const staged_item *order, size_t count, size_t bytes)
{
    size_t at;
    MLS_FIND_FIRST(at, count, order[at].bytes >= bytes);
    return at;
}

/* Choose the items to omit, with at least `excess` bytes in total: their `place` becomes
 * SIZE_MAX, and the others' 0. Meanwhile it is the step that omitted the item; before the
 * call it is SIZE_MAX - 1, above all steps. `order` is sorted by ascending size, and all
 * items together have at least `excess` bytes. Each step considers the smallest item that
 * covers the remaining excess as the last one. It then omits the largest item that does
 * not cover it, and continues. The step with the fewest omitted bytes wins. A last item
 * always exists: until one is found, no item is skipped, so the remaining items still
 * cover the excess. */
static void omit_items(staged_item *order, size_t count, size_t excess)
{
    /* bytes of the best choice so far, its last item and the step that found it */
    size_t least = SIZE_MAX, last = count, best = 0;
    size_t omitted = 0;
    size_t high = count; /* items below this position are available */
    for (size_t step = 0; omitted < excess; step++) {
        const size_t enough = find_item_of_size(order, high, excess - omitted);
        if (enough < high && omitted + order[enough].bytes < least) {
            least = omitted + order[enough].bytes;
            last = enough;
            best = step;
        }
        if (enough == 0) {
            break;
        }
        high = enough - 1;
        omitted += order[high].bytes;
        /* the step that omitted the item, for the loop below */
        order[high].place = step;
    }
    for (size_t i = 0; i < count; i++) {
        const bool out = i == last || order[i].place < best;
        order[i].place = out ? SIZE_MAX : 0;
    }
}

/* List the items to copy in `order`, smallest first, with their offsets in the staging
 * memory; `out` receives their number and total bytes. Items that are staged already are
 * skipped. `order` has room for all items. Errors of item_bytes; MLS_E_SIZE. */
static mls_code choose_items(const mls_staging *to, const mls_shard_item *items,
                             size_t count, staged_item *order, copy_state *out,
                             mls_status *st)
{
    size_t listed = 0, sum = 0, item_count = 0;
    for (size_t i = 0; i < count; i++) {
        if (items[i].staged) {
            continue;
        }
        /* as omit_items expects it; unless that runs, nothing is omitted */
        order[listed] = (staged_item){.number = i, .place = SIZE_MAX - 1};
        const mls_code code = item_bytes(&items[i], &order[listed].bytes, st);
        if (code != MLS_OK) {
            return code;
        }
        if (!mls_size_add(sum, order[listed].bytes, &sum)) {
            return mls_fail(st, MLS_E_SIZE,
                            "the state has more bytes than can be stored");
        }
        listed++;
    }
    qsort(order, listed, sizeof *order, compare_chosen);
    if (sum > to->bytes) {
        omit_items(order, listed, sum - to->bytes);
    }
    sum = 0;
    for (size_t i = 0; i < listed; i++) {
        if (order[i].place != SIZE_MAX) {
            order[item_count] = order[i];
            order[item_count].place = sum;
            sum += order[item_count++].bytes;
        }
    }
    out->count = item_count;
    out->bytes = sum;
    return MLS_OK;
}

/* ---- copying ---- */

/* Copy bytes `start` .. `start + bytes` of the item that `staged` describes to its place
 * in the staging memory; both are multiples of its element size. */
static void copy_bytes(const copy_state *c, const staged_item *staged, size_t start,
                       size_t bytes)
{
    const mls_shard_item *item = &c->items[staged->number];
    const size_t size = mls_dtype_of(item->dtype)->item_bytes;
    unsigned char *to = c->to->memory + staged->place + start;
    /* any strides and either byte order, or plain bytes */
    if (item->data == NULL) {
        mls_pack_range(c->to->kernels, item->strided, item->dtype,
                       item->first + start / size, bytes / size, to);
    } else {
        mls_copy_bytes(c->to->kernels, to, item->data + item->first * size + start, bytes,
                       (mls_destination){.bytes = c->bytes});
    }
}

/* Return the position of the last item that starts at or before byte `place` of the
 * staging memory. It always exists, since the items start at 0. */
static size_t find_item(const copy_state *c, size_t place)
{
    size_t after;
    MLS_FIND_FIRST(after, c->count, c->order[after].place > place);
    return after - 1;
}

/* Return the offset, in the item that `staged` describes, of the first element boundary
 * at or after byte `place` of the staging memory; 0 if the item starts later, at most its
 * length. Tasks may divide an item, whose copy is unaligned, but not an element. */
static size_t element_offset(const copy_state *c, const staged_item *staged, size_t place)
{
    if (place <= staged->place) {
        return 0;
    }
    const size_t size = mls_dtype_of(c->items[staged->number].dtype)->item_bytes;
    const size_t within = place - staged->place;
    const size_t rounded = within + (size - within % size) % size;
    return rounded < staged->bytes ? rounded : staged->bytes;
}

/* Thread function: copy the elements that belong into piece `index` (PIECE_BYTES bytes)
 * of the staging memory. A piece may start and end within an item. */
static void copy_task(void *context, size_t index)
{
    const copy_state *c = context;
    const size_t from = index * PIECE_BYTES;
    const size_t to = c->bytes - from < PIECE_BYTES ? c->bytes : from + PIECE_BYTES;
    for (size_t i = find_item(c, from); i < c->count && c->order[i].place < to; i++) {
        /* both ends are rounded in the same way, so exactly one task copies each
         * element */
        const size_t start = element_offset(c, &c->order[i], from);
        const size_t end = element_offset(c, &c->order[i], to);
        if (start < end) {
            copy_bytes(c, &c->order[i], start, end - start);
        }
    }
}

/* Make the items use their copies. Call it after all copying is done: the copy threads
 * read the items. */
static void point_to_copies(const copy_state *c)
{
    for (size_t i = 0; i < c->count; i++) {
        mls_shard_item *item = &c->items[c->order[i].number];
        item->data = c->to->memory + c->order[i].place;
        item->strided = NULL;
        item->first = 0;
        item->staged = true;
    }
}

/* Set `staged` of each item by whether its memory starts in `memory` .. `memory +
 * bytes`. */
void mls_staging_note(mls_shard_item *items, size_t count, const void *memory,
                      size_t bytes)
{
    const uintptr_t start = (uintptr_t)memory;
    for (size_t i = 0; i < count; i++) {
        mls_shard_item *item = &items[i];
        const unsigned char *data = item->data != NULL ? item->data : item->strided->data;
        const uintptr_t address = (uintptr_t)data;
        item->staged = address >= start && address - start < bytes;
    }
}

/* Choose, copy, then point the items to their copies. Sorting takes less than a
 * thousandth of the time of copying. Tasks divide the memory, not the items: several
 * threads share a large item, and small items are grouped. */
mls_code mls_stage(const mls_staging *to, mls_shard_item *items, size_t count,
                   mls_staged *out, mls_status *st)
{
    staged_item *order = mls_alloc(count, sizeof *order);
    if (order == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to stage %zu shards", count);
    }
    copy_state c = {.to = to, .items = items, .order = order};
    const mls_code code = choose_items(to, items, count, order, &c, st);
    if (code == MLS_OK) {
        const size_t pieces = c.bytes / PIECE_BYTES + (c.bytes % PIECE_BYTES != 0);
        mls_pool_run(to->pool, copy_task, &c, pieces);
        point_to_copies(&c);
        mls_staged staged = {.bytes = c.bytes};
        for (size_t i = 0; i < count; i++) {
            staged.lent += !items[i].staged;
        }
        *out = staged;
    }
    mls_free(order);
    return code;
}

/* ---- page allocation ---- */

/* Thread function: write zeros to piece `index` of the memory, so that the system
 * allocates its pages. */
static void touch_task(void *context, size_t index)
{
    const mls_staging *s = context;
    const size_t from = index * PIECE_BYTES;
    const size_t left = s->bytes - from;
    memset(s->memory + from, 0, left < PIECE_BYTES ? left : PIECE_BYTES);
}

/* Several threads share the work, because the system clears a page in the thread that
 * touches it. */
void mls_staging_touch(const mls_staging *staging)
{
    mls_staging copy = *staging;
    mls_pool_run(staging->pool, touch_task, &copy,
                 staging->bytes / PIECE_BYTES + (staging->bytes % PIECE_BYTES != 0));
}
