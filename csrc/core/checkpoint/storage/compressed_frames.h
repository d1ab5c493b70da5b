/* compressed_frames: the frames of a compressed layer: their size (1 MiB), and the table
 * of codecs.
 *
 * The elements of a layer are divided into frames of 1 MiB; the last frame may be
 * shorter. Each frame is compressed independently, so that threads can share the work and
 * a part can be read without the rest. Before compression the bytes of the elements are
 * shuffled: all first bytes, then all second bytes, and so on. Similar numbers then have
 * equal bytes side by side. A frame that compression does not shorten is stored
 * uncompressed.
 *
 * The caller provides the codecs. */
#ifndef MLS_COMPRESSED_FRAMES_H
#define MLS_COMPRESSED_FRAMES_H

#include "base/status.h"
#include "base/string_view.h"
#include "crc32c/crc32c.h"
#include "io/file.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Uncompressed bytes of a frame. It equals the size of a checksummed block of a file, so
 * a compressed frame intersects at most two blocks. */
enum { MLS_FRAME_BYTES = 1 << 20 };

typedef enum mls_codec { MLS_ZLIB, MLS_ZSTD, MLS_CODEC_COUNT } mls_codec;

/* Returns "zlib" or "zstd". */
const char *mls_codec_name(mls_codec codec);

/* Compression functions of the caller. Several threads may call them at once. */
typedef struct mls_codecs {
    /* Compress `bytes` bytes into `to`, which has space for `room` bytes; `*out` receives
     * the length. `*out` is 0 if the result would be longer than `room`. Errors:
     * MLS_E_MEMORY, MLS_E_VALUE (codec not available), MLS_E_STOPPED. */
    mls_code (*encode)(void *context, mls_codec codec, const unsigned char *from,
                       size_t bytes, unsigned char *to, size_t room, size_t *out,
                       mls_status *st);
    /* Decompress `bytes` bytes, which must produce exactly `out` bytes. Errors as above,
     * and MLS_E_FORMAT: the input is not valid. */
    mls_code (*decode)(void *context, mls_codec codec, const unsigned char *from,
                       size_t bytes, unsigned char *to, size_t out, mls_status *st);
    void *context;
} mls_codecs;

/* How a layer is compressed. */
typedef struct mls_compressed_frames {
    mls_codec codec;
    size_t item;  /* bytes of an element: 1, 2, 4 or 8 */
    size_t bytes; /* uncompressed size of the layer, never 0 */
    size_t *ends; /* end offset of each frame in the compressed bytes */
} mls_compressed_frames;

/* Number of frames for `bytes` uncompressed bytes. */
static inline size_t mls_compressed_frames_count(size_t bytes)
{
    return bytes / MLS_FRAME_BYTES + (bytes % MLS_FRAME_BYTES != 0 ? 1 : 0);
}

/* Uncompressed bytes of frame `number`, counted from 0. */
size_t mls_compressed_frame_bytes(const mls_compressed_frames *frames, size_t number);

/* Offset of frame `number` in the compressed bytes. */
static inline size_t mls_compressed_frame_begin(const mls_compressed_frames *frames,
                                                size_t number)
{
    return number == 0 ? 0 : frames->ends[number - 1];
}

/* Number of values in a text such as "812,900". */
size_t mls_compressed_frames_text_count(mls_str text);

/* Parse a text such as "812,900", the lengths of all compressed frames, into
 * `frames->ends`, which has room for them; `frames->bytes` determines their number.
 * Returns false if the number differs, or a length is 0 or exceeds the uncompressed
 * length. */
bool mls_compressed_frames_read(mls_compressed_frames *frames, mls_str text);

/* Compress one frame of `bytes` bytes at `from`, whose elements have `item` bytes, into
 * `to`. `to` and the scratch buffer `shuffled` have space for `bytes` bytes each. `*out`
 * receives the length. If it equals `bytes`, compression did not shorten the frame, and
 * `to` contains the original bytes. Errors of the codec. */
mls_code mls_compressed_frame_encode(const mls_codecs *codecs, mls_codec codec,
                                     size_t item, const unsigned char *from, size_t bytes,
                                     unsigned char *shuffled, unsigned char *to,
                                     size_t *out, mls_status *st);

/* A compressed byte range of a file. */
typedef struct mls_coded {
    mls_source source;
    uint64_t offset;      /* offset of the first byte in the file */
    size_t bytes;         /* compressed bytes */
    const uint32_t *crcs; /* CRC32C of each block; used only if `crc` is set */
    const mls_compressed_frames *frames;
    const mls_crc_kernels *crc; /* NULL: not verified */
    const mls_codecs *codecs;   /* NULL: cannot decompress */
} mls_coded;

/* Buffer for reading frames one at a time: 4 MiB. */
typedef struct mls_compressed_frame_reader {
    unsigned char *buffer; /* NULL: not yet allocated */
    const uint32_t *crcs;  /* identifies the range that was read last */
    size_t first, count;   /* its blocks in the buffer: the first, and their number */
} mls_compressed_frame_reader;

/* Read and decompress frame `number` of a place. `*data` points into the buffer and is
 * valid until the next call. With verification, whole blocks are read; frames in
 * ascending order read each block once.
 * Errors: MLS_E_IO, MLS_E_FORMAT (with offset), MLS_E_CHECKSUM (with offset),
 * MLS_E_MEMORY, MLS_E_VALUE (no decoder), and errors of the codec. */
mls_code mls_compressed_frame_read(mls_compressed_frame_reader *reader,
                                   const mls_coded *coded, size_t number,
                                   const unsigned char **data, mls_status *st);

/* Report a damaged block: `length` bytes at `offset` of the file. `checksum` is that of
 * the bytes, `expected` the recorded one. Returns MLS_E_CHECKSUM. */
mls_code mls_block_changed(uint64_t offset, size_t length, uint32_t checksum,
                           uint32_t expected, mls_status *st);

void mls_compressed_frame_reader_fini(
    mls_compressed_frame_reader *reader); /* accepts a zeroed one; zeroes it */

#endif
