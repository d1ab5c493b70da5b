/* gil: the bytes above which a call releases the GIL, and short sections that lock one
 * object. */
#ifndef MLSPY_GIL_H
#define MLSPY_GIL_H

#include "common/python_api.h"

#include <stdint.h>

/* Execute statements with the GIL released. */
#define MLSPY_WITHOUT_GIL(...)                                                           \
    do {                                                                                 \
        Py_BEGIN_ALLOW_THREADS                                                           \
            __VA_ARGS__;                                                                 \
        Py_END_ALLOW_THREADS                                                             \
    } while (0)

/* Below this size, releasing the GIL costs more than it gains. */
enum { MLSPY_RELEASE_BYTES = 64 * 1024 };

/* Release the GIL for work on `bytes` bytes, if that pays off. Pass the result to
 * mlspy_resume_python after the work. */
static inline PyThreadState *mlspy_leave_python(uint64_t bytes)
{
    return bytes >= MLSPY_RELEASE_BYTES ? PyEval_SaveThread() : NULL;
}

/* Acquire the GIL again. NULL: it was not released. */
static inline void mlspy_resume_python(PyThreadState *saved)
{
    if (saved != NULL) {
        PyEval_RestoreThread(saved);
    }
}

/* Enclose a few lines during which no other thread may change `object`. With the GIL no
 * lock is needed; a free-threaded Python locks the object. */
#if defined(Py_GIL_DISABLED)
#    define MLSPY_BEGIN_LOCKED(object) Py_BEGIN_CRITICAL_SECTION(object);
#    define MLSPY_END_LOCKED()         Py_END_CRITICAL_SECTION()
#else
#    define MLSPY_BEGIN_LOCKED(object) {
#    define MLSPY_END_LOCKED()         }
#endif

#endif
