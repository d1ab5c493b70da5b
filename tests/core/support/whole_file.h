/* whole_file: read the whole content of a file. */
#ifndef MLS_WHOLE_FILE_H
#define MLS_WHOLE_FILE_H

#include "base/memory.h"

#include <stdio.h>

/* Return the content, released with mls_free, or NULL if the file cannot be read. */
static inline unsigned char *read_file(const char *path, size_t *length)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        return NULL;
    }
    *length = (size_t)ftell(file);
    rewind(file);
    unsigned char *data = mls_alloc(*length, 1);
    if (data != NULL && fread(data, 1, *length, file) != *length) {
        mls_free(data);
        data = NULL;
    }
    fclose(file);
    return data;
}

#endif
