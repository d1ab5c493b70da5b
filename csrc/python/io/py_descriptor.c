/* py_descriptor: Descriptor: an open file or folder and its lock (flock), closed even if
 * an interrupt loses it.
 *
 * An interrupt can occur between any two steps of a Python function. It can lose a number
 * returned by os.open, and a lock on that file then stays. A lost object is deallocated.
 * So every step here is one call, which an interrupt precedes or follows.
 */
#include "common/functions.h"
#include "common/gil.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/file.h>
#include <unistd.h>

/* An open file or folder; `number` is its descriptor, -1 if it is closed. */
typedef struct descriptor_object {
    PyObject_HEAD int number;
    bool locked;
    pid_t pid; /* a forked child shares the lock, but only this process may release it */
} descriptor_object;

/* Open `path` for `self`, which is closed. `flags` are for open(); O_CLOEXEC is added,
 * and a new file has mode 0666 less the umask. Returns -1 with an exception set, by the
 * system or by a signal handler; `self` is then closed. */
static int open_path(descriptor_object *self, PyObject *path, int flags)
{
    PyObject *encoded = NULL;
    int number;
    if (!PyUnicode_FSConverter(path, &encoded)) {
        return -1;
    }
    const char *name = PyBytes_AS_STRING(encoded);
    do {
        MLSPY_WITHOUT_GIL(number = open(name, flags | O_CLOEXEC, 0666));
    } while (number < 0 && errno == EINTR && PyErr_CheckSignals() == 0);
    Py_DECREF(encoded);
    self->number = number;
    if (number < 0 && !PyErr_Occurred()) {
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    }
    return number < 0 ? -1 : 0;
}

/* Descriptor(path, flags): opens a file, or a folder; Descriptor(): a closed one */
static PyObject *descriptor_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *path = Py_None;
    int flags = 0;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "|Oi:Descriptor", &path, &flags)) {
        return NULL;
    }
    descriptor_object *self = (descriptor_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->number = -1;
    self->locked = false;
    self->pid = getpid();
    if (path != Py_None && open_path(self, path, flags) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* Close the file of `self`, if one is open; keeps errno. Unlocks first, because a child
 * forked meanwhile has the open file too. Errors are ignored: the number is free in any
 * case. */
static void close_number(descriptor_object *self)
{
    const int number = self->number, error = errno;
    self->number = -1;
    if (number >= 0) {
        if (self->locked && self->pid == getpid()) {
            (void)flock(number, LOCK_UN);
        }
        (void)close(number);
    }
    errno = error;
}

/* Deallocation closes the file. It runs no Python code, so no exception can prevent
 * it. */
static void descriptor_dealloc(descriptor_object *self)
{
    close_number(self);
    mlspy_free(self);
}

static PyObject *descriptor_close(descriptor_object *self, PyObject *unused)
{
    (void)unused;
    close_number(self);
    Py_RETURN_NONE;
}

/* open(path, flags): closes the file that is open, and opens another one; after an
 * OSError none is open */
static PyObject *descriptor_open(descriptor_object *self, PyObject *args)
{
    PyObject *path;
    int flags;
    if (!PyArg_ParseTuple(args, "Oi:open", &path, &flags)) {
        return NULL;
    }
    close_number(self);
    self->locked = false;
    self->pid = getpid();
    return open_path(self, path, flags) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *descriptor_fileno(descriptor_object *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(self->number);
}

/* lock() -> True, or False if another open file has the lock; never waits
 *
 * Locks the whole file exclusively (flock). Raises OSError.
 */
static PyObject *descriptor_lock(descriptor_object *self, PyObject *unused)
{
    int failed;
    (void)unused;
    MLSPY_WITHOUT_GIL(failed = flock(self->number, LOCK_EX | LOCK_NB));
    if (failed != 0 && errno != EWOULDBLOCK) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    self->locked = failed == 0;
    return PyBool_FromLong(self->locked);
}

static PyObject *descriptor___enter__(descriptor_object *self, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(self);
}

/* No interrupt can occur between the block of a `with` statement and this call. */
static PyObject *descriptor___exit__(descriptor_object *self, PyObject *unused)
{
    return descriptor_close(self, unused);
}

/* ---- the type ---- */

static PyMethodDef descriptor_methods[] = {
    MLSPY_METHOD(descriptor, open, METH_VARARGS, "path, flags, /"),
    MLSPY_METHOD(descriptor, fileno, METH_NOARGS, "/"),
    MLSPY_METHOD(descriptor, lock, METH_NOARGS, "/"),
    MLSPY_METHOD(descriptor, close, METH_NOARGS, "/"),
    MLSPY_METHOD(descriptor, __enter__, METH_NOARGS, "/"),
    MLSPY_METHOD(descriptor, __exit__, METH_VARARGS, "/, *unused"),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot descriptor_slots[] = {
    {Py_tp_new, (void *)descriptor_new},
    {Py_tp_dealloc, (void *)descriptor_dealloc},
    {Py_tp_methods, descriptor_methods},
    {Py_tp_doc, (void *)"Descriptor(path=None, flags=0, /)\n--\n\n"},
    {0, NULL},
};

MLSPY_DEFINE_SPEC(descriptor, "Descriptor", descriptor_object, Py_TPFLAGS_IMMUTABLETYPE);

int mlspy_descriptor_add(PyObject *module)
{
    return mlspy_add_type(module, &descriptor_spec, NULL, NULL);
}
