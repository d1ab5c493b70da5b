/* safetensors_read: opens a file, parses and checks its header.
 *
 * What can be wrong in a file, and which function detects it:
 *   the header's length     header_length, before memory is allocated
 *   its grammar and names   json_reader.c: one pass, no recursion, no duplicate names
 *   one tensor's entry      read_dtype, read_shape, read_offsets
 *   all tensors together    check_coverage: no overlaps, no gaps, no bytes left over
 *   changes since writing   read_checksums; safetensors_tensors_read.c for the contents
 *
 * Memory: the header, its parsed form, one mls_stored for each tensor and one size_t for
 * each dimension. Each of these needs several bytes of header, so memory stays within a
 * constant factor of the header's length in the file.
 */
#include "safetensors/safetensors.h"

#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"
#include "io/json_checksum.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LENGTH_BYTES = 8,  /* before the header */
    FIRST_READ = 4096, /* from the start of a file: a page holds most small headers */
    HEADER_DEPTH = 16, /* the format needs 3; other writers may nest deeper */
    SHOWN_NAME = 100,  /* bytes of a name in a message */
    SHOWN_DTYPE = 32   /* the same for a dtype that is not known */
};

/* State while a header is read. Results are stored in `file`, which is returned whole or
 * released whole. */
typedef struct header_reader {
    const char *text; /* the JSON text of the file */
    size_t length;
    uint64_t payload, file_bytes; /* file offsets at which the tensors start and end */
    mls_safetensors file;
    size_t dims_used; /* of file.dims; the shapes point into it */
    mls_json_node header_crc_node, block_crcs_node; /* the checksum entries, or
                                                       MLS_JSON_NONE */
    mls_status *st;
} header_reader;

/* ---- messages ----
 *
 * Offsets in messages count from the start of the file, as in a hex dump: JSON offsets
 * are increased by the 8 bytes before the header. */

/* Fail with MLS_E_FORMAT and "tensor 'name': problem" at the offset of `node`. The name
 * is truncated, because a hostile file may contain a name of megabytes. */
static mls_code fail_tensor(header_reader *r, mls_json_node node, mls_str name,
                            const char *problem)
{
    const int width = (int)(name.length < SHOWN_NAME ? name.length : SHOWN_NAME);
    mls_fail_at(r->st, LENGTH_BYTES + mls_json_offset(r->file.json, node),
                "tensor '%.*s': %s", width, name.data, problem);
    return mls_status_name(r->st, name.data, name.length);
}

/* As fail_tensor, for nodes outside of tensors. */
static mls_code fail_node(header_reader *r, mls_json_node node, const char *problem)
{
    return mls_fail_at(r->st, LENGTH_BYTES + mls_json_offset(r->file.json, node),
                       "safetensors header: %s", problem);
}

/* All allocations are proportional to the header, so the message gives the header's
 * length. */
static mls_code fail_memory(header_reader *r)
{
    return mls_fail(r->st, MLS_E_MEMORY, "no memory for a header of %zu bytes",
                    r->length);
}

/* ---- one tensor ----
 *
 * dtype, shape, offsets: in this order, since each is checked against those before it. */

/* Set `*out` to the member `key` of a tensor's `entry`, which must be of `type` (string
 * or array); `name` is the tensor's, for errors. Unknown members are ignored, as in the
 * safetensors package: a later version may add some. MLS_E_FORMAT. */
static mls_code find_member(header_reader *r, mls_json_node entry, mls_str name,
                            const char *key, mls_json_type type, mls_json_node *out)
{
    char text[80];
    const mls_json_node member = mls_json_find(r->file.json, entry, key);
    if (member == MLS_JSON_NONE) {
        snprintf(text, sizeof text, "the header lacks its \"%s\"", key);
        return fail_tensor(r, entry, name, text);
    }
    if (mls_json_type_of(r->file.json, member) != type) {
        snprintf(text, sizeof text, "\"%s\" is not %s", key,
                 type == MLS_JSON_STRING ? "a string" : "a list");
        return fail_tensor(r, member, name, text);
    }
    *out = member;
    return MLS_OK;
}

/* Read the dtype of a tensor from its `entry` into `t`, and its offset for messages.
 * Names must match exactly. The bytes of an unknown dtype are opaque. MLS_E_FORMAT. */
static mls_code read_dtype(header_reader *r, mls_json_node entry, mls_stored *t)
{
    mls_json_node node;
    if (find_member(r, entry, t->name, "dtype", MLS_JSON_STRING, &node) != MLS_OK) {
        return MLS_E_FORMAT;
    }
    const mls_str text = mls_json_text(r->file.json, node);
    if (text.length == 0) {
        return fail_tensor(r, node, t->name, "its dtype is empty");
    }
    if (!mls_dtype_from_file_name(text.data, text.length, &t->dtype)) {
        t->dtype = MLS_U8;
        t->opaque = text;
    }
    t->opaque_offset = LENGTH_BYTES + mls_json_offset(r->file.json, node);
    return MLS_OK;
}

/* Return whether the dtype of an opaque tensor is unknown; false for a packed dtype whose
 * last axis has no whole bytes, and for a tensor that is not opaque. */
static bool is_unknown(const mls_stored *t)
{
    mls_dtype ignored;
    return t->opaque.length > 0 &&
           !mls_dtype_from_file_name(t->opaque.data, t->opaque.length, &ignored);
}

/* Fail if a tensor is opaque. Both reasons have the same advice, to load the other
 * tensors by name. */
mls_code mls_stored_check(const mls_stored *tensor, mls_status *st)
{
    const mls_str dtype = tensor->opaque;
    const bool unknown = is_unknown(tensor);
    if (dtype.length == 0) {
        return MLS_OK;
    }
    const int width =
        (int)(tensor->name.length < SHOWN_NAME ? tensor->name.length : SHOWN_NAME);
    const int dtype_width =
        (int)(dtype.length < SHOWN_DTYPE ? dtype.length : SHOWN_DTYPE);
    mls_fail_at(st, tensor->opaque_offset,
                "tensor '%.*s': dtype '%.*s' %s; the other tensors can be loaded by name",
                width, tensor->name.data, dtype_width, dtype.data,
                unknown ? "is not supported by this version of mlstate"
                        : "has several elements in a byte, and the last axis does not "
                          "fill whole bytes");
    mls_status_name(st, tensor->name.data, tensor->name.length);
    return mls_status_got(st, "%.*s", dtype_width, dtype.data);
}

/* Convert the last axis of a packed dtype from elements to bytes in `shape`, and set the
 * size of `t`. `node` is the shape, for errors (MLS_E_FORMAT); `elements` is the product
 * of all axes that are not empty; `is_empty`: some axis is. The format only demands whole
 * bytes for the whole tensor, so an axis without whole bytes makes the tensor opaque. */
static mls_code pack_last_axis(header_reader *r, mls_json_node node, size_t *shape,
                               size_t elements, bool is_empty, mls_stored *t)
{
    const mls_dtype_info *info = mls_dtype_of(t->dtype);
    size_t bits;
    if (!mls_size_mul(elements, info->element_bits, &bits)) {
        return fail_tensor(r, node, t->name, "its shape is larger than memory");
    }
    t->bytes = is_empty ? 0 : bits / 8;
    if (!is_empty && bits % 8 != 0) {
        return fail_tensor(r, node, t->name, "its elements do not fill whole bytes");
    }
    if (t->rank == 0 ||
        !mls_dtype_items(t->dtype, shape[t->rank - 1], &shape[t->rank - 1])) {
        t->opaque.data = info->file_name;
        t->opaque.length = strlen(info->file_name);
        t->dtype = MLS_U8;
    }
    return MLS_OK;
}

/* Read the shape of a tensor from its `entry` into `t`, and compute its bytes. The
 * product skips empty axes, as in mls_tensor_init, so that every accepted shape can
 * become an array. A product that fits PTRDIFF_MAX fits a size_t. A tensor of an unknown
 * dtype gets its bytes from its offsets. MLS_E_FORMAT. */
static mls_code read_shape(header_reader *r, mls_json_node entry, mls_stored *t)
{
    const mls_json *json = r->file.json;
    const bool is_packed = mls_dtype_of(t->dtype)->kind == MLS_KIND_PACKED;
    mls_json_node node;
    if (find_member(r, entry, t->name, "shape", MLS_JSON_ARRAY, &node) != MLS_OK) {
        return MLS_E_FORMAT;
    }
    if (mls_json_size(json, node) > MLS_MAX_RANK) {
        return fail_tensor(r, node, t->name, "has more than 64 dimensions");
    }
    size_t bytes = mls_dtype_of(t->dtype)->item_bytes;
    bool is_empty = false;
    size_t *shape = r->file.dims + r->dims_used;
    t->rank = (int)mls_json_size(json, node);
    t->shape = shape;
    for (mls_json_node dim = mls_json_first(json, node); dim != MLS_JSON_NONE;
         dim = mls_json_next(json, dim)) {
        uint64_t value;
        if (!mls_json_u64(json, dim, &value)) {
            return fail_tensor(r, dim, t->name, "a dimension is not a whole number");
        }
        is_empty = is_empty || value == 0;
        if (!mls_size_from_u64(value, shape) ||
            !mls_size_mul(bytes, value == 0 ? 1 : *shape, &bytes) ||
            bytes > PTRDIFF_MAX) {
            return fail_tensor(r, dim, t->name, "its shape is larger than memory");
        }
        shape++;
        r->dims_used++;
    }
    t->bytes = is_empty ? 0 : bytes;
    return is_packed ? pack_last_axis(r, node, shape - t->rank, bytes, is_empty, t)
                     : MLS_OK;
}

/* Read the byte range of a tensor from its `entry` into `t`; it must have the size of its
 * shape, unless the dtype is unknown: then it determines `t->bytes`. Offsets count from
 * the end of the header. They are compared with the file's length before anything is
 * added to them, so no sum can wrap. MLS_E_FORMAT. */
static mls_code read_offsets(header_reader *r, mls_json_node entry, mls_stored *t)
{
    const mls_json *json = r->file.json;
    mls_json_node node;
    uint64_t begin, end;
    char text[120];
    if (find_member(r, entry, t->name, "data_offsets", MLS_JSON_ARRAY, &node) != MLS_OK) {
        return MLS_E_FORMAT;
    }
    const mls_json_node first = mls_json_first(json, node);
    if (mls_json_size(json, node) != 2 || !mls_json_u64(json, first, &begin) ||
        !mls_json_u64(json, mls_json_next(json, first), &end) || begin > end) {
        return fail_tensor(r, node, t->name,
                           "\"data_offsets\" is not a pair [begin, end] of offsets");
    }
    if (end > r->file_bytes - r->payload) {
        snprintf(text, sizeof text,
                 "its bytes end at %llu of %llu: the file is truncated or the header is "
                 "wrong",
                 (unsigned long long)end,
                 (unsigned long long)(r->file_bytes - r->payload));
        return fail_tensor(r, node, t->name, text);
    }
    if (is_unknown(t) && !mls_size_from_u64(end - begin, &t->bytes)) {
        return fail_tensor(r, node, t->name, "it is larger than memory");
    }
    if (end - begin != t->bytes) {
        snprintf(text, sizeof text, "its shape takes %zu bytes, its offsets span %llu",
                 t->bytes, (unsigned long long)(end - begin));
        fail_tensor(r, node, t->name, text);
        mls_status_expected(r->st, "%zu bytes", t->bytes);
        return mls_status_got(r->st, "%llu bytes", (unsigned long long)(end - begin));
    }
    t->offset = r->payload + begin;
    return MLS_OK;
}

/* Read one entry of the header as the next tensor of the file. It is counted only if it
 * is valid. MLS_E_FORMAT. */
static mls_code read_tensor(header_reader *r, mls_json_node entry)
{
    mls_stored *t = &r->file.tensors[r->file.count];
    t->name = mls_json_key(r->file.json, entry);
    if (mls_json_type_of(r->file.json, entry) != MLS_JSON_OBJECT) {
        return fail_tensor(r, entry, t->name, "its entry is not a JSON object");
    }
    if (read_dtype(r, entry, t) != MLS_OK || read_shape(r, entry, t) != MLS_OK ||
        read_offsets(r, entry, t) != MLS_OK) {
        return r->st->code;
    }
    r->file.count++;
    return MLS_OK;
}

/* ---- metadata and checksums ----
 *
 * The header's checksum covers the whole header, including the tensors' checksums, and
 * those cover the tensors. So the file is intact if all checksums match. */

static const mls_str prefix = {.data = MLS_SAFETENSORS_PREFIX,
                               .length = sizeof MLS_SAFETENSORS_PREFIX - 1};

/* Return whether a key starts with a branch of mlx-lm's tree (see safetensors.h): a digit
 * from '0' to `last`, and a dot. */
static bool is_in_branch(mls_str key, char last)
{
    return key.length >= 2 && key.data[0] >= '0' && key.data[0] <= last &&
           key.data[1] == '.';
}

/* Return a key of mlstate without its branch "0." or "1."; any other key as it is. */
mls_str mls_safetensors_own_key(mls_str key)
{
    if (is_in_branch(key, '1')) {
        const mls_str rest = {.data = key.data + 2, .length = key.length - 2};
        if (mls_str_starts(rest, prefix)) {
            return rest;
        }
    }
    return key;
}

/* Return the branch of the user's texts in metadata. All keys except the reserved ones
 * must be in a tree's branches. The value of "2.0" decides: "" is the newer form, with
 * "0.". */
mls_str mls_safetensors_branch(const mls_str_pair *metadata, size_t count)
{
    mls_str branch = {.data = "", .length = 0};
    for (size_t i = 0; i < count; i++) {
        const mls_str key = metadata[i].key;
        if (mls_str_is(key, "2.0")) {
            branch = (mls_str){metadata[i].value.length == 0 ? "0." : "1.", 2};
        } else if (!is_in_branch(key, '2') && !mls_str_starts(key, prefix)) {
            return (mls_str){.data = "", .length = 0};
        }
    }
    return branch;
}

/* Read a map of strings, or the null of mlx, as the file's metadata and checksums.
 * Keys of mlstate get one name in every branch. MLS_E_FORMAT, MLS_E_MEMORY. */
static mls_code read_metadata(header_reader *r, mls_json_node node)
{
    const mls_json *json = r->file.json;
    if (mls_json_type_of(json, node) != MLS_JSON_OBJECT) {
        return mls_json_type_of(json, node) == MLS_JSON_NULL
                   ? MLS_OK
                   : fail_node(r, node, "\"__metadata__\" is not a JSON object");
    }
    r->file.metadata = mls_alloc(mls_json_size(json, node), sizeof *r->file.metadata);
    if (r->file.metadata == NULL) {
        return fail_memory(r);
    }
    for (mls_json_node pair = mls_json_first(json, node); pair != MLS_JSON_NONE;
         pair = mls_json_next(json, pair)) {
        const mls_str key = mls_safetensors_own_key(mls_json_key(json, pair));
        if (mls_json_type_of(json, pair) != MLS_JSON_STRING) {
            return fail_node(r, pair,
                             "\"__metadata__\" has a value that is not a string");
        }
        mls_json_node *entry = mls_str_is(key, MLS_SAFETENSORS_PREFIX "header.crc32c")
                                   ? &r->header_crc_node
                               : mls_str_is(key, MLS_SAFETENSORS_PREFIX "blocks.crc32c")
                                   ? &r->block_crcs_node
                                   : NULL;
        if (entry != NULL) {
            if (*entry != MLS_JSON_NONE) { /* in two branches */
                return fail_node(r, pair, "\"__metadata__\" has a checksum entry twice");
            }
            *entry = pair;
        } else {
            r->file.metadata[r->file.metadata_count++] =
                (mls_str_pair){.key = key, .value = mls_json_text(json, pair)};
        }
    }
    return MLS_OK;
}

/* The last block of a tensor may be shorter; an empty tensor has no block. */
size_t mls_safetensors_blocks(size_t bytes)
{
    return bytes / MLS_SAFETENSORS_BLOCK + (bytes % MLS_SAFETENSORS_BLOCK != 0 ? 1 : 0);
}

/* Combine the checksums of blocks. All blocks are full, except perhaps the last. */
uint32_t mls_safetensors_join_crcs(const uint32_t *crcs, size_t bytes)
{
    uint32_t crc = 0;
    for (size_t at = 0; at < bytes; at += MLS_SAFETENSORS_BLOCK) {
        const size_t left = bytes - at;
        crc = mls_crc_combine(
            crc, *crcs++, left < MLS_SAFETENSORS_BLOCK ? left : MLS_SAFETENSORS_BLOCK);
    }
    return crc;
}

/* Fail with MLS_E_CHECKSUM because of a `problem` of the header's checksum. It can have a
 * harmless cause: a program copied the metadata of an mlstate file into another file,
 * whose checksums differ. */
static mls_code fail_checksum(header_reader *r, const char *problem)
{
    return mls_fail(
        r->st, MLS_E_CHECKSUM,
        "safetensors header: %s: the file is damaged, or another program kept the "
        "\"" MLS_SAFETENSORS_PREFIX "*\" metadata of a file that it changed",
        problem);
}

/* Compare the header with its checksum, computed over the bytes in the file with zeros
 * for its own digits, and store it in the file's header_crc. The digits must be 8 plain
 * characters: an escape would shift the bytes after them.
 * MLS_E_CHECKSUM. */
static mls_code verify_header(header_reader *r, const mls_crc_kernels *crc)
{
    static const char zeros[] = "00000000";
    unsigned char length[LENGTH_BYTES];
    uint32_t expected;
    const size_t at = mls_json_offset(r->file.json, r->header_crc_node) + 1;
    if (mls_json_text(r->file.json, r->header_crc_node).length != MLS_CRC_DIGITS ||
        !mls_crc_from_digits(r->text + at, &expected)) {
        return fail_checksum(r, "its checksum is not 8 digits");
    }
    const size_t behind = at + MLS_CRC_DIGITS;
    mls_store_le64(length, r->length);
    uint32_t checksum = crc->update(0, length, sizeof length);
    checksum = crc->update(checksum, r->text, at);
    checksum = crc->update(checksum, zeros, MLS_CRC_DIGITS);
    checksum = crc->update(checksum, r->text + behind, r->length - behind);
    if (checksum != expected) {
        fail_checksum(r, "its checksum does not match");
        mls_status_expected(r->st, "%08lx", (unsigned long)expected);
        return mls_status_got(r->st, "%08lx", (unsigned long)checksum);
    }
    r->file.header_crc = expected;
    return MLS_OK;
}

/* Point each tensor's `block_digits` to its digits in `digits`, 8 for each block of the
 * file in the order of the tensors. Returns false if the number of digits does not match
 * the blocks, or if other characters occur. */
static bool assign_block_digits(header_reader *r, mls_str digits)
{
    size_t left = digits.length / MLS_CRC_DIGITS;
    const char *next = digits.data;
    uint32_t ignored;
    for (size_t i = 0; i < r->file.count; i++) {
        const size_t blocks = mls_safetensors_blocks(r->file.tensors[i].bytes);
        if (blocks > left) {
            return false;
        }
        r->file.tensors[i].block_digits = next;
        for (size_t block = 0; block < blocks; block++, next += MLS_CRC_DIGITS) {
            if (!mls_crc_from_digits(next, &ignored)) {
                return false;
            }
        }
        left -= blocks;
    }
    return left == 0 && digits.length % MLS_CRC_DIGITS == 0;
}

/* Verify the header by its checksum, if `verify`, and assign the checksums of blocks.
 * Without entries nothing is verified (`has_crc` stays false). A file must have both
 * entries or neither: otherwise damage to one key would disable the check.
 * MLS_E_CHECKSUM. */
static mls_code read_checksums(header_reader *r, const mls_crc_kernels *crc, bool verify)
{
    if (!verify ||
        (r->header_crc_node == MLS_JSON_NONE && r->block_crcs_node == MLS_JSON_NONE)) {
        return MLS_OK;
    }
    if (r->header_crc_node == MLS_JSON_NONE || r->block_crcs_node == MLS_JSON_NONE) {
        return fail_checksum(r, "it has only one of mlstate's two checksum entries");
    }
    const mls_code code = verify_header(r, crc);
    if (code != MLS_OK) {
        return code;
    }
    if (!assign_block_digits(r, mls_json_text(r->file.json, r->block_crcs_node))) {
        return fail_checksum(r, "its tensors' checksums are not 8 digits for each MiB");
    }
    r->file.has_crc = true;
    return MLS_OK;
}

/* ---- the whole file ----
 *
 * Checks across tensors, and the two entry points: from memory and from a path. */

/* For qsort: by offset. Of two tensors at the same offset, the empty one comes first; the
 * address of the tensor breaks ties, so that every qsort gives the same order. */
static int compare_places(const void *a, const void *b)
{
    const mls_stored *x = *(const mls_stored *const *)a;
    const mls_stored *y = *(const mls_stored *const *)b;
    if (x->offset != y->offset) {
        return x->offset < y->offset ? -1 : 1;
    }
    if (x->bytes != y->bytes) {
        return x->bytes < y->bytes ? -1 : 1;
    }
    return x < y ? -1 : x > y;
}

/* Check `tensors`, sorted by offset: each must start at the end of the one before, and
 * the last must end with the file. So each byte belongs to exactly one tensor.
 * MLS_E_FORMAT. */
static mls_code check_places(header_reader *r, const mls_stored *const *tensors)
{
    uint64_t end = r->payload;
    for (size_t i = 0; i < r->file.count; i++) {
        const mls_stored *t = tensors[i];
        if (t->offset != end) {
            const int width =
                (int)(t->name.length < SHOWN_NAME ? t->name.length : SHOWN_NAME);
            mls_fail_at(r->st, t->offset < end ? t->offset : end,
                        t->offset < end ? "tensor '%.*s' overlaps the one before it"
                                        : "there is a gap in front of tensor '%.*s'",
                        width, t->name.data);
            return mls_status_name(r->st, t->name.data, t->name.length);
        }
        end += t->bytes; /* cannot wrap: the offsets were checked */
    }
    if (end != r->file_bytes) {
        return mls_fail_at(r->st, end,
                           "%llu bytes after the last tensor belong to no tensor",
                           (unsigned long long)(r->file_bytes - end));
    }
    return MLS_OK;
}

/* Check that the tensors cover the file without gaps or overlaps. Writers usually list
 * tensors in file order, so sorting is rare. */
static mls_code check_coverage(header_reader *r)
{
    bool sorted = true;
    const mls_stored **order = mls_alloc(r->file.count, sizeof *order);
    if (order == NULL) {
        return fail_memory(r);
    }
    for (size_t i = 0; i < r->file.count; i++) {
        order[i] = &r->file.tensors[i];
        sorted = sorted && (i == 0 || compare_places(&order[i - 1], &order[i]) < 0);
    }
    if (!sorted) {
        qsort(order, r->file.count, sizeof *order, compare_places);
    }
    const mls_code code = check_places(r, order);
    mls_free(order);
    return code;
}

/* Return the number of dimensions of all tensors, which share one block for their shapes.
 * Entries are not checked yet, so it is an upper bound, but not larger than the
 * header. */
static size_t count_dims(const mls_json *json)
{
    size_t count = 0;
    for (mls_json_node entry = mls_json_first(json, 0); entry != MLS_JSON_NONE;
         entry = mls_json_next(json, entry)) {
        const mls_json_node shape = mls_json_find(json, entry, "shape");
        count += shape == MLS_JSON_NONE ? 0 : mls_json_size(json, shape);
    }
    return count;
}

/* Read all entries: tensors and metadata. MLS_E_FORMAT, MLS_E_MEMORY. */
static mls_code read_entries(header_reader *r)
{
    const mls_json *json = r->file.json;
    r->file.tensors = mls_alloc(mls_json_size(json, 0), sizeof *r->file.tensors);
    r->file.dims = mls_alloc(count_dims(json), sizeof *r->file.dims);
    if (r->file.tensors == NULL || r->file.dims == NULL) {
        return fail_memory(r);
    }
    for (mls_json_node entry = mls_json_first(json, 0); entry != MLS_JSON_NONE;
         entry = mls_json_next(json, entry)) {
        const bool is_metadata = mls_str_is(mls_json_key(json, entry), "__metadata__");
        const mls_code code =
            is_metadata ? read_metadata(r, entry) : read_tensor(r, entry);
        if (code != MLS_OK) {
            return code;
        }
    }
    return MLS_OK;
}

/* Parse the header's text into `json`; offsets of failures become file offsets. The
 * format requires '{' as the first byte, without a space before it. */
static mls_code read_json(header_reader *r)
{
    /* a value takes at least one byte and a comma */
    const mls_json_limits limits = {.depth = HEADER_DEPTH, .nodes = r->length / 2 + 1};
    if (r->length == 0 || r->text[0] != '{') {
        return mls_fail_at(r->st, LENGTH_BYTES,
                           "not a safetensors file: its header does "
                           "not start with '{'");
    }
    const mls_code code =
        mls_json_parse(r->text, r->length, limits, &r->file.json, r->st);
    if (code == MLS_E_FORMAT) {
        char text[MLS_TEXT_BYTES];
        /* 280: with the prefix it fits, so gcc does not warn of truncation */
        snprintf(text, sizeof text, "safetensors header: %.280s", r->st->text);
        memcpy(r->st->text, text, sizeof text);
        r->st->offset += LENGTH_BYTES;
    }
    return code;
}

/* Set `*out` to the header's length from `head`, the first 8 bytes of a file, after
 * comparing it with `file_bytes`, the file's length (at least 8). No memory is allocated
 * before this check. */
static mls_code header_length(const unsigned char *head, uint64_t file_bytes, size_t *out,
                              mls_status *st)
{
    const uint64_t length = mls_load_le64(head);
    if (length > MLS_SAFETENSORS_MAX_HEADER) {
        return mls_fail_at(
            st, 0,
            "not a safetensors file: a header of %llu bytes is longer than "
            "the format allows",
            (unsigned long long)length);
    }
    if (length > file_bytes - LENGTH_BYTES) {
        return mls_fail_at(
            st, 0,
            "the file is truncated: its header should have %llu bytes, but only %llu "
            "follow",
            (unsigned long long)length, (unsigned long long)(file_bytes - LENGTH_BYTES));
    }
    *out = (size_t)length;
    return MLS_OK;
}

/* Fail because the file, perhaps empty, has no room for the header and the bytes of its
 * length. */
static mls_code fail_too_short(uint64_t file_bytes, mls_status *st)
{
    return mls_fail_at(st, file_bytes,
                       "not a safetensors file: %llu bytes are too few for one",
                       (unsigned long long)file_bytes);
}

/* Parse and check a header. Check in this order: grammar, single entries, all entries
 * together, checksums. So the first failure is closest to the cause. */
mls_code mls_safetensors_parse(const unsigned char *head, size_t head_bytes,
                               uint64_t file_bytes, const mls_crc_kernels *crc,
                               bool verify, mls_safetensors *out, mls_status *st)
{
    size_t length;
    if (head_bytes < LENGTH_BYTES || file_bytes < head_bytes) {
        return fail_too_short(file_bytes, st);
    }
    mls_code code = header_length(head, file_bytes, &length, st);
    if (code != MLS_OK) {
        return code;
    }
    if (length > head_bytes - LENGTH_BYTES) {
        return mls_fail(st, MLS_E_VALUE, "got only %zu bytes of the header", head_bytes);
    }
    header_reader r = {.text = (const char *)head + LENGTH_BYTES,
                       .length = length,
                       .payload = LENGTH_BYTES + length,
                       .file_bytes = file_bytes,
                       .header_crc_node = MLS_JSON_NONE,
                       .block_crcs_node = MLS_JSON_NONE,
                       .st = st};
    r.file.bytes = file_bytes;
    if (read_json(&r) != MLS_OK || read_entries(&r) != MLS_OK ||
        check_coverage(&r) != MLS_OK || read_checksums(&r, crc, verify) != MLS_OK) {
        mls_safetensors_fini(&r.file);
        return st->code;
    }
    *out = r.file;
    return MLS_OK;
}

/* Fail if any tensor is opaque; the first one is reported. */
mls_code mls_safetensors_check(const mls_safetensors *file, mls_status *st)
{
    mls_code code = MLS_OK;
    for (size_t i = 0; code == MLS_OK && i < file->count; i++) {
        code = mls_stored_check(&file->tensors[i], st);
    }
    return code;
}

/* Names and metadata point into the JSON document, which is freed last. */
void mls_safetensors_fini(mls_safetensors *file)
{
    mls_free(file->tensors);
    mls_free(file->metadata);
    mls_free(file->dims);
    mls_json_free(file->json);
    *file = (mls_safetensors){0};
}

/* Open a file and parse its header. A header that is longer than the first read is
 * completed in new memory, once the file is known to have it. */
mls_code mls_safetensors_open(const char *path, const mls_crc_kernels *crc, bool verify,
                              int *fd, mls_safetensors *out, mls_status *st)
{
    unsigned char start[FIRST_READ], *head = start, *longer = NULL;
    size_t length = 0, bytes = 0;
    int opened = -1;
    uint64_t file_bytes = 0;
    mls_code code = mls_file_open(path, &opened, &file_bytes, st);
    if (code == MLS_OK) {
        bytes = file_bytes < FIRST_READ ? (size_t)file_bytes : FIRST_READ;
        code = bytes < LENGTH_BYTES ? fail_too_short(file_bytes, st)
                                    : mls_file_read_at(opened, start, bytes, 0, st);
    }
    if (code == MLS_OK) {
        code = header_length(start, file_bytes, &length, st);
    }
    if (code == MLS_OK && length > bytes - LENGTH_BYTES) {
        const size_t rest = LENGTH_BYTES + length - bytes;
        head = longer = mls_alloc(bytes + rest, 1);
        if (longer == NULL) {
            code =
                mls_fail(st, MLS_E_MEMORY, "no memory for a header of %zu bytes", length);
        } else {
            memcpy(longer, start, bytes);
            code = mls_file_read_at(opened, longer + bytes, rest, bytes, st);
            bytes += rest;
        }
    }
    if (code == MLS_OK) {
        code = mls_safetensors_parse(head, bytes, file_bytes, crc, verify, out, st);
    }
    mls_free(longer);
    if (code == MLS_OK) {
        *fd = opened;
    } else if (opened >= 0) {
        (void)close(opened);
    }
    return code;
}
