/* codecs: calls Python's zlib and zstd (mlstate/checkpoint/_store/codecs.py) from threads
 * of the core.
 *
 * mlstate/checkpoint/_store/codecs.py implements them. Threads of the pool call them,
 * each with a Python thread state for the duration of the call. zlib and zstd release the
 * GIL, so the threads run in parallel. */
#include "checkpoint/codecs.h"

#include "common/gil.h"

#include <string.h>

/* Convert the exception that is set to a status, and return its code: MLS_E_MEMORY for a
 * MemoryError, MLS_E_VALUE if the codec is not installed, MLS_E_STOPPED (see below), else
 * MLS_E_FORMAT.
 *
 * `is_caller`: this is the Python thread that called the core, not a thread of the pool.
 * Python runs signal handlers in it, so an exception that no codec raises
 * (KeyboardInterrupt, or any exception of a handler) stays set there, with MLS_E_STOPPED.
 * Threads of the pool lose their exceptions with their thread states. */
static mls_code set_status(bool is_caller, mls_status *st)
{
    mls_code result = MLS_E_FORMAT;
    if (PyErr_ExceptionMatches(PyExc_MemoryError)) {
        result = MLS_E_MEMORY;
    } else if (PyErr_ExceptionMatches(PyExc_ImportError)) {
        result = MLS_E_VALUE; /* not installed; the message contains the remedy */
    } else if (is_caller && !PyErr_ExceptionMatches(PyExc_ValueError)) {
        return mls_fail(st, MLS_E_STOPPED, "stopped");
    }
    /* keep the message; callers that know file and tensor add them */
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

/* Release a memoryview of the core's memory, and consume the reference. Another owner,
 * such as the frames of a traceback, must not access the memory later: the core frees it.
 * Keeps an exception that is set. */
static void release_view(PyObject *view)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *result = PyObject_CallMethod(view, "release", NULL);
    if (result == NULL) {
        PyErr_Clear(); /* another thread is reading it, and finishes before the memory is
                          freed */
    }
    Py_XDECREF(result);
    Py_DECREF(view);
    PyErr_Restore(type, value, traceback);
}

/* Call the Python function named `function`, encode or decode, with a view of the `bytes`
 * bytes at `from`. `limit`: most bytes of the result. Returns a new reference to the
 * result, which supports the buffer protocol; NULL with an exception set. */
static PyObject *call_codec(const char *function, mls_codec codec,
                            const unsigned char *from, size_t bytes, size_t limit)
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
        release_view(view);
    }
    Py_XDECREF(module);
    return result;
}

/* Copy the bytes of a codec's result, at most `room`, to `to`, and release the result.
 * `*out` is their number, or 0 if there are more than `room`. A `result` of NULL becomes
 * the status of its exception; `is_caller` as in set_status. */
static mls_code copy_result(PyObject *result, bool is_caller, unsigned char *to,
                            size_t room, size_t *out, mls_status *st)
{
    Py_buffer view;
    if (result == NULL || PyObject_GetBuffer(result, &view, PyBUF_SIMPLE) < 0) {
        Py_XDECREF(result);
        return set_status(is_caller, st);
    }
    /* the view keeps the bytes alive, so the copy does not need the GIL */
    *out = (size_t)view.len <= room ? (size_t)view.len : 0;
    MLSPY_WITHOUT_GIL(memcpy(to, view.buf, *out));
    PyBuffer_Release(&view);
    Py_DECREF(result);
    return MLS_OK;
}

/* Take the GIL, possibly in a thread without a thread state, and call `function` of a
 * codec, encode or decode, for the `bytes` bytes at `from`. The result, `*out` bytes, is
 * at `to`, which has `room` bytes; see copy_result. The thread that called the core has a
 * thread state; the state of other threads ends with the call.
 * - MLS_E_FORMAT: the data is invalid. MLS_E_VALUE: the codec is not installed.
 * - MLS_E_MEMORY. MLS_E_STOPPED: an interrupt; its exception stays set. */
static mls_code run_codec(const char *function, mls_codec codec,
                          const unsigned char *from, size_t bytes, unsigned char *to,
                          size_t room, size_t *out, mls_status *st)
{
    const bool is_caller = PyGILState_GetThisThreadState() != NULL;
    const PyGILState_STATE gil = PyGILState_Ensure();
    const mls_code code =
        PyErr_Occurred() != NULL /* a pending interrupt: start no further work */
            ? mls_fail(st, MLS_E_STOPPED, "stopped")
            : copy_result(call_codec(function, codec, from, bytes, room), is_caller, to,
                          room, out, st);
    PyGILState_Release(gil);
    return code;
}

/* Compress `bytes` bytes; `*out` is 0 if the result does not fit `room`: see
 * compressed_frames.h. */
static mls_code encode(void *context, mls_codec codec, const unsigned char *from,
                       size_t bytes, unsigned char *to, size_t room, size_t *out,
                       mls_status *st)
{
    (void)context;
    return run_codec("encode", codec, from, bytes, to, room, out, st);
}

/* Decompress `bytes` bytes to exactly `out` bytes; any other number is MLS_E_FORMAT. The
 * Python function checks the length too. */
static mls_code decode(void *context, mls_codec codec, const unsigned char *from,
                       size_t bytes, unsigned char *to, size_t out, mls_status *st)
{
    size_t decoded_bytes = 0;
    (void)context;
    const mls_code code =
        run_codec("decode", codec, from, bytes, to, out, &decoded_bytes, st);
    return code != MLS_OK || decoded_bytes == out
               ? code
               : mls_fail(st, MLS_E_FORMAT, "%s gave another number of bytes",
                          mls_codec_name(codec));
}

/* One table for all codecs: each call names its codec. */
const mls_codecs *mlspy_codecs(void)
{
    static const mls_codecs codecs = {.encode = encode, .decode = decode};
    return &codecs;
}
