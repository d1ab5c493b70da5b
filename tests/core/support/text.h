/* text: string views of C strings and of literals. */
#ifndef MLS_TEST_TEXT_H
#define MLS_TEST_TEXT_H

#include "base/string_view.h"

#include <string.h>

/* A literal with all its bytes, NUL characters included. */
#define TEXT(literal) ((mls_str){.data = "" literal, .length = sizeof(literal) - 1})

static inline mls_str text(const char *chars)
{
    return (mls_str){.data = chars, .length = strlen(chars)};
}

#endif
