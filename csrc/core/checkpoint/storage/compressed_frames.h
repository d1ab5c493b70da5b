/* frames: the compressed bytes of a layer.
 *
 * What a layer holds is cut into frames of 1 MiB, the last one short, and each is coded
 * by itself: so that threads share the work, and a part is read without the rest.  Before
 * coding, bytes of elements are put apart, all first ones in front, then all second ones:
 * those of numbers that are much alike are neighbours then.  A frame that is not shorter
 * when it is coded is stored as it was.
 *
 * The codecs are not ours.  Who writes and reads brings them along.
 */
#ifndef MLS_FRAMES_H
#define MLS_FRAMES_H

#include "crc32c/crc32c.h"
#include "base/status.h"
#include "base/string_view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of a frame before it is coded: as many as a checksummed block of a file has, so
 * that no coded frame lies in more than two of them. */
enum { MLS_FRAME_BYTES = 1 << 20 };

typedef enum mls_codec { MLS_ZLIB, MLS_ZSTD, MLS_CODEC_COUNT } mls_codec;

/* "zlib", "zstd". */
const char *mls_codec_name(mls_codec codec);

/* What codes and decodes; called by any thread, by several at once. */
typedef struct mls_codecs {
    /* Code `bytes` bytes; `*out` are written to `to`, where there is room for `room`.
     * `*out` 0: that would have been more.  MLS_E_MEMORY, MLS_E_VALUE (it is not there),
     * MLS_E_STOPPED. */
    mls_code (*encode)(void *context, mls_codec codec, const unsigned char *from,
                       size_t bytes, unsigned char *to, size_t room, size_t *out,
                       mls_status *st);
    /* Decode `bytes` bytes, of which exactly `out` must come.  The same, and
     * MLS_E_FORMAT: these are no such bytes. */
    mls_code (*decode)(void *context, mls_codec codec, const unsigned char *from,
                       size_t bytes, unsigned char *to, size_t out, mls_status *st);
    void *context;
} mls_codecs;

/* How a layer's bytes are coded. */
typedef struct mls_frames {
    mls_codec codec;
    size_t item;  /* bytes of an element: 1, 2, 4 or 8 */
    size_t bytes; /* of all elements that the layer holds, never 0 */
    size_t *ends; /* of each frame: where it ends among the coded bytes */
} mls_frames;

/* How many frames so many bytes make. */
static inline size_t mls_frames_count(size_t bytes)
{
    return bytes / MLS_FRAME_BYTES + (bytes % MLS_FRAME_BYTES != 0 ? 1 : 0);
}

/* Bytes of one frame, before it is coded. */
size_t mls_frame_bytes(const mls_frames *frames, size_t number);

/* Where a frame begins among the coded bytes. */
static inline size_t mls_frame_begin(const mls_frames *frames, size_t number)
{
    return number == 0 ? 0 : frames->ends[number - 1];
}

/* How many numbers a text such as "812,900" may be. */
size_t mls_frames_text_count(mls_text text);

/* Read the lengths of all coded frames: `ends` are filled in, whose number is known by
 * `bytes`.  False: they are not as many, or one is 0 or more than what it codes. */
bool mls_frames_read(mls_frames *frames, mls_text text);

/* Code the bytes of one frame to `to`, where there is room for as many.  `apart` is room
 * for them, too.  `*out`: how many it became; as many as they were: it was not shorter,
 * and is stored as it was.  Errors of the codec. */
mls_code mls_frame_encode(const mls_codecs *codecs, mls_codec codec, size_t item,
                          const unsigned char *from, size_t bytes, unsigned char *apart,
                          unsigned char *to, size_t *out, mls_status *st);

#if !defined(_WIN32)

/* A place in a file whose bytes are coded. */
typedef struct mls_coded {
    int fd;
    uint64_t offset;      /* of the first coded byte */
    size_t bytes;         /* coded ones */
    const uint32_t *crcs; /* of blocks of these; looked at where `crc` is given */
    const mls_frames *frames;
    const mls_crc_kernels *crc; /* NULL: not verified */
    const mls_codecs *codecs;   /* NULL: there are none, and nothing can be decoded */
} mls_coded;

/* Room to read frames in, one after the other: 4 MiB. */
typedef struct mls_frame_room {
    unsigned char *room;  /* NULL: not yet allocated */
    const uint32_t *crcs; /* of the place that was read last, and which block ... */
    size_t first, count;  /* ... of it is the first of so many that are there */
} mls_frame_room;

/* Read one frame, and decode it: `*data` is in the room, and good until the next call.
 * Where it is verified whole blocks are read, each once if frames are read in their
 * order. MLS_E_IO, MLS_E_FORMAT (with offset), MLS_E_CHECKSUM (with offset),
 * MLS_E_MEMORY, and errors of the codec. */
mls_code mls_frame_read(mls_frame_room *room, const mls_coded *coded, size_t number,
                        const unsigned char **data, mls_status *st);

/* Say which block, `length` bytes from `start` on of a place at `offset`, is not what was
 * written. */
mls_code mls_block_changed(uint64_t offset, size_t start, size_t length, uint32_t found,
                           uint32_t expected, mls_status *st);

void mls_frame_room_fini(mls_frame_room *room); /* accepts a zeroed one; zeroes it */

#endif
#endif
