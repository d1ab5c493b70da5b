/* checkpoint_folder: opens the folder of a checkpoint, and adds a file's path to errors
 * about it.
 */
#include "checkpoint/checkpoint_folder.h"

#include "common/errors.h"
#include "common/module_state.h"

#include <errno.h>
#include <fcntl.h>

/* The descriptor refers to this folder even if it is renamed later. Network file systems
 * may be slow, so the GIL is released. */
int mlspy_open_folder(const mlspy_state *state, PyObject *path, int *out)
{
    PyObject *encoded = NULL;
    mls_status st;
    if (!PyUnicode_FSConverter(path, &encoded)) {
        return -1;
    }
    const char *text = PyBytes_AS_STRING(encoded);
    int fd, reason;
    Py_BEGIN_ALLOW_THREADS
        fd = open(text, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        reason = errno;
    Py_END_ALLOW_THREADS
    Py_DECREF(encoded);
    if (fd < 0) {
        mls_fail_os(&st, reason, "cannot open the folder");
        mlspy_raise(state, &st, path);
        return -1;
    }
    *out = fd;
    return 0;
}

/* Return a new reference to "path/relative", or to `path`. Paths of type bytes are not
 * joined: file names need not be valid text. */
static PyObject *join_path(PyObject *path, const char *relative)
{
    if (relative == NULL || relative[0] == '\0' || !PyUnicode_Check(path)) {
        return Py_NewRef(path);
    }
    return PyUnicode_FromFormat("%U/%s", path, relative);
}

/* The text of an error about contents gets the file's name in front, and that of an error
 * with a tensor the tensor's name, unless the core has added them. An OSError shows its
 * path anyway. The exception's path is the file's path, if the file is known. */
PyObject *mlspy_raise_under(const mlspy_state *state, const mls_status *st,
                            PyObject *path, const char *relative)
{
    mls_status named = *st;
    if (st->code == MLS_E_STOPPED && PyErr_Occurred()) {
        return NULL; /* keep the callback's exception, or KeyboardInterrupt */
    }
    const bool is_about_contents = st->code == MLS_E_FORMAT || st->code == MLS_E_CHECKSUM;
    const char *file = is_about_contents && relative != NULL ? relative : "";
    const bool names_tensor = strncmp(st->text, "tensor '", strlen("tensor '")) == 0;
    const bool names_file = names_tensor && strstr(st->text, "', file '") != NULL;
    if (st->name[0] != '\0' && !names_tensor && file[0] != '\0') {
        PyOS_snprintf(named.text, sizeof named.text, "%.120s: '%.60s': %.130s", file,
                      st->name, st->text);
    } else if (st->name[0] != '\0' && !names_tensor) {
        PyOS_snprintf(named.text, sizeof named.text, "'%.60s': %.250s", st->name,
                      st->text);
    } else if (file[0] != '\0' && !names_file) { /* twice would truncate the reason */
        PyOS_snprintf(named.text, sizeof named.text, "%.120s: %.195s", file, st->text);
    }
    PyObject *full = join_path(path, relative);
    if (full != NULL) {
        mlspy_raise(state, &named, full);
        Py_DECREF(full);
    }
    return NULL;
}
