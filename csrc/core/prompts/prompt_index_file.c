/* prompt_index_file: writes and loads the file `index`, so that opening need not read all
 * headers; when it cannot be used.
 *
 * After the head: put (8 bytes), clock, number of segments, number of entries, checksum
 * of all this and of what follows (4 each); 24 bytes for each segment; 44 for each entry.
 * The file is written and read row by row, so that it needs little other memory.
 */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    COUNTS = MLS_PROMPT_FILE_HEAD,
    TABLES = COUNTS + 24,
    SEGMENT_BYTES = 24,
    ENTRY_BYTES = 44,
    BUFFER = 64 << 10,
    MODE = 0666
};

static const char letters[] = "mlspridx";

/* Set `*out` to the length of an index file with these numbers of segments and entries.
 * Returns false if it exceeds the address space. */
static bool compute_length(size_t segments, size_t entries, size_t *out)
{
    size_t a, b;
    return mls_size_mul(segments, SEGMENT_BYTES, &a) &&
           mls_size_mul(entries, ENTRY_BYTES, &b) && mls_size_add(a, b, &a) &&
           mls_size_add(a, TABLES, out);
}

/* Return the checksum of the fields between the head of the file and the checksum. */
static uint32_t checksum_counts(const unsigned char *head, const mls_crc_kernels *crc)
{
    return crc->update(0, head + COUNTS, TABLES - COUNTS - 4);
}

/* ---- writing ---- */

/* Rows on their way to the file. */
typedef struct row_writer {
    mls_atomic_file file;
    const mls_crc_kernels *crc;
    unsigned char *buffer; /* BUFFER bytes */
    size_t used;
    uint64_t offset; /* of the buffer in the file */
    uint32_t sum;
    mls_code code; /* the first failure; later rows are dropped */
    mls_status *st;
} row_writer;

/* Write the rows in the buffer and add them to the checksum; nothing after a failure. */
static void flush_rows(row_writer *w)
{
    if (w->code == MLS_OK) {
        w->sum = w->crc->update(w->sum, w->buffer, w->used);
        w->code = mls_atomic_write(&w->file, w->buffer, w->used, w->offset, w->st);
    }
    w->offset += w->used;
    w->used = 0;
}

/* Return memory in the buffer for the next row, of `bytes` bytes; the caller fills it. A
 * full buffer is written first. A failure is kept in `w->code`. */
static unsigned char *add_row(row_writer *w, size_t bytes)
{
    if (BUFFER - w->used < bytes) {
        flush_rows(w);
    }
    w->used += bytes;
    return w->buffer + w->used - bytes;
}

/* Add a row of SEGMENT_BYTES for each segment, in the order of their numbers: number,
 * checksum of the last header, end, and offset of the last record. */
static void write_segments(const mls_prompt_log *log, row_writer *w)
{
    for (size_t i = 0; i < log->segment_count; i++) {
        const mls_prompt_segment *segment = &log->segments[i];
        unsigned char *out = add_row(w, SEGMENT_BYTES);
        mls_store_le32(out, segment->number);
        mls_store_le32(out + 4, segment->last_crc);
        mls_store_le64(out + 8, segment->bytes);
        mls_store_le64(out + 16, segment->last);
    }
}

/* Add a row of ENTRY_BYTES for each entry, removed ones too: the members of
 * mls_prompt_entry in their order. */
static void write_entries(const mls_prompt_index *index, row_writer *w)
{
    for (size_t i = 0; i < index->count; i++) {
        const mls_prompt_entry *entry = &index->entries[i];
        unsigned char *out = add_row(w, ENTRY_BYTES);
        memcpy(out, entry->key.bytes, MLS_PROMPT_KEY);
        mls_store_le32(out + 16, entry->segment);
        mls_store_le32(out + 20, entry->place);
        mls_store_le32(out + 24, entry->units);
        mls_store_le32(out + 28, entry->used);
        mls_store_le32(out + 32, entry->parent);
        mls_store_le32(out + 36, entry->end);
        mls_store_le32(out + 40, (uint32_t)(entry->kind | entry->flags << 8));
    }
}

/* Write the rows and then the fields before them, since these have the checksum of the
 * rows. Returns the first failure. */
static mls_code write_file(const mls_prompt_log *log, row_writer *w)
{
    unsigned char bytes[TABLES] = {0};
    mls_prompt_head head = {0};
    memcpy(head.id, log->id, sizeof head.id);
    mls_prompt_head_write(bytes, letters, &head, log->crc);
    mls_store_le64(bytes + COUNTS, log->put);
    mls_store_le32(bytes + COUNTS + 8, log->clock);
    mls_store_le32(bytes + COUNTS + 12, (uint32_t)log->segment_count);
    mls_store_le32(bytes + COUNTS + 16, (uint32_t)log->index.count);
    w->sum = checksum_counts(bytes, log->crc);
    w->offset = TABLES;
    write_segments(log, w);
    write_entries(&log->index, w);
    flush_rows(w);
    mls_store_le32(bytes + TABLES - 4, w->sum);
    return w->code == MLS_OK ? mls_atomic_write(&w->file, bytes, TABLES, 0, w->st)
                             : w->code;
}

/* Write a new index file and replace the old one by it. After a failure the old one is
 * unchanged, unless only the sync of the folder failed. MLS_E_IO, MLS_E_MEMORY. */
static mls_code replace_file(const mls_prompt_log *log, mls_status *st)
{
    row_writer w = {.crc = log->crc, .buffer = mls_alloc(BUFFER, 1), .st = st};
    mls_code code =
        w.buffer == NULL
            ? mls_fail(st, MLS_E_MEMORY, "no memory to write the index")
            : mls_atomic_begin_at(log->folder, MLS_PROMPT_INDEX, MODE, &w.file, st);
    if (code == MLS_OK) {
        code = write_file(log, &w);
        if (code == MLS_OK) {
            code = mls_atomic_commit(&w.file, st);
        } else {
            mls_atomic_abort(&w.file);
        }
    }
    mls_free(w.buffer);
    return code;
}

/* Replace the index file, without the entries that nothing uses. A file that
 * is not regular is left alone (MLS_E_FORMAT), so that the user notices it. */
mls_code mls_prompt_index_save(mls_prompt_log *log, mls_status *st)
{
    struct stat info;
    if (fstatat(log->folder, MLS_PROMPT_INDEX, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
        !S_ISREG(info.st_mode)) {
        return mls_fail(st, MLS_E_FORMAT, "`index` is not a regular file: delete it");
    }
    mls_code code = mls_prompt_index_pack(&log->index, st);
    if (code == MLS_OK) {
        code = replace_file(log, st);
    }
    if (code == MLS_OK) {
        size_t bytes = 0; /* cannot overflow: all of it takes more bytes in memory */
        (void)compute_length(log->segment_count, log->index.count, &bytes);
        log->unindexed = 0;
        log->index_bytes = bytes;
    }
    return code;
}

/* ---- reading ---- */

/* Rows that come from the file. */
typedef struct row_reader {
    int fd;
    const mls_crc_kernels *crc;
    const mls_progress *progress;
    unsigned char *buffer; /* BUFFER bytes */
    size_t at, filled;     /* the next row, and the end of the bytes */
    uint64_t offset;       /* of the next bytes of the file */
    uint64_t left;         /* of these */
    uint32_t sum;
} row_reader;

/* Return the next row of `bytes` bytes, or NULL if it cannot be read or the log's
 * progress stops the reading: then it stops the scan that follows, too. Valid until the
 * next call. If the buffer lacks a part of it, fill the buffer from the file and add the
 * new bytes to the checksum. */
static const unsigned char *next_row(row_reader *r, size_t bytes)
{
    if (r->filled - r->at < bytes) {
        const size_t rest = r->filled - r->at;
        const size_t step =
            r->left < BUFFER - rest ? (size_t)r->left : (size_t)BUFFER - rest;
        mls_status ignored;
        memmove(r->buffer, r->buffer + r->at, rest);
        if (rest + step < bytes || !mls_progress_report(r->progress, 0) ||
            mls_file_read_at(r->fd, r->buffer + rest, step, r->offset, &ignored) !=
                MLS_OK) {
            return NULL;
        }
        r->sum = r->crc->update(r->sum, r->buffer + rest, step);
        r->offset += step;
        r->left -= step;
        r->at = 0;
        r->filled = rest + step;
    }
    r->at += bytes;
    return r->buffer + r->at - bytes;
}

/* Return whether the newest segment still has the last record that the index file lists.
 * Only the newest segment changes: it may have been cut, and become long again. */
static bool newest_is_same(mls_prompt_log *log)
{
    mls_prompt_file *file = NULL;
    mls_status ignored;
    if (log->segment_count == 0) {
        return true;
    }
    mls_prompt_segment *newest = &log->segments[log->segment_count - 1];
    const bool is_same =
        mls_prompt_segment_hold(log, newest, &file, &ignored) == MLS_OK &&
        mls_prompt_last_is_same(newest, file->fd);
    mls_prompt_file_release(file);
    return is_same;
}

/* Read `count` rows of segments into the log. A segment that is gone was compacted after
 * the index was written, or deleted: its records were copied, or are lost. One that is
 * shorter makes the index useless. Returns false if the index file cannot be used; the
 * caller then clears the log. */
static bool load_segments(mls_prompt_log *log, row_reader *rows, size_t count)
{
    char name[MLS_PROMPT_NAME];
    struct stat info;
    mls_status ignored;
    uint32_t before = 0;
    for (size_t i = 0; i < count; i++) {
        const unsigned char *at = next_row(rows, SEGMENT_BYTES);
        if (at == NULL) {
            return false;
        }
        const mls_prompt_segment segment = {.number = mls_load_le32(at),
                                            .last_crc = mls_load_le32(at + 4),
                                            .bytes = mls_load_le64(at + 8),
                                            .last = mls_load_le64(at + 16)};
        if (segment.number <= before || segment.last > segment.bytes ||
            segment.bytes < MLS_PROMPT_FILE_HEAD ||
            segment.bytes % MLS_PROMPT_UNIT != 0) {
            return false;
        }
        before = segment.number;
        if (fstatat(log->folder, mls_prompt_segment_name(name, segment.number), &info,
                    AT_SYMLINK_NOFOLLOW) != 0) {
            if (errno != ENOENT) {
                return false;
            }
            continue;
        }
        if (!S_ISREG(info.st_mode) || (uint64_t)info.st_size < segment.bytes ||
            mls_prompt_segment_add(log, &segment, &ignored) != MLS_OK) {
            return false;
        }
    }
    return newest_is_same(log);
}

/* Convert a row of the index file to an entry; unknown flags are dropped. */
static mls_prompt_entry read_entry(const unsigned char *at)
{
    mls_prompt_entry entry = {
        .segment = mls_load_le32(at + 16),
        .place = mls_load_le32(at + 20),
        .units = mls_load_le32(at + 24),
        .used = mls_load_le32(at + 28),
        .parent = mls_load_le32(at + 32),
        .end = mls_load_le32(at + 36),
        .kind = at[40],
        .flags = at[41] & (MLS_PROMPT_REMOVED | MLS_PROMPT_PINNED | MLS_PROMPT_BRANCHES),
    };
    memcpy(entry.key.bytes, at, MLS_PROMPT_KEY);
    return entry;
}

/* Set the parent of each entry; one that is not valid becomes MLS_PROMPT_NONE. Parents
 * may come later in the file, so they are linked when all entries exist. */
static void link_parents(mls_prompt_index *index)
{
    for (size_t i = 0; i < index->count; i++) {
        const uint32_t parent = index->entries[i].parent;
        index->entries[i].parent = MLS_PROMPT_NONE;
        mls_prompt_index_link(index, (uint32_t)i, parent);
    }
}

/* Add the entry of `row` to the index as number `number`, and count its record's bytes in
 * its segment. An entry without a record (it was removed, or its segment is gone) is
 * added too, and then removed: parents are numbers of entries, which must not change.
 * `*recent` is the segment of the row before, or NULL, and becomes the one of this row.
 * Returns false if the record is not within its segment, or an earlier row has its
 * key. */
static bool load_entry(mls_prompt_log *log, const unsigned char *row, size_t number,
                       mls_prompt_segment **recent)
{
    const mls_prompt_entry stored = read_entry(row);
    const uint64_t bytes = mls_prompt_entry_bytes(&stored);
    if (*recent == NULL || (*recent)->number != stored.segment) {
        *recent = mls_prompt_segment_find(log, stored.segment);
    }
    const bool was_removed = (stored.flags & MLS_PROMPT_REMOVED) != 0;
    mls_prompt_segment *segment = was_removed ? NULL : *recent; /* NULL: no record */
    if (segment != NULL && mls_prompt_entry_offset(&stored) + bytes > segment->bytes) {
        return false;
    }
    mls_prompt_entry added = stored; /* as mls_prompt_index_add requires it */
    added.flags &= (uint8_t)~MLS_PROMPT_REMOVED;
    added.parent = MLS_PROMPT_NONE;
    if (mls_prompt_index_add(&log->index, &added) != number) {
        return false;
    }
    log->index.entries[number].parent = stored.parent; /* link_parents checks it */
    if (segment == NULL) {
        mls_prompt_index_remove(&log->index, (uint32_t)number);
    } else {
        segment->live += bytes;
    }
    return true;
}

/* Read `count` rows of entries into the index. Returns false if the index file cannot be
 * used; the caller then clears the log. */
static bool load_entries(mls_prompt_log *log, row_reader *rows, size_t count)
{
    mls_status ignored;
    mls_prompt_segment *recent = NULL;
    if (mls_prompt_index_reserve(&log->index, count, &ignored) != MLS_OK) {
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        const unsigned char *row = next_row(rows, ENTRY_BYTES);
        if (row == NULL || !load_entry(log, row, i, &recent)) {
            return false;
        }
    }
    link_parents(&log->index);
    return true;
}

/* Read an index file of `length` bytes into the log. The checksum is compared at the end:
 * rows that fit the segments harm nothing. Returns false if the file cannot be used; the
 * log is then filled in part, and the caller clears it. */
static bool load_rows(mls_prompt_log *log, row_reader *rows, uint64_t length)
{
    unsigned char bytes[TABLES];
    mls_prompt_head head;
    mls_status ignored;
    size_t expected;
    if (length < TABLES ||
        mls_file_read_at(rows->fd, bytes, TABLES, 0, &ignored) != MLS_OK ||
        mls_prompt_head_parse(bytes, letters, log->crc, &head, &ignored) != MLS_OK ||
        memcmp(head.id, log->id, sizeof head.id) != 0) {
        return false;
    }
    const size_t segments = mls_load_le32(bytes + COUNTS + 12);
    const size_t entries = mls_load_le32(bytes + COUNTS + 16);
    rows->sum = checksum_counts(bytes, log->crc);
    rows->offset = TABLES;
    rows->left = length - TABLES;
    log->put = mls_load_le64(bytes + COUNTS);
    log->clock = mls_load_le32(bytes + COUNTS + 8);
    return compute_length(segments, entries, &expected) && expected == length &&
           load_segments(log, rows, segments) && load_entries(log, rows, entries) &&
           rows->sum == mls_load_le32(bytes + TABLES - 4);
}

/* Read the index file into an empty log; false: it cannot be used. A file that cannot be
 * used costs only time: the segments have all records. */
bool mls_prompt_index_load(mls_prompt_log *log)
{
    row_reader rows = {.crc = log->crc, .progress = log->progress};
    uint64_t length = 0;
    mls_status ignored;
    if (mls_file_open_at(log->folder, MLS_PROMPT_INDEX, false /* no links */, &rows.fd,
                         &length, &ignored) != MLS_OK) {
        return false;
    }
    rows.buffer = mls_alloc(BUFFER, 1);
    const bool is_loaded = rows.buffer != NULL && load_rows(log, &rows, length);
    if (is_loaded) {
        log->index_bytes = length;
        log->highest =
            log->segment_count > 0 ? log->segments[log->segment_count - 1].number : 0;
    } else {
        mls_prompt_log_clear(log);
    }
    (void)close(rows.fd);
    mls_free(rows.buffer);
    return is_loaded;
}
