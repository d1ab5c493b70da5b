/* prompt_reclaim: which records a full store evicts (least recently used); compaction;
 * pins, unpins, deletions; the file `used`.
 *
 * A record is live while the index has an entry for it. A mark is a note, which is
 * appended to a segment like a record.
 *
 * An eviction only removes entries; the bytes are free when the segment is deleted. A
 * segment that is more than half dead is compacted: its live records are appended to
 * the newest segment, and it is deleted. Less suffices for a user who prunes, and for a
 * put that finds no room otherwise. An evicted record may come back when the log is
 * opened after a crash, which is harmless: its bytes are still there.
 *
 * How recent a use is: the log has a clock that counts puts and matches. The index file
 * stores the last use of each record. Matches append the key of the last record of their
 * chain to the file `used`, without a lock and without a sync, and an eviction reads it.
 * So uses can be lost: after a crash, without permission to write, or when the file is
 * long.
 */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    MODE = 0666,      /* of a new file `used` */
    UNINDEXED = 1024, /* records that the index file may lack, at least */
    CLOSED = -2,      /* as log->used: the file cannot be opened */
    MOSTLY = 2,       /* divisors of is_dead: a segment that pays for its compaction, */
    PARTLY = 8,       /* and one that the user wants to be compacted */
    ANY = 1 << 30     /* and one with any dead record */
};

/* ---- recency ---- */

/* Open the file `used` with the access that `flags` allow (such as O_RDWR). Returns -1 if
 * that fails or it is not a regular file. */
static int open_used(const mls_prompt_log *log, int flags)
{
    struct stat info;
    const int fd = openat(log->folder, MLS_PROMPT_USED,
                          flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, MODE);
    if (fd >= 0 && (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))) {
        (void)close(fd);
        return -1;
    }
    return fd;
}

/* Append the key of a used record to the file `used`. A row, the key and its checksum, is
 * short, so that the system appends it as a whole. The file is opened once; CLOSED means
 * that this failed. */
void mls_prompt_note_use(mls_prompt_log *log, const mls_prompt_key *key)
{
    unsigned char row[MLS_PROMPT_USED_ROW];
    struct stat info;
    if (log->used == -1) {
        const int fd = open_used(log, O_WRONLY | O_APPEND | O_CREAT);
        log->used = fd < 0 ? CLOSED : fd;
    }
    if (log->used < 0 || fstat(log->used, &info) != 0 ||
        info.st_size >= MLS_PROMPT_USED_MOST) {
        return;
    }
    memcpy(row, key->bytes, MLS_PROMPT_KEY);
    mls_store_le32(row + MLS_PROMPT_KEY, log->crc->update(0, row, MLS_PROMPT_KEY));
    (void)!write(log->used, row, sizeof row);
}

/* Return the length of the file `used`, 0 without one. */
static uint64_t used_bytes(const mls_prompt_log *log)
{
    struct stat info;
    return fstatat(log->folder, MLS_PROMPT_USED, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
                   S_ISREG(info.st_mode)
               ? (uint64_t)info.st_size
               : 0;
}

/* Set the last use of the record that a row of `used` names to a new time, if the row is
 * intact. */
static void apply_row(mls_prompt_log *log, const unsigned char *row)
{
    mls_prompt_key key;
    memcpy(key.bytes, row, MLS_PROMPT_KEY);
    const uint32_t number = mls_prompt_index_find(&log->index, &key);
    if (number != MLS_PROMPT_NONE &&
        log->crc->update(0, row, MLS_PROMPT_KEY) == mls_load_le32(row + MLS_PROMPT_KEY)) {
        log->clock += log->clock < UINT32_MAX;
        mls_prompt_index_touch(&log->index, number, log->clock);
    }
}

/* Apply the rows of the file `used`, open as `fd`, that this log has not applied. Another
 * process may have emptied the file. Failures lose uses only. */
static void apply_rows(mls_prompt_log *log, int fd)
{
    unsigned char *rows = mls_alloc(MLS_PROMPT_USED_MOST, 1);
    const ssize_t bytes = rows == NULL ? 0 : pread(fd, rows, MLS_PROMPT_USED_MOST, 0);
    log->used_applied = log->used_applied > bytes ? 0 : log->used_applied;
    while (log->used_applied + MLS_PROMPT_USED_ROW <= bytes) {
        apply_row(log, rows + log->used_applied);
        log->used_applied += MLS_PROMPT_USED_ROW;
    }
    mls_free(rows);
}

void mls_prompt_apply_uses(mls_prompt_log *log)
{
    const int fd = open_used(log, O_RDONLY);
    if (fd >= 0) {
        apply_rows(log, fd);
        (void)close(fd);
    }
}

/* Apply the uses that all processes noted in the file `used`, and empty it. */
static void merge_uses(mls_prompt_log *log)
{
    const int fd = open_used(log, O_RDWR | O_CREAT);
    if (fd < 0) {
        return;
    }
    apply_rows(log, fd);
    if (log->used_applied > 0 && ftruncate(fd, 0) == 0) {
        log->used_applied = 0;
    }
    (void)close(fd);
}

/* ---- sizes ---- */

/* Return the bytes of the log's files except `used`. The index file counts with its
 * present length, or with the one of the next save if that is longer: 88 bytes, 24 for
 * each segment and 44 for each entry (see prompt_index_file.c). */
uint64_t mls_prompt_disk_bytes(const mls_prompt_log *log)
{
    const uint64_t entries = log->index.count - log->index.removed;
    const uint64_t next_index_bytes =
        88 + 24 * (uint64_t)log->segment_count + 44 * entries;
    uint64_t bytes =
        MLS_PROMPT_FILE_HEAD +
        (next_index_bytes > log->index_bytes ? next_index_bytes : log->index_bytes);
    for (size_t i = 0; i < log->segment_count; i++) {
        bytes += log->segments[i].bytes;
    }
    return bytes;
}

/* Return the bytes of a segment's records that no entry refers to. */
static uint64_t dead_bytes(const mls_prompt_segment *segment)
{
    return segment->bytes - MLS_PROMPT_FILE_HEAD - segment->live;
}

/* Return whether more than the part 1 / `divisor` of a segment's records is dead. */
static bool is_dead(const mls_prompt_segment *segment, uint64_t divisor)
{
    return dead_bytes(segment) > (segment->bytes - MLS_PROMPT_FILE_HEAD) / divisor;
}

/* ---- compaction ---- */

/* How to compact; `limit` as in mls_prompt_append_begin. */
typedef struct compaction {
    mls_prompt_log *log;
    uint64_t limit;
    const mls_progress *progress; /* or NULL */
} compaction;

/* Return the numbers of the entries of segment `number`, and their `*count`. The caller
 * frees them. NULL: memory ran out. */
static uint32_t *list_entries(const mls_prompt_log *log, uint32_t number, size_t *count)
{
    const mls_prompt_index *index = &log->index;
    uint32_t *numbers = NULL;
    size_t listed = 0, room = 0;
    for (uint32_t i = 0; i < index->count; i++) {
        if (index->entries[i].segment == number &&
            (index->entries[i].flags & MLS_PROMPT_REMOVED) == 0) {
            uint32_t *grown = mls_grow(numbers, listed, &room, sizeof *numbers);
            if (grown == NULL) {
                mls_free(numbers);
                return NULL;
            }
            numbers = grown;
            numbers[listed++] = i;
        }
    }
    *count = listed;
    return numbers != NULL ? numbers : mls_alloc(1, sizeof *numbers);
}

/* Append a copy of the record of entry `number`, which is in the segment `file` of
 * `length` bytes; the copy is flagged as moved, and pinned if the entry is. Remove the
 * entry instead, and return MLS_OK, if the record is damaged or another one. Errors as
 * mls_prompt_append_copy. */
static mls_code move_record(mls_prompt_append *append, mls_prompt_file *file,
                            uint64_t length, uint32_t number, mls_status *st)
{
    mls_prompt_log *log = append->log;
    unsigned char header_buffer[MLS_PROMPT_HEAD_READ], *bytes = header_buffer;
    mls_prompt_header header;
    mls_prompt_lock_state(log);
    const mls_prompt_entry entry = log->index.entries[number];
    mls_prompt_unlock_state(log);
    const uint64_t offset = mls_prompt_entry_offset(&entry);
    bool is_good = false;
    mls_code code =
        mls_prompt_header_read(file->fd, offset, length - offset, log->crc, header_buffer,
                               MLS_PROMPT_HEAD_READ, &bytes, &header, st);
    if (code == MLS_OK && mls_prompt_key_equal(&header.key, &entry.key)) {
        const bool is_pinned = (entry.flags & MLS_PROMPT_PINNED) != 0;
        header.flags = MLS_PROMPT_MOVED | (is_pinned ? MLS_PROMPT_MOVED_PINNED : 0);
        code = mls_prompt_append_copy(append, file->fd, offset, &header, bytes, &is_good,
                                      st);
    } else if (code == MLS_E_FORMAT || code == MLS_E_CHECKSUM) {
        code = MLS_OK;
    }
    if (bytes != header_buffer) {
        mls_free(bytes);
    }
    if (code == MLS_OK && !is_good) {
        mls_prompt_lock_state(log);
        mls_prompt_forget_record(log, number);
        mls_prompt_unlock_state(log);
    }
    return code;
}

/* Append a copy of a note of the compacted `segment` if it still matters. A deletion
 * matters while another segment, up to that of the deleted record, exists: a copy of the
 * record in it would come back, even if the key was stored again. So does an unpin of an
 * evicted record: a copy would come back pinned. Any other pin or unpin matters if the
 * record is in another segment; its present state is written. Errors as
 * mls_prompt_append_notes. */
static mls_code move_note(mls_prompt_append *append, mls_prompt_note note,
                          uint32_t segment, mls_status *st)
{
    mls_prompt_log *log = append->log;
    bool matters;
    mls_prompt_lock_state(log);
    const uint32_t number = mls_prompt_index_find(&log->index, &note.key);
    if (note.operation == MLS_PROMPT_DELETE ||
        (note.operation == MLS_PROMPT_UNPIN && number == MLS_PROMPT_NONE)) {
        /* segments are in order; the compacted one is still among them */
        const size_t oldest = log->segments[0].number == segment ? 1 : 0;
        matters =
            log->segment_count > oldest && log->segments[oldest].number <= note.segment;
    } else {
        matters =
            number != MLS_PROMPT_NONE && log->index.entries[number].segment != segment;
        if (matters) {
            const bool is_pinned =
                (log->index.entries[number].flags & MLS_PROMPT_PINNED) != 0;
            note.operation = is_pinned ? MLS_PROMPT_PIN : MLS_PROMPT_UNPIN;
        }
    }
    mls_prompt_unlock_state(log);
    return matters ? mls_prompt_append_notes(append, &note, 1, st) : MLS_OK;
}

/* Copy the notes of the segment `file` of `length` bytes, whose number is `segment`, that
 * still matter. */
static mls_code move_notes(mls_prompt_append *append, mls_prompt_file *file,
                           uint64_t length, uint32_t segment, mls_status *st)
{
    const mls_crc_kernels *crc = append->log->crc;
    unsigned char header_buffer[MLS_PROMPT_HEAD_READ], *bytes;
    mls_prompt_header header;
    uint64_t effort = mls_prompt_effort(length), at = 0;
    mls_code code = mls_prompt_header_search(file->fd, MLS_PROMPT_FILE_HEAD, length, crc,
                                             &effort, append->progress, &at, st);
    while (code == MLS_OK && at > 0) {
        code = mls_prompt_header_read(file->fd, at, length - at, crc, header_buffer,
                                      MLS_PROMPT_HEAD_READ, &bytes, &header, st);
        const size_t note_bytes =
            code == MLS_OK && header.type == MLS_PROMPT_NOTES
                ? header.meta_bytes / MLS_PROMPT_NOTE * MLS_PROMPT_NOTE
                : 0;
        for (size_t i = 0; code == MLS_OK && i < note_bytes; i += MLS_PROMPT_NOTE) {
            code = move_note(append, mls_prompt_note_read(header.meta + i), segment, st);
        }
        if (bytes != header_buffer) {
            mls_free(bytes);
        }
        if (code == MLS_OK) {
            code = mls_prompt_header_search(file->fd, at + header.record_bytes, length,
                                            crc, &effort, append->progress, &at, st);
        }
    }
    return code;
}

/* Append the live records (`live` bytes) and notes of the segment `file` of `length`
 * bytes, whose number is `segment`, to the newest segment, and commit them. On failure
 * the newest segment is as before. */
static mls_code copy_live(const compaction *c, mls_prompt_file *file, uint64_t length,
                          uint64_t live, uint32_t segment, mls_status *st)
{
    mls_prompt_log *log = c->log;
    mls_prompt_append append;
    size_t count = 0;
    mls_prompt_lock_state(log);
    uint32_t *numbers = list_entries(log, segment, &count);
    mls_prompt_unlock_state(log);
    if (numbers == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to compact a segment");
    }
    mls_code code =
        mls_prompt_append_begin(log, live, c->limit, c->progress, &append, st);
    for (size_t i = 0; code == MLS_OK && i < count; i++) {
        code = move_record(&append, file, length, numbers[i], st);
    }
    if (code == MLS_OK) {
        code = move_notes(&append, file, length, segment, st);
    }
    mls_free(numbers);
    if (code == MLS_OK) {
        return mls_prompt_append_commit(&append, st);
    }
    mls_prompt_append_abort(&append);
    return code;
}

/* Delete the file of a segment that no entry refers to, and remove it from the list. A
 * missing file counts as deleted. MLS_E_IO: the list is unchanged. */
static mls_code remove_segment(mls_prompt_log *log, uint32_t number, mls_status *st)
{
    char name[MLS_PROMPT_NAME];
    mls_code code = MLS_OK;
    mls_prompt_segment_name(name, number);
    if (unlinkat(log->folder, name, 0) != 0 && errno != ENOENT) {
        code = mls_fail_os(st, errno, "cannot delete %s", name);
    } else {
        mls_prompt_lock_state(log);
        mls_prompt_segment_forget(log, number);
        mls_prompt_unlock_state(log);
    }
    return code;
}

/* Copy the live records of segment `number` to the newest one, and delete it. If it is
 * the newest, it gets a successor first, because it must stay as it is. */
static mls_code compact_segment(const compaction *c, uint32_t number, mls_status *st)
{
    mls_prompt_log *log = c->log;
    mls_prompt_file *file = NULL;
    mls_code code = MLS_OK;
    mls_prompt_lock_state(log);
    if (number == log->highest) {
        code = mls_prompt_segment_create(log, st);
    }
    const mls_prompt_segment *segment = mls_prompt_segment_find(log, number);
    const uint64_t length = segment->bytes, live = segment->live;
    if (code == MLS_OK) {
        code =
            mls_prompt_segment_hold(log, mls_prompt_segment_find(log, number), &file, st);
    }
    mls_prompt_unlock_state(log);
    if (code == MLS_OK) {
        code = copy_live(c, file, length, live, number, st);
    }
    mls_prompt_file_release(file);
    return code == MLS_OK ? remove_segment(log, number, st) : code;
}

/* Return the number of a segment, at most `last`, of whose bytes more than the part
 * 1 / `divisor` is dead, or MLS_PROMPT_NONE. */
static uint32_t find_dead(mls_prompt_log *log, uint32_t last, uint64_t divisor)
{
    uint32_t number = MLS_PROMPT_NONE;
    mls_prompt_lock_state(log);
    for (size_t i = 0; i < log->segment_count && number == MLS_PROMPT_NONE; i++) {
        const mls_prompt_segment *segment = &log->segments[i];
        if (segment->number <= last && is_dead(segment, divisor)) {
            number = segment->number;
        }
    }
    mls_prompt_unlock_state(log);
    return number;
}

/* Compact all segments of whose bytes more than the part 1 / `divisor` is dead; the
 * newest too if `newest_too`. Segments that this creates are left alone: one that has
 * only notes is mostly dead. */
static mls_code compact_all(const compaction *c, bool newest_too, uint64_t divisor,
                            mls_status *st)
{
    mls_prompt_log *log = c->log;
    const uint32_t last = log->highest - !newest_too; /* only the writer changes it */
    mls_code code = MLS_OK;
    for (uint32_t number; code == MLS_OK && log->highest > 0 &&
                          (number = find_dead(log, last, divisor)) != MLS_PROMPT_NONE;) {
        code = compact_segment(c, number, st);
    }
    return code;
}

/* Compact the segments that are still listed, and save the index file. */
mls_code mls_prompt_rewrite(mls_prompt_log *log, const uint32_t *numbers, size_t count,
                            const mls_progress *progress, mls_status *st)
{
    const compaction c = {log, mls_prompt_segment_limit(UINT64_MAX), progress};
    mls_code code = MLS_OK;
    for (size_t i = 0; code == MLS_OK && i < count; i++) {
        mls_prompt_lock_state(log);
        const bool is_listed = mls_prompt_segment_find(log, numbers[i]) != NULL;
        mls_prompt_unlock_state(log);
        code = is_listed ? compact_segment(&c, numbers[i], st) : MLS_OK;
    }
    mls_prompt_lock_state(log);
    code = code == MLS_OK ? mls_prompt_index_save(log, st) : code;
    mls_prompt_unlock_state(log);
    return code;
}

/* Compact mostly dead segments, and save or pack the index if that pays. The newest
 * segment is not compacted: it still grows. If the file `used` is half full, apply and
 * empty it. */
mls_code mls_prompt_compact(mls_prompt_log *log, uint64_t max_bytes,
                            const mls_progress *progress, mls_status *st)
{
    const compaction c = {log, mls_prompt_segment_limit(max_bytes), progress};
    mls_code code = compact_all(&c, false /* older ones */, MOSTLY, st);
    mls_prompt_lock_state(log);
    if (used_bytes(log) > MLS_PROMPT_USED_MOST / 2) {
        merge_uses(log);
    }
    if (code == MLS_OK && log->unindexed > UNINDEXED + log->index.count / 8) {
        code = mls_prompt_index_save(log, st);
    } else if (code == MLS_OK && log->index.removed > UNINDEXED + log->index.count / 2) {
        code = mls_prompt_index_pack(&log->index, st);
    }
    mls_prompt_unlock_state(log);
    return code == MLS_E_STOPPED ? code : MLS_OK;
}

/* ---- eviction ---- */

/* A record that may be evicted: time of its last use, its end in tokens, and its
 * entry. */
typedef struct candidate {
    uint32_t used, end, number;
    bool is_block;
} candidate;

/* For qsort: least recently used first; of one chain, the last record first. A block is
 * the parent of other records with the same end, so these come before it. */
static int compare_candidates(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->used != y->used) {
        return x->used < y->used ? -1 : 1;
    }
    if (x->end != y->end) {
        return x->end > y->end ? -1 : 1;
    }
    if (x->is_block != y->is_block) {
        return x->is_block ? 1 : -1;
    }
    return x->number < y->number ? -1 : x->number > y->number;
}

/* Flag pinned records and their ancestors as MLS_PROMPT_KEPT, as far as they can be
 * found: no record behind a removed one can, unless the present put stores that one. Ends
 * fall along a chain of parents; in a forged store the walk stops where they do not. */
static void keep_pinned(mls_prompt_index *index)
{
    for (uint32_t i = 0; i < index->count; i++) {
        uint32_t first = i; /* of those that can be found, the last one of the prompt */
        const mls_prompt_entry *entry = &index->entries[i];
        if ((entry->flags & MLS_PROMPT_PINNED) == 0) {
            continue;
        }
        for (uint32_t next = entry->parent, end = UINT32_MAX;
             next != MLS_PROMPT_NONE && index->entries[next].end < end &&
             (index->entries[next].flags & MLS_PROMPT_KEPT) == 0;
             next = index->entries[next].parent) {
            end = index->entries[next].end;
            if ((index->entries[next].flags & MLS_PROMPT_REMOVED) != 0) {
                first = index->entries[next].parent;
            }
        }
        while (first != MLS_PROMPT_NONE &&
               (index->entries[first].flags & MLS_PROMPT_KEPT) == 0) {
            index->entries[first].flags |= MLS_PROMPT_KEPT;
            first = index->entries[first].parent;
        }
    }
}

/* Return the `*count` records that may be evicted, in the order of their eviction, and
 * clear all flags MLS_PROMPT_KEPT. The caller frees the list. NULL: memory ran out. */
static candidate *list_candidates(mls_prompt_index *index, size_t *count)
{
    const uint8_t stays = MLS_PROMPT_REMOVED | MLS_PROMPT_KEPT;
    candidate *list = mls_alloc(index->count, sizeof *list);
    size_t listed = 0;
    if (list == NULL) {
        return NULL;
    }
    keep_pinned(index);
    for (size_t i = 0; i < index->count; i++) {
        mls_prompt_entry *entry = &index->entries[i];
        if ((entry->flags & stays) == 0) {
            list[listed++] = (candidate){.used = entry->used,
                                         .end = entry->end,
                                         .number = (uint32_t)i,
                                         .is_block = entry->kind == 0};
        }
        entry->flags &= (uint8_t)~MLS_PROMPT_KEPT;
    }
    qsort(list, listed, sizeof *list, compare_candidates);
    *count = listed;
    return list;
}

/* Return whether the log with `bytes` more bytes has at most `max_bytes`. */
static bool has_room(mls_prompt_log *log, uint64_t bytes, uint64_t max_bytes)
{
    mls_prompt_lock_state(log);
    const uint64_t used = mls_prompt_disk_bytes(log);
    mls_prompt_unlock_state(log);
    return used <= max_bytes && bytes <= max_bytes - used;
}

/* Return the dead bytes of all segments. */
static uint64_t all_dead(mls_prompt_log *log)
{
    uint64_t bytes = 0;
    mls_prompt_lock_state(log);
    for (size_t i = 0; i < log->segment_count; i++) {
        bytes += dead_bytes(&log->segments[i]);
    }
    mls_prompt_unlock_state(log);
    return bytes;
}

/* Remove the entry of a candidate; return whether its segment is mostly dead now. Entries
 * keep their numbers meanwhile: only the writer packs the index. */
static bool evict_entry(mls_prompt_log *log, uint32_t number)
{
    mls_prompt_lock_state(log);
    const mls_prompt_entry *entry = &log->index.entries[number];
    const mls_prompt_segment *segment = mls_prompt_segment_find(log, entry->segment);
    mls_prompt_forget_record(log, number);
    const bool is_worth_it = segment != NULL && is_dead(segment, MOSTLY);
    mls_prompt_unlock_state(log);
    return is_worth_it;
}

/* Evict and compact until `bytes` more bytes fit. Compact first, since dead bytes may
 * suffice. Then evict record by record; space becomes free only when a segment is mostly
 * dead and is compacted. If that is not enough, because the rest is pinned, compact all
 * that have dead bytes, such as the bytes of a damaged record. */
mls_code mls_prompt_make_room(mls_prompt_log *log, uint64_t bytes, uint64_t max_bytes,
                              const mls_progress *progress, bool *fits, mls_status *st)
{
    const compaction c = {log, mls_prompt_segment_limit(max_bytes), progress};
    size_t count = 0;
    *fits = max_bytes == UINT64_MAX || has_room(log, bytes, max_bytes);
    if (*fits || bytes > max_bytes) {
        return MLS_OK;
    }
    mls_prompt_lock_state(log);
    merge_uses(log);
    candidate *list = list_candidates(&log->index, &count);
    mls_prompt_unlock_state(log);
    if (list == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to choose records to evict");
    }
    mls_code code = compact_all(&c, true /* newest too */, MOSTLY, st);
    *fits = code == MLS_OK && has_room(log, bytes, max_bytes);
    for (size_t i = 0; code == MLS_OK && !*fits && i < count; i++) {
        if (evict_entry(log, list[i].number)) {
            code = compact_all(&c, true /* newest too */, MOSTLY, st);
            *fits = code == MLS_OK && has_room(log, bytes, max_bytes);
        }
    }
    mls_free(list);
    if (code == MLS_OK && !*fits && has_room(log, bytes, max_bytes + all_dead(log))) {
        code = compact_all(&c, true /* newest too */, ANY, st);
        *fits = code == MLS_OK && has_room(log, bytes, max_bytes);
    }
    return code;
}

/* Evict and compact. Compact the newest segment too, and write the index file, which is
 * then as short as possible. Returns MLS_OK even if the log does not fit: pinned records
 * may exceed the limit. `*freed` is set on failure too, to the bytes freed until then. */
mls_code mls_prompt_prune(mls_prompt_log *log, uint64_t max_bytes,
                          const mls_progress *progress, uint64_t *freed, mls_status *st)
{
    const compaction c = {log, mls_prompt_segment_limit(max_bytes), progress};
    bool fits = false;
    mls_prompt_lock_state(log);
    const uint64_t before = mls_prompt_disk_bytes(log);
    mls_prompt_unlock_state(log);
    mls_code code = mls_prompt_make_room(log, 0, max_bytes, progress, &fits, st);
    if (code == MLS_OK) {
        code = compact_all(&c, true /* newest too */, PARTLY, st);
    }
    mls_prompt_lock_state(log);
    if (code == MLS_OK) {
        code = mls_prompt_index_save(log, st);
    }
    const uint64_t after = mls_prompt_disk_bytes(log);
    mls_prompt_unlock_state(log);
    *freed = before > after ? before - after : 0;
    return code;
}

/* ---- marks ---- */

/* Append notes, durably. Notes are short, so they go to the newest segment unless it is
 * full. */
mls_code mls_prompt_write_notes(mls_prompt_log *log, const mls_prompt_note *notes,
                                size_t count, mls_status *st)
{
    mls_prompt_append append;
    mls_code code =
        mls_prompt_append_begin(log, count * MLS_PROMPT_NOTE,
                                mls_prompt_segment_limit(UINT64_MAX), NULL, &append, st);
    if (code == MLS_OK) {
        code = mls_prompt_append_notes(&append, notes, count, st);
    }
    if (code == MLS_OK) {
        return mls_prompt_append_commit(&append, st);
    }
    mls_prompt_append_abort(&append);
    return code;
}

/* Return how many records have each entry as parent, by the entry's number. The caller
 * frees the list. NULL: memory ran out. */
static uint32_t *count_children(const mls_prompt_index *index)
{
    uint32_t *children = mls_alloc(index->count, sizeof *children);
    for (size_t i = 0; children != NULL && i < index->count; i++) {
        const mls_prompt_entry *entry = &index->entries[i];
        if ((entry->flags & MLS_PROMPT_REMOVED) == 0 &&
            entry->parent != MLS_PROMPT_NONE) {
            children[entry->parent]++;
        }
    }
    return children;
}

/* Write a note to `out` for each of the `count` records, with indices `hits` in a match,
 * that `operation` changes, and return the number of notes. From the last record to the
 * first, so that a parent loses its children before it is examined; `children` is from
 * count_children. */
static size_t choose_notes(mls_prompt_log *log, const mls_prompt_match *match,
                           const size_t *hits, size_t count,
                           mls_prompt_operation operation, uint32_t *children,
                           mls_prompt_note *out)
{
    size_t chosen = 0;
    for (size_t i = count; i > 0; i--) {
        const mls_prompt_key *key = &match->hits[hits[i - 1]].header.key;
        const uint32_t number = mls_prompt_index_find(&log->index, key);
        if (number == MLS_PROMPT_NONE) {
            continue;
        }
        const mls_prompt_entry *entry = &log->index.entries[number];
        const bool is_pinned = (entry->flags & MLS_PROMPT_PINNED) != 0;
        if ((operation == MLS_PROMPT_PIN && is_pinned) ||
            (operation == MLS_PROMPT_UNPIN && !is_pinned) ||
            (operation == MLS_PROMPT_DELETE && children[number] > 0)) {
            continue;
        }
        if (operation == MLS_PROMPT_DELETE && entry->parent != MLS_PROMPT_NONE) {
            children[entry->parent]--;
        }
        out[chosen++] = (mls_prompt_note){
            .key = *key,
            .operation = operation == MLS_PROMPT_DROP ? MLS_PROMPT_DELETE : operation,
            .segment = entry->segment};
    }
    return chosen;
}

/* Change the state of records by notes, which are durable before the log is compacted. */
mls_code mls_prompt_mark(mls_prompt_log *log, const mls_prompt_match *match,
                         const size_t *hits, size_t count, mls_prompt_operation operation,
                         const mls_progress *progress, size_t *changed, mls_status *st)
{
    mls_prompt_note *notes = mls_alloc(count, sizeof *notes);
    size_t chosen = 0;
    mls_code code = MLS_OK;
    mls_prompt_lock_state(log);
    uint32_t *children = count_children(&log->index);
    if (notes == NULL || children == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory to mark %zu records", count);
    } else {
        chosen = choose_notes(log, match, hits, count, operation, children, notes);
    }
    mls_prompt_unlock_state(log);
    if (chosen > 0) {
        code = mls_prompt_write_notes(log, notes, chosen, st);
    }
    *changed = code == MLS_OK ? chosen : 0;
    if (*changed > 0) {
        code = mls_prompt_compact(log, UINT64_MAX, progress, st);
    }
    mls_free(children);
    mls_free(notes);
    return code;
}
