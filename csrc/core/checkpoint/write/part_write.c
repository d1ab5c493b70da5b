/* part_write: the runs of a part in the whole tensor, in steps that stay in the cache. */
#if !defined(_WIN32)

#    include "checkpoint/write/part_write.h"

#    include "array/copy/pack_range.h"
#    include "io/file.h"
#    include "safetensors/safetensors.h"

/* One tensor that is being written. */
typedef struct writing {
    const mls_part_writer *writer;
    const mls_shard_item *item;
    const mls_tensor_place *place;
    size_t item_bytes;
    size_t bytes; /* of the whole tensor */
    size_t unreported;
} writing;

/* Return bytes `at` .. of the item, packed into the buffer if its memory is strided. */
static const unsigned char *item_bytes_at(const writing *w, size_t at, size_t count)
{
    const mls_shard_item *item = w->item;
    if (item->data != NULL) {
        return item->data + item->first * w->item_bytes + at;
    }
    mls_pack_range(w->writer->kernels, item->strided, item->first + at / w->item_bytes,
                   count / w->item_bytes, w->writer->buffer);
    return w->writer->buffer;
}

/* XOR the share of bytes `to` .. `to + count` of the tensor, which are in one block, to
 * its checksum. */
static void add_block_share(const writing *w, const unsigned char *data, size_t to,
                            size_t count)
{
    const size_t block = to / MLS_SAFETENSORS_BLOCK;
    const size_t left = w->bytes - block * MLS_SAFETENSORS_BLOCK;
    const size_t length = left < MLS_SAFETENSORS_BLOCK ? left : MLS_SAFETENSORS_BLOCK;
    const size_t behind = length - (to % MLS_SAFETENSORS_BLOCK + count);
    const uint32_t crc = w->writer->crc->update(0, data, count);
    w->place->crcs[block] ^= behind == 0 ? crc : mls_crc_combine(crc, 0, behind);
}

/* The same for bytes of any blocks. */
static void add_share(const writing *w, const unsigned char *data, size_t to,
                      size_t count)
{
    while (count > 0) {
        const size_t room = MLS_SAFETENSORS_BLOCK - to % MLS_SAFETENSORS_BLOCK;
        const size_t step = count < room ? count : room;
        add_block_share(w, data, to, step);
        data += step;
        to += step;
        count -= step;
    }
}

/* Report bytes when there are enough of them: runs may be short. */
static mls_code report(writing *w, size_t count, mls_status *st)
{
    const mls_progress *progress = w->writer->progress;
    *w->place->written += count;
    w->unreported += count;
    if (progress == NULL || w->unreported < MLS_PART_STEP) {
        return MLS_OK;
    }
    const size_t bytes = w->unreported;
    w->unreported = 0;
    return progress->report(progress->context, bytes)
               ? MLS_OK
               : mls_fail(st, MLS_E_STOPPED, "cancelled by the caller");
}

/* Write bytes `at` .. `at + count` of the item to byte `to` of the tensor. Steps end at
 * file offsets that are multiples of a step, as in safetensors_write.c, and therefore of
 * the item size: the header aligns tensors to it. */
static mls_code write_run(writing *w, size_t at, size_t to, size_t count, mls_status *st)
{
    while (count > 0) {
        const size_t room =
            MLS_PART_STEP - (size_t)((w->place->offset + to) % MLS_PART_STEP);
        const size_t step = count < room ? count : room;
        const unsigned char *data = item_bytes_at(w, at, step);
        add_share(w, data, to, step);
        if (mls_file_write_at(w->place->fd, data, step, w->place->offset + to, st) !=
                MLS_OK ||
            report(w, step, st) != MLS_OK) {
            return st->code;
        }
        mls_file_start_writeback(w->place->fd, w->place->started,
                                 w->place->offset + to + step);
        at += step;
        to += step;
        count -= step;
    }
    return MLS_OK;
}

/* The runs of the part ascend in the whole tensor. */
mls_code mls_part_write(const mls_part_writer *writer, const mls_shard_item *item,
                        const mls_tensor_place *place, mls_status *st)
{
    const mls_layout all = {0};
    mls_part part, whole;
    mls_overlap overlap;
    mls_run run;
    mls_code code =
        mls_layout_part(&item->layout, item->rank, item->shape, item->part, &part, st);
    if (code != MLS_OK || (code = mls_layout_part(&all, item->rank, item->shape, 0,
                                                  &whole, st)) != MLS_OK) {
        return code;
    }
    const size_t size = mls_dtype_of(item->dtype)->item_bytes;
    writing w = {.writer = writer,
                 .item = item,
                 .place = place,
                 .item_bytes = size,
                 .bytes = mls_part_count(&whole) * size};
    mls_overlap_init(&overlap, &part, &whole);
    while (code == MLS_OK && mls_overlap_next(&overlap, &run)) {
        code = write_run(&w, run.a * size, run.b * size, run.count * size, st);
    }
    return code;
}

#else
/* No POSIX files: see io/file.h. */
typedef int mls_part_write_unused;
#endif
