/* progress: call Python from work that runs without the GIL.
 *
 * The threads of the pool only add to a counter. The thread that began the work takes
 * part in it; at intervals it acquires the GIL, passes the sum to the callback and checks
 * for signals.
 */
#include "common/progress.h"

#include <pthread.h>
#include <time.h>

enum { INTERVAL = 50 * 1000 * 1000 }; /* nanoseconds between two calls */

static int64_t read_nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Return the bytes not yet reported, and reset them. */
static unsigned long long take_pending(mlspy_progress *p)
{
    return __atomic_exchange_n(&p->pending, 0, __ATOMIC_RELAXED);
}

/* Call the callback, with the GIL held. Returns -1 with an exception set. */
static int report_pending(mlspy_progress *p)
{
    const unsigned long long bytes = take_pending(p);
    if (p->callback == NULL || bytes == 0) {
        return 0;
    }
    PyObject *result = PyObject_CallFunction(p->callback, "K", bytes);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* The core's callback, called from any thread. */
static bool add_progress(void *context, uint64_t bytes)
{
    mlspy_progress *p = context;
    __atomic_add_fetch(&p->pending, bytes, __ATOMIC_RELAXED);
    if (p->thread != (unsigned long)pthread_self() ||
        read_nanoseconds() - p->told < INTERVAL) {
        return true;
    }
    PyEval_RestoreThread(p->saved);
    const bool good = PyErr_CheckSignals() == 0 && report_pending(p) == 0;
    p->saved = PyEval_SaveThread();
    p->told = read_nanoseconds();
    return good;
}

/* An object that is not callable is refused before the work begins. */
int mlspy_progress_init(mlspy_progress *progress, PyObject *callback)
{
    if (callback != Py_None && !PyCallable_Check(callback)) {
        PyErr_Format(PyExc_TypeError, "progress must be callable, got %.100s",
                     Py_TYPE(callback)->tp_name);
        return -1;
    }
    *progress = (mlspy_progress){.callback = callback == Py_None ? NULL : callback,
                                 .core = {.report = add_progress, .context = progress}};
    return 0;
}

/* The thread state is kept, so that add_progress can acquire the GIL. */
void mlspy_progress_begin(mlspy_progress *progress)
{
    progress->thread = (unsigned long)pthread_self();
    progress->told = read_nanoseconds();
    progress->saved = PyEval_SaveThread();
}

/* If an exception stopped the work, it stays set in this thread. */
void mlspy_progress_end(mlspy_progress *progress)
{
    PyEval_RestoreThread(progress->saved);
}

/* Reports the bytes since the last interval, so that the reports add up to the total.
 * Called with the GIL held. */
int mlspy_progress_finish(mlspy_progress *progress)
{
    return report_pending(progress);
}
