/* codecs: Python's zlib and zstd, for the core. */
#ifndef MLSPY_CODECS_H
#define MLSPY_CODECS_H

#include "checkpoint/storage/compressed_frames.h"

/* Return the codecs of mlstate/checkpoint/_store/codecs.py. Any thread that does not hold
 * the GIL may call them. */
const mls_codecs *mlspy_codecs(void);

#endif
