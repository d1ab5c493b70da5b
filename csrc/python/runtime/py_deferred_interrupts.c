/* py_deferred_interrupts: deferred_interrupts, a section of the main thread that no
 * signal handler of Python interrupts.
 *
 * Python runs its signal handlers between any two steps of the main thread, and the usual
 * one raises KeyboardInterrupt there. While a section lasts, a handler in C takes the
 * place of Python's own and notes the signals. The end of the outermost section passes
 * them on. Handlers that the user sets during a section, exceptions of other threads and
 * _thread.interrupt_main() are not deferred.
 *
 * In a block of section.allowed(), signals are handled, unless another section is around
 * the section. A long operation runs there, and its undo in the section:
 *
 *     with deferred_interrupts() as section:
 *         begin()
 *         try:
 *             with section.allowed():
 *                 operate()
 *         finally:
 *             end()
 */
#include "common/attempts.h"
#include "common/functions.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#    include <sys/syscall.h>
#endif

static const int deferrable[] = {SIGINT, SIGALRM, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
enum { SIGNALS = sizeof deferrable / sizeof *deferrable };
enum { PATIENCE = 20 * 1000 * 1000 }; /* nanoseconds, of a second attempt at least */

/* Only the main thread changes these, except the notes of the signals. */
static struct {
    int depth;          /* sections entered and not left */
    int64_t stops_from; /* signals stop an attempt from this time on; 0: it is not one */
    pthread_t thread;   /* of the sections */
    bool installed[SIGNALS];
    struct sigaction replaced[SIGNALS];
    volatile sig_atomic_t noted[NSIG];
    void (*python_handler)(int); /* the C handler of CPython; NULL: not yet known */
} sections;

/* A section, or a block of `allowed`. `entered`: the section is counted in `depth`; the
 * block has ended its section for a while. */
typedef struct section_object {
    PyObject_HEAD bool entered;
    struct section_object *around; /* of a block: its section, held; NULL: a section */
} section_object;

static bool in_main_thread(void)
{
#ifdef __linux__
    return syscall(SYS_gettid) == getpid();
#else
    return pthread_main_np() != 0;
#endif
}

static void note(int number)
{
    sections.noted[number] = 1;
}

/* Return 1 if `handler` of a signal is CPython's, which calls a function of Python; -1
 * with an exception set. The address is learned from a signal that has such a function.
 */
static int is_python_handler(int number, void (*handler)(int))
{
    if (handler == SIG_DFL || handler == SIG_IGN || handler == SIG_ERR) {
        return 0;
    }
    if (sections.python_handler == NULL) {
        PyObject *module = PyImport_ImportModule("_signal");
        PyObject *function =
            module == NULL ? NULL : PyObject_CallMethod(module, "getsignal", "i", number);
        Py_XDECREF(module);
        if (function == NULL) {
            return -1;
        }
        if (PyCallable_Check(function)) {
            sections.python_handler = handler;
        }
        Py_DECREF(function);
    }
    return handler == sections.python_handler;
}

/* Put CPython's handlers back; handlers that were set meanwhile stay. */
static void uninstall(void)
{
    for (int i = 0; i < SIGNALS; i++) {
        struct sigaction now;
        if (sections.installed[i] && sigaction(deferrable[i], NULL, &now) == 0 &&
            now.sa_handler == note) {
            (void)sigaction(deferrable[i], &sections.replaced[i], NULL);
        }
        sections.installed[i] = false;
    }
}

/* Put `note` in the place of CPython's handlers. Returns -1 with an exception set; then
 * none is replaced. */
static int install(void)
{
    for (int i = 0; i < SIGNALS; i++) {
        struct sigaction *replaced = &sections.replaced[i];
        int is_python = sigaction(deferrable[i], NULL, replaced);
        if (is_python == 0) {
            is_python = is_python_handler(deferrable[i], replaced->sa_handler);
        } else {
            PyErr_SetFromErrno(PyExc_OSError);
        }
        if (is_python < 0) {
            uninstall();
            return -1;
        }
        if (is_python) {
            struct sigaction action = *replaced;
            action.sa_handler = note;
            sections.installed[i] = sigaction(deferrable[i], &action, NULL) == 0;
        }
    }
    return 0;
}

/* Let Python handle the noted signals, after this call. */
static void pass_on(void)
{
    for (int i = 0; i < SIGNALS; i++) {
        if (sections.noted[deferrable[i]]) {
            sections.noted[deferrable[i]] = 0;
            (void)PyErr_SetInterruptEx(deferrable[i]);
        }
    }
}

/* Enter a section of the main thread; a handler of Python for an earlier signal runs now.
 * Returns -1 with an exception set, in the section too: the caller leaves it. */
static int enter(void)
{
    sections.thread = pthread_self();
    if (sections.depth++ > 0) {
        return 0;
    }
    return install() < 0 ? -1 : PyErr_CheckSignals();
}

/* Leave one section of the main thread. */
static int leave(void *unused)
{
    (void)unused;
    if (sections.depth > 0 && --sections.depth == 0) {
        uninstall();
        pass_on();
    }
    return 0;
}

/* A child that another thread forked has no section: its only thread entered none. */
static void forget_in_child(void)
{
    if (sections.depth > 0 && !pthread_equal(sections.thread, pthread_self())) {
        uninstall();
        sections.depth = 0;
        sections.stops_from = 0;
    }
}

static PyObject *section___enter__(section_object *self, PyObject *unused)
{
    (void)unused;
    if (self->entered) {
        PyErr_SetString(PyExc_RuntimeError, "this section was entered before");
        return NULL;
    }
    if (self->around != NULL) {
        self->entered = self->around->entered && sections.depth == 1;
        if (self->entered) {
            leave(NULL);
        }
    } else if (in_main_thread()) {
        if (enter() < 0) {
            leave(NULL);
            return NULL;
        }
        self->entered = true;
    }
    return Py_NewRef(self);
}

static PyObject *section___exit__(section_object *self, PyObject *unused)
{
    (void)unused;
    if (self->entered) {
        self->entered = false;
        if (self->around != NULL) {
            return enter() < 0 ? NULL : Py_NewRef(Py_None);
        }
        leave(NULL);
        if (sections.depth == 0 && PyErr_CheckSignals() < 0) {
            return NULL; /* the signal's exception, at the end of the section */
        }
    }
    Py_RETURN_NONE;
}

/* allowed() -> a block that handles signals */
static PyObject *section_allowed(section_object *self, PyObject *unused)
{
    PyTypeObject *type = Py_TYPE(self);
    section_object *block = (section_object *)type->tp_alloc(type, 0);
    (void)unused;
    if (block != NULL) {
        block->around = (section_object *)Py_NewRef(self);
    }
    return (PyObject *)block;
}

/* deferred_interrupts.is_active() -> whether this thread is in a section */
static PyObject *section_is_active(PyObject *unused, PyObject *none)
{
    (void)unused;
    (void)none;
    return PyBool_FromLong(sections.depth > 0 && in_main_thread());
}

/* Return whether a signal waits for the end of the section. */
static bool is_pending(void)
{
    bool pending = false;
    for (int i = 0; i < SIGNALS; i++) {
        pending = pending || sections.noted[deferrable[i]];
    }
    return pending;
}

/* is_pending() -> whether a signal waits for the end of the section */
static PyObject *section_is_pending(section_object *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(self->entered && is_pending());
}

/* A lost section ends, in the main thread. */
static void section_dealloc(section_object *self)
{
    if (self->around != NULL) {
        Py_DECREF(self->around);
    } else if (self->entered && in_main_thread()) {
        leave(NULL);
    } else if (self->entered) {
        (void)Py_AddPendingCall(leave, NULL);
    }
    mlspy_free(self);
}

/* ---- attempts ---- */

/* Return a monotonic time in nanoseconds. */
static int64_t read_nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* End an attempt, and return whether another one follows. */
static bool end_attempt(mlspy_attempts *attempts, mls_code code)
{
    const int64_t took = read_nanoseconds() - attempts->began;
    attempts->patience = took > PATIENCE / 2 ? 2 * took : PATIENCE;
    if (attempts->is_section) {
        sections.stops_from = sections.depth == 1 ? 0 : sections.stops_from;
        leave(NULL);
    }
    return code == MLS_E_STOPPED && PyErr_CheckSignals() == 0;
}

/* Signals stop only the outermost section: any other one is a part of a longer one. */
bool mlspy_attempt(mlspy_attempts *attempts, mls_code code)
{
    if (attempts->is_running && !end_attempt(attempts, code)) {
        return false;
    }
    attempts->is_running = true;
    attempts->is_section = in_main_thread();
    attempts->began = read_nanoseconds();
    if (attempts->is_section) {
        if (enter() < 0) {
            leave(NULL);
            return false;
        }
        if (sections.depth == 1) {
            sections.stops_from = attempts->began + attempts->patience;
        }
    }
    return true;
}

bool mlspy_attempt_continues(void *unused, uint64_t bytes)
{
    (void)unused;
    (void)bytes;
    return !in_main_thread() || sections.stops_from == 0 || !is_pending() ||
           read_nanoseconds() < sections.stops_from;
}

/* ---- the type ---- */

static PyMethodDef section_methods[] = {
    MLSPY_METHOD(section, __enter__, METH_NOARGS, "/"),
    MLSPY_METHOD(section, __exit__, METH_VARARGS, "/, *unused"),
    MLSPY_METHOD(section, allowed, METH_NOARGS, "/"),
    MLSPY_METHOD(section, is_pending, METH_NOARGS, "/"),
    {"is_active", section_is_active, METH_NOARGS | METH_STATIC, "is_active()\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot section_slots[] = {
    {Py_tp_dealloc, (void *)section_dealloc},
    {Py_tp_methods, section_methods},
    {Py_tp_doc, (void *)"deferred_interrupts()\n--\n\n"},
    {0, NULL},
};

MLSPY_DEFINE_SPEC(section, "deferred_interrupts", section_object,
                  Py_TPFLAGS_IMMUTABLETYPE);

int mlspy_deferred_interrupts_add(PyObject *module)
{
    if (pthread_atfork(NULL, NULL, forget_in_child) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    return mlspy_add_type(module, &section_spec, NULL, NULL);
}
