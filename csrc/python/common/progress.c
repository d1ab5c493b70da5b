/* progress: the way back into Python from work that runs without the GIL.
 *
 * Threads of the pool only add to a counter.  The thread that began the work, which does
 * its share of it, takes the GIL from time to time, hands the sum to the callback and
 * lets Python look for signals.
 */
#include "common/progress.h"

#include <pthread.h>
#include <time.h>

enum { INTERVAL = 50 * 1000 * 1000 }; /* nanoseconds between two calls */

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The bytes that nobody was told of, which are told now. */
static unsigned long long take_pending(mlspy_progress *p)
{
    return __atomic_exchange_n(&p->pending, 0, __ATOMIC_RELAXED);
}

/* With the GIL: call back.  -1 with an exception set. */
static int tell(mlspy_progress *p)
{
    const unsigned long long bytes = take_pending(p);
    if (p->callback == NULL || bytes == 0) {
        return 0;
    }
    PyObject *result = PyObject_CallFunction(p->callback, "K", bytes);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* The core's callback, from any thread. */
static bool report(void *context, uint64_t bytes)
{
    mlspy_progress *p = context;
    __atomic_add_fetch(&p->pending, bytes, __ATOMIC_RELAXED);
    if (p->thread != (unsigned long)pthread_self() || now() - p->told < INTERVAL) {
        return true;
    }
    PyEval_RestoreThread(p->saved);
    const bool good = PyErr_CheckSignals() == 0 && tell(p) == 0;
    p->saved = PyEval_SaveThread();
    p->told = now();
    return good;
}

/* Nothing is called yet: an object that is no callable is refused before any work. */
int mlspy_progress_init(mlspy_progress *progress, PyObject *callback)
{
    if (callback != Py_None && !PyCallable_Check(callback)) {
        PyErr_Format(PyExc_TypeError, "progress must be callable, got %.100s",
                     Py_TYPE(callback)->tp_name);
        return -1;
    }
    *progress = (mlspy_progress){.callback = callback == Py_None ? NULL : callback,
                                 .core = {.report = report, .context = progress}};
    return 0;
}

/* From here on the thread state is kept for those moments when the GIL is taken back. */
void mlspy_progress_begin(mlspy_progress *progress)
{
    progress->thread = (unsigned long)pthread_self();
    progress->told = now();
    progress->saved = PyEval_SaveThread();
}

/* An exception that stopped the work is set in this thread, and stays set. */
void mlspy_progress_end(mlspy_progress *progress)
{
    PyEval_RestoreThread(progress->saved);
}

/* What the last interval left untold, so that the counts add up to the whole.  Called
 * with the GIL. */
int mlspy_progress_finish(mlspy_progress *progress)
{
    return tell(progress);
}
