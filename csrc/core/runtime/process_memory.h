/* process_memory: the memory that this process uses and may use, on each system.
 *
 * - Linux: the process's entries in /proc, the machine's memory, and the limits of the
 *   control groups (version 1 or 2) of the process and their parents.
 * - macOS: the kernel's figures of the task, and the machine's memory.
 * - Other systems: not supported.
 */
#ifndef MLS_PROCESS_MEMORY_H
#define MLS_PROCESS_MEMORY_H

#include "base/status.h"

/* All in bytes. */
typedef struct mls_process_memory {
    uint64_t used;  /* resident memory */
    uint64_t peak;  /* the highest resident size so far; at least `used` */
    uint64_t total; /* the machine's memory, or the lowest limit if that is lower */
} mls_process_memory;

/* Read the figures from the system. Thread-safe. Takes about 20 us on Linux, which reads
 * a few files. MLS_E_IO: the system does not report them; `*out` is untouched. */
mls_code mls_process_memory_read(mls_process_memory *out, mls_status *st);

/* Return the lowest memory limit of the control groups that `memberships`, the text of
 * /proc/self/cgroup, names, and of their parents. `root` is usually "/sys/fs/cgroup".
 * Returns UINT64_MAX without a limit. A file that cannot be read counts as no limit.
 */
uint64_t mls_process_memory_limit(const char *root, const char *memberships);

#endif
