/* progress: long work without the GIL that can be watched and interrupted. */
#ifndef MLSP_PROGRESS_H
#define MLSP_PROGRESS_H

#include "python_api.h"

#include "shard_read.h"

/* Progress of work without the GIL.  Only the thread that began the work calls Python,
 * now and then: a signal (Ctrl-C) or an exception of the callback stops the work. */
typedef struct mlsp_progress {
    mls_progress core;  /* what the core gets */
    PyObject *callback; /* borrowed: called with a number of bytes; or NULL */
    PyThreadState *saved;
    unsigned long long pending; /* bytes that were not reported yet; atomic */
    unsigned long thread;       /* that began */
    int64_t told;               /* when, in nanoseconds */
} mlsp_progress;

/* `callback` is a callable or None.  -1 with TypeError set. */
int mlsp_progress_init(mlsp_progress *progress, PyObject *callback);

/* Around the work: the GIL is released in between. */
void mlsp_progress_begin(mlsp_progress *progress);
void mlsp_progress_end(mlsp_progress *progress);

/* After the end, with the GIL: report the rest.  -1 with an exception set. */
int mlsp_progress_finish(mlsp_progress *progress);

#endif
