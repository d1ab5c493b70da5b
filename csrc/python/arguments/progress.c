/* progress: calls `progress=` and checks for Ctrl-C at intervals, during work without the
 * GIL.
 *
 * The threads of the pool only add to a counter. The thread that began the work takes
 * part in it; at intervals it acquires the GIL, passes the sum to the callback and checks
 * for signals.
 */
#include "arguments/progress.h"

#include "common/errors.h"

#include <pthread.h>
#include <time.h>

enum { INTERVAL = 50 * 1000 * 1000 }; /* nanoseconds between two calls */

/* Return a monotonic time in nanoseconds. */
static int64_t read_nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Also called by add_progress, at intervals. */
int mlspy_progress_finish(mlspy_progress *p)
{
    const unsigned long long bytes =
        __atomic_exchange_n(&p->pending, 0, __ATOMIC_RELAXED);
    if (p->callback == NULL || bytes == 0) {
        return 0;
    }
    PyObject *result = PyObject_CallFunction(p->callback, "K", bytes);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* The core's callback, called without the GIL from any thread: counts `bytes` bytes more,
 * and now and then reports them. Returns false, to stop the work, if a signal handler or
 * the callback of Python raised; the exception stays set in the thread that began the
 * work. */
static bool add_progress(void *context, uint64_t bytes)
{
    mlspy_progress *p = context;
    __atomic_add_fetch(&p->pending, bytes, __ATOMIC_RELAXED);
    if (p->thread != (unsigned long)pthread_self() ||
        read_nanoseconds() - p->reported_at < INTERVAL) {
        return true;
    }
    PyEval_RestoreThread(p->saved);
    const bool good = PyErr_CheckSignals() == 0 && mlspy_progress_finish(p) == 0;
    p->saved = PyEval_SaveThread();
    p->reported_at = read_nanoseconds();
    return good;
}

/* An object that is not callable is refused before the work begins. */
int mlspy_progress_init(mlspy_progress *progress, PyObject *callback)
{
    if (callback != Py_None && !PyCallable_Check(callback)) {
        return MLSPY_REFUSE(PyExc_TypeError, "progress must be callable, got %.100s",
                            Py_TYPE(callback)->tp_name);
    }
    *progress = (mlspy_progress){.callback = callback == Py_None ? NULL : callback,
                                 .core = {.report = add_progress, .context = progress}};
    return 0;
}

/* The thread state is kept, so that add_progress can acquire the GIL. */
void mlspy_progress_begin(mlspy_progress *progress)
{
    progress->thread = (unsigned long)pthread_self();
    progress->reported_at = read_nanoseconds();
    progress->saved = PyEval_SaveThread();
}

/* If an exception stopped the work, it stays set in this thread. */
void mlspy_progress_end(mlspy_progress *progress)
{
    PyEval_RestoreThread(progress->saved);
}

/* The core's poll, called without the GIL from any thread of the pool: returns false if
 * the work is to stop. Only the thread that began the work checks for signals. */
static bool go_on(void *context)
{
    return add_progress(context, 0);
}

mls_poll mlspy_progress_poll(mlspy_progress *progress)
{
    return (mls_poll){.go_on = go_on, .context = progress};
}
