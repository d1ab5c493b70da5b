/* prompt_append: writes records, copies and notes to the end of a segment: payloads, then
 * headers, then a sync.
 *
 * The payloads of all records are written first, each behind the place of its header, and
 * then the headers in order. Until then readers find zeros, or the end of the file, in
 * place of the first header. One sync makes all of it durable.
 */
#include "prompts/prompt_log_state.h"

#include "array/copy/pack_range.h"
#include "base/memory.h"
#include "base/size.h"
#include "io/file.h"
#include "prompts/payload_runs.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
    STEP = 1 << 20, /* bytes that are checksummed and then written while in the cache */
    VECTORS = 64,   /* ranges of memory that one system call writes */
    PACK = 64 << 10 /* bytes of the buffer of push_packed */
};

/* Bytes on their way to the file. */
typedef struct payload_writer {
    mls_prompt_append *append;
    uint64_t offset; /* of the collected bytes in the file */
    uint32_t crc;    /* of the part */
    struct iovec vectors[VECTORS];
    int count;
    size_t bytes; /* collected */
} payload_writer;

static const unsigned char zeros[MLS_PROMPT_UNIT];

/* ---- begin ---- */

/* Open the segment for writing. It was created by this program, but may have been
 * replaced: no link is followed, and a FIFO does not block. MLS_E_IO. */
static mls_code open_segment(mls_prompt_append *append, mls_status *st)
{
    char name[MLS_PROMPT_NAME];
    mls_prompt_segment_name(name, append->segment);
    append->fd =
        openat(append->log->folder, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    return append->fd >= 0 ? MLS_OK : mls_fail_os(st, errno, "cannot append to %s", name);
}

/* Begin to append, to the newest segment or to a new one. A segment that has no record
 * yet is used for any number of bytes. */
mls_code mls_prompt_append_begin(mls_prompt_log *log, uint64_t bytes, uint64_t limit,
                                 const mls_progress *progress, mls_prompt_append *out,
                                 mls_status *st)
{
    mls_code code = MLS_OK;
    *out = (mls_prompt_append){.log = log, .fd = -1, .progress = progress};
    mls_prompt_lock_state(log);
    const mls_prompt_segment *newest =
        log->segment_count > 0 ? &log->segments[log->segment_count - 1] : NULL;
    if (newest == NULL ||
        (newest->bytes > MLS_PROMPT_FILE_HEAD && newest->bytes + bytes > limit)) {
        code = mls_prompt_segment_create(log, st);
    }
    if (code == MLS_OK) {
        newest = &log->segments[log->segment_count - 1];
        out->segment = newest->number;
        out->start = out->end = out->started = newest->bytes;
        code = open_segment(out, st);
    }
    mls_prompt_unlock_state(log);
    return code;
}

/* ---- payloads ---- */

/* Write the collected bytes, and report them as progress. After a short or failed call,
 * each vector is written again. MLS_E_IO; MLS_E_STOPPED. */
static mls_code flush_payload(payload_writer *w, mls_status *st)
{
    mls_prompt_append *append = w->append;
    if (w->count == 0) {
        return MLS_OK;
    }
    const bool is_whole =
        pwritev(append->fd, w->vectors, w->count, (off_t)w->offset) == (ssize_t)w->bytes;
    for (int i = 0; i < w->count; i++) {
        const struct iovec *vector = &w->vectors[i];
        const mls_code code = is_whole
                                  ? MLS_OK
                                  : mls_file_write_at(append->fd, vector->iov_base,
                                                      vector->iov_len, w->offset, st);
        if (code != MLS_OK) {
            return code;
        }
        w->offset += vector->iov_len;
    }
    const size_t bytes = w->bytes;
    w->count = 0;
    w->bytes = 0;
    mls_file_start_writeback(append->fd, &append->started, w->offset);
    return mls_progress_report(append->progress, bytes)
               ? MLS_OK
               : mls_fail(st, MLS_E_STOPPED, "stopped");
}

/* Add `bytes` bytes at `data` to the checksum and collect them: they must stay in memory
 * until flush_payload. Errors as flush_payload, which is called when enough is collected.
 */
static mls_code collect_payload(payload_writer *w, const unsigned char *data,
                                size_t bytes, mls_status *st)
{
    while (bytes > 0) {
        const size_t step = mls_size_least(bytes, STEP - w->bytes);
        w->crc = w->append->log->crc->update(w->crc, data, step);
        w->vectors[w->count++] =
            (struct iovec){.iov_base = (void *)(uintptr_t)data, .iov_len = step};
        w->bytes += step;
        data += step;
        bytes -= step;
        if (w->bytes == STEP || w->count == VECTORS) {
            const mls_code code = flush_payload(w, st);
            if (code != MLS_OK) {
                return code;
            }
        }
    }
    return MLS_OK;
}

/* push_part for a view with short runs, or in the other byte order: `bytes` bytes are
 * packed into a buffer and written from there. MLS_E_MEMORY, and the errors of flush. */
static mls_code push_packed(payload_writer *w, const mls_tensor *part, size_t bytes,
                            mls_status *st)
{
    const size_t item = mls_tensor_item_bytes(part);
    const size_t step = PACK / item;
    mls_code code = flush_payload(w, st);
    unsigned char *buffer = mls_alloc(PACK, 1);
    if (buffer == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to pack an array");
    }
    for (size_t at = 0; code == MLS_OK && at < bytes / item; at += step) {
        const size_t count = mls_size_least(step, bytes / item - at);
        mls_pack_range(w->append->log->kernels, part, part->dtype, at, count, buffer);
        code = collect_payload(w, buffer, count * item, st);
        if (code == MLS_OK) {
            code = flush_payload(w, st);
        }
    }
    mls_free(buffer);
    return code;
}

/* Write the bytes of a part in C order, and set `*out` to its length and checksum.
 * MLS_E_SIZE: it is larger than memory; MLS_E_MEMORY; the errors of flush. */
static mls_code push_part(payload_writer *w, const mls_tensor *view, mls_prompt_part *out,
                          mls_status *st)
{
    size_t bytes = 0;
    mls_payload_runs runs;
    mls_code code = MLS_OK;
    if (!mls_tensor_bytes(view, &bytes)) {
        return mls_fail(st, MLS_E_SIZE, "a part is larger than memory");
    }
    w->crc = 0;
    mls_payload_runs_init(&runs, view);
    if (bytes > 0 && !mls_payload_runs_are_long(&runs)) {
        code = push_packed(w, view, bytes, st);
    } else {
        for (unsigned char *run;
             code == MLS_OK && (run = mls_payload_runs_next(&runs)) != NULL;) {
            code = collect_payload(w, run, runs.bytes, st);
        }
    }
    *out = (mls_prompt_part){.bytes = bytes, .crc = w->crc};
    return code;
}

/* Set `*out` to a view of a part, which is fetched from the append's source if it has no
 * data. A fetched part replaces the one before, so that one is written first.
 * MLS_E_STOPPED: the source refused; the errors of flush. */
static mls_code fetch_part(payload_writer *w, const mls_tensor *part, mls_tensor *out,
                           mls_status *st)
{
    const mls_prompt_source *source = w->append->source;
    size_t bytes = 0;
    *out = *part;
    if (source == NULL || part->data != NULL || !mls_tensor_bytes(part, &bytes) ||
        bytes == 0) { /* an empty part needs no data */
        return MLS_OK;
    }
    const mls_code code = flush_payload(w, st);
    return code == MLS_OK && !source->fetch(source->context, part, out)
               ? mls_fail(st, MLS_E_STOPPED, "stopped")
               : code;
}

/* Write all collected bytes, and zeros behind them up to file offset `end`, the end of
 * the record. Errors as flush_payload. */
static mls_code push_end(payload_writer *w, uint64_t end, mls_status *st)
{
    const uint64_t at = w->offset + w->bytes;
    const mls_code code = collect_payload(w, zeros, (size_t)(end - at), st);
    return code == MLS_OK ? flush_payload(w, st) : code;
}

/* ---- headers ---- */

/* Provide room for one more header of `bytes` bytes. MLS_E_MEMORY; `append` stays
 * valid. */
static mls_code reserve_header(mls_prompt_append *append, size_t bytes, mls_status *st)
{
    if (append->count == append->room) {
        const size_t room = 2 * append->room + 8;
        mls_prompt_header *headers =
            mls_realloc(append->headers, room, sizeof *append->headers);
        append->headers = headers != NULL ? headers : append->headers;
        uint64_t *offsets = mls_realloc(append->offsets, room, sizeof *append->offsets);
        append->offsets = offsets != NULL ? offsets : append->offsets;
        if (headers == NULL || offsets == NULL) {
            return mls_fail(st, MLS_E_MEMORY, "no memory for %zu records", room);
        }
        append->room = room;
    }
    const size_t needed = append->byte_count + bytes; /* of headers in memory */
    if (needed > append->byte_room) {
        const size_t room = mls_size_most(needed, 2 * append->byte_room);
        unsigned char *more = mls_realloc(append->bytes, room, 1);
        if (more == NULL) {
            return mls_fail(st, MLS_E_MEMORY, "no memory for headers of %zu bytes", room);
        }
        append->bytes = more;
        append->byte_room = room;
    }
    return MLS_OK;
}

/* Count the record at append->end, whose header is at the end of append->bytes already,
 * among the records of `append`, and move both ends behind it. */
static void note_header(mls_prompt_append *append, const mls_prompt_header *header)
{
    append->headers[append->count] = *header;
    append->offsets[append->count++] = append->end;
    append->byte_count += header->header_bytes;
    append->end += header->record_bytes;
}

/* Write the payload of a record to the segment. Its header is written to memory, behind
 * the other headers, when its parts have checksums. */
mls_code mls_prompt_append_record(mls_prompt_append *append, mls_prompt_header *header,
                                  const uint32_t *tokens, const mls_tensor *parts,
                                  mls_status *st)
{
    mls_prompt_part *stored = mls_alloc(header->part_count, sizeof *stored);
    if (stored == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %zu parts", header->part_count);
    }
    mls_code code = reserve_header(append, header->header_bytes, st);
    payload_writer w = {.append = append, .offset = append->end + header->header_bytes};
    for (size_t i = 0; code == MLS_OK && i < header->part_count; i++) {
        mls_tensor part;
        code = fetch_part(&w, &parts[i], &part, st);
        code = code == MLS_OK ? push_part(&w, &part, &stored[i], st) : code;
    }
    if (code == MLS_OK) {
        code = push_end(&w, append->end + header->record_bytes, st);
    }
    if (code == MLS_OK) {
        header->put = append->log->put + 1;
        mls_prompt_header_write(header, tokens, stored, append->log->crc,
                                append->bytes + append->byte_count);
        note_header(append, header);
    }
    mls_free(stored);
    return code;
}

/* Append notes. A header has at most MLS_PROMPT_MAX_META bytes of notes, so several may
 * be needed. */
mls_code mls_prompt_append_notes(mls_prompt_append *append, const mls_prompt_note *notes,
                                 size_t count, mls_status *st)
{
    mls_code code = MLS_OK;
    const size_t most = MLS_PROMPT_MAX_META / MLS_PROMPT_NOTE;
    unsigned char *meta = mls_alloc(mls_size_least(count, most), MLS_PROMPT_NOTE);
    if (meta == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %zu notes", count);
    }
    for (size_t at = 0; code == MLS_OK && at < count; at += most) {
        const size_t batch_count = mls_size_least(most, count - at);
        for (size_t i = 0; i < batch_count; i++) {
            mls_prompt_note_write(meta + MLS_PROMPT_NOTE * i, &notes[at + i]);
        }
        mls_prompt_header header = {.type = MLS_PROMPT_NOTES,
                                    .meta = meta,
                                    .meta_bytes = batch_count * MLS_PROMPT_NOTE};
        code = mls_prompt_header_sizes(&header, 0, st);
        if (code == MLS_OK) {
            code = mls_prompt_append_record(append, &header, NULL, NULL, st);
        }
    }
    mls_free(meta);
    return code;
}

/* ---- copies of stored records ---- */

/* Copy `bytes` bytes of the file `fd` at offset `from` to offset `to` of the segment.
 * After an error, part of them may be written.
 * MLS_E_FORMAT: `fd` ends earlier; MLS_E_STOPPED: the progress callback wants to stop;
 * MLS_E_IO, MLS_E_MEMORY. */
static mls_code copy_payload(mls_prompt_append *append, int fd, uint64_t from,
                             uint64_t to, uint64_t bytes, mls_status *st)
{
    mls_code code = MLS_OK;
    unsigned char *buffer = mls_alloc(STEP, 1);
    if (buffer == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to copy a record");
    }
    for (uint64_t at = 0; code == MLS_OK && at < bytes; at += STEP) {
        const size_t step = bytes - at < STEP ? (size_t)(bytes - at) : STEP;
        code = mls_file_read_at(fd, buffer, step, from + at, st);
        if (code == MLS_OK) {
            code = mls_file_write_at(append->fd, buffer, step, to + at, st);
        }
        if (code == MLS_OK && !mls_progress_report(append->progress, step)) {
            code = mls_fail(st, MLS_E_STOPPED, "stopped");
        }
    }
    mls_free(buffer);
    return code;
}

/* Set `*is_good` to whether the payload of the copied record at append->end has its
 * checksums; if not, the result is MLS_OK too. The copy is verified, and not the
 * original, so the bytes cannot change between check and copy. MLS_E_MEMORY, MLS_E_IO,
 * MLS_E_FORMAT: it cannot be read. */
static mls_code check_copy(mls_prompt_append *append, const mls_prompt_header *header,
                           bool *is_good, mls_status *st)
{
    unsigned char *buffer = mls_alloc(STEP, 1);
    if (buffer == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to verify a record");
    }
    const mls_code code = mls_prompt_payload_check(
        append->fd, append->end, header, append->log->crc, buffer, STEP, NULL, st);
    *is_good = code == MLS_OK;
    mls_free(buffer);
    return code == MLS_E_CHECKSUM ? MLS_OK : code;
}

/* Append a copy of a stored record. A skipped record does not move append->end, so the
 * next one overwrites the copy. */
mls_code mls_prompt_append_copy(mls_prompt_append *append, int fd, uint64_t offset,
                                const mls_prompt_header *header,
                                const unsigned char *bytes, bool *is_good, mls_status *st)
{
    mls_prompt_header copy = *header;
    const size_t head = header->header_bytes;
    mls_code code = reserve_header(append, head, st);
    *is_good = false;
    if (code == MLS_OK) {
        code = copy_payload(append, fd, offset + head, append->end + head,
                            header->record_bytes - head, st);
    }
    if (code == MLS_E_FORMAT) {
        return MLS_OK; /* the old segment was cut: the record is damaged */
    }
    if (code == MLS_OK) {
        code = check_copy(append, header, is_good, st);
    }
    if (code == MLS_OK && *is_good) {
        copy.put = append->log->put + 1;
        mls_prompt_header_copy(&copy, bytes, append->log->crc,
                               append->bytes + append->byte_count);
        note_header(append, &copy);
    }
    return code;
}

/* ---- end ---- */

/* Close the segment and free the memory of `append`, which may not be used any more. */
static void append_free(mls_prompt_append *append)
{
    if (append->fd >= 0) {
        (void)close(append->fd);
    }
    mls_free(append->headers);
    mls_free(append->offsets);
    mls_free(append->bytes);
    *append = (mls_prompt_append){.fd = -1};
}

/* Cut the new bytes off. If the file cannot be cut, the next writer does it. */
void mls_prompt_append_abort(mls_prompt_append *append)
{
    if (append->fd >= 0) {
        (void)ftruncate(append->fd, (off_t)append->start);
    }
    append_free(append);
}

/* Make the bytes of a file durable, without its times. Returns 0 or errno. */
static int sync_data(int fd)
{
#if defined(__linux__)
    int result;
    do {
        result = fdatasync(fd);
    } while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
#else
    return mls_file_sync(fd);
#endif
}

/* Enter all records into the log; `state` is held. The notes need the bytes of their
 * header. */
static void enter_all(mls_prompt_append *append)
{
    mls_prompt_log *log = append->log;
    const unsigned char *bytes = append->bytes;
    mls_prompt_segment *segment = mls_prompt_segment_find(log, append->segment);
    for (size_t i = 0; i < append->count; i++) {
        append->headers[i].meta = bytes + MLS_PROMPT_FIXED;
        mls_prompt_enter_header(log, segment, append->offsets[i], &append->headers[i]);
        bytes += append->headers[i].header_bytes;
    }
}

/* Write the headers, make all durable, and enter the records. Room in the index is
 * reserved first (a record and its parent): nothing can fail after the sync. Without
 * records, only release `append`. */
mls_code mls_prompt_append_commit(mls_prompt_append *append, mls_status *st)
{
    mls_prompt_log *log = append->log;
    mls_prompt_lock_state(log);
    mls_code code = mls_prompt_index_reserve(&log->index, 2 * append->count, st);
    mls_prompt_unlock_state(log);
    const unsigned char *bytes = append->bytes;
    for (size_t i = 0; code == MLS_OK && i < append->count; i++) {
        const size_t length = append->headers[i].header_bytes;
        code = mls_file_write_at(append->fd, bytes, length, append->offsets[i], st);
        bytes += length;
    }
    if (code == MLS_OK && append->count > 0) {
        const int reason = sync_data(append->fd);
        code = reason == 0 ? MLS_OK
                           : mls_fail_os(st, reason, "cannot sync a segment to disk");
    }
    if (code != MLS_OK || append->count == 0) {
        mls_prompt_append_abort(append);
        return code;
    }
    mls_prompt_lock_state(log);
    enter_all(append);
    log->synced_segment = append->segment;
    log->synced_bytes = append->end;
    mls_prompt_unlock_state(log);
    append_free(append);
    return MLS_OK;
}
