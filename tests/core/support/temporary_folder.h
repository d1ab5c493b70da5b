/* temporary_folder: an empty folder for each test of a file, deleted after it. */
#ifndef MLS_TEMPORARY_FOLDER_H
#define MLS_TEMPORARY_FOLDER_H

#include "support/runner.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>

enum { PATH_ROOM = 256 };

static char folder[PATH_ROOM / 2];
static char file_path[PATH_ROOM]; /* of a file in it, which does not exist yet */

static inline int remove_entry(const char *path, const struct stat *info, int type,
                               struct FTW *place)
{
    (void)info, (void)type, (void)place;
    return remove(path);
}

BEFORE_EACH
{
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/mlstate-test-XXXXXX", base ? base : "/tmp");
    REQUIRE(mkdtemp(folder) != NULL);
    snprintf(file_path, sizeof file_path, "%s/file", folder);
}

AFTER_EACH
{
    CHECK(nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS) == 0);
}

/* The path of a name in the folder, valid until the next call. */
static inline const char *path_of(const char *name)
{
    static char path[2 * PATH_ROOM];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static inline void write_file(const char *path, const void *data, size_t bytes)
{
    FILE *file = fopen(path, "wb");
    REQUIRE(file != NULL);
    CHECK(fwrite(data, 1, bytes, file) == bytes);
    fclose(file);
}

static inline void write_text(const char *path, const char *text)
{
    write_file(path, text, strlen(text));
}

#endif
