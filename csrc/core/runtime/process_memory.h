/* footprint: how much memory this process uses, and how much it may use.
 *
 * Linux: the process's own lines in /proc, the machine's memory, and the limits of the
 * control groups (version 1 or 2) that the process is in, with those above them.  macOS:
 * the kernel's figures of the task, and the machine's memory.  Elsewhere nothing is
 * known.
 */
#ifndef MLS_FOOTPRINT_H
#define MLS_FOOTPRINT_H

#include "base/status.h"

/* All in bytes. */
typedef struct mls_footprint {
    uint64_t used;  /* resident memory */
    uint64_t peak;  /* the most that was ever resident; at least `used` */
    uint64_t total; /* the machine's memory, or the least limit where that is lower */
} mls_footprint;

/* Ask the system.  Thread-safe.  Takes some 20 us on Linux: a few files are read.
 * MLS_E_IO: it does not tell; `*out` is untouched. */
mls_code mls_footprint_read(mls_footprint *out, mls_status *st);

/* The least limit of the control groups under `root` (usually "/sys/fs/cgroup") that
 * `memberships`, the text of /proc/self/cgroup, names; UINT64_MAX where there is none.
 * A group's parents count as well.  What cannot be read is no limit. */
uint64_t mls_footprint_limit(const char *root, const char *memberships);

#endif
