/* prompt_segments: the files of records: their names, greatest length, head, open
 * descriptors, creation and deletion. */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "base/search.h"
#include "base/size.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    OPEN_FILES = 64, /* segments that the log itself keeps open */
    FILE_MODE = 0666,
    MOST_SEGMENTS = 100000000, /* numbers with eight digits */
    NAME_BYTES = 18            /* "segment-" and at most ten digits */
};

static const char letters[] = "mlsprseg";

const char *mls_prompt_segment_name(char *name, uint32_t number)
{
    snprintf(name, MLS_PROMPT_NAME, MLS_PROMPT_SEGMENT, (unsigned)number);
    return name;
}

/* A sixteenth of the log, within 64 KiB to 256 MiB: a compaction copies at most one
 * segment. */
uint64_t mls_prompt_segment_limit(uint64_t max_bytes)
{
    const uint64_t least = 64 << 10, most = 256 << 20, share = max_bytes / 16;
    return share < least ? least : share > most ? most : share;
}

/* Return the segment of a number, or NULL. Binary search: the list is sorted by
 * number. */
mls_prompt_segment *mls_prompt_segment_find(const mls_prompt_log *log, uint32_t number)
{
    size_t at;
    MLS_FIND_FIRST(at, log->segment_count, log->segments[at].number >= number);
    const bool exists = at < log->segment_count && log->segments[at].number == number;
    return exists ? &log->segments[at] : NULL;
}

/* ---- the folder ---- */

/* Set `*number` to the number in the name of a segment. Returns false for any other name;
 * each number has one spelling. */
static bool parse_name(const char *name, uint32_t *number)
{
    char spelling[MLS_PROMPT_NAME];
    if (strncmp(name, "segment-", 8) != 0 || strlen(name) > NAME_BYTES) {
        return false;
    }
    *number = (uint32_t)strtoul(name + 8, NULL, 10);
    return *number > 0 && *number < MLS_PROMPT_NONE &&
           strcmp(name, mls_prompt_segment_name(spelling, *number)) == 0;
}

static int compare_numbers(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

mls_code mls_prompt_require_regular(const mls_prompt_log *log, const char *name,
                                    mls_status *st)
{
    struct stat info;
    if (fstatat(log->folder, name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
        return errno == ENOENT ? MLS_OK
                               : mls_fail_os(st, errno, "cannot examine %s", name);
    }
    return S_ISREG(info.st_mode)
               ? MLS_OK
               : mls_fail(st, MLS_E_FORMAT, "%s is not a regular file: delete it", name);
}

/* Delete the file `name` if it is a temporary that a killed process left while it
 * replaced a file. */
static void remove_temporary(const mls_prompt_log *log, const char *name)
{
    if (mls_atomic_is_temporary(name)) {
        (void)unlinkat(log->folder, name, 0);
    }
}

/* As mls_prompt_segments_list, from `open_folder`, the log's folder opened for reading
 * names: sets `*out` to the `*count` numbers. */
static mls_code read_names(const mls_prompt_log *log, bool cleans, DIR *open_folder,
                           uint32_t **out, size_t *count, mls_status *st)
{
    uint32_t *numbers = NULL, number;
    size_t listed = 0, room = 0;
    errno = 0;
    for (struct dirent *entry; (entry = readdir(open_folder)) != NULL; errno = 0) {
        if (!parse_name(entry->d_name, &number)) {
            if (cleans) {
                remove_temporary(log, entry->d_name);
            }
            continue;
        }
        uint32_t *grown = mls_grow(numbers, listed, &room, sizeof *numbers);
        const mls_code code =
            grown == NULL ? mls_fail(st, MLS_E_MEMORY, "no memory to list the segments")
                          : mls_prompt_require_regular(log, entry->d_name, st);
        if (code != MLS_OK) {
            mls_free(grown == NULL ? numbers : grown);
            return code;
        }
        numbers = grown;
        numbers[listed++] = number;
    }
    if (errno != 0) {
        const int reason = errno;
        mls_free(numbers);
        return mls_fail_os(st, reason, "cannot list the folder");
    }
    if (listed > 0) {
        qsort(numbers, listed, sizeof *numbers, compare_numbers);
    }
    *out = numbers;
    *count = listed;
    return MLS_OK;
}

/* The folder is opened again, because a duplicate would share its position. */
DIR *mls_prompt_folder_list(const mls_prompt_log *log, mls_status *st)
{
    const int fd = openat(log->folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *open_folder = fd < 0 ? NULL : fdopendir(fd);
    if (open_folder == NULL) {
        mls_fail_os(st, errno, "cannot list the folder");
        if (fd >= 0) {
            (void)close(fd);
        }
    }
    return open_folder;
}

/* List the numbers of the segments in the folder. */
mls_code mls_prompt_segments_list(const mls_prompt_log *log, bool cleans, uint32_t **out,
                                  size_t *count, mls_status *st)
{
    DIR *open_folder = mls_prompt_folder_list(log, st);
    if (open_folder == NULL) {
        return st->code;
    }
    const mls_code code = read_names(log, cleans, open_folder, out, count, st);
    (void)closedir(open_folder);
    return code;
}

/* ---- open files ---- */

void mls_prompt_file_hold(mls_prompt_file *file)
{
    atomic_fetch_add(&file->holders, 1);
}

void mls_prompt_file_release(mls_prompt_file *file)
{
    if (file != NULL && atomic_fetch_sub(&file->holders, 1) == 1) {
        (void)close(file->fd);
        mls_free(file);
    }
}

/* Release the log's hold of a segment's file; matches may still hold it. */
static void close_segment(mls_prompt_log *log, mls_prompt_segment *segment)
{
    if (segment->file != NULL) {
        mls_prompt_file_release(segment->file);
        segment->file = NULL;
        log->open_files--;
    }
}

/* Close the log's own descriptors of all segments but the newest. */
static void close_older(mls_prompt_log *log)
{
    for (size_t i = 0; i + 1 < log->segment_count; i++) {
        close_segment(log, &log->segments[i]);
    }
}

/* Fail with MLS_E_FORMAT if the head of the file `fd` has another number than `number`,
 * or the id of another store: it is a copy. A damaged head is accepted: each record has
 * checksums, and a key that only this store can make. MLS_E_IO. */
static mls_code check_head(const mls_prompt_log *log, int fd, uint32_t number,
                           mls_status *st)
{
    unsigned char bytes[MLS_PROMPT_FILE_HEAD];
    mls_prompt_head head;
    mls_code code = mls_file_read_at(fd, bytes, sizeof bytes, 0, st);
    if (code == MLS_OK) {
        code = mls_prompt_head_parse(bytes, letters, log->crc, &head, st);
    }
    if (code == MLS_OK &&
        (head.number != number || memcmp(head.id, log->id, sizeof head.id) != 0)) {
        return mls_fail(st, MLS_E_FORMAT, "the segment belongs to another place");
    }
    return code == MLS_E_FORMAT ? MLS_OK : code;
}

bool mls_prompt_segment_has_head(const mls_prompt_log *log, uint32_t number, int fd)
{
    unsigned char bytes[MLS_PROMPT_FILE_HEAD], expected[MLS_PROMPT_FILE_HEAD];
    mls_prompt_head head = {.number = number};
    mls_status ignored;
    memcpy(head.id, log->id, sizeof head.id);
    mls_prompt_head_write(expected, letters, &head, log->crc);
    return mls_file_read_at(fd, bytes, sizeof bytes, 0, &ignored) == MLS_OK &&
           memcmp(bytes, expected, sizeof bytes) == 0;
}

mls_code mls_prompt_segment_id(const mls_prompt_log *log, uint32_t number,
                               unsigned char *id, mls_status *st)
{
    char name[MLS_PROMPT_NAME];
    unsigned char bytes[MLS_PROMPT_FILE_HEAD];
    mls_prompt_head head;
    uint64_t length;
    int fd = -1;
    mls_code code = mls_file_open_at(log->folder, mls_prompt_segment_name(name, number),
                                     false /* no links */, &fd, &length, st);
    if (code != MLS_OK) {
        return code;
    }
    code = mls_file_read_at(fd, bytes, sizeof bytes, 0, st);
    (void)close(fd);
    code = code == MLS_OK ? mls_prompt_head_parse(bytes, letters, log->crc, &head, st)
                          : code;
    if (code == MLS_OK) {
        memcpy(id, head.id, sizeof head.id);
    }
    return code;
}

/* Open segment `number` for reading, and set `*out` to its descriptor. MLS_E_IO;
 * MLS_E_FORMAT: not a segment of this log. */
static mls_code open_file(const mls_prompt_log *log, uint32_t number, int *out,
                          mls_status *st)
{
    char name[MLS_PROMPT_NAME];
    uint64_t length;
    int fd = -1;
    mls_code code = mls_file_open_at(log->folder, mls_prompt_segment_name(name, number),
                                     false /* no links */, &fd, &length, st);
    if (code == MLS_E_IO && st->os_error == EISDIR) {
        return mls_fail(st, MLS_E_FORMAT, "not a regular file but a folder");
    }
    if (code != MLS_OK) {
        return code;
    }
    code = check_head(log, fd, number, st);
    if (code != MLS_OK) {
        (void)close(fd);
        return code;
    }
    *out = fd;
    return MLS_OK;
}

/* Open a segment unless it is open, and hold it for the caller. The log keeps at most
 * OPEN_FILES segments open for itself. */
mls_code mls_prompt_segment_hold(mls_prompt_log *log, mls_prompt_segment *segment,
                                 mls_prompt_file **out, mls_status *st)
{
    if (segment->file == NULL) {
        if (log->open_files >= OPEN_FILES) {
            close_older(log);
        }
        mls_prompt_file *file = mls_alloc(1, sizeof *file);
        if (file == NULL) {
            return mls_fail(st, MLS_E_MEMORY, "no memory to open a segment");
        }
        const mls_code code = open_file(log, segment->number, &file->fd, st);
        if (code != MLS_OK) {
            mls_free(file);
            return code;
        }
        atomic_init(&file->holders, 1);
        segment->file = file;
        log->open_files++;
    }
    mls_prompt_file_hold(segment->file);
    *out = segment->file;
    return MLS_OK;
}

/* Delete a segment that is not in the list. open_file accepts only a segment of this log,
 * or one with a damaged head. */
void mls_prompt_segment_remove_stray(const mls_prompt_log *log, uint32_t number)
{
    char name[MLS_PROMPT_NAME];
    int fd = -1;
    mls_status ignored;
    if (open_file(log, number, &fd, &ignored) == MLS_OK) {
        (void)close(fd);
        (void)unlinkat(log->folder, mls_prompt_segment_name(name, number), 0);
    }
}

/* ---- the list ---- */

/* Add a segment to the end of the list. */
mls_code mls_prompt_segment_add(mls_prompt_log *log, const mls_prompt_segment *segment,
                                mls_status *st)
{
    mls_prompt_segment *segments =
        mls_grow(log->segments, log->segment_count, &log->segment_room, sizeof *segments);
    if (segments == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the list of segments");
    }
    log->segments = segments;
    segments[log->segment_count++] = *segment;
    return MLS_OK;
}

/* Remove a segment from the list. Does nothing if the list has no such segment. */
void mls_prompt_segment_forget(mls_prompt_log *log, uint32_t number)
{
    mls_prompt_segment *segment = mls_prompt_segment_find(log, number);
    if (segment != NULL) {
        close_segment(log, segment);
        const size_t after = (size_t)(log->segments + log->segment_count - segment - 1);
        memmove(segment, segment + 1, after * sizeof *segment);
        log->segment_count--;
    }
}

/* Forget all segments and entries. The memory of the list stays for the next load. */
void mls_prompt_log_clear(mls_prompt_log *log)
{
    for (size_t i = 0; i < log->segment_count; i++) {
        close_segment(log, &log->segments[i]);
    }
    log->segment_count = 0;
    log->highest = 0;
    log->put = 0;
    log->clock = 0;
    log->unindexed = 0;
    log->used_applied = 0;
    log->tail_segment = 0;
    mls_prompt_index_fini(&log->index);
}

/* ---- a new segment ---- */

/* Write the head of the new segment `fd`, and make file and name durable. MLS_E_IO. */
static mls_code prepare_segment(const mls_prompt_log *log, int fd, uint32_t number,
                                mls_status *st)
{
    unsigned char bytes[MLS_PROMPT_FILE_HEAD];
    mls_prompt_head head = {.number = number};
    memcpy(head.id, log->id, sizeof head.id);
    mls_prompt_head_write(bytes, letters, &head, log->crc);
    mls_code code = mls_file_write_at(fd, bytes, sizeof bytes, 0, st);
    int reason = code == MLS_OK ? mls_file_sync(fd) : 0;
    if (code == MLS_OK && reason == 0) {
        reason = mls_folder_sync(log->folder);
    }
    return code == MLS_OK && reason != 0
               ? mls_fail_os(st, reason, "cannot sync a new segment to disk")
               : code;
}

/* Store the number of the newest segment in `store`, for readers; a failure only costs
 * them time. */
static void write_hint(const mls_prompt_log *log)
{
    unsigned char bytes[4];
    mls_status ignored;
    mls_store_le32(bytes, log->highest);
    (void)mls_file_write_at(log->store, bytes, sizeof bytes, MLS_PROMPT_HINT, &ignored);
}

/* Create the next segment, durably, and store its number as the log's highest and as the
 * hint for readers. A file that is not complete is deleted again. */
mls_code mls_prompt_segment_create(mls_prompt_log *log, mls_status *st)
{
    char name[MLS_PROMPT_NAME];
    uint32_t number = log->highest;
    int fd;
    do { /* a file with a damaged head may have the next number */
        if (++number >= MOST_SEGMENTS) {
            return mls_fail(st, MLS_E_SIZE, "the store has no segment numbers left");
        }
        mls_prompt_segment_name(name, number);
        fd = openat(log->folder, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, FILE_MODE);
    } while (fd < 0 && errno == EEXIST);
    if (fd < 0) {
        return mls_fail_os(st, errno, "cannot create %s", name);
    }
    const mls_prompt_segment segment = {.number = number, .bytes = MLS_PROMPT_FILE_HEAD};
    mls_code code = prepare_segment(log, fd, number, st);
    if (code == MLS_OK) {
        code = mls_prompt_segment_add(log, &segment, st);
    }
    (void)close(fd);
    if (code != MLS_OK) {
        (void)unlinkat(log->folder, name, 0);
        return code;
    }
    log->highest = number;
    write_hint(log);
    return MLS_OK;
}
