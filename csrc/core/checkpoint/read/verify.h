/* verify: whether the files of an index hold what it says, and what does not.
 *
 * Every byte of every file is read, and everything that is wrong is listed, not only the
 * first.
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
    MLS_PROBLEM_UNREADABLE, /* the system refused; `text` says why */
    MLS_PROBLEM_LENGTH,     /* cut off, or longer than it was */
    MLS_PROBLEM_FOREIGN,    /* another file: good by itself, or no file of ours at all */
    MLS_PROBLEM_HEADER,     /* its header changed */
    MLS_PROBLEM_ALTERED,    /* bytes of a tensor changed */
    MLS_PROBLEM_COUNT
} mls_problem_kind;

/* "missing", "unreadable", "length", "foreign", "header", "altered". */
const char *mls_problem_name(mls_problem_kind kind);

typedef struct mls_problem {
    mls_problem_kind kind;
    size_t file;            /* of the index */
    size_t shard;           /* of the index, or SIZE_MAX: the file as a whole */
    uint64_t offset, bytes; /* the range of the file concerned */
    char text[MLS_TEXT_BYTES];
} mls_problem;

typedef struct mls_problems {
    mls_problem *list; /* by file and offset */
    size_t count;
    uint64_t bytes_read;
} mls_problems;

enum { MLS_PROBLEMS_MOST = 4096 }; /* looking goes on, listing does not */

#if !defined(_WIN32)

/* Gives: release with mls_problems_fini.  What is wrong with files is no failure.
 * MLS_E_MEMORY, MLS_E_STOPPED. */
mls_code mls_index_verify(int folder, const mls_index *index, const mls_crc_kernels *crc,
                          mls_pool *pool, const mls_progress *progress, mls_problems *out,
                          mls_status *st);

/* Check the header of an open file, whose first tensor that counts starts at `end` or
 * before that, against its record in an index.
 * MLS_E_IO, MLS_E_MEMORY; MLS_E_FORMAT, MLS_E_CHECKSUM: it changed; MLS_E_VALUE: it is
 * another file's. */
mls_code mls_index_check_header(int fd, uint64_t end, const mls_index_file *record,
                                const mls_crc_kernels *crc, mls_status *st);

#endif

void mls_problems_fini(mls_problems *problems); /* accepts a zeroed one; zeroes it */

#endif
