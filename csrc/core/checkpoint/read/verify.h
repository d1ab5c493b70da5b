/* verify: verification of the files of an index, and the kinds of problems that it lists.
 *
 * Every byte of every file is read, and all problems are listed, not only the first one.
 */
#ifndef MLS_VERIFY_H
#define MLS_VERIFY_H

#include "base/status.h"
#include "checkpoint/index/index.h"
#include "checkpoint/read/shard_read.h"
#include "crc32c/crc32c.h"
#include "runtime/thread_pool.h"

#include <stddef.h>
#include <stdint.h>

typedef enum mls_problem_kind {
    MLS_PROBLEM_MISSING,    /* no such file */
    MLS_PROBLEM_UNREADABLE, /* the system refused; `text` contains the reason */
    MLS_PROBLEM_LENGTH,     /* too short or too long */
    MLS_PROBLEM_FOREIGN, /* a different file: a valid one, or not a shard file at all */
    MLS_PROBLEM_HEADER,  /* the header is damaged */
    MLS_PROBLEM_ALTERED, /* bytes of a tensor are damaged */
    MLS_PROBLEM_COUNT
} mls_problem_kind;

/* Returns "missing", "unreadable", "length", "foreign", "header" or "altered". */
const char *mls_problem_name(mls_problem_kind kind);

typedef struct mls_problem {
    mls_problem_kind kind;
    size_t file;  /* index into the files of the index */
    size_t shard; /* index into the shards of the index, or SIZE_MAX: the whole file */
    uint64_t offset, bytes; /* the damaged range of the file */
    char text[MLS_TEXT_BYTES];
} mls_problem;

typedef struct mls_problems {
    mls_problem *list; /* sorted by file and offset */
    size_t count;
    uint64_t bytes_read;
} mls_problems;

/* Limit of the list of problems; verification continues without listing. */
enum { MLS_PROBLEMS_MOST = 4096 };

/* Verify all files that `index` lists, in the folder `folder` (a descriptor). `progress`
 * may be NULL. Gives: release `*out` with mls_problems_fini. Problems with files are not
 * failures. MLS_E_MEMORY, MLS_E_STOPPED; `*out` is untouched then. */
mls_code mls_index_verify(int folder, const mls_index *index, const mls_crc_kernels *crc,
                          mls_pool *pool, const mls_progress *progress, mls_problems *out,
                          mls_status *st);

/* Check the header of the open file `fd` against its record in an index. `end` is the
 * offset of a tensor of the file: the header must end there or before.
 * MLS_E_IO, MLS_E_MEMORY; MLS_E_FORMAT, MLS_E_CHECKSUM: the header is damaged;
 * MLS_E_VALUE: it belongs to a different file. */
mls_code mls_index_check_header(int fd, uint64_t end, const mls_index_file *record,
                                const mls_crc_kernels *crc, mls_status *st);

void mls_problems_fini(mls_problems *problems); /* accepts a zeroed one; zeroes it */

#endif
