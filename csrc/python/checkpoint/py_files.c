/* py_files: checks and checksums of JSON texts, CRC32C, durable files, paths, renames,
 * file names.
 */
#include "arguments/args.h"
#include "checkpoint/checkpoint_folder.h"
#include "common/errors.h"
#include "common/functions.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "io/file.h"
#include "io/json_checksum.h"
#include "io/json_reader.h"
#include "io/safe_filename.h"

#include <errno.h>
#include <unistd.h>

enum { MAX_JSON_VALUES = 64 << 20 }; /* in one text */

/* json_checksum_set(text) -> bytes: a copy of a JSON text, which starts with the checksum
 * member, with the correct checksum in it */
PyObject *core_json_checksum_set(mlspy_state *state, PyObject *const *args)
{
    char *bytes;
    Py_ssize_t length;
    const size_t start = sizeof MLS_JSON_CHECKSUM_START - 1;
    if (PyBytes_AsStringAndSize(args[0], &bytes, &length) < 0) {
        return NULL;
    }
    if ((size_t)length < start || memcmp(bytes, MLS_JSON_CHECKSUM_START, start) != 0) {
        return PyErr_Format(PyExc_ValueError,
                            "the text must start with " MLS_JSON_CHECKSUM_START);
    }
    PyObject *result = PyBytes_FromStringAndSize(bytes, length);
    if (result != NULL) {
        mls_json_checksum_set(PyBytes_AS_STRING(result), (size_t)length,
                              mlspy_crc(state));
    }
    return result;
}

/* json_checksum_check(data, path): raises ChecksumError or FormatError unless the
 * checksum in the JSON text `data` is correct; `path` is only for the error */
PyObject *core_json_checksum_check(mlspy_state *state, PyObject *const *args)
{
    char *bytes;
    Py_ssize_t length;
    mls_status st;
    if (PyBytes_AsStringAndSize(args[0], &bytes, &length) < 0) {
        return NULL;
    }
    return mls_json_checksum_check(bytes, (size_t)length, mlspy_crc(state), &st) == MLS_OK
               ? Py_NewRef(Py_None)
               : mlspy_raise(state, &st, args[1]);
}

/* json_check(data, max_depth, path): raises FormatError unless `data` is JSON as
 * docs/format.md requires, nested at most `max_depth` deep, with at most MAX_JSON_VALUES
 * values; `path` is only for the error */
PyObject *core_json_check(mlspy_state *state, PyObject *const *args)
{
    char *bytes;
    Py_ssize_t length;
    mls_status st;
    mls_json *json = NULL;
    mls_code code;
    if (PyBytes_AsStringAndSize(args[0], &bytes, &length) < 0) {
        return NULL;
    }
    const size_t max_depth = PyLong_AsSize_t(args[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    MLSPY_WITHOUT_GIL(code = mls_json_parse(bytes, (size_t)length,
                                            (mls_json_limits){max_depth, MAX_JSON_VALUES},
                                            &json, &st));
    mls_json_free(json);
    return code == MLS_OK ? Py_NewRef(Py_None) : mlspy_raise(state, &st, args[2]);
}

/* crc32c(data) -> the CRC32C of any buffer, an int
 *
 * Always releases the GIL: the usual input is an index, which is large.
 */
PyObject *core_crc32c(mlspy_state *state, PyObject *const *args)
{
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    const mls_crc_kernels *crc = mlspy_crc(state);
    uint32_t checksum;
    MLSPY_WITHOUT_GIL(checksum = crc->update(0, view.buf, (size_t)view.len));
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(checksum);
}

/* file_replace(path, data, mode): makes `data` the content of a file, or creates the file
 *
 * Used for the roots of checkpoints. Afterwards the file contains all of `data`, durably;
 * after a failure it is unchanged, unless only the sync of its folder failed. `mode`,
 * less the umask, applies to a new file.
 */
PyObject *core_file_replace(mlspy_state *state, PyObject *const *args)
{
    char *bytes;
    Py_ssize_t length;
    PyObject *encoded = NULL;
    mls_status st;
    mls_code code;
    unsigned mode;
    if (mlspy_take_mode(state, args[2], &mode) < 0 ||
        PyBytes_AsStringAndSize(args[1], &bytes, &length) < 0 ||
        !PyUnicode_FSConverter(args[0], &encoded)) {
        return NULL;
    }
    const char *to = PyBytes_AS_STRING(encoded);
    MLSPY_WITHOUT_GIL(code = mls_file_replace(to, mode, bytes, (size_t)length, &st));
    Py_DECREF(encoded);
    return code == MLS_OK ? Py_NewRef(Py_None) : mlspy_raise(state, &st, args[0]);
}

/* folder_sync(path): make the names in a folder durable; the contents of its files are
 * synced separately */
PyObject *core_folder_sync(mlspy_state *state, PyObject *const *args)
{
    mls_status st;
    int fd, reason;
    if (mlspy_open_folder(state, args[0], &fd) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        reason = mls_folder_sync(fd);
        (void)close(fd);
    Py_END_ALLOW_THREADS
    if (reason != 0) {
        mls_fail_os(&st, reason, "cannot sync the folder to disk");
        return mlspy_raise(state, &st, args[0]);
    }
    return Py_NewRef(Py_None);
}

/* path_exists(path) -> whether the path has a file, folder or link; True if that cannot
 * be found out, so that an open of the path reports the error */
PyObject *core_path_exists(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    bool exists;
    PyObject *encoded = NULL;
    if (!PyUnicode_FSConverter(args[0], &encoded)) {
        return NULL;
    }
    const char *path = PyBytes_AS_STRING(encoded);
    MLSPY_WITHOUT_GIL(exists = mls_path_exists(path));
    Py_DECREF(encoded);
    return PyBool_FromLong(exists);
}

/* path_rename(source, target, swap): renames without replacing anything, or swaps two
 * names if `swap`; raises OSError, whose meaning the caller knows */
PyObject *core_path_rename(mlspy_state *state, PyObject *const *args)
{
    (void)state;
    bool swap;
    int reason;
    PyObject *from = NULL, *to = NULL;
    if (mlspy_take_bool(args[2], &swap) < 0 || !PyUnicode_FSConverter(args[0], &from)) {
        return NULL;
    }
    if (!PyUnicode_FSConverter(args[1], &to)) {
        Py_DECREF(from);
        return NULL;
    }
    const char *old_name = PyBytes_AS_STRING(from), *new_name = PyBytes_AS_STRING(to);
    const mls_rename_mode mode = swap ? MLS_RENAME_SWAP : MLS_RENAME_NEW;
    MLSPY_WITHOUT_GIL(reason = mls_path_rename(old_name, new_name, mode));
    Py_DECREF(from);
    Py_DECREF(to);
    errno = reason;
    return reason == 0 ? Py_NewRef(Py_None)
                       : PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, args[1]);
}

/* file_name(name, number) -> a file name for `name` that is valid on any system, without
 * a suffix; only long names are truncated, and then contain the number, which the caller
 * makes unique among them */
PyObject *core_file_name(mlspy_state *state, PyObject *const *args)
{
    mls_str text;
    int64_t number;
    char encoded[MLS_FILENAME_BYTES + 1];
    if (mlspy_take_text(args[0], "name", &text) < 0 ||
        mlspy_take_int64(state, args[1], "number", &number) < 0) {
        return NULL;
    }
    (void)mls_filename_encode(text, (uint64_t)number, encoded);
    return PyUnicode_FromString(encoded);
}
