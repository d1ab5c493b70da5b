/* text: a string view of a C string. */
#ifndef MLS_TEST_TEXT_H
#define MLS_TEST_TEXT_H

#include "base/string_view.h"

#include <string.h>

static inline mls_str text(const char *chars)
{
    return (mls_str){.data = chars, .length = strlen(chars)};
}

#endif
