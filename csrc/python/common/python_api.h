/* python_api: the headers of Python and NumPy, configured for all binding files.
 *
 * Unless its comment differs, a function of csrc/python that can fail returns -1, or a
 * NULL pointer, with an exception set; a function that returns an object returns a new
 * reference.
 *
 * NumPy's API is one static pointer. module.c defines and fills it: it defines
 * MLSPY_IMPORT_NUMPY before this include.
 */
#ifndef MLSPY_PYTHON_API_H
#define MLSPY_PYTHON_API_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifndef MLSPY_IMPORT_NUMPY
#    define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

/* Define type_spec: a class of _core, with instances of struct `object` and the slots
 * type_slots. `more` are flags besides the default ones. */
#define MLSPY_DEFINE_SPEC(type, class, object, more)                                     \
    static PyType_Spec type##_spec = {.name = "mlstate._core." class,                    \
                                      .basicsize = sizeof(object),                       \
                                      .flags = Py_TPFLAGS_DEFAULT | (more),              \
                                      .slots = type##_slots}

/* The entry of a PyMethodDef table for method `name` of a type, implemented by
 * type_name. `parameters` are those after $self, for inspect.signature. */
#define MLSPY_METHOD(type, name, flags, parameters)                                      \
    {#name, (PyCFunction)(void (*)(void))type##_##name, flags,                           \
     #name "($self, " parameters ")\n--\n\n"}

#endif
