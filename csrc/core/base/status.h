/* status: error codes of the core (MLS_E_...), the fields of an error, and the lengths of
 * their texts.
 *
 * Every fallible function returns an mls_code (MLS_OK is 0). On failure it fills the
 * caller's mls_status with the facts that a user needs to fix the call: the failure, its
 * offset, the expected and the actual value. Results are returned through out-parameters,
 * which a failing function leaves untouched. A status owns no memory: there is nothing to
 * free.
 */
#ifndef MLS_STATUS_H
#define MLS_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum mls_code {
    MLS_OK = 0,
    MLS_E_MEMORY,   /* an allocation failed */
    MLS_E_VALUE,    /* an argument is invalid */
    MLS_E_SHAPE,    /* ranks or dimensions do not match */
    MLS_E_DTYPE,    /* a dtype is unknown, or the conversion is not supported */
    MLS_E_CAPACITY, /* a position or length does not fit */
    MLS_E_OVERLAP,  /* source and destination share memory */
    MLS_E_SIZE,     /* a product or sum of sizes exceeds the address space */
    MLS_E_FORMAT,   /* a file does not follow its format */
    MLS_E_CHECKSUM, /* the bytes of a file changed since they were written */
    MLS_E_IO,       /* the operating system reported an error: see os_error */
    MLS_E_BUSY,     /* memory may not move now, because a view of it is alive */
    MLS_E_STOPPED,  /* the caller asked to stop */
    MLS_E_PEER,     /* another rank is gone, is late, or called another function */
    MLS_E_COUNT     /* number of codes; never returned */
} mls_code;

enum {
    MLS_TEXT_BYTES = 320, /* room for the message, with its NUL */
    MLS_NAME_BYTES = 160, /* room for a tensor's or state's name */
    MLS_FACT_BYTES = 96   /* room for `expected` and for `got` */
};

/* All strings are NUL-terminated and truncated at a UTF-8 character boundary. */
typedef struct mls_status {
    mls_code code;
    int os_error;    /* errno of MLS_E_IO, else 0 */
    bool has_offset; /* whether `offset` is set */
    uint64_t offset; /* byte offset of the failure in the file */
    char text[MLS_TEXT_BYTES];
    char name[MLS_NAME_BYTES];     /* tensor, state or key that failed, or "" */
    char expected[MLS_FACT_BYTES]; /* short phrase, or "" */
    char got[MLS_FACT_BYTES];      /* short phrase, or "" */
} mls_status;

#if defined(__GNUC__)
#    define MLS_PRINTF(text, first) __attribute__((__format__(__printf__, text, first)))
#else
#    define MLS_PRINTF(text, first)
#endif

/* Reset `st` to MLS_OK and empty strings. */
void mls_status_clear(mls_status *st);

/* Fill `st` with `code` and a printf-style text, clear all other fields, return `code`.
 * Use as `return mls_fail(st, MLS_E_SHAPE, "...")`. */
mls_code mls_fail(mls_status *st, mls_code code, const char *format, ...)
    MLS_PRINTF(3, 4);

/* mls_fail with MLS_E_IO. Stores the errno `os_error` and appends its strerror text. */
mls_code mls_fail_os(mls_status *st, int os_error, const char *format, ...)
    MLS_PRINTF(3, 4);

/* mls_fail with MLS_E_FORMAT. Stores the byte `offset` of the failure in the file. */
mls_code mls_fail_at(mls_status *st, uint64_t offset, const char *format, ...)
    MLS_PRINTF(3, 4);

/* Add details to a status that mls_fail filled, and return its code: the name of the
 * tensor, state or key (`length` bytes), the expected value, the actual one, or both.
 * Each is truncated to fit, and kept apart from the message. A value is a phrase, such as
 * "at least 4". */
mls_code mls_status_name(mls_status *st, const char *name, size_t length);
mls_code mls_status_expected(mls_status *st, const char *format, ...) MLS_PRINTF(2, 3);
mls_code mls_status_got(mls_status *st, const char *format, ...) MLS_PRINTF(2, 3);
mls_code mls_status_differ(mls_status *st, const char *expected, const char *got);

#endif
