/* codecs: zlib and zstd of Python, for the core.
 *
 * mlstate/_codecs.py has them.  They are called by threads of the pool, each of which has
 * a thread state for as long as the call takes; zlib and zstd let go of the GIL while
 * they work, so the threads do so side by side.
 */
#include "checkpoint.h"

#include <string.h>

/* An exception becomes a status.  One that is nobody's failure, such as
 * KeyboardInterrupt, which only the thread that began the work can meet, stays set. */
static mls_code failed(mls_status *st)
{
    mls_code result = MLS_E_FORMAT;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return mls_fail(st, MLS_E_STOPPED, "stopped");
    }
    if (PyErr_ExceptionMatches(PyExc_MemoryError)) {
        result = MLS_E_MEMORY;
    } else if (PyErr_ExceptionMatches(PyExc_ImportError)) {
        result = MLS_E_VALUE; /* it is not installed; its message says what to do */
    }
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

/* Call `encode` or `decode` with a view of the bytes; a new reference to what comes of
 * it, which has the buffer protocol. */
static PyObject *call(const char *function, mls_codec codec, const unsigned char *from,
                      size_t bytes, size_t limit)
{
    PyObject *result = NULL;
    PyObject *module = PyImport_ImportModule("mlstate._codecs");
    PyObject *view =
        PyMemoryView_FromMemory((char *)(uintptr_t)from, (Py_ssize_t)bytes, PyBUF_READ);
    if (module != NULL && view != NULL) {
        result = PyObject_CallMethod(module, function, "sOn", mls_codec_name(codec), view,
                                     (Py_ssize_t)limit);
    }
    Py_XDECREF(view);
    Py_XDECREF(module);
    return result;
}

/* Copy what came of it, at most `room` bytes, and forget it.  `*out` 0: it has more. */
static mls_code take(PyObject *result, unsigned char *to, size_t room, size_t *out,
                     mls_status *st)
{
    Py_buffer view;
    if (result == NULL || PyObject_GetBuffer(result, &view, PyBUF_SIMPLE) < 0) {
        Py_XDECREF(result);
        return failed(st);
    }
    *out = (size_t)view.len <= room ? (size_t)view.len : 0;
    Py_BEGIN_ALLOW_THREADS
        memcpy(to, view.buf, *out);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    Py_DECREF(result);
    return MLS_OK;
}

/* Both ways with the GIL, in a thread that may never have had it. */
static mls_code run(const char *function, mls_codec codec, const unsigned char *from,
                    size_t bytes, unsigned char *to, size_t room, size_t *out,
                    mls_status *st)
{
    const PyGILState_STATE gil = PyGILState_Ensure();
    const mls_code code =
        PyErr_Occurred() != NULL /* an interrupt that waits: no more is begun */
            ? mls_fail(st, MLS_E_STOPPED, "stopped")
            : take(call(function, codec, from, bytes, room), to, room, out, st);
    PyGILState_Release(gil);
    return code;
}

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

const mls_codecs *mlsp_codecs(void)
{
    static const mls_codecs codecs = {.encode = encode, .decode = decode};
    return &codecs;
}
