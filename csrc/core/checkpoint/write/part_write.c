/* part_write: the runs of a part in the whole tensor, in steps that stay in the cache. */
#if !defined(_WIN32)

#    include "checkpoint/write/part_write.h"

#    include "array/copy/pack_range.h"
#    include "io/file.h"
#    include "safetensors/safetensors.h"

typedef struct writing {
    const mls_part_writer *writer;
    const mls_shard_item *item;
    const mls_tensor_place *place;
    size_t item_bytes;
    size_t bytes; /* of the whole tensor */
    size_t unreported;
    size_t end;          /* end of the last bytes of the tensor that were written */
    uint32_t share;      /* of the checksum of the bytes up to `end` in their block */
    uint64_t zero_count; /* mls_crc_zeros(zero_count) is `zeros`: runs repeat lengths */
    uint32_t zeros;
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

static void append_zeros(writing *w, size_t count)
{
    if (w->share != 0 && w->zero_count != count) {
        w->zeros = mls_crc_zeros(count);
        w->zero_count = count;
    }
    w->share = w->share == 0 ? 0 : mls_crc_append(w->share, w->zeros);
}

/* XOR the share of the current block to its checksum. The bytes up to the end of the
 * block count as zeros. */
static void finish_block(writing *w)
{
    if (w->share != 0) {
        const size_t block = (w->end - 1) / MLS_SAFETENSORS_BLOCK;
        const size_t next = (block + 1) * MLS_SAFETENSORS_BLOCK;
        const size_t end = next < w->bytes ? next : w->bytes;
        w->place->crcs[block] ^= mls_crc_combine(w->share, 0, end - w->end);
        w->share = 0;
    }
}

/* Add bytes `to` .. `to + count` of the tensor to the shares of their blocks. Bytes
 * between them and the last ones count as zeros. Calls ascend. */
static void add_share(writing *w, const unsigned char *data, size_t to, size_t count)
{
    while (count > 0) {
        const size_t room = MLS_SAFETENSORS_BLOCK - to % MLS_SAFETENSORS_BLOCK;
        const size_t step = count < room ? count : room;
        if (w->end > 0 &&
            to / MLS_SAFETENSORS_BLOCK != (w->end - 1) / MLS_SAFETENSORS_BLOCK) {
            finish_block(w);
        }
        append_zeros(w, to + step - w->end);
        w->share ^= w->writer->crc->update(0, data, step);
        w->end = to + step;
        data += step;
        to += step;
        count -= step;
    }
}

/* Report bytes when there are enough of them: runs may be short. */
static mls_code report(writing *w, size_t count, mls_status *st)
{
    *w->place->written += count;
    w->unreported += count;
    if (w->unreported < MLS_PART_STEP) {
        return MLS_OK;
    }
    const size_t bytes = w->unreported;
    w->unreported = 0;
    return mls_progress_report(w->writer->progress, bytes)
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
    finish_block(&w);
    return code;
}

#else
/* No POSIX files: see io/file.h. */
typedef int mls_part_write_unused;
#endif
