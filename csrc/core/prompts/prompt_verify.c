/* prompt_verify: walks over all records to list, count or verify them, and removes the
 * damaged ones (repair).
 *
 * A record with a damaged header has no entry, unless the index file has it. So segments
 * are verified too: each must have a valid header at its start and behind each record.
 */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { STEP = 256 << 10 };

/* ---- all entries ---- */

/* For qsort: by segment, then by place, so that files are read from start to end. */
static int compare_entries(const void *a, const void *b)
{
    const mls_prompt_entry *x = a, *y = b;
    if (x->segment != y->segment) {
        return x->segment < y->segment ? -1 : 1;
    }
    return x->place < y->place ? -1 : x->place > y->place;
}

/* Read the changes of other processes, and set `*out` to a copy of the `*count` entries
 * with a record, sorted by place: the index may change while they are read. The caller
 * frees it. MLS_E_IO, MLS_E_MEMORY, MLS_E_SIZE. */
static mls_code copy_entries(mls_prompt_log *log, mls_prompt_entry **out, size_t *count,
                             mls_status *st)
{
    mls_prompt_lock_state(log);
    mls_code code = mls_prompt_follow(log, st);
    mls_prompt_apply_uses(log);
    mls_prompt_entry *entries = NULL;
    size_t listed = 0;
    if (code == MLS_OK) {
        entries = mls_alloc(log->index.count, sizeof *entries);
        code = entries != NULL
                   ? MLS_OK
                   : mls_fail(st, MLS_E_MEMORY, "no memory for a list of records");
    }
    for (size_t i = 0; code == MLS_OK && i < log->index.count; i++) {
        if ((log->index.entries[i].flags & MLS_PROMPT_REMOVED) == 0) {
            entries[listed++] = log->index.entries[i];
        }
    }
    mls_prompt_unlock_state(log);
    if (code == MLS_OK) {
        qsort(entries, listed, sizeof *entries, compare_entries);
        *out = entries;
        *count = listed;
    }
    return code;
}

/* Set `*file` to the open segment of an entry, which the caller releases, and `*end` to
 * the end of its records. MLS_E_IO (ENOENT: the segment is gone), MLS_E_FORMAT,
 * MLS_E_MEMORY. */
static mls_code hold_file(mls_prompt_log *log, const mls_prompt_entry *entry,
                          mls_prompt_file **file, uint64_t *end, mls_status *st)
{
    mls_prompt_lock_state(log);
    mls_prompt_segment *segment = mls_prompt_segment_find(log, entry->segment);
    const mls_code code = segment == NULL
                              ? mls_fail_os(st, ENOENT, "a segment is missing")
                              : mls_prompt_segment_hold(log, segment, file, st);
    *end = segment == NULL ? 0 : segment->bytes;
    mls_prompt_unlock_state(log);
    return code;
}

/* Read the header of the record of an entry into `*hit`, through `header_buffer` of
 * MLS_PROMPT_HEAD_READ bytes. The caller frees hit->bytes and releases hit->file, also on
 * failure. MLS_E_FORMAT, MLS_E_CHECKSUM: damaged; MLS_E_IO; MLS_E_MEMORY. */
static mls_code read_entry(mls_prompt_log *log, const mls_prompt_entry *entry,
                           unsigned char *header_buffer, mls_prompt_hit *hit,
                           mls_status *st)
{
    const uint64_t offset = mls_prompt_entry_offset(entry);
    uint64_t end = 0;
    *hit = (mls_prompt_hit){.kind = entry->kind,
                            .end = entry->end,
                            .offset = offset,
                            .segment = entry->segment};
    mls_code code = hold_file(log, entry, &hit->file, &end, st);
    if (code == MLS_OK && end < offset) {
        code = mls_fail(st, MLS_E_FORMAT, "the segment is cut off");
    }
    unsigned char *bytes = header_buffer;
    if (code == MLS_OK) {
        code = mls_prompt_header_read(hit->file->fd, offset, end - offset, log->crc,
                                      header_buffer, MLS_PROMPT_HEAD_READ, &bytes,
                                      &hit->header, st);
    }
    hit->bytes = bytes == header_buffer ? NULL : bytes;
    if (code == MLS_OK && !mls_prompt_key_equal(&hit->header.key, &entry->key)) {
        code = mls_fail(st, MLS_E_FORMAT, "another record is stored there");
    }
    if (code == MLS_OK) {
        hit->start = hit->end - hit->header.token_count;
    }
    return code;
}

static void release_entry(mls_prompt_hit *hit)
{
    mls_prompt_file_release(hit->file);
    mls_free(hit->bytes);
}

/* Return whether an error, such as too many open files, proves no damage. Bytes that the
 * disk cannot read (EIO) count as damaged here: only a repair can remove them. */
static bool is_system_error(mls_code code, const mls_status *st)
{
    return code == MLS_E_MEMORY || code == MLS_E_STOPPED ||
           (code == MLS_E_IO && st->os_error != EIO && st->os_error != ENOENT);
}

/* Call `visit` with each record whose header can be read. Damaged records, and records of
 * a segment that is gone, are left out. */
mls_code mls_prompt_list(mls_prompt_log *log,
                         bool (*visit)(void *context, const mls_prompt_listed *listed),
                         void *context, const mls_progress *progress, mls_status *st)
{
    mls_prompt_entry *entries = NULL;
    size_t count = 0;
    mls_code code = copy_entries(log, &entries, &count, st);
    bool is_done = false;
    for (size_t i = 0; code == MLS_OK && !is_done && i < count; i++) {
        unsigned char header_buffer[MLS_PROMPT_HEAD_READ];
        mls_prompt_listed listed = {.is_pinned =
                                        (entries[i].flags & MLS_PROMPT_PINNED) != 0,
                                    .used = entries[i].used};
        if (!mls_progress_report(progress, 0)) {
            code = mls_fail(st, MLS_E_STOPPED, "stopped");
            break;
        }
        const mls_code result =
            read_entry(log, &entries[i], header_buffer, &listed.hit, st);
        const bool is_gone = result == MLS_E_IO && st->os_error == ENOENT;
        if (result == MLS_OK) {
            is_done = !visit(context, &listed);
        } else if (is_system_error(result, st) || (result == MLS_E_IO && !is_gone)) {
            code = result;
        }
        release_entry(&listed.hit);
    }
    mls_free(entries);
    return code;
}

/* ---- verification ---- */

/* One verification. */
typedef struct verification {
    mls_prompt_log *log;
    mls_prompt_entry *entries; /* sorted by compare_entries */
    size_t entry_count;
    mls_prompt_damage_list found;
    mls_prompt_note *notes; /* to remove the damaged records */
    uint32_t *segments;     /* numbers of those with a damaged header */
    size_t note_count, segment_count, note_room, segment_room;
    unsigned char *buffer;
    const mls_progress *progress;
} verification;

/* Append the damage of an entry's record, with the reason `text`, and the note that
 * removes it. MLS_E_MEMORY. */
static mls_code report_record(verification *v, const mls_prompt_entry *entry,
                              const char *text, mls_status *st)
{
    mls_prompt_note *notes =
        mls_grow(v->notes, v->note_count, &v->note_room, sizeof *notes);
    if (notes == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to report damage");
    }
    v->notes = notes;
    notes[v->note_count++] = (mls_prompt_note){
        .key = entry->key, .operation = MLS_PROMPT_DELETE, .segment = entry->segment};
    return mls_prompt_damage_add_record(&v->found, entry, text, st);
}

/* Note that a segment has a damaged header at `offset`, and append the damage unless an
 * entry has its record there, which is verified itself. MLS_E_MEMORY. */
static mls_code report_header(verification *v, uint32_t segment, uint64_t offset,
                              mls_status *st)
{
    const mls_prompt_entry place = {.segment = segment,
                                    .place = (uint32_t)(offset / MLS_PROMPT_UNIT)};
    const size_t last = v->segment_count;
    if (last == 0 || v->segments[last - 1] != segment) {
        uint32_t *segments =
            mls_grow(v->segments, last, &v->segment_room, sizeof *segments);
        if (segments == NULL) {
            return mls_fail(st, MLS_E_MEMORY, "no memory to report damage");
        }
        v->segments = segments;
        segments[v->segment_count++] = segment;
    }
    const bool has_entry =
        v->entry_count > 0 && bsearch(&place, v->entries, v->entry_count, sizeof place,
                                      compare_entries) != NULL;
    return has_entry ? MLS_OK
                     : mls_prompt_damage_add(&v->found, segment, offset, NULL, st);
}

/* Report a damaged head of the segment `file`, which is used in spite of it.
 * MLS_E_MEMORY. */
static mls_code verify_head(verification *v, uint32_t number, const mls_prompt_file *file,
                            mls_status *st)
{
    return mls_prompt_segment_has_head(v->log, number, file->fd)
               ? MLS_OK
               : report_header(v, number, 0, st);
}

/* Report the places of the segment `file` that must have a valid header, and do not.
 * What follows the last valid header of the newest segment may be a put that has not
 * ended; so it is read twice. Errors as mls_prompt_header_search. */
static mls_code verify_headers(verification *v, uint32_t number, bool is_newest,
                               const mls_prompt_file *file, mls_status *st)
{
    const mls_crc_kernels *crc = v->log->crc;
    struct stat info;
    bool is_second = false;
    if (fstat(file->fd, &info) != 0) {
        return mls_fail_os(st, errno, "cannot examine a segment");
    }
    const uint64_t length = (uint64_t)info.st_size;
    uint64_t effort = mls_prompt_effort(length), next = 0;
    for (uint64_t at = MLS_PROMPT_FILE_HEAD;
         length > at && length - at >= MLS_PROMPT_FIXED;) {
        unsigned char header_buffer[MLS_PROMPT_HEAD_READ], *bytes = header_buffer;
        mls_prompt_header header;
        mls_code code = mls_prompt_header_search(file->fd, at, length, crc, &effort,
                                                 v->progress, &next, st);
        const bool is_tail = code == MLS_OK && next == 0;
        if (is_tail && is_newest &&
            (!is_second || mls_prompt_is_unfinished(file->fd, at))) {
            if (is_second) {
                return MLS_OK;
            }
            is_second = true;
            continue;
        }
        if (code == MLS_OK && next != at) {
            code = report_header(v, number, at, st);
        }
        if (code != MLS_OK || is_tail) {
            return code;
        }
        code = mls_prompt_header_read(file->fd, next, length - next, crc, header_buffer,
                                      sizeof header_buffer, &bytes, &header, st);
        if (bytes != header_buffer) {
            mls_free(bytes);
        }
        if (code != MLS_OK) { /* the writer has cut the file meanwhile */
            return code == MLS_E_CHECKSUM || code == MLS_E_FORMAT ? MLS_OK : code;
        }
        at = next + header.record_bytes;
    }
    return MLS_OK;
}

/* Verify the headers of all segments. A segment that is gone was compacted by another
 * process; damage that no read passes is reported with its entries. MLS_E_IO,
 * MLS_E_MEMORY, MLS_E_STOPPED. */
static mls_code verify_segments(verification *v, mls_status *st)
{
    mls_prompt_log *log = v->log;
    mls_code code = MLS_OK;
    uint32_t number = 0;
    for (bool is_done = false; code == MLS_OK && !is_done;) {
        mls_prompt_file *file = NULL;
        mls_prompt_lock_state(log);
        size_t i = 0;
        while (i < log->segment_count && log->segments[i].number <= number) {
            i++;
        }
        is_done = i == log->segment_count;
        if (!is_done) {
            number = log->segments[i].number;
            code = mls_prompt_segment_hold(log, &log->segments[i], &file, st);
        }
        const bool is_newest = number == log->highest;
        mls_prompt_unlock_state(log);
        if (file != NULL) {
            code = verify_head(v, number, file, st);
            code = code == MLS_OK ? verify_headers(v, number, is_newest, file, st) : code;
        }
        if (code != MLS_OK && !is_system_error(code, st)) {
            code = MLS_OK;
        }
        mls_prompt_file_release(file);
    }
    return code;
}

/* Read the record of an entry and report it if it is damaged. A segment that is gone was
 * compacted by another process, which is not damage. Errors that prove no damage are
 * returned. */
static mls_code verify_entry(verification *v, const mls_prompt_entry *entry,
                             mls_status *st)
{
    unsigned char header_buffer[MLS_PROMPT_HEAD_READ];
    mls_prompt_hit hit;
    if (!mls_progress_report(v->progress, 0)) {
        return mls_fail(st, MLS_E_STOPPED, "stopped");
    }
    mls_code code = read_entry(v->log, entry, header_buffer, &hit, st);
    const bool is_gone = code == MLS_E_IO && st->os_error == ENOENT;
    if (code == MLS_OK) {
        code = mls_prompt_payload_check(hit.file->fd, hit.offset, &hit.header,
                                        v->log->crc, v->buffer, STEP, v->progress, st);
    }
    release_entry(&hit);
    if (code == MLS_OK || is_gone) {
        return MLS_OK;
    }
    return is_system_error(code, st) ? code : report_record(v, entry, st->text, st);
}

/* Verify all records, and remove the damaged ones with `repair`. The log is not locked
 * without `repair`: the entries are a copy. */
mls_code mls_prompt_verify(mls_prompt_log *log, bool repair, const mls_progress *progress,
                           mls_prompt_damage **out, size_t *count, mls_status *st)
{
    verification v = {.log = log, .progress = progress, .buffer = mls_alloc(STEP, 1)};
    mls_code code = v.buffer == NULL
                        ? mls_fail(st, MLS_E_MEMORY, "no memory to verify a store")
                        : copy_entries(log, &v.entries, &v.entry_count, st);
    for (size_t i = 0; code == MLS_OK && i < v.entry_count; i++) {
        code = verify_entry(&v, &v.entries[i], st);
    }
    if (code == MLS_OK) {
        code = verify_segments(&v, st);
    }
    mls_prompt_lock_state(log);
    const bool has_damaged_head = log->has_damaged_head;
    mls_prompt_unlock_state(log);
    if (code == MLS_OK && has_damaged_head) {
        code = mls_prompt_damage_add(&v.found, 0 /* store */, 0, NULL, st);
    }
    for (size_t i = 0; code == MLS_OK && repair && i < log->removed.count; i++) {
        const mls_prompt_damage *each = &log->removed.damage[i];
        code =
            mls_prompt_damage_add(&v.found, each->segment, each->offset, each->text, st);
    }
    if (code == MLS_OK && repair && v.note_count > 0) {
        code = mls_prompt_write_notes(log, v.notes, v.note_count, st);
    }
    if (code == MLS_OK && repair && v.segment_count > 0) {
        code = mls_prompt_rewrite(log, v.segments, v.segment_count, progress, st);
    }
    mls_free(v.entries);
    mls_free(v.segments);
    mls_free(v.buffer);
    mls_free(v.notes);
    if (code == MLS_OK) {
        *out = v.found.damage;
        *count = v.found.count;
    } else {
        mls_free(v.found.damage);
    }
    return code;
}

/* ---- statistics ---- */

/* Count records and bytes. Removed entries count only as memory. */
mls_code mls_prompt_stats_of(mls_prompt_log *log, mls_prompt_stats *out, mls_status *st)
{
    mls_prompt_lock_state(log);
    const mls_code code = mls_prompt_follow(log, st);
    mls_prompt_stats stats = {0};
    for (size_t i = 0; code == MLS_OK && i < log->index.count; i++) {
        const mls_prompt_entry *entry = &log->index.entries[i];
        if ((entry->flags & MLS_PROMPT_REMOVED) == 0) {
            stats.records++;
            stats.blocks += entry->kind == 0;
            stats.pinned += (entry->flags & MLS_PROMPT_PINNED) != 0;
            stats.live_bytes += mls_prompt_entry_bytes(entry);
        }
    }
    stats.segments = log->segment_count;
    stats.disk_bytes = mls_prompt_disk_bytes(log);
    stats.memory_bytes = mls_prompt_index_bytes(&log->index);
    mls_prompt_unlock_state(log);
    if (code == MLS_OK) {
        *out = stats;
    }
    return code;
}
