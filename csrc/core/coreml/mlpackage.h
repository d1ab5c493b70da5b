/* mlpackage: the states that a Core ML model declares, read from its package.
 *
 * A package is a folder: Manifest.json names the specification, a protobuf file under
 * Data/. A bare specification file (.mlmodel) can be read too. Only the model's
 * description is fetched, with a few small reads. The program, which makes up nearly all
 * of the file, is skipped, and the weights are in another file that is never opened.
 *
 * Packages are untrusted: lengths, counts and shapes are checked before use, a manifest's
 * path cannot leave the package, and only regular files are read. Links are followed,
 * since download caches build packages from links.
 */
#ifndef MLS_MLPACKAGE_H
#define MLS_MLPACKAGE_H

#include "array/dtype.h"
#include "base/status.h"
#include "base/string_view.h"

#include <stddef.h>
#include <stdint.h>

/* Limits far above real models, and low enough to bound the cost of hostile ones. */
enum {
    MLS_ML_MAX_RANK = 16,             /* dimensions of a state */
    MLS_ML_MAX_FUNCTIONS = 1024,      /* functions of a model */
    MLS_ML_MAX_STATES = 2048,         /* states of a function */
    MLS_ML_MAX_ALL_STATES = 16384,    /* states of a model */
    MLS_ML_MAX_FIELDS = 4096,         /* top-level fields of a specification */
    MLS_ML_MAX_NAME_BYTES = 1024,     /* bytes of a name of a function or state */
    MLS_ML_MAX_DESCRIPTION = 64 << 20 /* bytes of a model's description */
};

/* Names are valid UTF-8 without NUL characters, not NUL-terminated, never empty. */
typedef struct mls_ml_state {
    mls_str name; /* unique within its function */
    mls_dtype dtype;
    int rank;                      /* at least 1 */
    size_t shape[MLS_ML_MAX_RANK]; /* no dimension is 0; the bytes fit a size_t */
} mls_ml_state;

typedef struct mls_ml_function {
    mls_str name;         /* unique within the model */
    size_t first, states; /* its range in mls_mlpackage.states */
} mls_ml_function;

/* The declarations of a model. The names are owned by the package. */
typedef struct mls_mlpackage {
    mls_ml_function *functions; /* at least one */
    size_t function_count;
    mls_ml_state *states; /* of all functions, in file order */
    size_t state_count;
    size_t default_function; /* index, or function_count if the model has no default */
    unsigned char *text;     /* the model's description, which contains the names */
} mls_mlpackage;

/* Read the states from `length` bytes of a specification, which need not outlive the
 * call. A model without functions gets one named "main", as in Core ML. The caller
 * releases `*out` with mls_mlpackage_fini. `*out` is untouched on failure.
 * MLS_E_FORMAT with the byte offset: not a specification, or an invalid one: truncated, a
 * length out of bounds, a duplicate or missing name, an unknown data type, a dimension
 * that is not positive, a limit exceeded. MLS_E_MEMORY. */
mls_code mls_mlpackage_parse(const unsigned char *spec, size_t length, mls_mlpackage *out,
                             mls_status *st);

void mls_mlpackage_fini(mls_mlpackage *package); /* accepts a zeroed struct; zeroes it */

/* As mls_mlpackage_parse, for a .mlpackage folder or a .mlmodel file. Error texts start
 * with the name of the file inside the package.
 * MLS_E_IO: a file cannot be opened or read (os_error gives the reason).
 * MLS_E_FORMAT also for: a folder without a manifest, a manifest that is invalid or
 * refers outside the package, a file that is not regular or changes during the read. */
mls_code mls_mlpackage_read(const char *path, mls_mlpackage *out, mls_status *st);

#endif
