/* Writing: the header's length is known before its checksums are, since those have a
 * fixed width.  So the tensors are written first, each byte being touched once, and the
 * header last.
 *
 * Where a byte goes: from a large contiguous tensor straight to the system; from a small
 * one into the buffer, so that twenty thousand of them do not cost as many calls; from a
 * strided or swapped one into the buffer too, in the largest pieces that fit.  The
 * buffer is the only memory that does not depend on the number of tensors.
 */
#if !defined(_WIN32)

#    include "safetensors.h"

#    include "buffer.h"
#    include "fsio.h"
#    include "mem.h"
#    include "size.h"

#    include <stdio.h>
#    include <stdlib.h>
#    include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "files are little-endian, and so must the machine be");

enum {
    LENGTH_BYTES = 8,
    CRC_DIGITS = 8,
    PAYLOAD_ALIGNMENT = 64,   /* a cache line, and enough for every vector */
    BUFFER_BYTES = 1 << 20,   /* gathers small tensors, packs strided ones */
    DIRECT_BYTES = 256 << 10, /* larger contiguous runs are written from where they lie */
    SHOWN_NAME = 100          /* bytes of a name in a message */
};

/* ---- order ---- */

/* A tensor in its place. */
typedef struct placed {
    const mls_named_tensor *from;
    size_t bytes;
    size_t index;   /* in the content, and later in the file */
    uint32_t *crcs; /* of its blocks */
    size_t done;    /* bytes that were checksummed */
} placed;

/* For qsort: by name, bytes compared as numbers. */
static int compare_names(const void *a, const void *b)
{
    return mls_text_compare(((const placed *)a)->from->name,
                            ((const placed *)b)->from->name);
}

/* By falling item size, then by name.  Every tensor's size is a multiple of its item
 * size, which is a power of two, so each starts aligned without any padding between
 * them. */
static int compare_places(const void *a, const void *b)
{
    const size_t x = mls_tensor_item_bytes(((const placed *)a)->from->tensor);
    const size_t y = mls_tensor_item_bytes(((const placed *)b)->from->tensor);
    return x != y ? (x < y ? 1 : -1) : compare_names(a, b);
}

/* For qsort: metadata by key, in the same order. */
static int compare_pairs(const void *a, const void *b)
{
    return mls_text_compare(((const mls_text_pair *)a)->key,
                            ((const mls_text_pair *)b)->key);
}

/* ---- what a file is made of ---- */

/* One file in the making; all of it is released at the end of mls_safetensors_write. */
typedef struct writer {
    const mls_kernels *kernels;
    const mls_crc_kernels *crc;
    mls_status *st;
    placed *tensors; /* sorted */
    size_t count;
    mls_text_pair *metadata; /* sorted, our own included, their values still empty */
    size_t metadata_count;
    mls_buffer header;             /* the 8 length bytes included */
    size_t header_crc, block_crcs; /* where their digits go in it */
    uint32_t *crcs;                /* of all blocks, in the order of the file */
    size_t block_count;
    mls_atomic_file file;
    unsigned char *buffer; /* BUFFER_BYTES */
    size_t buffered;
    uint64_t written; /* offset of what is in the buffer */
} writer;

/* "what 'name' why", the name cut to a length that leaves room for the reason. */
static mls_code fail_name(writer *w, const char *what, mls_text name, const char *why)
{
    const int shown = (int)(name.length < SHOWN_NAME ? name.length : SHOWN_NAME);
    mls_fail(w->st, MLS_E_VALUE, "%s '%.*s' %s", what, shown, name.data, why);
    mls_status_name(w->st, name.data, name.length);
    return MLS_E_VALUE;
}

/* For the tables of tensors and metadata too: they are what becomes the header. */
static mls_code no_memory(writer *w)
{
    return mls_fail(w->st, MLS_E_MEMORY, "no memory for the file's header");
}

/* Check names and sizes, and bring the tensors into the file's order.  Sorted by name
 * first, duplicates are neighbours. */
static mls_code sort_tensors(writer *w, const mls_safetensors_content *content)
{
    w->tensors = mls_alloc(content->count, sizeof *w->tensors);
    if (w->tensors == NULL) {
        return no_memory(w);
    }
    w->count = content->count;
    for (size_t i = 0; i < w->count; i++) {
        placed *p = &w->tensors[i];
        p->from = &content->tensors[i];
        const mls_text name = p->from->name;
        if (mls_text_is(name, "__metadata__")) {
            return fail_name(w, "tensor name", name, "is reserved by the format");
        }
        if (!mls_utf8_valid(name.data, name.length)) {
            return fail_name(w, "tensor name", name, "is not valid UTF-8");
        }
        if (!mls_tensor_bytes(p->from->tensor, &p->bytes)) {
            return fail_name(w, "tensor", name, "is larger than memory");
        }
    }
    qsort(w->tensors, w->count, sizeof *w->tensors, compare_names);
    for (size_t i = 1; i < w->count; i++) {
        if (compare_names(&w->tensors[i - 1], &w->tensors[i]) == 0) {
            return fail_name(w, "tensor name", w->tensors[i].from->name, "appears twice");
        }
    }
    qsort(w->tensors, w->count, sizeof *w->tensors, compare_places);
    return MLS_OK;
}

/* Room for the checksums of all blocks, now that the order is known. */
static mls_code place_checksums(writer *w)
{
    for (size_t i = 0; i < w->count; i++) {
        /* no more blocks than bytes of memory */
        w->block_count += mls_safetensors_blocks(w->tensors[i].bytes);
    }
    w->crcs = mls_alloc(w->block_count, sizeof *w->crcs);
    if (w->crcs == NULL) {
        return no_memory(w);
    }
    uint32_t *next = w->crcs;
    for (size_t i = 0; i < w->count; i++) {
        w->tensors[i].crcs = next;
        next += mls_safetensors_blocks(w->tensors[i].bytes);
    }
    return MLS_OK;
}

static const char header_key[] = MLS_SAFETENSORS_PREFIX "header.crc32c";
static const char blocks_key[] = MLS_SAFETENSORS_PREFIX "blocks.crc32c";

/* Metadata that cannot be written, or that could be taken for ours when it is read. */
static mls_code check_pair(writer *w, const mls_text_pair *pair)
{
    const mls_text prefix = {.data = MLS_SAFETENSORS_PREFIX,
                             .length = sizeof MLS_SAFETENSORS_PREFIX - 1};
    if (!mls_utf8_valid(pair->key.data, pair->key.length)) {
        return fail_name(w, "metadata key", pair->key, "is not valid UTF-8");
    }
    if (!mls_utf8_valid(pair->value.data, pair->value.length)) {
        return fail_name(w, "the value of metadata key", pair->key, "is not valid UTF-8");
    }
    if (mls_text_starts(pair->key, prefix) &&
        !mls_text_is(pair->key, MLS_SAFETENSORS_STATE)) {
        return fail_name(w, "metadata key", pair->key,
                         "is reserved: choose one that does not start with "
                         "\"" MLS_SAFETENSORS_PREFIX "\"");
    }
    return MLS_OK;
}

/* The user's entries and our two, by key. */
static mls_code sort_metadata(writer *w, const mls_safetensors_content *content)
{
    size_t room;
    if (!mls_size_add(content->metadata_count, 2, &room) ||
        (w->metadata = mls_alloc(room, sizeof *w->metadata)) == NULL) {
        return no_memory(w);
    }
    for (size_t i = 0; i < content->metadata_count; i++) {
        const mls_code code = check_pair(w, &content->metadata[i]);
        if (code != MLS_OK) {
            return code;
        }
        w->metadata[w->metadata_count++] = content->metadata[i];
    }
    w->metadata[w->metadata_count++].key =
        (mls_text){.data = header_key, .length = sizeof header_key - 1};
    w->metadata[w->metadata_count++].key =
        (mls_text){.data = blocks_key, .length = sizeof blocks_key - 1};
    qsort(w->metadata, w->metadata_count, sizeof *w->metadata, compare_pairs);
    for (size_t i = 1; i < w->metadata_count; i++) {
        if (compare_pairs(&w->metadata[i - 1], &w->metadata[i]) == 0) {
            return fail_name(w, "metadata key", w->metadata[i].key, "appears twice");
        }
    }
    return MLS_OK;
}

/* ---- the header, with zeros for checksums ---- */

/* `count` checksums to be; remembers where their digits start. */
static void put_digits(mls_buffer *b, size_t count, size_t *at)
{
    mls_buffer_text(b, "\"");
    *at = b->length;
    for (size_t i = 0; i < count; i++) {
        mls_buffer_text(b, "00000000");
    }
    mls_buffer_text(b, "\"");
}

/* The first member of the header's object: other readers look for it by its key.  Our
 * keys are known by their address, since the user's may not start like them. */
static void put_metadata(writer *w)
{
    mls_buffer *b = &w->header;
    mls_buffer_text(b, "{\"__metadata__\":{");
    for (size_t i = 0; i < w->metadata_count; i++) {
        const mls_text_pair *pair = &w->metadata[i];
        mls_buffer_text(b, i == 0 ? "" : ",");
        mls_buffer_json(b, pair->key);
        mls_buffer_text(b, ":");
        if (pair->key.data == header_key) {
            put_digits(b, 1, &w->header_crc);
        } else if (pair->key.data == blocks_key) {
            put_digits(b, w->block_count, &w->block_crcs);
        } else {
            mls_buffer_json(b, pair->value);
        }
    }
    mls_buffer_text(b, "}");
}

/* One tensor's entry; its members in the order in which the package writes them. */
static void put_tensor(mls_buffer *b, const mls_named_tensor *t, uint64_t begin,
                       uint64_t end)
{
    mls_buffer_text(b, ",");
    mls_buffer_json(b, t->name);
    mls_buffer_text(b, ":{\"dtype\":\"");
    mls_buffer_text(b, mls_dtype_of(t->tensor->dtype)->file_name);
    mls_buffer_text(b, "\",\"shape\":[");
    for (int axis = 0; axis < t->tensor->rank; axis++) {
        mls_buffer_text(b, axis == 0 ? "" : ",");
        mls_buffer_number(b, t->tensor->shape[axis]);
    }
    mls_buffer_text(b, "],\"data_offsets\":[");
    mls_buffer_number(b, begin);
    mls_buffer_text(b, ",");
    mls_buffer_number(b, end);
    mls_buffer_text(b, "]}");
}

/* The whole header with zeros for length and checksums, padded with spaces, which the
 * format allows behind the object. */
static mls_code build_header(writer *w)
{
    mls_buffer *b = &w->header;
    uint64_t begin = 0;
    mls_buffer_put(b, "\0\0\0\0\0\0\0\0", LENGTH_BYTES);
    put_metadata(w);
    for (size_t i = 0; i < w->count; i++) {
        uint64_t end;
        if (!mls_u64_add(begin, w->tensors[i].bytes, &end)) {
            return mls_fail(w->st, MLS_E_SIZE, "the tensors are larger than any file");
        }
        put_tensor(b, w->tensors[i].from, begin, end);
        begin = end;
    }
    mls_buffer_text(b, "}");
    while (b->code == MLS_OK && b->length % PAYLOAD_ALIGNMENT != 0) {
        mls_buffer_text(b, " ");
    }
    if (b->code == MLS_E_MEMORY) {
        return no_memory(w);
    }
    if (b->code != MLS_OK) {
        return mls_fail(w->st, b->code,
                        "names and metadata take more than %zu bytes, the most that the "
                        "format allows: split the state over several files",
                        MLS_SAFETENSORS_MAX_HEADER);
    }
    return MLS_OK;
}

/* Overwrite eight zeros; nothing else moves. */
static void store_digits(char *text, uint32_t crc)
{
    char digits[CRC_DIGITS + 1];
    snprintf(digits, sizeof digits, "%08lx", (unsigned long)crc);
    memcpy(text, digits, CRC_DIGITS);
}

/* Fill in length and checksums, and write the header.  Its own checksum comes last:
 * over all of it, while its own digits are still zeros. */
static mls_code finish_header(writer *w)
{
    char *header = w->header.data;
    mls_store_le64((unsigned char *)header, w->header.length - LENGTH_BYTES);
    for (size_t i = 0; i < w->block_count; i++) {
        store_digits(header + w->block_crcs + i * CRC_DIGITS, w->crcs[i]);
    }
    store_digits(header + w->header_crc, w->crc->update(0, header, w->header.length));
    return mls_atomic_write(&w->file, header, w->header.length, 0, w->st);
}

/* ---- tensors ---- */

/* Send on what was gathered.  `written` is then where the next byte goes. */
static mls_code flush(writer *w)
{
    const mls_code code =
        mls_atomic_write(&w->file, w->buffer, w->buffered, w->written, w->st);
    if (code == MLS_OK) {
        w->written += w->buffered;
        w->buffered = 0;
    }
    return code;
}

/* Small contiguous tensors are gathered in the buffer, checksummed on the way. */
static mls_code write_small(writer *w, placed *p)
{
    if (p->bytes > BUFFER_BYTES - w->buffered) {
        const mls_code code = flush(w);
        if (code != MLS_OK) {
            return code;
        }
    }
    if (p->bytes > 0) {
        p->crcs[0] =
            w->crc->copy(0, w->buffer + w->buffered, p->from->tensor->data, p->bytes);
        w->buffered += p->bytes;
    }
    return MLS_OK;
}

/* Take the next bytes of a tensor into the checksums of its blocks. */
static void checksum(writer *w, placed *p, const unsigned char *data, size_t bytes)
{
    while (bytes > 0) {
        uint32_t *crc = &p->crcs[p->done / MLS_SAFETENSORS_BLOCK];
        const size_t left = MLS_SAFETENSORS_BLOCK - p->done % MLS_SAFETENSORS_BLOCK;
        const size_t step = bytes < left ? bytes : left;
        *crc = w->crc->update(*crc, data, step);
        p->done += step;
        data += step;
        bytes -= step;
    }
}

/* Large contiguous ones go out from where they lie, in steps that stay in the cache
 * between checksum and system call. */
static mls_code write_direct(writer *w, placed *p)
{
    mls_code code = flush(w);
    for (size_t done = 0; code == MLS_OK && done < p->bytes;) {
        const size_t left = p->bytes - done;
        const size_t step = left < DIRECT_BYTES ? left : DIRECT_BYTES;
        const unsigned char *from = p->from->tensor->data + done;
        checksum(w, p, from, step);
        code = mls_atomic_write(&w->file, from, step, w->written, w->st);
        w->written += step;
        done += step;
    }
    return code;
}

/* How a strided tensor is cut: along `axis`, `step` indices at a time, for each index of
 * the axes in front of it. */
typedef struct packing {
    int axis;
    size_t step;
    size_t inner; /* bytes of one index along `axis`, packed */
} packing;

/* The largest pieces that fit the buffer: an axis of one index at least always does,
 * since an item is no longer than 8 bytes. */
static packing choose_packing(const mls_tensor *t)
{
    packing p = {.axis = t->rank - 1, .inner = mls_tensor_item_bytes(t)};
    while (p.axis > 0 && p.inner * t->shape[p.axis] <= BUFFER_BYTES) {
        p.inner *= t->shape[p.axis];
        p.axis--;
    }
    p.step = BUFFER_BYTES / p.inner;
    return p;
}

/* Pack `view` into the buffer and send it on.  It fits: see choose_packing. */
static mls_code write_piece(writer *w, placed *p, const mls_tensor *view, size_t bytes)
{
    if (bytes > BUFFER_BYTES - w->buffered) {
        const mls_code code = flush(w);
        if (code != MLS_OK) {
            return code;
        }
    }
    mls_tensor packed;
    unsigned char *to = w->buffer + w->buffered;
    const mls_code code =
        mls_tensor_init(&packed, to, view->dtype, view->rank, view->shape, w->st);
    if (code != MLS_OK) {
        return code;
    }
    mls_copy(w->kernels, &packed, view, false);
    checksum(w, p, to, bytes);
    w->buffered += bytes;
    return MLS_OK;
}

/* All pieces along `how.axis` for one index of the axes in front. */
static mls_code write_row(writer *w, placed *p, const mls_tensor *row, packing how)
{
    for (size_t start = 0; start < row->shape[how.axis]; start += how.step) {
        const size_t left = row->shape[how.axis] - start;
        const size_t length = left < how.step ? left : how.step;
        const mls_tensor piece = mls_tensor_slice(row, how.axis, start, length);
        const mls_code code = write_piece(w, p, &piece, length * how.inner);
        if (code != MLS_OK) {
            return code;
        }
    }
    return MLS_OK;
}

/* Step `index` over the axes in front of `axis`, the last of them fastest, as C order
 * wants it; false after the last. */
static bool next_index(const mls_tensor *t, int axis, size_t *index)
{
    for (int i = axis - 1; i >= 0; i--) {
        if (++index[i] < t->shape[i]) {
            return true;
        }
        index[i] = 0;
    }
    return false;
}

/* Not contiguous, or in the other byte order; not empty.  A tensor of no dimensions is
 * written as one of a single index. */
static mls_code write_packed(writer *w, placed *p)
{
    mls_tensor t = *p->from->tensor;
    size_t index[MLS_MAX_RANK] = {0};
    if (t.rank == 0) {
        t.rank = 1;
        t.shape[0] = 1;
        t.strides[0] = 0;
    }
    const packing how = choose_packing(&t);
    do {
        mls_tensor row = t;
        for (int i = 0; i < how.axis; i++) {
            row = mls_tensor_slice(&row, i, index[i], 1);
        }
        const mls_code code = write_row(w, p, &row, how);
        if (code != MLS_OK) {
            return code;
        }
    } while (next_index(&t, how.axis, index));
    return MLS_OK;
}

/* Three ways, by shape and size; all of them see every byte once. */
static mls_code write_tensor(writer *w, placed *p)
{
    const mls_tensor *t = p->from->tensor;
    if (p->bytes > 0 && (t->swapped || !mls_tensor_is_contiguous(t))) {
        return write_packed(w, p);
    }
    return p->bytes <= DIRECT_BYTES ? write_small(w, p) : write_direct(w, p);
}

/* Tensors first, header last.  Should the process die in between, the temporary has no
 * valid header, and nobody takes it for a file. */
static mls_code write_content(writer *w)
{
    w->written = w->header.length;
    for (size_t i = 0; i < w->count; i++) {
        const mls_code code = write_tensor(w, &w->tensors[i]);
        if (code != MLS_OK) {
            const mls_text name = w->tensors[i].from->name;
            mls_status_name(w->st, name.data, name.length);
            return code;
        }
    }
    const mls_code code = flush(w);
    return code == MLS_OK ? finish_header(w) : code;
}

/* Everything about the content is checked before the file system is touched; from begin
 * on, every way out goes through commit or abort. */
mls_code mls_safetensors_write(const char *path, const mls_safetensors_content *content,
                               const mls_kernels *kernels, const mls_crc_kernels *crc,
                               mls_status *st)
{
    writer w = {.kernels = kernels,
                .crc = crc,
                .st = st,
                .header = {.most = MLS_SAFETENSORS_MAX_HEADER}};
    bool is_open = false;
    mls_code code = sort_tensors(&w, content);
    if (code == MLS_OK) {
        code = place_checksums(&w);
    }
    if (code == MLS_OK) {
        code = sort_metadata(&w, content);
    }
    if (code == MLS_OK) {
        code = build_header(&w);
    }
    if (code == MLS_OK && (w.buffer = mls_alloc(BUFFER_BYTES, 1)) == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for a buffer of 1 MiB");
    }
    if (code == MLS_OK) {
        code = mls_atomic_begin(path, &w.file, st);
        is_open = code == MLS_OK;
    }
    if (code == MLS_OK) {
        code = write_content(&w);
    }
    if (code == MLS_OK) {
        code = mls_atomic_commit(&w.file, st);
    } else if (is_open) {
        mls_atomic_abort(&w.file);
    }
    mls_free(w.buffer);
    mls_free(w.crcs);
    mls_free(w.tensors);
    mls_free(w.metadata);
    mls_buffer_fini(&w.header);
    return code;
}

#endif
