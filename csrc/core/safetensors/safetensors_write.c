/* safetensors_write: writes a file atomically in one pass: tensors, their checksums, then
 * the header.
 *
 * The checksums have a fixed width, so the header's length is known before them. The
 * tensors are written first, in one pass over their bytes, and the header last.
 *
 * All bytes pass through the buffer, so the checksum always matches the bytes written,
 * even if another thread changes the tensor meanwhile. Contiguous tensors are checksummed
 * while they are copied; strided or byte-swapped tensors are packed in the largest parts
 * that fit the buffer, then checksummed. Only the buffer's size does not depend on the
 * number of tensors.
 */
#include "safetensors/safetensors.h"

#include "base/memory.h"
#include "io/file.h"
#include "safetensors/safetensors_header_build.h"

#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "safetensors files are little-endian, so a big-endian machine cannot "
               "write them");

enum {
    PAYLOAD_ALIGNMENT = 64, /* a cache line, enough for every vector register */
    BUFFER_BYTES = 1 << 20, /* for packing strided tensors */
    STEP_BYTES = 256 << 10, /* contiguous tensors are written up to its multiples */
    SHOWN_NAME = 100        /* bytes of a name in a message */
};

/* The writing of one tensor. */
typedef struct tensor_write {
    const mls_tensor *tensor;
    const mls_header_tensor *entry; /* in the header */
    size_t done;                    /* bytes checksummed so far */
} tensor_write;

/* State of one write; all of it is released at the end of mls_safetensors_write. */
typedef struct writer {
    const mls_kernels *kernels;
    const mls_crc_kernels *crc;
    mls_status *st;
    mls_header header;
    mls_atomic_file file;
    unsigned char *buffer; /* BUFFER_BYTES */
    size_t buffered;       /* bytes in it that are not written yet */
    uint64_t written;      /* file offset of the buffer's first byte */
} writer;

/* Fail with MLS_E_VALUE if a key of the metadata is reserved for mlstate, except
 * MLS_SAFETENSORS_STATE. */
static mls_code check_keys(const mls_safetensors_content *content, mls_status *st)
{
    const mls_str prefix = {.data = MLS_SAFETENSORS_PREFIX,
                            .length = sizeof MLS_SAFETENSORS_PREFIX - 1};
    for (size_t i = 0; i < content->metadata_count; i++) {
        const mls_str key = content->metadata[i].key;
        if (mls_str_starts(mls_safetensors_own_key(key), prefix) &&
            !mls_str_is(key, MLS_SAFETENSORS_STATE)) {
            const int width = (int)(key.length < SHOWN_NAME ? key.length : SHOWN_NAME);
            mls_fail(st, MLS_E_VALUE,
                     "metadata key '%.*s' is reserved: choose one that does not start "
                     "with \"" MLS_SAFETENSORS_PREFIX "\"",
                     width, key.data);
            return mls_status_name(st, key.data, key.length);
        }
    }
    return MLS_OK;
}

/* Set `*out` to an array with a header entry for each tensor; `number` is its index in
 * `content`. The caller frees it after the header, which refers to it. MLS_E_SHAPE,
 * MLS_E_SIZE, MLS_E_MEMORY. */
static mls_code describe_tensors(const mls_safetensors_content *content,
                                 mls_header_tensor **out, mls_status *st)
{
    mls_header_tensor *tensors = mls_alloc(content->count, sizeof *tensors);
    if (tensors == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the file's header");
    }
    for (size_t i = 0; i < content->count; i++) {
        const mls_tensor *t = content->tensors[i].tensor;
        const mls_str name = content->tensors[i].name;
        tensors[i] = (mls_header_tensor){.name = name,
                                         .shape = t->shape,
                                         .rank = t->rank,
                                         .dtype = t->dtype,
                                         .number = i};
        const mls_code code =
            mls_tensor_bytes(t, &tensors[i].bytes)
                ? mls_header_check(&tensors[i], st)
                : mls_fail(st, MLS_E_SIZE, "a tensor is larger than memory");
        if (code != MLS_OK) {
            mls_free(tensors);
            return mls_status_name(st, name.data, name.length);
        }
    }
    *out = tensors;
    return MLS_OK;
}

/* ---- tensors ---- */

/* Write the buffered bytes to the file, behind the bytes already there. On failure the
 * buffer is kept. */
static mls_code flush_buffer(writer *w)
{
    const mls_code code =
        mls_atomic_write(&w->file, w->buffer, w->buffered, w->written, w->st);
    if (code == MLS_OK) {
        w->written += w->buffered;
        w->buffered = 0;
    }
    return code;
}

/* Add the next `bytes` bytes of a tensor to the checksums of their blocks. Calls come in
 * the order of the bytes; `pending->done` counts the bytes so far. */
static void checksum_bytes(writer *w, tensor_write *pending, const unsigned char *data,
                           size_t bytes)
{
    while (bytes > 0) {
        uint32_t *crc = &pending->entry->crcs[pending->done / MLS_SAFETENSORS_BLOCK];
        const size_t left = MLS_SAFETENSORS_BLOCK - pending->done % MLS_SAFETENSORS_BLOCK;
        const size_t step = bytes < left ? bytes : left;
        *crc = w->crc->update(*crc, data, step);
        pending->done += step;
        data += step;
        bytes -= step;
    }
}

/* Return the bytes to the next file offset that is a multiple of STEP_BYTES. ext4 caches
 * a write between such offsets in larger units: 4 MiB took 0.82 times as long to write,
 * and 0.92 times as long to sync (Linux 6.18, AMD EPYC family 25 model 17). */
static size_t step_room(const writer *w)
{
    return STEP_BYTES - (size_t)((w->written + w->buffered) % STEP_BYTES);
}

/* Write a contiguous tensor: copy and checksum in one pass, in steps that stay cached
 * until the system call. */
static mls_code write_contiguous(writer *w, tensor_write *pending)
{
    /* packed tensors may have filled more of the buffer than a step */
    mls_code code = w->buffered >= STEP_BYTES ? flush_buffer(w) : MLS_OK;
    while (code == MLS_OK && pending->done < pending->entry->bytes) {
        uint32_t *crc = &pending->entry->crcs[pending->done / MLS_SAFETENSORS_BLOCK];
        const size_t left = pending->entry->bytes - pending->done, room = step_room(w);
        const size_t block =
            MLS_SAFETENSORS_BLOCK - pending->done % MLS_SAFETENSORS_BLOCK;
        size_t step = left < room ? left : room;
        step = step < block ? step : block;
        *crc =
            w->crc->copy(*crc, w->buffer + w->buffered,
                         pending->tensor->data + pending->done, step, MLS_STORE_CACHED);
        w->buffered += step;
        pending->done += step;
        /* at a multiple of STEP_BYTES, the room is a whole step again */
        code = step_room(w) == STEP_BYTES ? flush_buffer(w) : MLS_OK;
    }
    return code;
}

/* How a strided tensor is divided: along `axis`, `step` indices at a time, for each index
 * of the axes before it. */
typedef struct packing {
    int axis;
    size_t step;
    size_t inner; /* packed bytes of one index along `axis` */
} packing;

/* Return the division of a strided tensor into the largest pieces that fit the buffer.
 * One index of the last axis always fits, since an item has at most 8 bytes. */
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

/* Pack `view`, the next `bytes` bytes of the tensor `pending`, into the buffer, after
 * writing the buffer if it has too little room. An empty buffer has enough: see
 * choose_packing. */
static mls_code write_piece(writer *w, tensor_write *pending, const mls_tensor *view,
                            size_t bytes)
{
    if (bytes > BUFFER_BYTES - w->buffered) {
        const mls_code code = flush_buffer(w);
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
    mls_copy(w->kernels, &packed, view, mls_cached());
    checksum_bytes(w, pending, to, bytes);
    w->buffered += bytes;
    return MLS_OK;
}

/* Write `row`, which has one index in each axis before `how.axis`, in pieces of
 * `how.step` indices along that axis, each of which fits the buffer. */
static mls_code write_row(writer *w, tensor_write *pending, const mls_tensor *row,
                          packing how)
{
    for (size_t start = 0; start < row->shape[how.axis]; start += how.step) {
        const size_t left = row->shape[how.axis] - start;
        const size_t length = left < how.step ? left : how.step;
        const mls_tensor piece = mls_tensor_slice(row, how.axis, start, length);
        const mls_code code = write_piece(w, pending, &piece, length * how.inner);
        if (code != MLS_OK) {
            return code;
        }
    }
    return MLS_OK;
}

/* Advance `index`, the indices of the axes before `axis`, in C order. Returns false after
 * the last. */
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

/* Write a tensor that is not contiguous or has the other byte order, and is not empty. A
 * 0-d tensor is written as one with a single index. */
static mls_code write_packed(writer *w, tensor_write *pending)
{
    mls_tensor t = *pending->tensor;
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
        const mls_code code = write_row(w, pending, &row, how);
        if (code != MLS_OK) {
            return code;
        }
    } while (next_index(&t, how.axis, index));
    return MLS_OK;
}

/* Write one tensor to the buffer and the file, by one of two ways. An empty tensor needs
 * no packing. */
static mls_code write_tensor(writer *w, tensor_write *pending)
{
    const mls_tensor *t = pending->tensor;
    if (pending->entry->bytes > 0 && (t->swapped || !mls_tensor_is_contiguous(t))) {
        return write_packed(w, pending);
    }
    return write_contiguous(w, pending);
}

/* Write all tensors in file order, then the header before them. If the process dies in
 * between, the temporary has no valid header, so no reader accepts it. */
static mls_code write_content(writer *w, const mls_safetensors_content *content)
{
    w->written = w->header.text.length;
    for (size_t i = 0; i < w->header.count; i++) {
        const mls_header_tensor *entry = &w->header.tensors[i];
        tensor_write pending = {.tensor = content->tensors[entry->number].tensor,
                                .entry = entry};
        const mls_code code = write_tensor(w, &pending);
        if (code != MLS_OK) {
            mls_status_name(w->st, entry->name.data, entry->name.length);
            return code;
        }
    }
    const mls_code code = flush_buffer(w);
    if (code != MLS_OK) {
        return code;
    }
    mls_header_finish(&w->header, w->crc);
    return mls_atomic_write(&w->file, w->header.text.data, w->header.text.length, 0,
                            w->st);
}

/* Write a whole file, atomically. Check the content before the file system is accessed.
 * After mls_atomic_begin, every path ends in commit or abort. */
mls_code mls_safetensors_write(const char *path, const mls_safetensors_content *content,
                               const mls_kernels *kernels, const mls_crc_kernels *crc,
                               mls_status *st)
{
    writer w = {.kernels = kernels, .crc = crc, .st = st};
    mls_header_tensor *tensors = NULL;
    bool is_open = false;
    mls_code code = check_keys(content, st);
    if (code == MLS_OK) {
        code = describe_tensors(content, &tensors, st);
    }
    if (code == MLS_OK) {
        code = mls_header_init(&w.header, tensors, content->count, content->metadata,
                               content->metadata_count, PAYLOAD_ALIGNMENT, st);
    }
    if (code == MLS_OK && (w.buffer = mls_alloc(BUFFER_BYTES, 1)) == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for a buffer of 1 MiB");
    }
    if (code == MLS_OK) {
        code = mls_atomic_begin(path, 0666, &w.file, st);
        is_open = code == MLS_OK;
    }
    if (code == MLS_OK) {
        code = write_content(&w, content);
    }
    if (code == MLS_OK) {
        code = mls_atomic_commit(&w.file, st);
    } else if (is_open) {
        mls_atomic_abort(&w.file);
    }
    mls_free(w.buffer);
    mls_header_fini(&w.header);
    mls_free(tensors);
    return code;
}
