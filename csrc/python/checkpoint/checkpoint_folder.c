/* checkpoint_folder: the folder of a checkpoint, and errors about files in it. */
#include "checkpoint/checkpoint_folder.h"

#include "common/errors.h"
#include "common/module_state.h"

#include <errno.h>
#include <fcntl.h>

/* The descriptor stands for the folder from here on, even where its name becomes that of
 * another.  A network file system may take its time: the GIL is released. */
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
        mls_fail_os(&st, reason, "cannot open the checkpoint's folder");
        mlspy_raise(state, &st, path);
        return -1;
    }
    *out = fd;
    return 0;
}

/* "path/relative", or `path`; a new reference.  Paths of bytes stay as they are: what a
 * file system has for names need not be text. */
static PyObject *joined(PyObject *path, const char *relative)
{
    if (relative == NULL || relative[0] == '\0' || !PyUnicode_Check(path)) {
        return Py_NewRef(path);
    }
    return PyUnicode_FromFormat("%U/%s", path, relative);
}

/* What is wrong with the content of a file starts with the file's name, and the tensor
 * concerned; an OSError shows its path by itself.  The path that the exception carries is
 * that of the file, where one is known. */
PyObject *mlspy_raise_under(const mlspy_state *state, const mls_status *st,
                            PyObject *path, const char *relative)
{
    mls_status named = *st;
    if (st->code == MLS_E_STOPPED && PyErr_Occurred()) {
        return NULL; /* the callback's own exception, or KeyboardInterrupt */
    }
    const bool about_file = st->code == MLS_E_FORMAT || st->code == MLS_E_CHECKSUM;
    const char *file = about_file && relative != NULL ? relative : "";
    if (strncmp(st->text, "tensor '", strlen("tensor '")) == 0) {
        /* the core named tensor and file: saying it twice would cut off the reason */
    } else if (st->name[0] != '\0') {
        PyOS_snprintf(named.text, sizeof named.text, "%.120s%s'%.60s': %.130s", file,
                      file[0] != '\0' ? ": " : "", st->name, st->text);
    } else if (file[0] != '\0') {
        PyOS_snprintf(named.text, sizeof named.text, "%.120s: %.195s", file, st->text);
    }
    PyObject *full = joined(path, relative);
    if (full != NULL) {
        mlspy_raise(state, &named, full);
        Py_DECREF(full);
    }
    return NULL;
}
