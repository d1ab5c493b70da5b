/* mlpackage: the states that a Core ML model declares, read from its package.
 *
 * A package is a folder: Manifest.json names the specification, a protobuf file under
 * Data/.  A bare specification file (.mlmodel) is read too.  Only the model's description
 * is fetched, with a few small reads: the program, which makes up nearly all of the file,
 * is stepped over, and the weights lie in another file that is never opened.
 *
 * Packages are treated as hostile: lengths, counts and shapes are checked before they are
 * used, no path leaves the package by way of its manifest, and only regular files are
 * read.  Links are followed, since download caches build packages out of them.
 */
#ifndef MLS_MLPACKAGE_H
#define MLS_MLPACKAGE_H

#include "array/dtype.h"
#include "base/status.h"
#include "base/string_view.h"

#include <stddef.h>
#include <stdint.h>

/* Far above any real model, and low enough that a hostile one costs little. */
enum {
    MLS_ML_MAX_RANK = 16,             /* dimensions of a state */
    MLS_ML_MAX_FUNCTIONS = 1024,      /* functions of a model */
    MLS_ML_MAX_STATES = 2048,         /* states of a function */
    MLS_ML_MAX_ALL_STATES = 16384,    /* states of a model */
    MLS_ML_MAX_FIELDS = 4096,         /* fields at the top of a specification */
    MLS_ML_MAX_NAME_BYTES = 1024,     /* a name of a function or state */
    MLS_ML_MAX_DESCRIPTION = 64 << 20 /* bytes of a model's description */
};

/* Names are valid UTF-8 without NUL characters, not terminated, never empty. */
typedef struct mls_ml_state {
    mls_text name; /* unique within its function */
    mls_dtype dtype;
    int rank;                      /* at least 1 */
    size_t shape[MLS_ML_MAX_RANK]; /* no dimension is 0; the bytes fit a size_t */
} mls_ml_state;

typedef struct mls_ml_function {
    mls_text name;        /* unique within the model */
    size_t first, states; /* its part of mls_mlpackage.states */
} mls_ml_function;

/* What a model declares.  The names share the package's memory. */
typedef struct mls_mlpackage {
    mls_ml_function *functions; /* at least one */
    size_t function_count;
    mls_ml_state *states; /* of all functions, in file order */
    size_t state_count;
    size_t default_function; /* index, or function_count where the model names none */
    unsigned char *text;     /* the model's description, which holds the names */
} mls_mlpackage;

/* Read the states from `length` bytes of a specification, which need not outlive the
 * call.  A model that declares no functions has one, called "main", as Core ML has it.
 * Gives: release with mls_mlpackage_fini.  On failure `*out` is untouched.
 * MLS_E_FORMAT with the byte offset: not a specification, or one that lies: cut off,
 * a length beyond its bounds, a duplicate or missing name, an unknown data type, a
 * dimension that is not positive, too many of anything.  MLS_E_MEMORY. */
mls_code mls_mlpackage_parse(const unsigned char *spec, size_t length, mls_mlpackage *out,
                             mls_status *st);

void mls_mlpackage_fini(mls_mlpackage *package); /* accepts a zeroed one; zeroes it */

#if !defined(_WIN32)

/* As mls_mlpackage_parse, from a .mlpackage folder or a .mlmodel file.  Errors start with
 * the name of the file inside the package.
 * MLS_E_IO: a file that cannot be opened or read (os_error says why).
 * MLS_E_FORMAT besides: a folder without a manifest, a manifest that is not understood or
 * points out of the package, a file that is not regular or changes while it is read. */
mls_code mls_mlpackage_read(const char *path, mls_mlpackage *out, mls_status *st);

#endif
#endif
