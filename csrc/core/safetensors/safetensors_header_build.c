/* safetensors_header_build: order, offsets, dtypes and padding of the tensors in a new
 * file's header.
 *
 * The header is built with zeros for length and checksums, which are filled in at the
 * end.
 *
 * The order of everything is fixed: metadata by key, tensors by item size and name,
 * members as the package writes them. So equal content produces equal bytes.
 */
#include "safetensors/safetensors_header_build.h"

#include "array/tensor.h"
#include "base/memory.h"
#include "base/size.h"
#include "io/json_checksum.h"

#include <stdlib.h>
#include <string.h>

enum {
    LENGTH_BYTES = 8,
    SHOWN_NAME = 100 /* bytes of a name in a message */
};

/* The keys of mlstate in metadata without a tree, and in the two forms of mlx-lm's tree,
 * whose texts of the user are in the branch "0." or "1.". */
enum own_key { HEADER_KEY, BLOCKS_KEY, STATE_KEY, OWN_KEYS };
static const char *const own_keys[3][OWN_KEYS] = {
    {MLS_SAFETENSORS_PREFIX "header.crc32c", MLS_SAFETENSORS_PREFIX "blocks.crc32c",
     MLS_SAFETENSORS_STATE},
    {"0." MLS_SAFETENSORS_PREFIX "header.crc32c",
     "0." MLS_SAFETENSORS_PREFIX "blocks.crc32c", "0." MLS_SAFETENSORS_STATE},
    {"1." MLS_SAFETENSORS_PREFIX "header.crc32c",
     "1." MLS_SAFETENSORS_PREFIX "blocks.crc32c", "1." MLS_SAFETENSORS_STATE},
};

static mls_str text_of(const char *text)
{
    return (mls_str){.data = text, .length = strlen(text)};
}

/* Return the row of own_keys for the form that the caller's metadata have. */
static const char *const *choose_keys(const mls_str_pair *metadata, size_t count)
{
    const mls_str branch = mls_safetensors_branch(metadata, count);
    return own_keys[branch.length == 0 ? 0 : branch.data[0] - '0' + 1];
}

/* ---- order ---- */

/* For qsort: by the bytes of the names. */
static int compare_names(const void *a, const void *b)
{
    return mls_str_compare(((const mls_header_tensor *)a)->name,
                           ((const mls_header_tensor *)b)->name);
}

/* Return the size that decides a tensor's place in the file order. */
static size_t element_bytes(const mls_header_tensor *tensor)
{
    return tensor->element_bytes != 0 ? tensor->element_bytes
                                      : mls_dtype_of(tensor->dtype)->item_bytes;
}

/* For qsort: by descending size of an element, then by name. A tensor's size is a
 * multiple of its element's, which is a power of two, so each starts aligned without
 * padding. */
static int compare_places(const void *a, const void *b)
{
    const size_t x = element_bytes(a), y = element_bytes(b);
    return x != y ? (x < y ? 1 : -1) : compare_names(a, b);
}

static int compare_pairs(const void *a, const void *b)
{
    return mls_str_compare(((const mls_str_pair *)a)->key,
                           ((const mls_str_pair *)b)->key);
}

/* Fail with MLS_E_VALUE and the message "label 'name' why". The name is truncated to
 * leave room for the reason. */
static mls_code fail_name(const char *label, mls_str name, const char *why,
                          mls_status *st)
{
    const int width = (int)(name.length < SHOWN_NAME ? name.length : SHOWN_NAME);
    mls_fail(st, MLS_E_VALUE, "%s '%.*s' %s", label, width, name.data, why);
    return mls_status_name(st, name.data, name.length);
}

/* The message also covers the tables of metadata and checksums, which make the header. */
static mls_code fail_memory(mls_status *st)
{
    return mls_fail(st, MLS_E_MEMORY, "no memory for the file's header");
}

/* Check the names and sort the tensors into file order. Sorting by name first puts
 * duplicates next to each other.
 * MLS_E_VALUE: a name appears twice, is reserved or is not UTF-8. */
static mls_code sort_tensors(mls_header *h, mls_status *st)
{
    for (size_t i = 0; i < h->count; i++) {
        const mls_str name = h->tensors[i].name;
        if (mls_str_is(name, "__metadata__")) {
            return fail_name("tensor name", name, "is reserved by the format", st);
        }
        if (!mls_utf8_valid(name.data, name.length)) {
            return fail_name("tensor name", name, "is not valid UTF-8", st);
        }
    }
    qsort(h->tensors, h->count, sizeof *h->tensors, compare_names);
    for (size_t i = 1; i < h->count; i++) {
        if (compare_names(&h->tensors[i - 1], &h->tensors[i]) == 0) {
            return fail_name("tensor name", h->tensors[i].name, "appears twice", st);
        }
    }
    /* ties are sorted by name again, so the caller's order does not affect the file */
    qsort(h->tensors, h->count, sizeof *h->tensors, compare_places);
    return MLS_OK;
}

/* Allocate one array for the checksums of all blocks, in file order, and point each
 * tensor's `crcs` to its first one. They start at zero, as a running checksum does.
 * MLS_E_MEMORY. */
static mls_code place_checksums(mls_header *h, mls_status *st)
{
    for (size_t i = 0; i < h->count; i++) {
        /* cannot overflow: there are no more blocks than bytes of memory */
        h->block_count += mls_safetensors_blocks(h->tensors[i].bytes);
    }
    h->crcs = mls_alloc(h->block_count, sizeof *h->crcs);
    if (h->crcs == NULL) {
        return fail_memory(st);
    }
    uint32_t *next = h->crcs;
    for (size_t i = 0; i < h->count; i++) {
        h->tensors[i].crcs = next;
        next += mls_safetensors_blocks(h->tensors[i].bytes);
    }
    return MLS_OK;
}

/* Set `*out` to a new array of `count` + 2 pairs, sorted by key: the pairs of `metadata`
 * and the two checksum entries, still without values. The caller frees it. `keys`: the
 * row of own_keys for this metadata; the caller's MLS_SAFETENSORS_STATE gets the key of
 * that row. A caller's key that equals one of the two checksum keys is a duplicate; other
 * reserved keys are allowed here.
 * MLS_E_VALUE: a key appears twice, or a text is not UTF-8. MLS_E_MEMORY. */
static mls_code sort_metadata(const mls_str_pair *metadata, size_t count,
                              const char *const *keys, mls_str_pair **out, mls_status *st)
{
    size_t room;
    mls_str_pair *sorted = NULL;
    if (!mls_size_add(count, 2, &room) ||
        (sorted = mls_alloc(room, sizeof *sorted)) == NULL) {
        return fail_memory(st);
    }
    for (size_t i = 0; i < count; i++) {
        sorted[i] = metadata[i];
        if (mls_str_is(sorted[i].key, MLS_SAFETENSORS_STATE)) {
            sorted[i].key = text_of(keys[STATE_KEY]);
        }
    }
    /* they have no value yet, but are sorted with the others, so that equal content
     * always has the same order */
    sorted[count].key = text_of(keys[HEADER_KEY]);
    sorted[count + 1].key = text_of(keys[BLOCKS_KEY]);
    qsort(sorted, room, sizeof *sorted, compare_pairs);
    for (size_t i = 0; i < room; i++) {
        const mls_str_pair pair = sorted[i];
        const char *why =
            !mls_utf8_valid(pair.key.data, pair.key.length)       ? "is not valid UTF-8"
            : !mls_utf8_valid(pair.value.data, pair.value.length) ? "has a value that is "
                                                                    "not valid UTF-8"
            : i > 0 && compare_pairs(&sorted[i - 1], &pair) == 0  ? "appears twice"
                                                                  : NULL;
        if (why != NULL) {
            const mls_code code = fail_name("metadata key", pair.key, why, st);
            mls_free(sorted);
            return code;
        }
    }
    *out = sorted;
    return MLS_OK;
}

/* ---- the text, with zeros for checksums ---- */

/* Append a string of zeros for `count` checksums, and set `*at` to the position of its
 * first digit in the text. A position, because the text moves while it grows. */
static void put_digits(mls_json_writer *json, size_t count, size_t *at)
{
    mls_json_writer_text(json, "\"");
    *at = json->length;
    for (size_t i = 0; i < count; i++) {
        mls_json_writer_text(json, "00000000");
    }
    mls_json_writer_text(json, "\"");
}

/* Append the start of the header and the `count` pairs of sorted metadata, its first
 * member. The two checksum keys are recognised by their address; the positions of their
 * digits are stored in `h`. */
static void put_metadata(mls_header *h, const mls_str_pair *metadata, size_t count,
                         const char *const *keys)
{
    mls_json_writer *json = &h->text;
    mls_json_writer_text(json, "{\"__metadata__\":{");
    for (size_t i = 0; i < count; i++) {
        mls_json_writer_text(json, i == 0 ? "" : ",");
        mls_json_writer_json(json, metadata[i].key);
        mls_json_writer_text(json, ":");
        if (metadata[i].key.data == keys[HEADER_KEY]) {
            put_digits(json, 1, &h->header_crc_at);
        } else if (metadata[i].key.data == keys[BLOCKS_KEY]) {
            put_digits(json, h->block_count, &h->block_crcs_at);
        } else {
            mls_json_writer_json(json, metadata[i].value);
        }
    }
    mls_json_writer_text(json, "}");
}

/* Return the dtype that a header lists for such items. A 0-d item of a packed dtype has
 * several elements, so it is listed as bytes too. */
mls_dtype mls_header_dtype(mls_dtype dtype, int rank, const size_t *shape)
{
    size_t ignored;
    const bool is_packed = mls_dtype_of(dtype)->kind == MLS_KIND_PACKED;
    return is_packed &&
                   (rank == 0 || !mls_dtype_elements(dtype, shape[rank - 1], &ignored))
               ? MLS_U8
               : dtype;
}

/* Fail if a tensor would be listed under another dtype. Compare the dtype with the one
 * that mls_header_dtype chooses. */
mls_code mls_header_check(const mls_header_tensor *t, mls_status *st)
{
    char shape[MLS_FACT_BYTES];
    if (mls_header_dtype(t->dtype, t->rank, t->shape) == t->dtype) {
        return MLS_OK;
    }
    mls_shape_text(shape, sizeof shape, t->rank, t->shape);
    mls_fail(st, MLS_E_SHAPE,
             "a tensor of %s with shape %s in bytes: its last axis is not a whole number "
             "of elements with %zu bits",
             mls_dtype_of(t->dtype)->name, shape, mls_dtype_of(t->dtype)->element_bits);
    return mls_status_got(st, "%s", shape);
}

/* Append the entry of `t`, with members in the order of the safetensors package. The
 * shape counts elements, and the offsets count from the first tensor: t->offset is still
 * relative. */
static void put_tensor(mls_json_writer *json, const mls_header_tensor *t)
{
    const mls_dtype dtype = mls_header_dtype(t->dtype, t->rank, t->shape);
    mls_json_writer_text(json, ",");
    mls_json_writer_json(json, t->name);
    mls_json_writer_text(json, ":{\"dtype\":\"");
    mls_json_writer_text(json, mls_dtype_of(dtype)->file_name);
    mls_json_writer_text(json, "\",\"shape\":[");
    for (int axis = 0; axis < t->rank; axis++) {
        size_t length = t->shape[axis];
        if (axis == t->rank - 1) {
            (void)mls_dtype_elements(dtype, length, &length); /* whole: see dtype */
        }
        mls_json_writer_text(json, axis == 0 ? "" : ",");
        mls_json_writer_number(json, length);
    }
    mls_json_writer_text(json, "],\"data_offsets\":[");
    mls_json_writer_number(json, t->offset);
    mls_json_writer_text(json, ",");
    mls_json_writer_number(json, t->offset + t->bytes);
    mls_json_writer_text(json, "]}");
}

/* Append spaces up to the next multiple of `alignment` bytes; the format allows them
 * after the object. They are part of the header, so its checksum covers every byte up to
 * the first tensor. */
static void pad_text(mls_json_writer *json, size_t alignment)
{
    while (json->code == MLS_OK && json->length % alignment != 0) {
        mls_json_writer_text(json, " ");
    }
}

/* Report why the header's text could not be written: no memory, or too long. Returns the
 * writer's code. */
static mls_code fail_text(const mls_json_writer *json, mls_status *st)
{
    return json->code == MLS_E_MEMORY
               ? fail_memory(st)
               : mls_fail(st, json->code,
                          "names and metadata take more than %zu bytes, the most that "
                          "the format allows: split the state over several files",
                          MLS_SAFETENSORS_MAX_HEADER);
}

/* Build the text, and set the tensors' offsets and the file's length. `metadata` is the
 * sorted copy, with `count` pairs; `keys` has the keys of its branch. The first tensor
 * starts at a multiple of `alignment`. Offsets in the text count from the first tensor;
 * the members `offset` become file offsets at the end, when the length of the text is
 * known. MLS_E_SIZE: the text is too long. MLS_E_MEMORY. */
static mls_code build_text(mls_header *h, const mls_str_pair *metadata, size_t count,
                           const char *const *keys, size_t alignment, mls_status *st)
{
    uint64_t next = 0; /* offset of the next tensor from the first one */
    mls_json_writer_put(&h->text, "\0\0\0\0\0\0\0\0", LENGTH_BYTES);
    put_metadata(h, metadata, count, keys);
    for (size_t i = 0; i < h->count; i++) {
        h->tensors[i].offset = next;
        /* cannot overflow unless the checksums above have made the text too long */
        next += h->tensors[i].bytes;
        put_tensor(&h->text, &h->tensors[i]);
    }
    mls_json_writer_text(&h->text, "}");
    pad_text(&h->text, alignment);
    if (h->text.code != MLS_OK) {
        return fail_text(&h->text, st);
    }
    h->file_bytes = h->text.length + next;
    for (size_t i = 0; i < h->count; i++) {
        h->tensors[i].offset += h->text.length;
    }
    return MLS_OK;
}

/* Sort the tensors and build the header without checksums. Changes only the order of the
 * caller's tensors and the members that are set here. The names determine the file order,
 * the order determines the position of the checksums, and their number determines the
 * length of the text. */
mls_code mls_header_init(mls_header *out, mls_header_tensor *tensors, size_t count,
                         const mls_str_pair *metadata, size_t metadata_count,
                         size_t alignment, mls_status *st)
{
    mls_header h = {
        .tensors = tensors, .count = count, .text = {.most = MLS_SAFETENSORS_MAX_HEADER}};
    mls_str_pair *sorted = NULL;
    const char *const *keys = choose_keys(metadata, metadata_count);
    const bool is_built =
        sort_tensors(&h, st) == MLS_OK && place_checksums(&h, st) == MLS_OK &&
        sort_metadata(metadata, metadata_count, keys, &sorted, st) == MLS_OK &&
        build_text(&h, sorted, metadata_count + 2, keys, alignment, st) == MLS_OK;
    mls_free(sorted);
    if (!is_built) {
        mls_header_fini(&h);
        return st->code;
    }
    *out = h;
    return MLS_OK;
}

/* Write the length and the checksums into the header. Compute the header's checksum last,
 * over the whole header with zeros for its own digits. */
uint32_t mls_header_finish(mls_header *header, const mls_crc_kernels *crc)
{
    char *text = header->text.data;
    const size_t length = header->text.length;
    mls_store_le64((unsigned char *)text, length - LENGTH_BYTES);
    for (size_t i = 0; i < header->block_count; i++) {
        mls_crc_to_digits(header->crcs[i],
                          text + header->block_crcs_at + i * MLS_CRC_DIGITS);
    }
    /* the length and all other digits are filled in, so the checksum covers them */
    const uint32_t checksum = crc->update(0, text, length);
    mls_crc_to_digits(checksum, text + header->header_crc_at);
    return checksum;
}

/* The tensors belong to the caller. */
void mls_header_fini(mls_header *header)
{
    mls_free(header->crcs);
    mls_json_writer_fini(&header->text);
    *header = (mls_header){0};
}
