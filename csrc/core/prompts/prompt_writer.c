/* prompt_writer: locks a store for one writer, and repairs what a killed writer or a
 * power failure left. */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    UNINDEXED = 256,   /* records that the index file may lack when a log is closed */
    BUFFER = 256 << 10 /* bytes of the buffer that verifies payloads */
};

/* Make the records of another writer in the newest segment `fd` durable: it may have been
 * killed before its sync, and a put of the same records returns that they are stored.
 * Does nothing if this process synced them. Returns 0 or errno. */
static int sync_newest(mls_prompt_log *log, const mls_prompt_segment *newest, int fd)
{
    if (newest->number == log->synced_segment && newest->bytes == log->synced_bytes) {
        return 0;
    }
    int reason = mls_file_sync(fd);
    reason = reason == 0 ? mls_folder_sync(log->folder) : reason;
    if (reason == 0) {
        log->synced_segment = newest->number;
        log->synced_bytes = newest->bytes;
    }
    return reason;
}

/* Sync the newest segment of the list, without the lock of the writer: one that appends
 * to another segment has synced this one, and so has one that compacted and deleted it.
 */
mls_code mls_prompt_sync(mls_prompt_log *log, mls_status *st)
{
    mls_prompt_file *file = NULL;
    mls_prompt_segment newest = {.number = 0};
    mls_code code = MLS_OK;
    mls_prompt_lock_state(log);
    if (log->segment_count > 0) {
        newest = log->segments[log->segment_count - 1];
        code = mls_prompt_segment_hold(log, &log->segments[log->segment_count - 1], &file,
                                       st);
        code = code == MLS_E_IO && st->os_error == ENOENT ? MLS_OK : code;
    }
    const bool is_synced =
        newest.number == log->synced_segment && newest.bytes == log->synced_bytes;
    mls_prompt_unlock_state(log);
    if (file != NULL && !is_synced) {
        int reason = mls_file_sync(file->fd);
        reason = reason == 0 ? mls_folder_sync(log->folder) : reason;
        code = reason == 0
                   ? MLS_OK
                   : mls_fail_os(st, reason, "cannot make stored prompts durable");
    }
    if (file != NULL && code == MLS_OK) {
        mls_prompt_lock_state(log);
        log->synced_segment = newest.number;
        log->synced_bytes = newest.bytes;
        mls_prompt_unlock_state(log);
    }
    mls_prompt_file_release(file);
    return code;
}

/* Cut the bytes after the last complete record off the newest segment, which a killed
 * writer left, and make its records durable. Does nothing without a segment. MLS_E_IO. */
static mls_code cut_newest(mls_prompt_log *log, mls_status *st)
{
    char name[MLS_PROMPT_NAME];
    struct stat info;
    if (log->segment_count == 0) {
        return MLS_OK;
    }
    const mls_prompt_segment *newest = &log->segments[log->segment_count - 1];
    mls_prompt_segment_name(name, newest->number);
    const int fd =
        openat(log->folder, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    int reason = fd < 0 || fstat(fd, &info) != 0 ? errno : 0;
    if (reason == 0 && S_ISREG(info.st_mode) && (uint64_t)info.st_size > newest->bytes) {
        if (!mls_prompt_is_unfinished(fd, newest->bytes)) {
            (void)mls_prompt_damage_add(&log->removed, newest->number, newest->bytes,
                                        NULL, st); /* a report is not worth a failure */
        }
        reason = ftruncate(fd, (off_t)newest->bytes) != 0 ? errno : 0;
    }
    reason = reason == 0 ? sync_newest(log, newest, fd) : reason;
    if (fd >= 0) {
        (void)close(fd);
    }
    return reason == 0 ? MLS_OK : mls_fail_os(st, reason, "cannot repair %s", name);
}

/* Compare the record of an entry, in the segment `fd` whose records end at `end`, with
 * its checksums. `buffer` has BUFFER bytes. Errors as mls_prompt_header_read and
 * mls_prompt_payload_check. */
static mls_code check_record(const mls_prompt_log *log, const mls_prompt_entry *entry,
                             int fd, uint64_t end, unsigned char *buffer, mls_status *st)
{
    const uint64_t offset = mls_prompt_entry_offset(entry);
    unsigned char header_buffer[MLS_PROMPT_HEAD_READ], *bytes = header_buffer;
    mls_prompt_header header;
    mls_code code =
        mls_prompt_header_read(fd, offset, end - offset, log->crc, header_buffer,
                               MLS_PROMPT_HEAD_READ, &bytes, &header, st);
    if (code == MLS_OK) {
        code = mls_prompt_payload_check(fd, offset, &header, log->crc, buffer, BUFFER,
                                        log->progress, st);
    }
    if (bytes != header_buffer) {
        mls_free(bytes);
    }
    return code;
}

/* Return whether the last put wrote the record of an entry. The records of one commit are
 * in one segment: they are those of `tail_segment` from `tail_offset` on. */
static bool is_of_last_put(const mls_prompt_log *log, const mls_prompt_entry *entry)
{
    return (entry->flags & MLS_PROMPT_REMOVED) == 0 &&
           entry->segment == log->tail_segment &&
           mls_prompt_entry_offset(entry) >= log->tail_offset;
}

/* Notes that grow; the caller frees `notes`. */
typedef struct note_list {
    mls_prompt_note *notes;
    size_t count, room;
} note_list;

/* Append a note that deletes the record of an entry, and its damage, with the reason
 * `text`. MLS_E_MEMORY. */
static mls_code add_deletion(mls_prompt_log *log, note_list *list,
                             const mls_prompt_entry *entry, const char *text,
                             mls_status *st)
{
    mls_prompt_note *notes =
        mls_grow(list->notes, list->count, &list->room, sizeof *notes);
    if (notes == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to note damage");
    }
    list->notes = notes;
    notes[list->count++] = (mls_prompt_note){
        .key = entry->key, .operation = MLS_PROMPT_DELETE, .segment = entry->segment};
    return mls_prompt_damage_add_record(&log->removed, entry, text, st);
}

/* Append a deletion to `out` for each damaged record of the last put. Does nothing if no
 * put is newer than the index file: it is written after the records are durable. An error
 * of the system proves no damage. MLS_E_MEMORY, MLS_E_IO, MLS_E_FORMAT, MLS_E_STOPPED. */
static mls_code list_damage_of_last_put(mls_prompt_log *log, note_list *out,
                                        mls_status *st)
{
    mls_prompt_segment *segment = mls_prompt_segment_find(log, log->tail_segment);
    mls_prompt_file *file = NULL;
    if (segment == NULL) {
        return MLS_OK;
    }
    unsigned char *buffer = mls_alloc(BUFFER, 1);
    mls_code code = buffer == NULL ? mls_fail(st, MLS_E_MEMORY, "no memory for a buffer")
                                   : mls_prompt_segment_hold(log, segment, &file, st);
    for (uint32_t i = 0; code == MLS_OK && i < log->index.count; i++) {
        const mls_prompt_entry *entry = &log->index.entries[i];
        const mls_code result =
            is_of_last_put(log, entry)
                ? check_record(log, entry, file->fd, segment->bytes, buffer, st)
                : MLS_OK;
        if (result == MLS_E_CHECKSUM || result == MLS_E_FORMAT) {
            code = add_deletion(log, out, entry, st->text, st);
        } else if (result == MLS_E_STOPPED) {
            code = result;
        }
    }
    mls_prompt_file_release(file);
    mls_free(buffer);
    return code;
}

/* Remove the damaged records of the last put, so that a later put writes them again:
 * after a power failure it may have headers without their payload. All earlier puts were
 * synced. Done once for an open log. */
static mls_code check_last_put(mls_prompt_log *log, mls_status *st)
{
    note_list damage = {.notes = NULL};
    if (log->is_checked) {
        return MLS_OK;
    }
    mls_prompt_lock_state(log);
    mls_code code = list_damage_of_last_put(log, &damage, st);
    mls_prompt_unlock_state(log);
    if (code == MLS_OK && damage.count > 0) {
        code = mls_prompt_write_notes(log, damage.notes, damage.count, st);
    }
    mls_free(damage.notes);
    log->is_checked = code == MLS_OK;
    return code;
}

/* Forget the segments that another process deleted, and the records that this log still
 * places there: they were evicted. `numbers`: the `count` segments in the folder, sorted.
 */
static void forget_deleted(mls_prompt_log *log, const uint32_t *numbers, size_t count)
{
    const size_t before = log->segment_count;
    for (size_t i = before; i > 0; i--) {
        const uint32_t number = log->segments[i - 1].number;
        while (count > 0 && numbers[count - 1] > number) {
            count--;
        }
        if (count == 0 || numbers[count - 1] != number) {
            mls_prompt_segment_forget(log, number);
        }
    }
    for (uint32_t i = 0; before > log->segment_count && i < log->index.count; i++) {
        if (mls_prompt_segment_find(log, log->index.entries[i].segment) == NULL) {
            mls_prompt_forget_record(log, i);
        }
    }
}

/* Bring the list and the index up to date, delete stray files, and cut the newest
 * segment. The folder is listed, because another process may have created a segment, and
 * been killed before it stored the hint for readers. */
static mls_code prepare_writing(mls_prompt_log *log, mls_status *st)
{
    uint32_t *numbers = NULL;
    size_t count = 0;
    mls_code code = mls_prompt_follow(log, st);
    if (code == MLS_OK) {
        code = mls_prompt_segments_list(log, true /* delete temporaries */, &numbers,
                                        &count, st);
    }
    if (code == MLS_OK && count > 0 && numbers[count - 1] > log->highest) {
        code = mls_prompt_load(log, st);
    }
    for (size_t i = 0; code == MLS_OK && i < count && numbers[i] < log->highest; i++) {
        if (mls_prompt_segment_find(log, numbers[i]) == NULL) {
            mls_prompt_segment_remove_stray(log, numbers[i]);
        }
    }
    if (code == MLS_OK) {
        forget_deleted(log, numbers, count);
    }
    mls_free(numbers);
    if (code == MLS_OK) {
        code = mls_prompt_scan_behind_damage(log, st);
    }
    return code == MLS_OK ? cut_newest(log, st) : code;
}

/* Try to lock the file `store`. Returns 0, or errno (EWOULDBLOCK: another process has the
 * lock). File systems without locks have one writer only if the user takes care of it. */
static int lock_store(mls_prompt_log *log)
{
    if (flock(log->store, LOCK_EX | LOCK_NB) == 0) {
        log->is_locked = true;
        return 0;
    }
    return errno == ENOLCK || errno == ENOTSUP || errno == EINVAL || errno == ENOSYS
               ? 0
               : errno;
}

/* Try to become the writer. Lock threads of this process out first, then other processes,
 * and then repair the log. */
mls_code mls_prompt_lock(mls_prompt_log *log, bool *busy, mls_status *st)
{
    mls_prompt_lock_state(log); /* also in the child of a fork */
    mls_prompt_unlock_state(log);
    *busy = false;
    if (log->refused != 0) {
        return mls_fail_os(st, log->refused, "the prompt store can only be read");
    }
    if (pthread_mutex_trylock(&log->writer) != 0) {
        *busy = true;
        return MLS_OK;
    }
    const int reason = lock_store(log);
    if (reason != 0) {
        pthread_mutex_unlock(&log->writer);
        *busy = reason == EWOULDBLOCK || reason == EINTR;
        return *busy ? MLS_OK : mls_fail_os(st, reason, "cannot lock the prompt store");
    }
    mls_prompt_lock_state(log);
    log->removed.count = 0;
    mls_code code = prepare_writing(log, st);
    if (code == MLS_OK && log->has_damaged_head) {
        code = mls_prompt_damage_add(&log->removed, 0, 0, NULL, st);
        code = code == MLS_OK ? mls_prompt_store_mend(log, st) : code;
    }
    log->is_writing = true;
    mls_prompt_unlock_state(log);
    if (code == MLS_OK) {
        code = check_last_put(log, st);
    }
    if (code != MLS_OK) {
        mls_prompt_unlock(log);
    }
    return code;
}

/* End the writing. Threads of this process may follow the newest segment again. */
void mls_prompt_unlock(mls_prompt_log *log)
{
    mls_prompt_lock_state(log);
    log->is_writing = false;
    mls_prompt_unlock_state(log);
    if (log->is_locked) {
        log->is_locked = false;
        (void)flock(log->store, LOCK_UN);
    }
    pthread_mutex_unlock(&log->writer);
}

/* Save the index file if it lacks many records. Needs the lock of the writer, and gives
 * up if another has it. */
void mls_prompt_log_save_index(mls_prompt_log *log)
{
    bool busy = false;
    mls_status ignored;
    mls_prompt_lock_state(log);
    const bool is_worth_it = log->unindexed >= UNINDEXED;
    mls_prompt_unlock_state(log);
    if (is_worth_it && mls_prompt_lock(log, &busy, &ignored) == MLS_OK && !busy) {
        mls_prompt_lock_state(log);
        (void)mls_prompt_index_save(log, &ignored);
        mls_prompt_unlock_state(log);
        mls_prompt_unlock(log);
    }
}
