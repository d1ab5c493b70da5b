/* array_view: views NumPy arrays, torch tensors and DLPack exporters without a copy, or
 * refuses them; NumPy's dtypes.
 *
 * A view has the address of the elements and a reference to their owner; nothing is
 * copied. NumPy arrays are read through NumPy's API, which is the fastest way and the
 * only one for the types of ml_dtypes, which have no buffer protocol. Other objects use
 * DLPack, which has every type of the core, or else NumPy's __array_interface__.
 *
 * A dtype of the core is identified by NumPy's type number if NumPy has the type,
 * otherwise by the name under which ml_dtypes registered it. Without ml_dtypes, such
 * tensors are read as unsigned integers of the same size, whose descriptor has the name
 * in its metadata; tensors of packed dtypes always are.
 */
#include "array/array_view.h"

#include "array/dlpack.h"
#include "common/errors.h"
#include "common/gil.h"
#include "common/module_state.h"

#include "array/float_convert.h"
#include "array/overlap.h"
#include "base/size.h"

/* ---- dtypes ---- */

enum { MOST_ITEM_BYTES = 16 }; /* of an item: NumPy's complex128 */

/* Find the dtype with a DLPack type code and an item of `bytes` bytes; no two dtypes
 * share both. Returns false if the core has none. */
static bool dtype_of_code(unsigned code, size_t bytes, mls_dtype *out)
{
#define CODE_ENTRY(id, suffix, name, file_name, item, code, ...)                         \
    [DLPACK_##code][sizeof(item)] = MLS_##id + 1,
    /* dtypes plus 1: 0 marks unused entries */
    static const unsigned char dtypes[DLPACK_CODES][MOST_ITEM_BYTES + 1] = {
        MLS_DTYPES(CODE_ENTRY)};
    if (code >= DLPACK_CODES || bytes > MOST_ITEM_BYTES || dtypes[code][bytes] == 0) {
        return false;
    }
    *out = (mls_dtype)(dtypes[code][bytes] - 1);
    return true;
}

/* Find a dtype that another package registered with NumPy, by the name of its scalar
 * type. Returns false if the core has no dtype of that name and item size. */
static bool registered_of(PyArray_Descr *descr, mls_dtype *out)
{
    const char *name = descr->typeobj->tp_name;
    const char *dot = strrchr(name, '.');
    /* tp_name may start with the module */
    name = dot == NULL ? name : dot + 1;
    return mls_dtype_from_name(name, strlen(name), out) &&
           mls_dtype_of(*out)->item_bytes == (size_t)PyDataType_ELSIZE(descr);
}

/* Return NumPy's type number of a dtype, or NPY_NOTYPE if only ml_dtypes has the type.
 * Finds it by the DLPack type code and the item size. */
static int type_number(mls_dtype dtype)
{
#define DTYPE_CODE(id, suffix, name, file_name, item, code, ...)                         \
    [MLS_##id] = DLPACK_##code,
    static const unsigned char codes[MLS_DTYPE_COUNT] = {MLS_DTYPES(DTYPE_CODE)};
    /* type numbers plus 1: 0 marks unused entries */
    static const unsigned char numbers[DLPACK_CODES][MOST_ITEM_BYTES + 1] = {
        [DLPACK_INT] = {[1] = NPY_INT8 + 1,
                        [2] = NPY_INT16 + 1,
                        [4] = NPY_INT32 + 1,
                        [8] = NPY_INT64 + 1},
        [DLPACK_UINT] = {[1] = NPY_UINT8 + 1,
                         [2] = NPY_UINT16 + 1,
                         [4] = NPY_UINT32 + 1,
                         [8] = NPY_UINT64 + 1},
        [DLPACK_FLOAT] = {[2] = NPY_HALF + 1, [4] = NPY_FLOAT + 1, [8] = NPY_DOUBLE + 1},
        [DLPACK_COMPLEX] = {[8] = NPY_CFLOAT + 1, [16] = NPY_CDOUBLE + 1},
        [DLPACK_BOOL] = {[1] = NPY_BOOL + 1},
    };
    const int number = numbers[codes[dtype]][mls_dtype_of(dtype)->item_bytes];
    return number == 0 ? NPY_NOTYPE : number - 1;
}

bool mlspy_dtype_in_numpy(mls_dtype dtype)
{
    return type_number(dtype) != NPY_NOTYPE;
}

/* Metadata key of unsigned integers that hold the bits of another dtype. */
static const char label_key[] = "mlstate.dtype";

/* Find the dtype whose name labels a descriptor of unsigned integers (labelled_descr): a
 * dtype that NumPy lacks, of the same item size. Other labels are ignored. Returns false
 * without an exception if there is none. */
static bool labelled_of(PyArray_Descr *descr, mls_dtype *out)
{
    PyObject *metadata = PyDataType_METADATA(descr);
    if (metadata == NULL || !PyTypeNum_ISUNSIGNED(descr->type_num)) {
        return false;
    }
    PyObject *label = PyDict_GetItemString(metadata, label_key);
    Py_ssize_t length = 0;
    const char *name = label != NULL && PyUnicode_Check(label)
                           ? PyUnicode_AsUTF8AndSize(label, &length)
                           : NULL;
    mls_dtype labelled;
    if (name == NULL) {
        PyErr_Clear(); /* a label that is not a UTF-8 str */
        return false;
    }
    const bool is_valid_label =
        mls_dtype_from_name(name, (size_t)length, &labelled) &&
        !mlspy_dtype_in_numpy(labelled) &&
        mls_dtype_of(labelled)->item_bytes == (size_t)PyDataType_ELSIZE(descr);
    if (is_valid_label) {
        *out = labelled;
    }
    return is_valid_label;
}

/* Registered types are found by name, because their numbers differ between processes. */
bool mlspy_dtype_of_descr(PyArray_Descr *descr, mls_dtype *out)
{
    const int number = descr->type_num;
    if (number >= NPY_USERDEF || number < 0) {
        return registered_of(descr, out);
    }
    if (PyTypeNum_ISINTEGER(number)) { /* long and long long differ only in name */
        return labelled_of(descr, out) ||
               dtype_of_code(PyTypeNum_ISSIGNED(number) ? DLPACK_INT : DLPACK_UINT,
                             (size_t)PyDataType_ELSIZE(descr), out);
    }
    switch (number) {
    case NPY_BOOL:
        return dtype_of_code(DLPACK_BOOL, 1, out);
    case NPY_HALF:
        return dtype_of_code(DLPACK_FLOAT, 2, out);
    case NPY_FLOAT:
        return dtype_of_code(DLPACK_FLOAT, 4, out);
    case NPY_DOUBLE:
        return dtype_of_code(DLPACK_FLOAT, 8, out);
    case NPY_CFLOAT:
        return dtype_of_code(DLPACK_COMPLEX, 8, out);
    case NPY_CDOUBLE:
        return dtype_of_code(DLPACK_COMPLEX, 16, out);
    default:
        return false;
    }
}

/* Return a new reference to the descriptor of ml_dtypes for a dtype; NULL with the
 * exception of its import, or another, set. */
static PyArray_Descr *registered_descr(mls_dtype dtype)
{
    PyObject *package = PyImport_ImportModule("ml_dtypes");
    if (package == NULL) {
        return NULL;
    }
    PyObject *scalar = PyObject_GetAttrString(package, mls_dtype_of(dtype)->name);
    Py_DECREF(package);
    PyArray_Descr *descr = NULL;
    if (scalar != NULL && PyArray_DescrConverter(scalar, &descr) != NPY_SUCCEED) {
        descr = NULL;
    }
    Py_XDECREF(scalar);
    return descr;
}

/* Return a new descriptor of unsigned integers of a dtype's item size, with its name in
 * the metadata; NULL with an exception set. */
static PyArray_Descr *labelled_descr(mls_dtype dtype)
{
    const mls_dtype_info *info = mls_dtype_of(dtype);
    PyObject *args = Py_BuildValue("(N)", PyUnicode_FromFormat("u%zu", info->item_bytes));
    PyObject *options = Py_BuildValue("{s{ss}}", "metadata", label_key, info->name);
    PyObject *descr = args == NULL || options == NULL
                          ? NULL
                          : PyObject_Call((PyObject *)&PyArrayDescr_Type, args, options);
    Py_XDECREF(args);
    Py_XDECREF(options);
    return (PyArray_Descr *)descr;
}

/* ml_dtypes is imported only if one of its types is needed. */
PyArray_Descr *mlspy_descr_of_dtype(mls_dtype dtype)
{
    const int number = type_number(dtype);
    if (number != NPY_NOTYPE) {
        return PyArray_DescrFromType(number);
    }
    if (mls_dtype_of(dtype)->kind == MLS_KIND_PACKED) {
        return labelled_descr(dtype); /* ml_dtypes does not pack */
    }
    PyArray_Descr *descr = registered_descr(dtype);
    /* an ml_dtypes that is installed but broken is an error */
    if (descr == NULL && PyErr_ExceptionMatches(PyExc_ModuleNotFoundError)) {
        PyErr_Clear();
        descr = labelled_descr(dtype);
    }
    return descr;
}

/* As mlspy_descr_of_dtype for a dtype that a user requests. Labelled integers instead of
 * floats are an ImportError, because users may compute with the result; packed dtypes
 * have no other form. */
static PyArray_Descr *requested_descr(mls_dtype dtype)
{
    const int number = type_number(dtype);
    if (mls_dtype_of(dtype)->kind == MLS_KIND_PACKED) {
        return labelled_descr(dtype);
    }
    PyArray_Descr *descr =
        number == NPY_NOTYPE ? registered_descr(dtype) : PyArray_DescrFromType(number);
    if (descr == NULL && PyErr_ExceptionMatches(PyExc_ImportError)) {
        PyErr_Format(PyExc_ImportError,
                     "NumPy has no dtype %s: install the package ml_dtypes with pip "
                     "install 'mlstate[dtypes]'",
                     mls_dtype_of(dtype)->name);
    }
    return descr;
}

int mlspy_dtype_named(PyObject *object, mls_dtype *out)
{
    Py_ssize_t length = 0;
    const char *name =
        PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &length) : NULL;
    if (name == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return mls_dtype_from_name(name, (size_t)length, out) ? 1 : 0;
}

/* The core's own names come first: NumPy knows "bfloat16" only after an import of
 * ml_dtypes. */
PyArray_Descr *mlspy_descr_of_object(const mlspy_state *state, PyObject *object,
                                     mls_dtype *out)
{
    PyArray_Descr *descr = NULL;
    const int named = mlspy_dtype_named(object, out);
    if (named > 0) {
        descr = requested_descr(*out);
    } else if (named < 0) {
        return NULL;
    } else if (PyArray_DescrConverter(object, &descr) != NPY_SUCCEED) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) { /* NumPy's text lacks the name */
            PyErr_Format(PyExc_TypeError, "dtype must be a dtype or its name, got %.200R",
                         object);
        }
        return NULL;
    }
    /* NumPy has types that the core lacks: text, dates, objects, long double */
    if (descr != NULL && !mlspy_dtype_of_descr(descr, out)) {
        mlspy_raise_text(state, MLS_E_DTYPE, "dtype %.60s is not supported",
                         descr->typeobj->tp_name);
        Py_CLEAR(descr);
    }
    return descr;
}

/* ---- ndarrays ---- */

/* Fill a view of an ndarray with this dtype; the array becomes its owner. Writes only the
 * dimensions that the array has, because most of a view is room for dimensions. */
static void fill_view(PyArrayObject *array, mls_dtype dtype, mlspy_view *out)
{
    mls_tensor *t = &out->tensor;
    t->data = PyArray_DATA(array);
    t->dtype = dtype;
    t->swapped = PyArray_ISBYTESWAPPED(array);
    t->rank = PyArray_NDIM(array);
    for (int axis = 0; axis < t->rank; axis++) {
        t->shape[axis] = (size_t)PyArray_DIM(array, axis);
        t->strides[axis] = PyArray_STRIDE(array, axis);
    }
    out->readonly = !PyArray_ISWRITEABLE(array);
    out->owner = Py_NewRef((PyObject *)array);
}

/* Return numpy.ma.MaskedArray (borrowed from the state), or NULL if numpy.ma is not
 * imported: then no masked array exists. No exception is set. */
static PyTypeObject *masked_type(const mlspy_state *state)
{
    mlspy_state *cache = mlspy_state_of(state->module);
    PyTypeObject *type = atomic_load_explicit(&cache->masked_type, memory_order_acquire);
    if (type != NULL) {
        return type;
    }
    PyObject *module = PyImport_GetModule(state->names[MLSPY_NAME_MASKED_MODULE]);
    PyObject *value =
        module == NULL ? NULL : PyObject_GetAttrString(module, "MaskedArray");
    Py_XDECREF(module);
    if (value == NULL || !PyType_Check(value)) {
        Py_XDECREF(value);
        PyErr_Clear();
        return NULL;
    }
    type = NULL;
    if (!atomic_compare_exchange_strong(&cache->masked_type, &type,
                                        (PyTypeObject *)value)) {
        Py_DECREF(value); /* another thread stored it */
        return type;
    }
    return (PyTypeObject *)value;
}

/* A field of a record, and an attribute of a user's class, may be called mask. */
bool mlspy_is_masked(const mlspy_state *state, PyObject *array)
{
    if (PyArray_CheckExact(array)) {
        return false;
    }
    PyTypeObject *type = masked_type(state);
    return type != NULL && PyObject_TypeCheck(array, type);
}

int mlspy_refuse_masked(const char *label)
{
    return MLSPY_REFUSE(PyExc_TypeError,
                        "%s is a masked array, whose mask would be lost: pass its "
                        "filled(), or its data and mask as two arrays",
                        label);
}

/* Set `*out` to a view of an ndarray, which becomes the owner; `label` names it in
 * errors. Returns -1 with CompatibilityError set for a dtype that the core lacks, or
 * TypeError for a masked array; any shape and strides are accepted. */
static int view_of_ndarray(const mlspy_state *state, PyArrayObject *array,
                           const char *label, mlspy_view *out)
{
    mls_dtype dtype;
    PyArray_Descr *descr = PyArray_DESCR(array);
    if (mlspy_is_masked(state, (PyObject *)array)) {
        return mlspy_refuse_masked(label);
    }
    if (!mlspy_dtype_of_descr(descr, &dtype)) {
        return MLSPY_FAIL(state, MLS_E_DTYPE, "%s: dtype %.60s is not supported", label,
                          descr->typeobj->tp_name);
    }
    fill_view(array, dtype, out);
    return 0;
}

/* ---- DLPack ---- */

/* Find the core's dtype for a DLPack dtype. Returns false if the core has none. Only an
 * item of a packed dtype has several lanes: the elements in it. */
static bool dlpack_dtype_of(dlpack_dtype kind, mls_dtype *out)
{
    const size_t bits = (size_t)kind.bits * kind.lanes;
    return bits % 8 == 0 && dtype_of_code(kind.code, bits / 8, out) &&
           mls_dtype_of(*out)->element_bits == kind.bits;
}

/* Get an attribute that most exporters lack. Returns 1 with a new reference in `*out`, 0
 * if it is missing, or -1 with an exception set; `*out` is then NULL. */
static int find_attribute(PyObject *array, PyObject *name, PyObject **out)
{
    *out = PyObject_GetAttr(array, name);
    if (*out != NULL) {
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

/* Return a new reference to `array`, or its detach() if it requires a gradient: torch
 * does not export tensors that are part of a graph. Both have the same memory. NULL with
 * an exception set. */
static PyObject *without_graph(const mlspy_state *state, PyObject *array)
{
    PyObject *flag;
    int required = find_attribute(array, state->names[MLSPY_NAME_REQUIRES_GRAD], &flag);
    if (required > 0) {
        required = PyObject_IsTrue(flag);
        Py_DECREF(flag);
    }
    return required > 0    ? PyObject_CallMethod(array, "detach", NULL)
           : required == 0 ? Py_NewRef(array)
                           : NULL;
}

/* Return 1 if a torch tensor is a lazily negated view, which torch exports without its
 * negation; 0 if not, or for any other object; -1 with an exception set. */
static int is_negated(const mlspy_state *state, PyObject *array)
{
    PyObject *method;
    const int has_method =
        find_attribute(array, state->names[MLSPY_NAME_IS_NEG], &method);
    if (has_method <= 0) {
        return has_method;
    }
    PyObject *is_neg = PyObject_CallNoArgs(method);
    const int negated = is_neg == NULL ? -1 : is_neg == Py_True;
    Py_DECREF(method);
    Py_XDECREF(is_neg);
    return negated;
}

/* Put `label` before the text of the exception that an exporter raised, since its text
 * does not name the array. Only for exception types that take a single text; others stay
 * unchanged. */
static void prefix_error(const char *label)
{
    PyObject *const types[] = {PyExc_BufferError, PyExc_RuntimeError, PyExc_TypeError,
                               PyExc_ValueError};
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (type == types[i]) {
            PyErr_Format(type, "%s: %S", label, error == NULL ? Py_None : error);
            Py_DECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(trace);
            return;
        }
    }
    PyErr_Restore(type, error, trace);
}

/* Return the capsule that `array` exports, as a new reference; NULL with an exception
 * set. Asks for the versioned form first, since only that one declares read-only memory;
 * older exporters do not support it. */
static PyObject *export_capsule(const mlspy_state *state, PyObject *array)
{
    /* max_version=(1, 1); no stream argument, since only devices have streams */
    PyObject *detached = without_graph(state, array);
    PyObject *method =
        detached == NULL ? NULL : PyObject_GetAttrString(detached, "__dlpack__");
    PyObject *options =
        method == NULL ? NULL : Py_BuildValue("{s(ii)}", "max_version", 1, 1);
    PyObject *no_arguments = options == NULL ? NULL : PyTuple_New(0);
    PyObject *capsule = NULL;
    if (no_arguments != NULL) {
        /* the capsule keeps its memory alive, so `detached` can be released */
        capsule = PyObject_Call(method, no_arguments, options);
        /* an exporter older than the versioned protocol */
        if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            capsule = PyObject_CallNoArgs(method);
        }
    }
    Py_XDECREF(no_arguments);
    Py_XDECREF(options);
    Py_XDECREF(method);
    Py_XDECREF(detached);
    return capsule;
}

/* Return the tensor inside a capsule (borrowed), or NULL with TypeError set. Sets
 * `*readonly` to whether its memory must not be written to. */
static const dlpack_tensor *capsule_tensor(PyObject *capsule, bool *readonly)
{
    *readonly = false;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        const dlpack_managed_versioned *m =
            PyCapsule_GetPointer(capsule, "dltensor_versioned");
        /* a higher major version may have another layout */
        if (m->major == 1) {
            *readonly = (m->flags & DLPACK_READ_ONLY) != 0;
            return &m->tensor;
        }
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        const dlpack_managed *m = PyCapsule_GetPointer(capsule, "dltensor");
        return &m->tensor;
    }
    PyErr_SetString(PyExc_TypeError, "__dlpack__ gave a capsule of unknown version");
    return NULL;
}

/* Fill in rank, shape and strides (in bytes) of `t`, which has its address and dtype.
 * Returns false if the shape is invalid or its memory does not fit the address space. */
static bool take_dlpack_shape(const dlpack_tensor *from, mls_tensor *t)
{
    /* `packed` is the stride of the axis in C order, used if there are no strides */
    size_t packed = mls_tensor_item_bytes(t);
    const ptrdiff_t item_bytes = (ptrdiff_t)packed;
    if (from->rank < 0 || from->rank > MLS_MAX_RANK ||
        (from->rank > 0 && from->shape == NULL)) {
        return false;
    }
    t->rank = from->rank;
    for (int axis = t->rank - 1; axis >= 0; axis--) {
        t->shape[axis] = (size_t)from->shape[axis];
        t->strides[axis] = (ptrdiff_t)packed;
        if (from->shape[axis] < 0 ||
            (from->strides != NULL &&
             __builtin_mul_overflow(from->strides[axis], item_bytes,
                                    &t->strides[axis])) ||
            !mls_size_mul(packed, t->shape[axis] == 0 ? 1 : t->shape[axis], &packed) ||
            packed > PTRDIFF_MAX) {
            return false;
        }
    }
    return mls_tensor_is_addressable(t);
}

/* Names of the two kinds of owners; the name determines the deleter. */
static const char plain_owner[] = "mlstate.dltensor";
static const char versioned_owner[] = "mlstate.dltensor_versioned";

/* Call the deleter of an owner's tensor. The deleter may run Python code, and the owner
 * may be freed while an exception is set, so the exception is saved. */
static void owner_end(PyObject *owner)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    if (PyCapsule_IsValid(owner, versioned_owner)) {
        dlpack_managed_versioned *m = PyCapsule_GetPointer(owner, versioned_owner);
        if (m->deleter != NULL) {
            m->deleter(m);
        }
    } else {
        dlpack_managed *m = PyCapsule_GetPointer(owner, plain_owner);
        if (m->deleter != NULL) {
            m->deleter(m);
        }
    }
    PyErr_Restore(type, error, trace);
}

/* Return a new owner of the tensor in `capsule`, and mark the capsule as used, as the
 * protocol requires: otherwise another consumer of the same capsule could free the
 * memory. Returns NULL with an exception set, and the capsule unchanged. */
static PyObject *take_capsule(PyObject *capsule)
{
    PyObject *owner = NULL;
    MLSPY_BEGIN_LOCKED(capsule)
        const bool versioned = PyCapsule_IsValid(capsule, "dltensor_versioned") != 0;
        void *managed =
            PyCapsule_GetPointer(capsule, versioned ? "dltensor_versioned" : "dltensor");
        if (managed != NULL) {
            owner = PyCapsule_New(managed, versioned ? versioned_owner : plain_owner,
                                  owner_end);
        }
        if (owner != NULL) { /* cannot fail: it is a capsule, and the name is valid */
            (void)PyCapsule_SetName(capsule, versioned ? "used_dltensor_versioned"
                                                       : "used_dltensor");
        }
    MLSPY_END_LOCKED()
    return owner;
}

/* Check device, dtype, shape and address of a DLPack tensor, and fill in `out`. `label`
 * names it in errors: MLS_E_VALUE, MLS_E_DTYPE or MLS_E_SHAPE. */
static mls_code check_dlpack(const dlpack_tensor *from, const char *label,
                             mls_tensor *out, mls_status *st)
{
    size_t elements = 0;
    if (from->device_type != DLPACK_CPU && from->device_type != DLPACK_CUDA_HOST) {
        return mls_fail(st, MLS_E_VALUE, "%s is not in this machine's main memory",
                        label);
    }
    if (!dlpack_dtype_of(from->dtype, &out->dtype)) {
        return mls_fail(st, MLS_E_DTYPE,
                        "%s: DLPack type code %d with %d bits is not supported", label,
                        from->dtype.code, from->dtype.bits);
    }
    /* a NULL address, or one that wraps, is invalid */
    uintptr_t address;
    const bool wraps =
        __builtin_add_overflow((uintptr_t)from->data, from->byte_offset, &address);
    out->data = from->data == NULL || wraps ? NULL : (unsigned char *)address;
    if (!take_dlpack_shape(from, out)) {
        return mls_fail(st, MLS_E_SHAPE, "%s: DLPack gives an impossible shape", label);
    }
    /* an empty tensor may have no memory */
    if (out->data == NULL && mls_tensor_count(out, &elements) && elements > 0) {
        return mls_fail(st, MLS_E_VALUE, "%s: DLPack gives elements without memory",
                        label);
    }
    return MLS_OK;
}

/* Raise CompatibilityError if `array`, exported with the dtype `exported`, has a torch
 * dtype of less than 8 bits: torch exports its elements as uint8 or int8. Returns 0 for
 * any other array, or -1 with an exception set. */
static int refuse_few_bits(const mlspy_state *state, PyObject *array, mls_dtype exported,
                           const char *label)
{
    if (exported != MLS_U8 && exported != MLS_I8) {
        return 0;
    }
    PyObject *dtype;
    const int has_dtype = find_attribute(array, state->names[MLSPY_NAME_DTYPE], &dtype);
    if (has_dtype <= 0) {
        return has_dtype;
    }
    PyObject *text = PyObject_Str(dtype);
    Py_DECREF(dtype);
    const char *name = text == NULL ? NULL : PyUnicode_AsUTF8(text);
    const bool is_allowed =
        name != NULL && (strncmp(name, "torch.", 6) != 0 ||
                         strcmp(name + 6, "uint8") == 0 || strcmp(name + 6, "int8") == 0);
    if (name != NULL && !is_allowed) {
        mlspy_raise_text(state, MLS_E_DTYPE,
                         "%s is %s, for which mlstate's files have no name: store it as "
                         "integers, by tensor.view(torch.uint8)",
                         label, name);
    }
    Py_XDECREF(text);
    return is_allowed ? 0 : -1;
}

/* As mlspy_view_of, for an object with __dlpack__. The owner is a capsule that calls the
 * exporter's deleter. */
static int view_of_dlpack(const mlspy_state *state, PyObject *array, const char *label,
                          mlspy_view *out)
{
    mls_status st;
    bool readonly;
    mls_tensor t = {0};
    PyObject *owner = NULL;
    const int negated = is_negated(state, array);
    if (negated > 0) {
        PyErr_Format(PyExc_TypeError,
                     "%s is a view that is negated when read: store its resolve_neg()",
                     label);
    }
    PyObject *capsule = negated != 0 ? NULL : export_capsule(state, array);
    if (capsule == NULL && negated == 0) {
        prefix_error(label);
    }
    const dlpack_tensor *from =
        capsule == NULL ? NULL : capsule_tensor(capsule, &readonly);
    if (from != NULL && check_dlpack(from, label, &t, &st) != MLS_OK) {
        mlspy_raise(state, &st, NULL);
    } else if (from != NULL && refuse_few_bits(state, array, t.dtype, label) == 0) {
        owner = take_capsule(capsule);
    }
    Py_XDECREF(capsule); /* an unused capsule frees its tensor */
    if (owner == NULL) {
        return -1;
    }
    *out = (mlspy_view){.tensor = t, .readonly = readonly, .owner = owner};
    return 0;
}

/* ---- __array_interface__ ---- */

/* Return a new ndarray over the memory of `object`, which it keeps alive, or NULL:
 * without an exception if the object has no interface. NumPy's scalars are copied: they
 * have the interface too, but for ml_dtypes' types it describes plain bytes. */
static PyObject *array_over(PyObject *object)
{
    if (PyArray_IsScalar(object, Generic)) {
        return PyArray_FromScalar(object, NULL);
    }
    PyObject *array = PyArray_FromInterface(object);
    return array == Py_NotImplemented ? NULL : array; /* Py_NotImplemented is borrowed */
}

/* As mlspy_view_of, for an object with __array_interface__; any other object raises
 * TypeError. A view of a scalar's copy is read-only, because a write to the copy would be
 * lost. */
static int view_of_interface(const mlspy_state *state, PyObject *object,
                             const char *label, mlspy_view *out)
{
    PyObject *array = array_over(object);
    if (array == NULL) {
        /* all other ways failed: the object is not an array */
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError,
                         "%s must be a NumPy array or a torch tensor, got %.100s", label,
                         Py_TYPE(object)->tp_name);
        }
        return -1;
    }
    const int failed = view_of_ndarray(state, (PyArrayObject *)array, label, out);
    if (failed == 0 && PyArray_IsScalar(object, Generic)) {
        out->readonly = true;
    }
    Py_DECREF(array); /* the view has its own reference */
    return failed;
}

/* ---- views ---- */

/* Looks the name up in the dicts of the classes, because a failed lookup of an attribute
 * would raise for every tensor. */
bool mlspy_is_part(const mlspy_state *state, PyObject *object)
{
    PyObject *classes = Py_TYPE(object)->tp_mro;
    const Py_ssize_t count = classes == NULL ? 0 : PyTuple_GET_SIZE(classes);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyTypeObject *type = (PyTypeObject *)PyTuple_GET_ITEM(classes, i);
        PyObject *names =
            PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) ? type->tp_dict : NULL;
        /* cannot fail: the key is a str */
        if (names != NULL &&
            PyDict_GetItemWithError(names, state->names[MLSPY_NAME_PART]) != NULL) {
            return true;
        }
    }
    return false;
}

/* As mlspy_view_of, for a part of a tensor: view its array. */
static int view_of_part(const mlspy_state *state, PyObject *part, const char *label,
                        mlspy_view *out)
{
    PyObject *array = PyObject_GetAttrString(part, "array");
    int failed = -1;
    if (array != NULL && mlspy_is_part(state, array)) {
        PyErr_Format(PyExc_TypeError, "%s is a part of a part", label);
    } else if (array != NULL) {
        failed = mlspy_view_of(state, array, label, out);
    }
    Py_XDECREF(array);
    return failed;
}

int mlspy_has_attribute(PyObject *value, const char *name)
{
    PyObject *attribute = PyObject_GetAttrString(value, name);
    if (attribute == NULL && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Clear();
    Py_XDECREF(attribute);
    return attribute != NULL;
}

/* Subclasses of ndarray are treated as arrays, whatever else they offer. DLPack comes
 * before the interface, because it has every type of the core and states the device. */
int mlspy_view_of(const mlspy_state *state, PyObject *array, const char *label,
                  mlspy_view *out)
{
    out->owner = NULL;
    if (PyArray_Check(array)) {
        return view_of_ndarray(state, (PyArrayObject *)array, label, out);
    }
    if (mlspy_is_part(state, array)) {
        return view_of_part(state, array, label, out);
    }
    const int has_dlpack = mlspy_has_attribute(array, "__dlpack__");
    if (has_dlpack != 0) {
        return has_dlpack < 0 ? -1 : view_of_dlpack(state, array, label, out);
    }
    return view_of_interface(state, array, label, out);
}

/* Return the DLPack exchange functions of an object's exact type (never freed), or NULL,
 * possibly with an exception set. Subclasses inherit the attribute but may have more than
 * their memory, so they do not qualify. */
static const dlpack_exchange *exchange_of(const mlspy_state *state, PyObject *array)
{
    const PyTypeObject *type = Py_TYPE(array);
    if (!PyType_HasFeature(Py_TYPE(array), Py_TPFLAGS_HEAPTYPE) ||
        type->tp_dict == NULL) {
        return NULL;
    }
    PyObject *capsule =
        PyDict_GetItemWithError(type->tp_dict, state->names[MLSPY_NAME_EXCHANGE]);
    const dlpack_exchange *exchange = NULL;
    if (capsule != NULL && PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
        exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    }
    return exchange != NULL && exchange->major == 1 && exchange->tensor_of != NULL
               ? exchange
               : NULL;
}

/* Return whether a torch tensor is not part of a graph and not lazily negated. Returns
 * false, possibly with an exception set, if this cannot be determined. */
static bool is_detached_tensor(const mlspy_state *state, PyObject *array)
{
    PyObject *requires_grad =
        PyObject_GetAttr(array, state->names[MLSPY_NAME_REQUIRES_GRAD]);
    PyObject *is_neg =
        requires_grad == Py_False
            ? PyObject_CallMethodNoArgs(array, state->names[MLSPY_NAME_IS_NEG])
            : NULL;
    const bool is_detached = is_neg == Py_False;
    Py_XDECREF(requires_grad);
    Py_XDECREF(is_neg);
    return is_detached;
}

/* View a tensor through its type's exchange functions, which take a tenth of the time of
 * __dlpack__. The owner is the tensor itself. Returns false without an exception on any
 * failure: the caller uses the slow path, which raises it again. */
static bool view_by_exchange(const mlspy_state *state, PyObject *array, mlspy_view *out)
{
    const dlpack_exchange *exchange = exchange_of(state, array);
    dlpack_tensor from = {0};
    mls_status st;
    if (exchange == NULL || !is_detached_tensor(state, array) ||
        exchange->tensor_of(array, &from) != 0 ||
        check_dlpack(&from, "an array", &out->tensor, &st) != MLS_OK ||
        refuse_few_bits(state, array, out->tensor.dtype, "an array") < 0 ||
        out->tensor.dtype == MLS_C64) { /* may be lazily conjugated */
        PyErr_Clear();
        return false;
    }
    out->tensor.swapped = false;
    out->readonly = false;
    out->owner = Py_NewRef(array);
    return true;
}

bool mlspy_view_quickly(const mlspy_state *state, PyObject *array, bool writable,
                        mlspy_view *out)
{
    mls_dtype dtype;
    if (!PyArray_Check(array)) {
        if (!view_by_exchange(state, array, out)) {
            return false;
        }
    } else if (mlspy_is_masked(state, array) ||
               !mlspy_dtype_of_descr(PyArray_DESCR((PyArrayObject *)array), &dtype) ||
               (writable && !PyArray_ISWRITEABLE((PyArrayObject *)array))) {
        return false;
    } else {
        fill_view((PyArrayObject *)array, dtype, out);
    }
    if (writable && mls_tensor_overlaps_itself(&out->tensor)) {
        mlspy_view_release(out);
        return false;
    }
    return true;
}

/* The view of an array that must not be written to is released again. */
int mlspy_view_writable(const mlspy_state *state, PyObject *array, const char *label,
                        mlspy_view *out)
{
    if (mlspy_view_of(state, array, label, out) < 0) {
        return -1;
    }
    if (out->readonly) {
        mlspy_view_release(out);
        return MLSPY_REFUSE(PyExc_ValueError, "%s is read-only: pass a writable array",
                            label);
    }
    if (mls_tensor_overlaps_itself(&out->tensor)) {
        mlspy_view_release(out);
        return MLSPY_REFUSE(PyExc_ValueError,
                            "%s: its elements share memory with one another, as in a "
                            "broadcast view: pass a copy",
                            label);
    }
    return 0;
}

int mlspy_view_for(const mlspy_state *state, PyObject *array, const char *label,
                   bool writable, mlspy_view *out)
{
    if (mlspy_view_quickly(state, array, writable, out)) {
        return 0;
    }
    return writable ? mlspy_view_writable(state, array, label, out)
                    : mlspy_view_of(state, array, label, out);
}

PyArrayObject *mlspy_packed_array(PyObject *object, int type, int rank)
{
    PyArrayObject *array = (PyArrayObject *)object;
    return PyArray_Check(object) && PyArray_TYPE(array) == type &&
                   PyArray_NDIM(array) == rank && PyArray_ISCARRAY_RO(array)
               ? array
               : NULL;
}

/* Needs the GIL: the owner may be deallocated. */
void mlspy_view_release(mlspy_view *view)
{
    Py_CLEAR(view->owner);
}

void mlspy_views_release(mlspy_view *views, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        mlspy_view_release(&views[i]);
    }
}

size_t mlspy_bytes(const mls_tensor *tensor)
{
    size_t bytes = 0;
    (void)mls_tensor_bytes(tensor, &bytes);
    return bytes;
}
