/* progress: long work without the GIL that can be watched and interrupted. */
#ifndef MLSPY_PROGRESS_H
#define MLSPY_PROGRESS_H

#include "common/python_api.h"

#include "checkpoint/read/shard_read.h"

/* Progress of work without the GIL.  Only the thread that began the work calls Python,
 * now and then: a signal (Ctrl-C) or an exception of the callback stops the work. */
typedef struct mlspy_progress {
    mls_progress core;  /* what the core gets */
    PyObject *callback; /* borrowed: called with a number of bytes; or NULL */
    PyThreadState *saved;
    unsigned long long pending; /* bytes that were not reported yet; atomic */
    unsigned long thread;       /* that began */
    int64_t told;               /* when, in nanoseconds */
} mlspy_progress;

/* `callback` is a callable or None.  -1 with TypeError set. */
int mlspy_progress_init(mlspy_progress *progress, PyObject *callback);

/* Around the work: the GIL is released in between. */
void mlspy_progress_begin(mlspy_progress *progress);
void mlspy_progress_end(mlspy_progress *progress);

/* After the end, with the GIL: report the rest.  -1 with an exception set. */
int mlspy_progress_finish(mlspy_progress *progress);

#endif
