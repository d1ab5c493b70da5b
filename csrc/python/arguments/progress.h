/* progress: long work without the GIL that reports progress and can be interrupted. */
#ifndef MLSPY_PROGRESS_H
#define MLSPY_PROGRESS_H

#include "common/python_api.h"

#include "checkpoint/read/shard_read.h"
#include "planning/plan_costs.h"

/* Progress of work without the GIL. Only the thread that began the work calls Python, at
 * intervals. A signal (Ctrl-C) or an exception in the callback stops the work. */
typedef struct mlspy_progress {
    mls_progress core;          /* passed to the core */
    PyObject *callback;         /* borrowed: called with a number of bytes; or NULL */
    PyThreadState *saved;       /* of `thread`, while the GIL is released */
    unsigned long long pending; /* bytes not yet reported; atomic */
    unsigned long thread;       /* the thread that began the work */
    int64_t reported_at;        /* time of the last report, in nanoseconds */
} mlspy_progress;

/* Initialise; `callback` is a callable, called with the number of bytes since its last
 * call, or None. The caller holds it. Returns -1 with TypeError set. */
int mlspy_progress_init(mlspy_progress *progress, PyObject *callback);

/* Call these, in the same thread, before and after the work; the GIL is released in
 * between. */
void mlspy_progress_begin(mlspy_progress *progress);
void mlspy_progress_end(mlspy_progress *progress);

/* Report the remaining bytes, so that all reports add up to the total. Call it after
 * mlspy_progress_end, with the GIL. Returns -1 with the callback's exception. */
int mlspy_progress_finish(mlspy_progress *progress);

/* Return a poll for the work of a planner, which stops at a signal. It borrows
 * `progress`. */
mls_poll mlspy_progress_poll(mlspy_progress *progress);

#endif
