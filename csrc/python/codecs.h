/* codecs: zlib and zstd of Python, for the core. */
#ifndef MLSPY_CODECS_H
#define MLSPY_CODECS_H

#include "frames.h"

/* The codecs of mlstate/_codecs.py, for any thread that does not hold the GIL. */
const mls_codecs *mlspy_codecs(void);

#endif
