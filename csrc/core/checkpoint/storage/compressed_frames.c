/* compressed_frames: shuffles and compresses frames; reads, verifies and decompresses
 * them; error for a damaged block.
 *
 * Compressed frames are not aligned with the checksummed blocks of the file. A verified
 * read loads the one or two blocks that contain a frame, and keeps the second block,
 * which is usually the first block of the next frame. */
#include "checkpoint/storage/compressed_frames.h"

#include "base/memory.h"
#include "io/file.h"
#include "safetensors/safetensors.h"

#include <string.h>

/* The name in an index, which is also the name of the package that provides the codec. */
const char *mls_codec_name(mls_codec codec)
{
    static const char *const names[MLS_CODEC_COUNT] = {
        [MLS_ZLIB] = "zlib", [MLS_ZSTD] = "zstd"};
    return names[codec];
}

/* Return the uncompressed bytes of frame `number`; the last frame may be shorter than the
 * others. */
size_t mls_compressed_frame_bytes(const mls_compressed_frames *frames, size_t number)
{
    const size_t left = frames->bytes - number * MLS_FRAME_BYTES;
    return left < MLS_FRAME_BYTES ? left : MLS_FRAME_BYTES;
}

/* ---- lengths as text ---- */

size_t mls_compressed_frames_text_count(mls_str text)
{
    return mls_str_count(text, ',') + 1;
}

/* Parse the comma-separated lengths of compressed frames, and store their running sums in
 * `ends`. Returns false unless there is one valid length for each frame. A compressed
 * frame is never longer than its uncompressed bytes, so the sums cannot overflow. */
bool mls_compressed_frames_read(mls_compressed_frames *frames, mls_str text)
{
    const char *at = text.data, *end = at + text.length;
    const size_t count = mls_compressed_frames_count(frames->bytes);
    size_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t length;
        if (at == end || !mls_str_next_number(&at, end, &length) || length == 0 ||
            length > mls_compressed_frame_bytes(frames, i)) {
            return false;
        }
        sum += (size_t)length;
        frames->ends[i] = sum;
    }
    return at == end;
}

/* ---- byte shuffle ---- */

/* Clang vectorizes these loops at -O2, gcc only at -O3: ten times as fast. */
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC push_options
#    pragma GCC optimize("O3")
#endif

/* Move byte b of each of `count` elements at `from` to plane b of `to`, `count` adjacent
 * bytes, or back. `item`, the bytes of an element, and `back` are constants at each
 * call. */
static inline void move_items(const unsigned char *restrict from, size_t count,
                              size_t item, bool back, unsigned char *restrict to)
{
    for (size_t i = 0; i < count; i++) {
        for (size_t b = 0; b < item; b++) {
            const size_t element = i * item + b, plane = b * count + i;
            if (back) {
                to[element] = from[plane];
            } else {
                to[plane] = from[element];
            }
        }
    }
}

/* Sort the bytes of all elements at `from` into planes at `to` (all first bytes, all
 * second bytes, ...), or restore the elements if `back`. `bytes` is the size of each
 * side; `item`, the bytes of an element, is 2, 4 or 8: a constant in each branch gives a
 * fast loop. */
static inline void move_bytes(const unsigned char *from, size_t bytes, size_t item,
                              bool back, unsigned char *to)
{
    if (item == 2) {
        move_items(from, bytes / 2, 2, back, to);
    } else if (item == 4) {
        move_items(from, bytes / 4, 4, back, to);
    } else {
        move_items(from, bytes / 8, 8, back, to);
    }
}

#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC pop_options
#endif

/* Shuffle a frame's elements into `shuffled` and compress that. Elements of one byte need
 * no shuffle, but are copied anyway: a codec may read its input twice, and must see the
 * same bytes even if another thread changes the array. */
mls_code mls_compressed_frame_encode(const mls_codecs *codecs, mls_codec codec,
                                     size_t item, const unsigned char *from, size_t bytes,
                                     unsigned char *shuffled, unsigned char *to,
                                     size_t *out, mls_status *st)
{
    size_t length = 0;
    if (item > 1) {
        move_bytes(from, bytes, item, false, shuffled);
    } else {
        memcpy(shuffled, from, bytes);
    }
    /* one byte short, so that a frame that does not shrink is rejected */
    const mls_code code = codecs->encode(codecs->context, codec, shuffled, bytes, to,
                                         bytes - 1, &length, st);
    if (code == MLS_OK && length == 0) {
        /* not shorter: store the frame uncompressed */
        memcpy(to, from, bytes);
        length = bytes;
    }
    if (code == MLS_OK) {
        *out = length;
    }
    return code;
}

/* ---- reading ---- */

/* Offsets in the buffer: two blocks, the decompressed bytes that are still shuffled, the
 * elements. */
enum {
    BLOCK = MLS_SAFETENSORS_BLOCK,
    SHUFFLED = 2 * BLOCK,
    DATA = 3 * BLOCK,
    BUFFER_BYTES = 4 * BLOCK
};

_Static_assert((int)MLS_FRAME_BYTES == (int)BLOCK, "a frame is in at most two blocks");

/* Report that a block's `checksum` differs from the `expected` one. They have the same
 * digits as in the index, so that users can search for them. */
mls_code mls_block_changed(uint64_t offset, size_t length, uint32_t checksum,
                           uint32_t expected, mls_status *st)
{
    mls_fail(st, MLS_E_CHECKSUM,
             "its bytes have changed since they were written (checksum %08lx, "
             "expected %08lx, in bytes %llu to %llu of the file): the file is damaged",
             (unsigned long)checksum, (unsigned long)expected, (unsigned long long)offset,
             (unsigned long long)(offset + length));
    st->has_offset = true;
    st->offset = offset;
    mls_status_expected(st, "%08lx", (unsigned long)expected);
    return mls_status_got(st, "%08lx", (unsigned long)checksum);
}

/* Read block `block` of the compressed bytes into position `slot` (0 or 1) of the
 * buffer, and verify it. The last block may be shorter. MLS_E_CHECKSUM: it is damaged;
 * errors of mls_source_read_at. */
static mls_code read_block(const mls_compressed_frame_reader *reader,
                           const mls_coded *coded, size_t block, size_t slot,
                           mls_status *st)
{
    const size_t start = block * BLOCK, left = coded->bytes - start;
    const size_t length = left < BLOCK ? left : BLOCK;
    unsigned char *to = reader->buffer + slot * BLOCK;
    const mls_code code =
        mls_source_read_at(&coded->source, to, length, coded->offset + start, st);
    if (code != MLS_OK) {
        return code;
    }
    const uint32_t checksum = coded->crc->update(0, to, length);
    return checksum == coded->crcs[block]
               ? MLS_OK
               : mls_block_changed(coded->offset + start, length, checksum,
                                   coded->crcs[block], st);
}

/* Make the buffer contain the verified blocks `first` to `last`, one or two, from its
 * start. Blocks that are in the buffer already are moved, not read again. After an error
 * the buffer counts as empty. Errors as read_block. */
static mls_code load_blocks(mls_compressed_frame_reader *reader, const mls_coded *coded,
                            size_t first, size_t last, mls_status *st)
{
    size_t have = 0; /* blocks that are in the buffer already */
    if (reader->crcs == coded->crcs && reader->count > 0) {
        if (first == reader->first) {
            have = reader->count;
        } else if (reader->count == 2 && first == reader->first + 1) {
            memcpy(reader->buffer, reader->buffer + BLOCK, BLOCK);
            have = 1;
        }
    }
    reader->count = 0; /* in case reading fails */
    for (size_t i = have; i <= last - first; i++) {
        const mls_code code = read_block(reader, coded, first + i, i, st);
        if (code != MLS_OK) {
            return code;
        }
        have = i + 1;
    }
    reader->crcs = coded->crcs;
    reader->first = first;
    reader->count = have;
    return MLS_OK;
}

/* Read bytes `begin` .. `end` of the compressed bytes `coded`; `*out` points to them in
 * the buffer, until the next call. With verification (`coded->crc` is not NULL) whole
 * blocks are read, and kept for the next frame. Errors as read_block. */
static mls_code read_frame_bytes(mls_compressed_frame_reader *reader,
                                 const mls_coded *coded, size_t begin, size_t end,
                                 const unsigned char **out, mls_status *st)
{
    mls_code code;
    if (coded->crc == NULL) {
        reader->count = 0;
        *out = reader->buffer;
        return mls_source_read_at(&coded->source, reader->buffer, end - begin,
                                  coded->offset + begin, st);
    }
    code = load_blocks(reader, coded, begin / BLOCK, (end - 1) / BLOCK, st);
    *out = reader->buffer + begin % BLOCK;
    return code;
}

/* Read and decompress frame `number`, counted from 0. A frame whose stored length equals
 * its uncompressed length is stored uncompressed and not shuffled. MLS_E_VALUE: there is
 * no decoder; other errors of reading, of a damaged block and of the codec, see the
 * header. After an error `*data` is not valid. */
mls_code mls_compressed_frame_read(mls_compressed_frame_reader *reader,
                                   const mls_coded *coded, size_t number,
                                   const unsigned char **data, mls_status *st)
{
    const mls_compressed_frames *frames = coded->frames;
    const mls_codecs *codecs = coded->codecs;
    const size_t begin = mls_compressed_frame_begin(frames, number),
                 end = frames->ends[number];
    const size_t bytes = mls_compressed_frame_bytes(frames, number);
    const unsigned char *from;
    if (reader->buffer == NULL &&
        (reader->buffer = mls_realloc(NULL, BUFFER_BYTES, 1)) == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a buffer of %d MiB",
                        BUFFER_BYTES >> 20);
    }
    mls_code code = read_frame_bytes(reader, coded, begin, end, &from, st);
    if (code != MLS_OK || end - begin == bytes) {
        *data = from;
        return code;
    }
    if (codecs == NULL) {
        return mls_fail(st, MLS_E_VALUE, "no decoder for %s is available",
                        mls_codec_name(frames->codec));
    }
    /* decompress to scratch memory if unshuffling follows; the blocks keep the compressed
     * bytes, as the last block may be the first of the next frame */
    unsigned char *to = reader->buffer + (frames->item > 1 ? SHUFFLED : DATA);
    code =
        codecs->decode(codecs->context, frames->codec, from, end - begin, to, bytes, st);
    if (code == MLS_E_FORMAT) {
        st->has_offset = true;
        st->offset = coded->offset + begin;
    }
    if (code == MLS_OK && frames->item > 1) {
        move_bytes(to, bytes, frames->item, true, reader->buffer + DATA);
    }
    *data = reader->buffer + DATA;
    return code;
}

void mls_compressed_frame_reader_fini(mls_compressed_frame_reader *reader)
{
    mls_free(reader->buffer);
    *reader = (mls_compressed_frame_reader){0};
}
