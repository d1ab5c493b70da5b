/* codecs: zlib and zstd of Python, for the core. */
#ifndef MLSPY_CODECS_H
#define MLSPY_CODECS_H

#include "checkpoint/storage/compressed_frames.h"

/* The codecs of mlstate/checkpoint/_store/codecs.py, for any thread that does not hold
 * the GIL. */
const mls_codecs *mlspy_codecs(void);

#endif
