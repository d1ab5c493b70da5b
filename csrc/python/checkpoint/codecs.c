/* codecs: zlib and zstd of Python, for the core.
 *
 * mlstate/checkpoint/_store/codecs.py has them.  They are called by threads of the pool,
 * each of which has a thread state for as long as the call takes; zlib and zstd let go of
 * the GIL while they work, so the threads do so side by side.
 */
#include "checkpoint/codecs.h"

#include "common/python_api.h"

#include <string.h>

/* An exception becomes a status.  What is no codec's failure stays set in the thread that
 * began the work: KeyboardInterrupt, and whatever else handlers of signals raise, which
 * Python runs there.  Other threads lose their exceptions with their states. */
static mls_code failed(bool began, mls_status *st)
{
    mls_code result = MLS_E_FORMAT;
    if (PyErr_ExceptionMatches(PyExc_MemoryError)) {
        result = MLS_E_MEMORY;
    } else if (PyErr_ExceptionMatches(PyExc_ImportError)) {
        result = MLS_E_VALUE; /* it is not installed; its message says what to do */
    } else if (began && !PyErr_ExceptionMatches(PyExc_ValueError)) {
        return mls_fail(st, MLS_E_STOPPED, "stopped");
    }
    /* its words go on; which file and tensor they are about is added where that is known
     */
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *text = value == NULL ? NULL : PyObject_Str(value);
    const char *words = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    mls_fail(st, result, "%.250s", words == NULL || *words == '\0' ? "no memory" : words);
    Py_XDECREF(text);
    PyErr_Clear();
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return result;
}

/* Give a view up.  Whoever has kept it, be it in the frames of a traceback, must not look
 * at memory that is ours and goes. */
static void release(PyObject *view)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *result = PyObject_CallMethod(view, "release", NULL);
    if (result == NULL) {
        PyErr_Clear(); /* somebody reads it at this moment, and is done before we are */
    }
    Py_XDECREF(result);
    Py_DECREF(view);
    PyErr_Restore(type, value, traceback);
}

/* Call `encode` or `decode` with a view of the bytes; a new reference to what comes of
 * it, which has the buffer protocol. */
static PyObject *call(const char *function, mls_codec codec, const unsigned char *from,
                      size_t bytes, size_t limit)
{
    PyObject *result = NULL;
    PyObject *module = PyImport_ImportModule("mlstate.checkpoint._store.codecs");
    PyObject *view =
        PyMemoryView_FromMemory((char *)(uintptr_t)from, (Py_ssize_t)bytes, PyBUF_READ);
    if (module != NULL && view != NULL) {
        result = PyObject_CallMethod(module, function, "sOn", mls_codec_name(codec), view,
                                     (Py_ssize_t)limit);
    }
    if (view != NULL) {
        release(view);
    }
    Py_XDECREF(module);
    return result;
}

/* Copy what came of it, at most `room` bytes, and forget it.  `*out` 0: it has more. */
static mls_code take(PyObject *result, bool began, unsigned char *to, size_t room,
                     size_t *out, mls_status *st)
{
    Py_buffer view;
    if (result == NULL || PyObject_GetBuffer(result, &view, PyBUF_SIMPLE) < 0) {
        Py_XDECREF(result);
        return failed(began, st);
    }
    /* the bytes are ours until the view is released: nobody needs the GIL to copy them */
    *out = (size_t)view.len <= room ? (size_t)view.len : 0;
    Py_BEGIN_ALLOW_THREADS
        memcpy(to, view.buf, *out);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    Py_DECREF(result);
    return MLS_OK;
}

/* Both ways with the GIL, in a thread that may never have had it.  Only the one that
 * began the work has a state already; that of others ends with the call. */
static mls_code run(const char *function, mls_codec codec, const unsigned char *from,
                    size_t bytes, unsigned char *to, size_t room, size_t *out,
                    mls_status *st)
{
    const bool began = PyGILState_GetThisThreadState() != NULL;
    const PyGILState_STATE gil = PyGILState_Ensure();
    const mls_code code =
        PyErr_Occurred() != NULL /* an interrupt that waits: no more is begun */
            ? mls_fail(st, MLS_E_STOPPED, "stopped")
            : take(call(function, codec, from, bytes, room), began, to, room, out, st);
    PyGILState_Release(gil);
    return code;
}

/* What is longer than the room is dropped, and 0 stands for it: see compressed_frames.h.
 */
static mls_code encode(void *context, mls_codec codec, const unsigned char *from,
                       size_t bytes, unsigned char *to, size_t room, size_t *out,
                       mls_status *st)
{
    (void)context;
    return run("encode", codec, from, bytes, to, room, out, st);
}

/* The function of Python answers for the length. */
static mls_code decode(void *context, mls_codec codec, const unsigned char *from,
                       size_t bytes, unsigned char *to, size_t out, mls_status *st)
{
    size_t found = 0;
    (void)context;
    const mls_code code = run("decode", codec, from, bytes, to, out, &found, st);
    return code != MLS_OK || found == out
               ? code
               : mls_fail(st, MLS_E_FORMAT, "%s gave another number of bytes",
                          mls_codec_name(codec));
}

/* One pair for all: which codec it is is said with each call. */
const mls_codecs *mlspy_codecs(void)
{
    static const mls_codecs codecs = {.encode = encode, .decode = decode};
    return &codecs;
}
