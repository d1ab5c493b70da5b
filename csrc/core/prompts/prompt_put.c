/* prompt_put: which records of a prompt are not stored yet; checks of token ids and
 * items; batches that are stored. */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "base/size.h"
#include "prompts/prompt_extra.h"

#include <string.h>

enum { HEADER_BYTES = 4 << 20 }; /* headers kept in memory for one sync */

/* One put. */
typedef struct put_work {
    mls_prompt_log *log;
    const mls_prompt_prefix *prefix;
    mls_prompt_item *items;
    size_t count;
    uint64_t max_bytes;
    const mls_progress *progress;
    unsigned char fingerprint[MLS_PROMPT_FINGERPRINT];
    mls_prompt_key *chain; /* key of the prefix with i blocks; `blocks` + 1 of them */
    size_t blocks;
    mls_prompt_header *headers; /* of the items */
} put_work;

/* ---- token ids ---- */

/* Return the id at `from`, an integer of a dtype with `bytes` bytes. A negative one is
 * large. */
static inline uint64_t load_id(mls_dtype dtype, size_t bytes, const unsigned char *from)
{
    uint32_t narrow;
    uint64_t wide;
    if (bytes == 8) {
        memcpy(&wide, from, sizeof wide);
        return wide;
    }
    memcpy(&narrow, from, sizeof narrow);
    return dtype == MLS_I32 && narrow > INT32_MAX ? UINT64_MAX : narrow;
}

/* Copy the ids of `view` to `tokens`, and return the number of the first one that is out
 * of range, or of all. */
static size_t copy_ids(const mls_tensor *view, uint32_t *tokens)
{
    const size_t count = view->shape[0], bytes = mls_tensor_item_bytes(view);
    const mls_dtype dtype = view->dtype;
    const ptrdiff_t step = view->strides[0];
    const unsigned char *from = view->data;
    for (size_t i = 0; i < count; i++, from += step) {
        const uint64_t id = load_id(dtype, bytes, from);
        if (id > UINT32_MAX) {
            return i;
        }
        tokens[i] = (uint32_t)id;
    }
    return count;
}

/* Copy token ids from an array of integers. Negative ids are refused by their size: see
 * load_id. */
mls_code mls_prompt_tokens(const mls_tensor *view, uint32_t **out, mls_status *st)
{
    const bool is_integer = view->dtype == MLS_I32 || view->dtype == MLS_U32 ||
                            view->dtype == MLS_I64 || view->dtype == MLS_U64;
    if (!is_integer || view->swapped) {
        return mls_fail(st, MLS_E_DTYPE,
                        "token ids must be integers of 32 or 64 bits, got %s",
                        mls_dtype_of(view->dtype)->name);
    }
    if (view->rank != 1) {
        return mls_fail(st, MLS_E_SHAPE, "token ids must have one axis, got %d",
                        view->rank);
    }
    uint32_t *tokens = mls_alloc(view->shape[0], sizeof *tokens);
    if (tokens == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %zu token ids", view->shape[0]);
    }
    const size_t copied = copy_ids(view, tokens);
    if (copied < view->shape[0]) {
        mls_free(tokens);
        return mls_fail(st, MLS_E_VALUE, "token %zu is not in 0 .. 2**32 - 1", copied);
    }
    *out = tokens;
    return MLS_OK;
}

/* ---- keys and headers of the items ---- */

/* Return the number of tokens before the item: the end of the last block before it. */
static size_t item_start(const put_work *w, const mls_prompt_item *item)
{
    const size_t block = w->prefix->block_tokens;
    return item->kind == 0 ? item->end - block : item->end / block * block;
}

/* Fail with MLS_E_VALUE if the item's end is beyond the prompt or not the end of a
 * block. */
static mls_code check_item(const put_work *w, const mls_prompt_item *item, mls_status *st)
{
    const size_t block = w->prefix->block_tokens;
    if (item->end > w->prefix->count || item->end > UINT32_MAX) {
        return mls_fail(st, MLS_E_VALUE,
                        "a record ends at token %zu of a prompt of %zu tokens", item->end,
                        w->prefix->count);
    }
    if (item->kind == 0 && (item->end == 0 || item->end % block != 0)) {
        return mls_fail(st, MLS_E_VALUE, "a block of %zu tokens cannot end at token %zu",
                        block, item->end);
    }
    return MLS_OK;
}

/* Compute the key of each prefix of whole blocks. */
static void compute_chain(put_work *w)
{
    mls_prompt_hash hash =
        mls_prompt_hash_root(w->log->id, w->fingerprint, w->prefix->fingerprint_bytes);
    w->chain[0] = mls_prompt_hash_key(&hash);
    for (size_t i = 0; i < w->blocks; i++) {
        hash = mls_prompt_hash_begin(w->log->id, &w->chain[i], 0);
        mls_prompt_hash_range(&hash, w->log->id, 0, w->prefix,
                              i * w->prefix->block_tokens,
                              (i + 1) * w->prefix->block_tokens);
        w->chain[i + 1] = mls_prompt_hash_key(&hash);
    }
}

/* Set `*out` to the header of the item's record, with its key and sizes. MLS_E_VALUE,
 * MLS_E_SIZE. */
static mls_code make_header(const put_work *w, const mls_prompt_item *item,
                            mls_prompt_header *out, mls_status *st)
{
    const size_t start = item_start(w, item);
    *out = (mls_prompt_header){.kind = item->kind,
                               .parent = w->chain[start / w->prefix->block_tokens],
                               .fingerprint_bytes = w->prefix->fingerprint_bytes,
                               .end = item->end,
                               .token_count = item->end - start,
                               .part_count = item->part_count,
                               .meta = item->meta,
                               .meta_bytes = item->meta_bytes};
    out->extras =
        mls_prompt_extras_between(w->prefix, start, item->end, &out->extra_count);
    memcpy(out->fingerprint, w->fingerprint, MLS_PROMPT_FINGERPRINT);
    mls_prompt_hash hash = mls_prompt_hash_begin(w->log->id, &out->parent, item->kind);
    mls_prompt_hash_range(&hash, w->log->id, item->kind, w->prefix, start, item->end);
    out->key = mls_prompt_hash_key(&hash);
    uint64_t payload = 0;
    for (size_t i = 0; i < item->part_count; i++) {
        size_t bytes = 0;
        if (!mls_tensor_bytes(&item->parts[i], &bytes) ||
            !mls_u64_add(payload, bytes, &payload)) {
            return mls_fail(st, MLS_E_SIZE,
                            "the parts have more bytes than can be stored");
        }
    }
    return mls_prompt_header_sizes(out, payload, st);
}

/* Return whether the parent of an item is stored, or is the root. */
static bool has_parent(const put_work *w, const mls_prompt_item *item)
{
    return item_start(w, item) == 0 ||
           mls_prompt_index_find(&w->log->index, &w->headers[item - w->items].parent) !=
               MLS_PROMPT_NONE;
}

/* Set the flag MLS_PROMPT_KEPT of the entry with `key`, removed or not, if the index has
 * one, to `is_kept`. */
static void set_kept(mls_prompt_index *index, const mls_prompt_key *key, bool is_kept)
{
    const uint32_t number = mls_prompt_index_find_any(index, key);
    if (number != MLS_PROMPT_NONE) {
        uint8_t *flags = &index->entries[number].flags;
        *flags &= (uint8_t)~MLS_PROMPT_KEPT;
        *flags |= is_kept ? MLS_PROMPT_KEPT : 0;
    }
}

/* Protect the stored part of the chain, and the stored items, from the eviction for the
 * others; or end the protection if not `is_protected`. Removed entries are flagged too:
 * this put stores them, so pinned records behind them can be found. */
static void protect_stored(const put_work *w, bool is_protected)
{
    for (size_t i = 1; i <= w->blocks; i++) {
        set_kept(&w->log->index, &w->chain[i], is_protected);
    }
    for (size_t i = 0; i < w->count; i++) {
        set_kept(&w->log->index, &w->headers[i].key, is_protected);
    }
}

/* ---- batches: the records that one sync makes durable ---- */

/* Compare item `number` with the earlier ones of its batch, which begins with item
 * `first`: clear `*is_new` if one has its key, and set `*is_rooted` if one is its parent.
 * Items are in the order of their ends, so those before its block do not matter. */
static void compare_with_batch(const put_work *w, size_t first, size_t number,
                               bool *is_new, bool *is_rooted)
{
    const mls_prompt_header *header = &w->headers[number];
    const size_t start = item_start(w, &w->items[number]);
    for (size_t i = number; i > first && w->items[i - 1].end >= start; i--) {
        if (w->items[i - 1].result == 1) {
            const mls_prompt_key *key = &w->headers[i - 1].key;
            *is_new = *is_new && !mls_prompt_key_equal(key, &header->key);
            *is_rooted = *is_rooted || mls_prompt_key_equal(key, &header->parent);
        }
    }
}

/* Choose items from number `first` on, at least one, and as many as a segment should have
 * (`limit` bytes). Sets their result to 1; to 0 if an item is stored already, and to -1
 * if it has no parent. Returns the number after the last one, and sets `*bytes` to the
 * bytes of those with result 1. */
static size_t choose_batch(put_work *w, size_t first, uint64_t limit, uint64_t *bytes)
{
    size_t next = first, header_bytes = 0;
    uint64_t sum = 0;
    for (; next < w->count; next++) {
        mls_prompt_item *item = &w->items[next];
        const mls_prompt_header *header = &w->headers[next];
        bool is_new =
            mls_prompt_index_find(&w->log->index, &header->key) == MLS_PROMPT_NONE;
        bool is_rooted = has_parent(w, item);
        compare_with_batch(w, first, next, &is_new, &is_rooted);
        item->result = !is_new ? 0 : is_rooted ? 1 : -1;
        if (item->result != 1) {
            continue;
        }
        if (sum > 0 && (sum + header->record_bytes > limit ||
                        header_bytes + header->header_bytes > HEADER_BYTES)) {
            break;
        }
        sum += header->record_bytes;
        header_bytes += header->header_bytes;
    }
    *bytes = sum;
    return next;
}

/* Append the items first .. end - 1 with result 1, which have `bytes` bytes, and commit
 * them; `limit` as in mls_prompt_append_begin. On failure none of them is stored. */
static mls_code write_batch(put_work *w, size_t first, size_t end, uint64_t bytes,
                            uint64_t limit, mls_status *st)
{
    mls_prompt_append append;
    mls_code code =
        mls_prompt_append_begin(w->log, bytes, limit, w->progress, &append, st);
    for (size_t i = first; code == MLS_OK && i < end; i++) {
        const mls_prompt_item *item = &w->items[i];
        if (item->result == 1) {
            append.source = item->source;
            code = mls_prompt_append_record(&append, &w->headers[i],
                                            w->prefix->tokens + item_start(w, item),
                                            item->parts, st);
        }
    }
    if (code == MLS_OK) {
        return mls_prompt_append_commit(&append, st);
    }
    mls_prompt_append_abort(&append);
    return code;
}

/* Store the next batch of items, from number `*next` on, and set `*next` to the item
 * behind it. Without room for a batch, nothing after it is stored either: their result is
 * -1. */
static mls_code put_batch(put_work *w, size_t *next, mls_status *st)
{
    const uint64_t limit = mls_prompt_segment_limit(w->max_bytes);
    const size_t first = *next;
    uint64_t bytes;
    bool fits = true;
    mls_prompt_lock_state(w->log);
    *next = choose_batch(w, first, limit, &bytes);
    protect_stored(w, true);
    mls_prompt_unlock_state(w->log);
    /* an upper bound: the head of a new segment, and the rows of the segment and of the
     * entries in the index file */
    const uint64_t overhead =
        2 * MLS_PROMPT_FILE_HEAD + MLS_PROMPT_UNIT * (*next - first);
    mls_code code = bytes == 0
                        ? MLS_OK
                        : mls_prompt_make_room(w->log, bytes + overhead, w->max_bytes,
                                               w->progress, &fits, st);
    mls_prompt_lock_state(w->log);
    protect_stored(w, false);
    mls_prompt_unlock_state(w->log);
    for (size_t i = first; !fits && i < w->count; i++) {
        w->items[i].result = w->items[i].result == 0 && i < *next ? 0 : -1;
    }
    if (!fits) {
        *next = w->count;
    } else if (code == MLS_OK && bytes > 0) {
        code = write_batch(w, first, *next, bytes, limit, st);
    }
    return code;
}

/* ---- the put ---- */

/* Allocate and compute the keys of the chain and the headers of the items, and check all
 * items. The caller frees both, also on failure. MLS_E_VALUE, MLS_E_SIZE,
 * MLS_E_MEMORY. */
static mls_code prepare_items(put_work *w, mls_status *st)
{
    mls_code code = MLS_OK;
    memcpy(w->fingerprint, w->prefix->fingerprint, w->prefix->fingerprint_bytes);
    w->blocks = w->prefix->count / w->prefix->block_tokens;
    w->chain = mls_alloc(w->blocks + 1, sizeof *w->chain);
    w->headers = mls_alloc(w->count, sizeof *w->headers);
    if (w->chain == NULL || w->headers == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %zu records", w->count);
    }
    compute_chain(w);
    for (size_t i = 0; code == MLS_OK && i < w->count; i++) {
        code = check_item(w, &w->items[i], st);
        if (code == MLS_OK) {
            code = make_header(w, &w->items[i], &w->headers[i], st);
        }
    }
    return code;
}

/* Store the records of a prompt, batch by batch. All items are checked before the first
 * is written. */
mls_code mls_prompt_put(mls_prompt_log *log, const mls_prompt_prefix *prefix,
                        mls_prompt_item *items, size_t count, uint64_t max_bytes,
                        const mls_progress *progress, mls_status *st)
{
    put_work w = {.log = log,
                  .prefix = prefix,
                  .items = items,
                  .count = count,
                  .max_bytes = max_bytes,
                  .progress = progress};
    mls_code code = prepare_items(&w, st);
    for (size_t next = 0; code == MLS_OK && next < count;) {
        code = put_batch(&w, &next, st);
    }
    if (code == MLS_OK) {
        code = mls_prompt_compact(log, max_bytes, progress, st);
    }
    mls_free(w.chain);
    mls_free(w.headers);
    return code;
}
