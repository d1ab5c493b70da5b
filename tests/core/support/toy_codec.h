/* toy_codec: a run-length codec that tests can observe and make fail. */
#ifndef MLS_TOY_CODEC_H
#define MLS_TOY_CODEC_H

#include "checkpoint/storage/compressed_frames.h"

#include <stdatomic.h>
#include <string.h>

/* The counters and failures of one codec.  Zeroed: no call fails. */
typedef struct toy {
    atomic_int encoded, decoded;          /* calls */
    int encode_fails_at, decode_fails_at; /* from the nth call on; 0: none */
    mls_code failure;                     /* the code that failing calls return */
    mls_codecs codecs;
} toy;

/* Pairs of a count and a byte. */
static inline mls_code toy_encode(void *context, mls_codec codec,
                                  const unsigned char *from, size_t bytes,
                                  unsigned char *to, size_t room, size_t *out,
                                  mls_status *st)
{
    toy *self = context;
    size_t used = 0;
    const int call = atomic_fetch_add(&self->encoded, 1) + 1;
    if (self->encode_fails_at != 0 && call >= self->encode_fails_at) {
        return mls_fail(st, self->failure, "%s is broken", mls_codec_name(codec));
    }
    *out = 0;
    for (size_t i = 0, count; i < bytes; i += count) {
        count = 1;
        while (count < 255 && i + count < bytes && from[i + count] == from[i]) {
            count++;
        }
        if (room - used < 2) {
            return MLS_OK;
        }
        to[used++] = (unsigned char)count;
        to[used++] = from[i];
    }
    *out = used;
    return MLS_OK;
}

static inline mls_code toy_decode(void *context, mls_codec codec,
                                  const unsigned char *from, size_t bytes,
                                  unsigned char *to, size_t out, mls_status *st)
{
    toy *self = context;
    size_t used = 0;
    const int call = atomic_fetch_add(&self->decoded, 1) + 1;
    if (self->decode_fails_at != 0 && call >= self->decode_fails_at) {
        return mls_fail(st, self->failure, "%s is broken", mls_codec_name(codec));
    }
    for (size_t i = 0; i + 1 < bytes && from[i] > 0 && from[i] <= out - used; i += 2) {
        memset(to + used, from[i + 1], from[i]);
        used += from[i];
    }
    return bytes % 2 == 0 && used == out
               ? MLS_OK
               : mls_fail(st, MLS_E_FORMAT, "these are no runs of %zu bytes", out);
}

static inline void toy_begin(toy *self)
{
    *self =
        (toy){.codecs = {.encode = toy_encode, .decode = toy_decode, .context = self}};
}

#endif
