/* py_descriptor: an open file or folder, closed when the object is deallocated.
 *
 * An interrupt can occur between any two steps of a Python function. It can lose a number
 * returned by os.open, and a lock on that file then stays. A lost object is deallocated.
 * So every step here is one call, which an interrupt precedes or follows.
 */
#include "common/common_bindings.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/file.h>
#include <unistd.h>

/* `number` is -1 if the file is closed. */
typedef struct descriptor_object {
    PyObject_HEAD int number;
    bool locked;
    pid_t pid; /* a forked child shares the lock, but only this process may release it */
} descriptor_object;

/* Open a file for `self`. Returns -1 with an exception set, by the system or by a signal
 * handler. */
static int open_path(descriptor_object *self, PyObject *path, int flags)
{
    PyObject *encoded = NULL;
    int number;
    if (!PyUnicode_FSConverter(path, &encoded)) {
        return -1;
    }
    const char *name = PyBytes_AS_STRING(encoded);
    do {
        Py_BEGIN_ALLOW_THREADS
            number = open(name, flags | O_CLOEXEC, 0666);
        Py_END_ALLOW_THREADS
    } while (number < 0 && errno == EINTR && PyErr_CheckSignals() == 0);
    Py_DECREF(encoded);
    self->number = number;
    if (number < 0 && !PyErr_Occurred()) {
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    }
    return number < 0 ? -1 : 0;
}

/* Descriptor(path, flags) */
static PyObject *descriptor_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *path;
    int flags;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "Oi:Descriptor", &path, &flags)) {
        return NULL;
    }
    descriptor_object *self = (descriptor_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->number = -1;
    self->locked = false;
    self->pid = getpid();
    if (open_path(self, path, flags) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

/* Unlocks first, because a child forked meanwhile has the open file too. Errors are
 * ignored: the number is free in any case. */
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

/* Deallocation closes the file. It runs no Python code, so no exception can prevent it.
 */
static void descriptor_dealloc(descriptor_object *self)
{
    PyTypeObject *type = Py_TYPE(self);
    close_number(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *descriptor_close(descriptor_object *self, PyObject *unused)
{
    (void)unused;
    close_number(self);
    Py_RETURN_NONE;
}

static PyObject *descriptor_fileno(descriptor_object *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(self->number);
}

/* lock() -> True, or False if another open file has the lock; never waits */
static PyObject *descriptor_lock(descriptor_object *self, PyObject *unused)
{
    int failed;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
        failed = flock(self->number, LOCK_EX | LOCK_NB);
    Py_END_ALLOW_THREADS
    if (failed != 0 && errno != EWOULDBLOCK) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    self->locked = failed == 0;
    return PyBool_FromLong(self->locked);
}

static PyObject *descriptor_enter(descriptor_object *self, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(self);
}

/* No interrupt can occur between the block of a `with` statement and this call. */
static PyObject *descriptor_exit(descriptor_object *self, PyObject *unused)
{
    (void)unused;
    close_number(self);
    Py_RETURN_NONE;
}

/* ---- the type ---- */

static PyMethodDef descriptor_methods[] = {
    {"fileno", (PyCFunction)(void (*)(void))descriptor_fileno, METH_NOARGS,
     "fileno($self, /)\n--\n\nReturn the number, or -1 if it is closed."},
    {"lock", (PyCFunction)(void (*)(void))descriptor_lock, METH_NOARGS,
     "lock($self, /)\n--\n\nTry to lock the file; return whether it is locked now."},
    {"close", (PyCFunction)(void (*)(void))descriptor_close, METH_NOARGS,
     "close($self, /)\n--\n\nUnlock and close the file, if it is open."},
    {"__enter__", (PyCFunction)(void (*)(void))descriptor_enter, METH_NOARGS,
     "__enter__($self, /)\n--\n\nReturn the object."},
    {"__exit__", (PyCFunction)(void (*)(void))descriptor_exit, METH_VARARGS,
     "__exit__($self, /, *unused)\n--\n\nClose, as `close` does."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot descriptor_slots[] = {
    {Py_tp_new, (void *)descriptor_new},
    {Py_tp_dealloc, (void *)descriptor_dealloc},
    {Py_tp_methods, descriptor_methods},
    {Py_tp_doc,
     (void *)"Descriptor(path, flags, /)\n--\n\nA file or folder that is open; "
             "deallocation unlocks and closes it."},
    {0, NULL},
};

static PyType_Spec descriptor_spec = {
    .name = "mlstate._core.Descriptor",
    .basicsize = sizeof(descriptor_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = descriptor_slots,
};

int mlspy_descriptor_add(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &descriptor_spec, NULL);
    const int failed = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return failed;
}
