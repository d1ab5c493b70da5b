/* prompt_scan: reads the records that segments got since, also from other processes, into
 * the index; skips damage.
 *
 * Entering a record adds its entry to the index. A note, in a header without a payload,
 * is applied instead: it pins, unpins or deletes the record of another header.
 */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { WINDOW = 16384 }; /* bytes that a scan reads at once: many small records */

/* ---- entries ---- */

/* Add the bytes of an entry's record to the live bytes of its segment, or subtract them
 * if not `adds`. Does nothing if the segment is not listed. */
static void change_live(mls_prompt_log *log, const mls_prompt_entry *entry, bool adds)
{
    mls_prompt_segment *segment = mls_prompt_segment_find(log, entry->segment);
    if (segment != NULL) {
        const uint64_t bytes = mls_prompt_entry_bytes(entry);
        segment->live += adds ? bytes : (uint64_t)0 - bytes;
    }
}

void mls_prompt_forget_record(mls_prompt_log *log, uint32_t number)
{
    if ((log->index.entries[number].flags & MLS_PROMPT_REMOVED) == 0) {
        change_live(log, &log->index.entries[number], false /* subtract */);
        mls_prompt_index_remove(&log->index, number);
    }
}

/* Return the number of the parent's entry, MLS_PROMPT_NONE for the root. The parent's
 * record may come later, since a compaction changes the order: then its entry is removed
 * until it comes. */
static uint32_t require_parent(mls_prompt_log *log, const mls_prompt_header *header)
{
    const uint64_t start = header->end - header->token_count;
    return start == 0
               ? MLS_PROMPT_NONE
               : mls_prompt_index_require(&log->index, &header->parent, (uint32_t)start);
}

/* Add the entry of the record at `offset` of `segment`, or change the one with its key: a
 * later record replaces an earlier one. A copy made by a compaction keeps the time of the
 * last use, and whether it is pinned. */
static void enter_record(mls_prompt_log *log, const mls_prompt_segment *segment,
                         uint64_t offset, const mls_prompt_header *header)
{
    mls_prompt_entry entry = {
        .key = header->key,
        .segment = segment->number,
        .place = (uint32_t)(offset / MLS_PROMPT_UNIT),
        .units = (uint32_t)(header->record_bytes / MLS_PROMPT_UNIT),
        .parent = MLS_PROMPT_NONE,
        .end = (uint32_t)header->end,
        .kind = (uint8_t)header->kind,
    };
    uint32_t number = mls_prompt_index_find(&log->index, &header->key);
    if (number == MLS_PROMPT_NONE) {
        entry.parent = require_parent(log, header);
        number = mls_prompt_index_add(&log->index, &entry);
    } else {
        mls_prompt_entry *old = &log->index.entries[number];
        change_live(log, old, false /* subtract */);
        old->segment = entry.segment;
        old->place = entry.place;
        old->units = entry.units;
    }
    change_live(log, &entry, true /* add */);
    if ((header->flags & MLS_PROMPT_MOVED) == 0) {
        mls_prompt_index_touch(&log->index, number, log->clock);
    } else if ((header->flags & MLS_PROMPT_MOVED_PINNED) != 0) {
        log->index.entries[number].flags |= MLS_PROMPT_PINNED;
    }
}

/* Return whether an ancestor of entry `number` has no record, but its bytes may be in a
 * segment: one whose segment is gone was moved, or is lost. A parent that is not known
 * yet has no segment. Ends decrease along a chain; in a forged store the loop ends where
 * they do not. */
static bool lacks_ancestor(const mls_prompt_log *log, uint32_t number)
{
    uint32_t end = UINT32_MAX;
    while ((number = log->index.entries[number].parent) != MLS_PROMPT_NONE &&
           log->index.entries[number].end < end) {
        const mls_prompt_entry *entry = &log->index.entries[number];
        end = entry->end;
        if ((entry->flags & MLS_PROMPT_REMOVED) != 0 &&
            (entry->segment == 0 ||
             mls_prompt_segment_find(log, entry->segment) != NULL)) {
            return true;
        }
    }
    return false;
}

/* Apply a note to the entry of its key. A deletion concerns the record in its segment and
 * older copies in segments before it; a later one is of a key that was stored again. */
void mls_prompt_note_apply(mls_prompt_log *log, const mls_prompt_note *note)
{
    const uint32_t number = mls_prompt_index_find(&log->index, &note->key);
    if (number == MLS_PROMPT_NONE) {
        /* a record whose segment is gone was moved: its copy has the pin */
        log->lacks_pinned =
            log->lacks_pinned || (note->operation == MLS_PROMPT_PIN &&
                                  mls_prompt_segment_find(log, note->segment) != NULL);
        return;
    }
    mls_prompt_entry *entry = &log->index.entries[number];
    if (note->operation == MLS_PROMPT_PIN) {
        entry->flags |= MLS_PROMPT_PINNED;
        log->lacks_pinned =
            log->lacks_pinned || (log->index.removed > 0 && lacks_ancestor(log, number));
    } else if (note->operation == MLS_PROMPT_UNPIN) {
        entry->flags &= (uint8_t)~MLS_PROMPT_PINNED;
    } else if (note->operation == MLS_PROMPT_DELETE && entry->segment <= note->segment) {
        mls_prompt_forget_record(log, number);
    }
}

/* Apply all notes of a header, in their order. */
static void apply_notes(mls_prompt_log *log, const mls_prompt_header *header)
{
    for (size_t at = 0; at + MLS_PROMPT_NOTE <= header->meta_bytes;
         at += MLS_PROMPT_NOTE) {
        const mls_prompt_note note = mls_prompt_note_read(header->meta + at);
        mls_prompt_note_apply(log, &note);
    }
}

/* Enter a record, or apply notes, at the end of a segment. All records of one put get one
 * time, so that no parent is older than its children. */
void mls_prompt_enter_header(mls_prompt_log *log, mls_prompt_segment *segment,
                             uint64_t offset, const mls_prompt_header *header)
{
    if (header->put != log->put) {
        log->put = header->put > log->put ? header->put : log->put;
        log->clock += log->clock < UINT32_MAX;
        log->tail_segment = segment->number;
        log->tail_offset = offset;
    }
    if (header->type == MLS_PROMPT_NOTES) {
        apply_notes(log, header);
    } else {
        enter_record(log, segment, offset, header);
    }
    segment->bytes = offset + header->record_bytes;
    segment->last = offset;
    segment->last_crc = header->crc;
    log->unindexed++;
}

/* ---- the end of a segment ---- */

/* A scan of one segment from segment->bytes on, which advances. */
typedef struct scan {
    mls_prompt_log *log;
    mls_prompt_segment *segment;
    int fd;
    uint64_t length; /* of the file */
    uint64_t effort; /* see mls_prompt_effort */
} scan;

/* Read the header at the end of the segment, which the window does not have whole, to
 * `header_buffer`, `*bytes` and `*header` as mls_prompt_header_read does;
 * header->header_bytes is the length that the window shows, or 0. A long header that is
 * invalid reduces the effort. MLS_E_CHECKSUM too if the effort is used up. */
static mls_code read_long(scan *s, unsigned char *header_buffer, unsigned char **bytes,
                          mls_prompt_header *header, mls_status *st)
{
    const uint64_t at = s->segment->bytes;
    const size_t length = header->header_bytes;
    if (length > MLS_PROMPT_HEAD_READ && length > s->effort) {
        return MLS_E_CHECKSUM;
    }
    const mls_code code =
        mls_prompt_header_read(s->fd, at, s->length - at, s->log->crc, header_buffer,
                               MLS_PROMPT_HEAD_READ, bytes, header, st);
    s->effort -= code != MLS_OK && length <= s->effort ? length : 0;
    return code;
}

/* Enter the records whose headers are in `window`, the `bytes` bytes of the segment from
 * its end on. Sets `*done` at the first invalid header; otherwise the next window may
 * have more. MLS_E_IO, MLS_E_MEMORY, MLS_E_SIZE (too many records). */
static mls_code scan_window(scan *s, const unsigned char *window, size_t bytes,
                            bool *done, mls_status *st)
{
    mls_prompt_log *log = s->log;
    mls_prompt_segment *segment = s->segment;
    const uint64_t start = segment->bytes;
    unsigned char header_buffer[MLS_PROMPT_HEAD_READ], *bytes_of_header = header_buffer;
    mls_prompt_header header = {.header_bytes = 0};
    while (segment->bytes - start < bytes) {
        const size_t at = (size_t)(segment->bytes - start);
        const uint64_t left = s->length - segment->bytes;
        bytes_of_header = header_buffer;
        mls_code code =
            mls_prompt_header_parse(window + at, bytes - at, left, log->crc, &header, st);
        if (code == MLS_E_CAPACITY || bytes - at < MLS_PROMPT_FIXED) {
            if (at > 0) {
                return MLS_OK; /* the next window has more of it */
            }
            code = read_long(s, header_buffer, &bytes_of_header, &header, st);
        }
        if (code == MLS_E_CHECKSUM || code == MLS_E_FORMAT) {
            *done = true;
            return MLS_OK; /* the end, or a record that is being written */
        }
        if (code == MLS_OK) {
            code = mls_prompt_index_reserve(&log->index, 2, st);
        }
        if (code == MLS_OK) {
            mls_prompt_enter_header(log, segment, segment->bytes, &header);
        }
        if (bytes_of_header != header_buffer) {
            mls_free(bytes_of_header);
        }
        if (code != MLS_OK) {
            return code;
        }
    }
    return MLS_OK;
}

/* Move the end of the segment to the next valid header behind a damaged one, and clear
 * `*done`; without one, nothing changes. Headers before it may have been written during
 * the search, so it is repeated. */
static mls_code skip_damage(scan *s, bool *done, mls_status *st)
{
    uint64_t next = 0;
    mls_code code =
        mls_prompt_header_search(s->fd, s->segment->bytes + MLS_PROMPT_UNIT, s->length,
                                 s->log->crc, &s->effort, s->log->progress, &next, st);
    if (code == MLS_OK && next > 0) {
        code = mls_prompt_header_search(s->fd, s->segment->bytes, s->length, s->log->crc,
                                        &s->effort, s->log->progress, &next, st);
    }
    if (code == MLS_OK && next > 0) {
        s->segment->bytes = next;
        *done = false;
    }
    return code;
}

/* Enter the records from the end of the segment on. With `skips`, the scan continues
 * behind damaged headers. Without, it ends there: at the end of the newest segment that
 * is usually a record that is being written. The scan of a file that became
 * shorter ends at its new end, with MLS_OK. Errors as scan_window. */
static mls_code scan_records(scan *s, bool skips, mls_status *st)
{
    unsigned char window[WINDOW];
    bool done = false;
    mls_code code = MLS_OK;
    while (!done && code == MLS_OK && s->length > s->segment->bytes &&
           s->length - s->segment->bytes >= MLS_PROMPT_FIXED) {
        if (!mls_progress_report(s->log->progress, 0)) {
            return mls_fail(st, MLS_E_STOPPED, "stopped");
        }
        const uint64_t left = s->length - s->segment->bytes;
        const size_t bytes = left < WINDOW ? (size_t)left : WINDOW;
        code = mls_file_read_at(s->fd, window, bytes, s->segment->bytes, st);
        if (code == MLS_E_FORMAT) {
            return MLS_OK; /* the writer cut the file meanwhile */
        }
        if (code == MLS_OK) {
            code = scan_window(s, window, bytes, &done, st);
        }
        if (code == MLS_OK && done && skips) {
            code = skip_damage(s, &done, st);
        }
    }
    return code;
}

/* Enter the records that were appended to the newest segment; `skips` as in scan_records.
 * Sets `*changed` and returns MLS_OK if the segment was cut, replaced or removed: the log
 * must be read anew. Errors as scan_window. */
static mls_code scan_newest(mls_prompt_log *log, bool skips, bool *changed,
                            mls_status *st)
{
    mls_prompt_segment *segment = &log->segments[log->segment_count - 1];
    mls_prompt_file *file = NULL;
    struct stat info;
    mls_code code = mls_prompt_segment_hold(log, segment, &file, st);
    if (code != MLS_OK) {
        *changed = code == MLS_E_FORMAT || st->os_error == ENOENT;
        return *changed ? MLS_OK : code;
    }
    if (fstat(file->fd, &info) != 0) {
        code = mls_fail_os(st, errno, "cannot examine a segment");
    } else if (info.st_nlink == 0 || (uint64_t)info.st_size < segment->bytes) {
        *changed = true;
    } else if ((uint64_t)info.st_size > segment->bytes) {
        *changed = !mls_prompt_last_is_same(segment, file->fd);
        if (!*changed) {
            const uint64_t most = (uint64_t)UINT32_MAX * MLS_PROMPT_UNIT; /* of places */
            const uint64_t length =
                (uint64_t)info.st_size < most ? (uint64_t)info.st_size : most;
            scan s = {log, segment, file->fd, length, mls_prompt_effort(length)};
            code = scan_records(&s, skips, st);
        }
    }
    mls_prompt_file_release(file);
    return code;
}

/* ---- the folder ---- */

/* Add segment `number`, which becomes the log's highest, and enter its records. A
 * damaged or missing one is left out, and the result is MLS_OK. MLS_E_IO, MLS_E_MEMORY,
 * MLS_E_SIZE. */
static mls_code scan_new_segment(mls_prompt_log *log, uint32_t number, mls_status *st)
{
    const mls_prompt_segment segment = {.number = number, .bytes = MLS_PROMPT_FILE_HEAD};
    mls_prompt_file *file = NULL;
    bool changed = false;
    mls_code code = mls_prompt_segment_add(log, &segment, st);
    if (code != MLS_OK) {
        return code;
    }
    code =
        mls_prompt_segment_hold(log, &log->segments[log->segment_count - 1], &file, st);
    mls_prompt_file_release(file);
    if (code == MLS_OK) {
        log->highest = number;
        return scan_newest(log, true /* skip damage */, &changed, st);
    }
    mls_prompt_segment_forget(log, number);
    const bool is_left_out =
        code == MLS_E_FORMAT || (code == MLS_E_IO && st->os_error == ENOENT);
    return is_left_out ? MLS_OK : code;
}

/* Enter the records of all segments that the list lacks. The newest listed segment is
 * scanned to its end first: a segment is complete when its successor exists. Sets
 * `is_stale` if a listed segment changed or is gone. */
static mls_code scan_folder(mls_prompt_log *log, mls_status *st)
{
    uint32_t *numbers = NULL;
    size_t count = 0;
    bool changed = false;
    mls_code code =
        mls_prompt_segments_list(log, false /* delete nothing */, &numbers, &count, st);
    if (code == MLS_OK && log->segment_count > 0) {
        code = scan_newest(log, true /* skip damage */, &changed, st);
    }
    const uint32_t newest =
        log->segment_count > 0 ? log->segments[log->segment_count - 1].number : 0;
    size_t missing = log->segment_count;
    for (size_t i = 0; code == MLS_OK && i < count; i++) {
        if (numbers[i] > newest) {
            code = scan_new_segment(log, numbers[i], st);
        } else {
            missing -= mls_prompt_segment_find(log, numbers[i]) != NULL;
        }
    }
    mls_free(numbers);
    changed = changed || missing > 0; /* open files would keep the space of the others */
    log->is_stale = log->is_stale || changed;
    return code;
}

mls_code mls_prompt_scan_behind_damage(mls_prompt_log *log, mls_status *st)
{
    bool changed = false;
    return log->segment_count > 0 ? scan_newest(log, true /* skip damage */, &changed, st)
                                  : MLS_OK;
}

/* Read the whole log anew. Without a usable index file, all segments are scanned from
 * their start; then records that were evicted come back if their bytes are there, such as
 * those that another process has pinned since. A pin of a record that is gone
 * costs this second reading, and the times of use. */
mls_code mls_prompt_load(mls_prompt_log *log, mls_status *st)
{
    bool has_index = !log->lacks_pinned;
    mls_code code;
    for (;;) {
        mls_prompt_log_clear(log);
        log->is_stale = log->lacks_pinned = false;
        code = mls_prompt_require_regular(log, MLS_PROMPT_INDEX, st);
        if (code != MLS_OK) {
            break;
        }
        has_index = has_index && mls_prompt_index_load(log);
        code = scan_folder(log, st);
        if (code != MLS_OK || !has_index || !log->lacks_pinned) {
            break;
        }
        has_index = false; /* once more, without the index file */
    }
    log->lacks_pinned = false;
    if (code != MLS_OK) {
        mls_prompt_log_clear(log);
        log->is_stale = true;
    }
    return code;
}

/* Return the number of the newest segment, which the writer stores in `store` as a hint;
 * 0 if it cannot be read. */
static uint32_t read_hint(const mls_prompt_log *log)
{
    unsigned char bytes[4];
    mls_status ignored;
    const mls_code code =
        mls_file_read_at(log->store, bytes, sizeof bytes, MLS_PROMPT_HINT, &ignored);
    return code == MLS_OK ? mls_load_le32(bytes) : 0;
}

/* Read the records that other processes appended. The hint saves listing the folder:
 * usually only the newest segment has grown. */
mls_code mls_prompt_follow(mls_prompt_log *log, mls_status *st)
{
    bool changed = log->is_stale;
    mls_code code = MLS_OK;
    if (log->is_writing) {
        return MLS_OK;
    }
    if (!changed && read_hint(log) > log->highest) {
        code = scan_folder(log, st);
        changed = log->is_stale;
        log->is_stale = changed || code != MLS_OK; /* what it skipped is not known */
    } else if (!changed && log->segment_count > 0) {
        code = scan_newest(log, false /* end at damage */, &changed, st);
    }
    changed = changed || (code == MLS_OK && log->lacks_pinned);
    return changed ? mls_prompt_load(log, st) : code;
}
