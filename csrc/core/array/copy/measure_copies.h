/* measure_copies: decides how copies store their results by trials now, before the
 * process has copied enough itself. */
#ifndef MLS_MEASURE_COPIES_H
#define MLS_MEASURE_COPIES_H

#include "array/copy/copy.h"
#include "base/status.h"
#include "crc32c/crc32c.h"

/* Make the missing decisions for results of 16 MiB in touched memory: copies, fills,
 * conversions and checksums. Takes less than 100 ms, and 32 MiB of memory.
 * `kernels->choices` must be set; if it is forced, there is nothing to decide.
 * MLS_E_MEMORY. */
mls_code mls_measure_copies(const mls_kernels *kernels, const mls_crc_kernels *crc,
                            mls_status *st);

#endif
