/* part_write: writes each rank's parts, also converted, into files that ranks share
 * (exports); shares of their checksums.
 *
 * A part has runs in the whole tensor, which are written in steps that stay in the cache.
 */
#include "checkpoint/write/part_write.h"

#include "array/copy/pack_range.h"
#include "array/copy/scaled_codes.h"
#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"
#include "safetensors/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

/* The open file. */
typedef struct part_file {
    int fd;
    uint64_t writeback_end; /* of the bytes whose writeback has started */
    unsigned char *buffer;  /* 2 * MLS_PART_STEP bytes: elements as in the file, and 8-bit
                               floats before they are converted */
} part_file;

/* One item, which is a part of a tensor, that is being written. */
typedef struct item_write {
    const mls_parts_job *job;
    const mls_placed_item *placed;
    part_file *file;
    uint64_t offset;      /* of the tensor's first byte in the file */
    uint32_t *crcs;       /* of the tensor's blocks */
    size_t element_bytes; /* in the file */
    size_t bytes;         /* of the whole tensor in the file */
    size_t unreported;    /* bytes written, but not yet reported as progress */
    size_t end;           /* end of the last bytes of the tensor that were written */
    uint32_t share;       /* of the checksum of the bytes up to `end` in their block */
    uint64_t zero_count;  /* mls_crc_zeros(zero_count) is `zeros`: runs repeat lengths */
    uint32_t zeros;
} item_write;

/* Convert `count` 8-bit floats of dtype `from` at `codes` to dtype `to`; `out` has room
 * for them in that dtype. mls_scaled_codes_decode without scales does that. */
static void convert_bytes(const mls_kernels *kernels, mls_dtype from, mls_dtype to,
                          const unsigned char *codes, size_t count, unsigned char *out)
{
    const size_t shape[] = {1, 1, count};
    mls_scaled_codes source = {.dtype = from};
    mls_tensor values;
    mls_status ignored; /* cannot fail: the elements are in memory */
    (void)mls_tensor_init(&values, out, to, 3, shape, &ignored);
    (void)mls_tensor_init(&source.codes, (void *)(uintptr_t)codes, from, 3, shape,
                          &ignored);
    mls_scaled_codes_decode(kernels, NULL, &values, &source);
}

/* Convert elements `first` .. `first + count` of the item to the file's dtype, into the
 * first half of the buffer, and return them. The second half is scratch space for packed
 * 8-bit floats. */
static const unsigned char *converted_at(const item_write *w, size_t first, size_t count)
{
    const mls_kernels *kernels = w->job->kernels;
    const mls_shard_item *item = w->placed->item;
    const mls_dtype from = item->dtype, to = w->placed->dtype;
    const size_t size = mls_dtype_of(from)->item_bytes;
    unsigned char *out = w->file->buffer, *spare = out + MLS_PART_STEP;
    const unsigned char *data =
        item->data == NULL ? NULL : item->data + (item->first + first) * size;
    if (mls_dtype_of(from)->kind == MLS_KIND_FLOAT8) {
        if (data == NULL) {
            mls_pack_range(kernels, item->strided, from, item->first + first, count,
                           spare);
            data = spare;
        }
        convert_bytes(kernels, from, to, data, count, out);
    } else if (data == NULL) {
        mls_pack_range(kernels, item->strided, to, item->first + first, count, out);
    } else {
        kernels->convert[from][to](out, data, count, MLS_STORE_CACHED);
    }
    return out;
}

/* Return bytes `at` .. `at + count` of the item's part in the file's dtype: a pointer
 * into its memory, or into the buffer if the memory is strided or has another dtype. Both
 * are multiples of the element size. */
static const unsigned char *part_bytes_at(const item_write *w, size_t at, size_t count)
{
    const mls_shard_item *item = w->placed->item;
    if (item->dtype != w->placed->dtype) {
        return converted_at(w, at / w->element_bytes, count / w->element_bytes);
    }
    if (item->data != NULL) {
        return item->data + item->first * w->element_bytes + at;
    }
    mls_pack_range(w->job->kernels, item->strided, item->dtype,
                   item->first + at / w->element_bytes, count / w->element_bytes,
                   w->file->buffer);
    return w->file->buffer;
}

/* Extend the current block's share of the checksum by `count` zero bytes. The CRC of that
 * many zeros is cached, since runs often have equal distances; a share of 0 stays 0. */
static void append_zeros(item_write *w, size_t count)
{
    if (w->share != 0 && w->zero_count != count) {
        w->zeros = mls_crc_zeros(count);
        w->zero_count = count;
    }
    w->share = w->share == 0 ? 0 : mls_crc_append(w->share, w->zeros);
}

/* XOR the current block's share to the block's checksum, after extending it by zeros to
 * the end of the block. A share is the CRC of the block with this item's bytes and zeros
 * elsewhere. The next block starts with a share of 0. */
static void finish_block(item_write *w)
{
    if (w->share != 0) {
        const size_t block = (w->end - 1) / MLS_SAFETENSORS_BLOCK;
        const size_t next = (block + 1) * MLS_SAFETENSORS_BLOCK;
        const size_t end = next < w->bytes ? next : w->bytes;
        w->crcs[block] ^= mls_crc_combine(w->share, 0, end - w->end);
        w->share = 0;
    }
}

/* Add `count` bytes `data`, which are at byte `to` of the tensor, to the shares of their
 * blocks. Bytes between them and the previous ones count as zeros: other items add those.
 * Calls ascend. */
static void add_share(item_write *w, const unsigned char *data, size_t to, size_t count)
{
    while (count > 0) {
        const size_t room = MLS_SAFETENSORS_BLOCK - to % MLS_SAFETENSORS_BLOCK;
        const size_t step = count < room ? count : room;
        if (w->end > 0 &&
            to / MLS_SAFETENSORS_BLOCK != (w->end - 1) / MLS_SAFETENSORS_BLOCK) {
            finish_block(w);
        }
        append_zeros(w, to + step - w->end);
        w->share ^= w->job->crc->update(0, data, step);
        w->end = to + step;
        data += step;
        to += step;
        count -= step;
    }
}

/* Report the bytes that are written but not reported yet, if there are at least `least`
 * of them: runs may be short. MLS_E_STOPPED: the caller wants to stop. */
static mls_code report_bytes(item_write *w, size_t least, mls_status *st)
{
    if (w->unreported < least) {
        return MLS_OK;
    }
    const size_t bytes = w->unreported;
    w->unreported = 0;
    return mls_progress_report(w->job->progress, bytes)
               ? MLS_OK
               : mls_fail(st, MLS_E_STOPPED, "cancelled by the caller");
}

/* Write bytes `at` .. `at + count` of the item's part to byte `to` of its whole tensor in
 * the file, in steps of at most MLS_PART_STEP bytes that stay in the cache between the
 * checksum and the write. A step ends at a multiple of MLS_PART_STEP in the file, and
 * tensors start at a multiple of their element size there (the header aligns them), so no
 * step ends within an element. MLS_E_IO, MLS_E_STOPPED. */
static mls_code write_run(item_write *w, size_t at, size_t to, size_t count,
                          mls_status *st)
{
    while (count > 0) {
        const size_t room = MLS_PART_STEP - (size_t)((w->offset + to) % MLS_PART_STEP);
        const size_t step = count < room ? count : room;
        const unsigned char *data = part_bytes_at(w, at, step);
        add_share(w, data, to, step);
        if (mls_file_write_at(w->file->fd, data, step, w->offset + to, st) != MLS_OK) {
            return st->code;
        }
        w->job->written[w->placed->number] += step;
        w->unreported += step;
        if (report_bytes(w, MLS_PART_STEP, st) != MLS_OK) {
            return st->code;
        }
        mls_file_start_writeback(w->file->fd, &w->file->writeback_end,
                                 w->offset + to + step);
        at += step;
        to += step;
        count -= step;
    }
    return MLS_OK;
}

/* Write one item to its open file. Its part consists of runs: adjacent elements in both
 * the part and the whole tensor, in ascending order. Its share of the checksums is XORed
 * to the job's. MLS_E_IO, MLS_E_STOPPED, errors of mls_layout_part. */
static mls_code write_item(const mls_parts_job *job, const mls_placed_item *placed,
                           part_file *file, mls_status *st)
{
    const mls_shard_item *item = placed->item;
    const mls_layout undivided = {0};
    mls_part part, full_part;
    mls_overlap overlap;
    mls_run run;
    mls_code code =
        mls_layout_part(&item->layout, item->rank, item->shape, item->part, &part, st);
    if (code != MLS_OK || (code = mls_layout_part(&undivided, item->rank, item->shape, 0,
                                                  &full_part, st)) != MLS_OK) {
        return code;
    }
    const size_t size = mls_dtype_of(placed->dtype)->item_bytes;
    item_write w = {.job = job,
                    .placed = placed,
                    .file = file,
                    .offset = (uint64_t)placed->offset,
                    .crcs = job->crcs + placed->block,
                    .element_bytes = size,
                    .bytes = mls_part_count(&full_part) * size};
    mls_overlap_init(&overlap, &part, &full_part);
    while (code == MLS_OK && mls_overlap_next(&overlap, &run)) {
        code = write_run(&w, run.a * size, run.b * size, run.count * size, st);
    }
    finish_block(&w);
    return code == MLS_OK ? report_bytes(&w, 1, st) : code;
}

/* Open, write and close one file. `items` are the `count` items of this file, sorted by
 * offset. The file must exist. `file->buffer` is used. MLS_E_IO, and errors of
 * write_item. */
static mls_code write_file(const mls_parts_job *job, const mls_placed_item *items,
                           size_t count, part_file *file, mls_status *st)
{
    mls_code code = MLS_OK;
    file->writeback_end = (uint64_t)items->offset;
    /* O_NONBLOCK: opening a FIFO without a reader must not block */
    file->fd = openat(job->folder, job->names[items->file],
                      O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file->fd < 0) {
        return mls_fail_os(st, errno, "cannot open the file");
    }
    for (size_t i = 0; code == MLS_OK && i < count; i++) {
        code = write_item(job, &items[i], file, st);
    }
    const int reason = job->syncs && code == MLS_OK ? mls_file_sync(file->fd) : 0;
    (void)close(file->fd);
    return reason == 0 ? code : mls_fail_os(st, reason, "cannot sync the file to disk");
}

/* Return whether the file, block and result numbers of an item are within the job's
 * arrays (its tensor's last block too), and its offset is not negative. The caller's
 * numbers are signed and unchecked. */
static bool is_inside(const mls_parts_job *job, const mls_placed_item *placed)
{
    const mls_shard_item *item = placed->item;
    size_t bytes = mls_dtype_of(placed->dtype)->item_bytes;
    for (int i = 0; i < item->rank; i++) {
        if (!mls_size_mul(bytes, item->shape[i], &bytes)) {
            return false;
        }
    }
    return placed->file >= 0 && (size_t)placed->file < job->file_count &&
           placed->offset >= 0 && placed->block >= 0 &&
           (size_t)placed->block <= job->block_count &&
           mls_safetensors_blocks(bytes) <= job->block_count - (size_t)placed->block &&
           placed->number >= 0 && (size_t)placed->number < job->written_count;
}

/* Return whether the item's elements can be written in the file's dtype. */
static bool is_convertible(const mls_placed_item *placed)
{
    const mls_dtype from = placed->item->dtype, to = placed->dtype;
    return mls_dtype_converts(from, to) ||
           (mls_dtype_of(from)->kind == MLS_KIND_FLOAT8 && (int)to < MLS_CONVERTIBLE);
}

/* Order for qsort: by file, then by offset in the file. */
static int compare_places(const void *a, const void *b)
{
    const mls_placed_item *x = a, *y = b;
    return x->file != y->file       ? (x->file < y->file ? -1 : 1)
           : x->offset != y->offset ? (x->offset < y->offset ? -1 : 1)
                                    : 0;
}

/* Check all items before anything is written, sort them by file and offset, and open each
 * file once. `*failed` is also set if all files succeed: to the last one. */
mls_code mls_parts_write(const mls_parts_job *job, const char **failed, mls_status *st)
{
    mls_code code = MLS_OK;
    *failed = NULL;
    for (size_t i = 0; i < job->count; i++) {
        if (!is_inside(job, &job->items[i])) {
            return mls_fail(st, MLS_E_VALUE, "a place is outside the files");
        }
        if (!is_convertible(&job->items[i])) {
            return mls_fail(st, MLS_E_DTYPE, "%s cannot be written as %s",
                            mls_dtype_of(job->items[i].item->dtype)->name,
                            mls_dtype_of(job->items[i].dtype)->name);
        }
    }
    part_file file = {.buffer = mls_alloc(2, MLS_PART_STEP)};
    if (file.buffer == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a buffer of 512 KiB");
    }
    qsort(job->items, job->count, sizeof *job->items, compare_places);
    for (size_t i = 0, next; code == MLS_OK && i < job->count; i = next) {
        for (next = i + 1;
             next < job->count && job->items[next].file == job->items[i].file; next++) {
        }
        *failed = job->names[job->items[i].file];
        code = write_file(job, &job->items[i], next - i, &file, st);
    }
    mls_free(file.buffer);
    return code;
}
