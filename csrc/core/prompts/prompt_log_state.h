/* prompt_log_state: an open log, and the functions that its files share.
 *
 * `state` is held for short times: while the index and the list of segments are used. The
 * writer holds `writer` and the lock of the file `store` in addition; `is_writing` is
 * then set, and other threads of the process do not follow the end of the newest segment.
 * Unless its comment differs, a function here needs `state`.
 */
#ifndef MLS_PROMPT_LOG_STATE_H
#define MLS_PROMPT_LOG_STATE_H

#include "prompts/prompt_index.h"
#include "prompts/prompt_log.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#define MLS_PROMPT_STORE   "store"
#define MLS_PROMPT_INDEX   "index"
#define MLS_PROMPT_USED    "used"
#define MLS_PROMPT_SEGMENT "segment-%08u"

enum {
    MLS_PROMPT_NAME = 32, /* room for the name of a segment */
    MLS_PROMPT_USED_ROW = 20,
    MLS_PROMPT_USED_MOST = 1 << 18, /* readers append no more than so many bytes */
    MLS_PROMPT_HINT = 40,           /* place in `store` of the newest segment's number */
    MLS_PROMPT_HEAD_READ = 4096     /* bytes read for a header of unknown length */
};

/* An open segment, shared by the log and by matches. */
typedef struct mls_prompt_file {
    atomic_size_t holders; /* the last one to release it closes it */
    int fd;
} mls_prompt_file;

typedef struct mls_prompt_segment {
    uint32_t number;
    uint32_t last_crc;     /* of the header of the last record */
    uint64_t bytes;        /* end of the last record */
    uint64_t last;         /* offset of the last record; 0: none */
    uint64_t live;         /* bytes of records that entries refer to */
    mls_prompt_file *file; /* NULL: not open */
} mls_prompt_segment;

struct mls_prompt_log {
    int folder, store; /* descriptors; `store` may be open for reading only */
    int used;          /* descriptor of `used`; -1: not open yet; -2: cannot be opened */
    int refused;       /* errno of opening `store` for writing; 0: it is open so */
    _Atomic pid_t pid; /* the owner of the mutexes; 0 while a child renews them */
    unsigned char id[MLS_PROMPT_KEY];
    const mls_kernels *kernels;
    const mls_crc_kernels *crc;
    pthread_mutex_t state, writer;
    /* is_locked: the writer has the lock of the file `store`. is_stale: the log must be
     * read anew before its next use. is_checked: the records of the last put before this
     * process wrote were verified. lacks_pinned: a note pinned a record that has, or one
     * of whose ancestors has, no entry; this process, or the index file, may have evicted
     * it while its bytes stayed. */
    bool is_writing, is_locked, is_stale, is_checked, lacks_pinned;
    mls_prompt_index index;
    mls_prompt_segment *segments; /* sorted by number */
    size_t segment_count, segment_room, open_files;
    uint32_t highest;      /* number of the newest segment in the folder, valid or not */
    uint64_t put;          /* number of the last put */
    uint32_t clock;        /* counts puts and uses: the time of a use */
    size_t unindexed;      /* records that the index file lacks */
    uint32_t tail_segment; /* that has the first record of the last put; 0: unknown */
    uint64_t tail_offset;  /* of that record in it */
    uint64_t index_bytes;  /* length of the index file */
    int64_t used_applied;  /* bytes of `used` whose uses the index has */
    bool has_damaged_head; /* of `store`: the segments gave the id */
    uint32_t synced_segment;        /* this process made this segment durable, */
    uint64_t synced_bytes;          /* up to here */
    mls_prompt_damage_list removed; /* by the last lock */
    const mls_progress *progress;   /* stops scans, which hold `state`; or NULL */
};

/* ---- prompt_segments.c ---- */

/* Return the length in bytes at which the writer begins another segment, if the log may
 * have `max_bytes`. */
uint64_t mls_prompt_segment_limit(uint64_t max_bytes);

/* Write the name of segment `number` to `name`, which has MLS_PROMPT_NAME bytes. Returns
 * `name`. */
const char *mls_prompt_segment_name(char *name, uint32_t number);

/* Return the listed segment with this number, or NULL. Valid until segments are added or
 * removed. */
mls_prompt_segment *mls_prompt_segment_find(const mls_prompt_log *log, uint32_t number);

/* Fail with MLS_E_FORMAT if the file `name` of the folder exists and is a link, a FIFO or
 * another file that is not regular. MLS_E_IO. */
mls_code mls_prompt_require_regular(const mls_prompt_log *log, const char *name,
                                    mls_status *st);

/* Open the log's folder to read its names; the caller closes it. NULL: MLS_E_IO. */
DIR *mls_prompt_folder_list(const mls_prompt_log *log, mls_status *st);

/* Set `*out` to the `*count` numbers of the segments in the folder, sorted. The caller
 * frees it. Needs no lock. With `cleans`, for the writer, deletes the temporary files of
 * killed ones. MLS_E_FORMAT: one is not a regular file; MLS_E_IO; MLS_E_MEMORY. */
mls_code mls_prompt_segments_list(const mls_prompt_log *log, bool cleans, uint32_t **out,
                                  size_t *count, mls_status *st);

/* Return whether the head of segment `number`, open as `fd`, is undamaged. */
bool mls_prompt_segment_has_head(const mls_prompt_log *log, uint32_t number, int fd);

/* Copy the id of the store from the head of segment `number` to `id`. MLS_E_IO;
 * MLS_E_FORMAT: the head is damaged. */
mls_code mls_prompt_segment_id(const mls_prompt_log *log, uint32_t number,
                               unsigned char *id, mls_status *st);

/* Open a segment unless it is open, and set `*out` to it for the caller, who calls
 * mls_prompt_file_release. MLS_E_IO (ENOENT: it was removed); MLS_E_FORMAT: it is not a
 * segment of this log; MLS_E_MEMORY. */
mls_code mls_prompt_segment_hold(mls_prompt_log *log, mls_prompt_segment *segment,
                                 mls_prompt_file **out, mls_status *st);
/* Count one more holder of an open segment, who calls mls_prompt_file_release. */
void mls_prompt_file_hold(mls_prompt_file *file);
void mls_prompt_file_release(mls_prompt_file *file); /* needs no lock; accepts NULL */

/* Delete a segment that is not in the list, if it belongs to this log: the deletion after
 * a compaction was lost by a power failure. Failures are ignored. */
void mls_prompt_segment_remove_stray(const mls_prompt_log *log, uint32_t number);

/* Add a copy of `segment`, whose number is above all others, to the list.
 * MLS_E_MEMORY. */
mls_code mls_prompt_segment_add(mls_prompt_log *log, const mls_prompt_segment *segment,
                                mls_status *st);

/* Remove a segment from the list; its entries must be gone. */
void mls_prompt_segment_forget(mls_prompt_log *log, uint32_t number);

/* Forget all segments and entries. */
void mls_prompt_log_clear(mls_prompt_log *log);

/* Create the next segment, durably, as the last of the list. The caller is the writer.
 * MLS_E_IO; MLS_E_MEMORY; MLS_E_SIZE: no segment numbers are left. */
mls_code mls_prompt_segment_create(mls_prompt_log *log, mls_status *st);

/* ---- prompt_open.c ---- */

/* Write the head of `store` again. The caller has its lock. MLS_E_IO. */
mls_code mls_prompt_store_mend(mls_prompt_log *log, mls_status *st);

/* ---- prompt_stored.c: without a lock ---- */

/* Read the header of the record at `offset` into `*out`. Its bytes are in
 * `header_buffer`, of `room` bytes (at least MLS_PROMPT_FIXED), or in longer memory that
 * the caller frees; `*bytes` is the address of either. `left`: bytes of the file from the
 * record on. MLS_E_IO, MLS_E_MEMORY, and the errors of mls_prompt_header_parse; `*bytes`
 * is `header_buffer` then. */
mls_code mls_prompt_header_read(int fd, uint64_t offset, uint64_t left,
                                const mls_crc_kernels *crc, unsigned char *header_buffer,
                                size_t room, unsigned char **bytes,
                                mls_prompt_header *out, mls_status *st);

/* Append damage at `offset` of a segment, with the reason `text`; NULL: of the head of
 * the file, or of a header, whose record is lost. MLS_E_MEMORY. */
mls_code mls_prompt_damage_add(mls_prompt_damage_list *list, uint32_t segment,
                               uint64_t offset, const char *text, mls_status *st);

/* Append the damage of an entry's record; the text says if it was pinned. MLS_E_MEMORY.
 */
mls_code mls_prompt_damage_add_record(mls_prompt_damage_list *list,
                                      const mls_prompt_entry *entry, const char *text,
                                      mls_status *st);

/* Return whether the place at `offset` of a segment has an empty header: a put begins
 * there that has not ended, because headers are written when all payloads are. */
bool mls_prompt_is_unfinished(int fd, uint64_t offset);

/* Bytes of invalid long headers that a scan of `length` bytes may read. A hostile segment
 * can claim a long header at each place; behind this limit they count as damage
 * unread. */
static inline uint64_t mls_prompt_effort(uint64_t length)
{
    return (64 << 20) + 4 * length;
}

/* Set `*out` to the offset of the first valid header from `from` on, which is a multiple
 * of the unit; to 0 if none starts before `end`. Reduces `*effort` (see
 * mls_prompt_effort) by the bytes of invalid long headers. Skips holes of the file.
 * `progress` (may be NULL) can stop the search.
 * MLS_E_IO, MLS_E_MEMORY, MLS_E_STOPPED. */
mls_code mls_prompt_header_search(int fd, uint64_t from, uint64_t end,
                                  const mls_crc_kernels *crc, uint64_t *effort,
                                  const mls_progress *progress, uint64_t *out,
                                  mls_status *st);

/* Return whether the last record of a segment that the log has read is unchanged in the
 * file `fd`: a writer may have cut the file and appended others. */
bool mls_prompt_last_is_same(const mls_prompt_segment *segment, int fd);

/* Compare the payload of the record at `offset` with its checksums, through `buffer` of
 * `buffer_bytes` bytes. `progress` (may be NULL) can stop the work.
 * MLS_E_CHECKSUM, MLS_E_IO, MLS_E_FORMAT (the file ends earlier), MLS_E_STOPPED. */
mls_code mls_prompt_payload_check(int fd, uint64_t offset,
                                  const mls_prompt_header *header,
                                  const mls_crc_kernels *crc, unsigned char *buffer,
                                  size_t buffer_bytes, const mls_progress *progress,
                                  mls_status *st);

/* ---- prompt_scan.c ---- */

/* Read the whole log anew: the index file, then the ends of the segments; without the
 * index file if `lacks_pinned`. A damaged header is skipped together with its record.
 * After a failure the log is empty and stale. MLS_E_IO, MLS_E_MEMORY, MLS_E_STOPPED. */
mls_code mls_prompt_load(mls_prompt_log *log, mls_status *st);

/* Read the records that other processes appended since; the whole log if it was
 * compacted. Does nothing while this process writes. MLS_E_IO, MLS_E_MEMORY,
 * MLS_E_STOPPED: a later call continues. */
mls_code mls_prompt_follow(mls_prompt_log *log, mls_status *st);

/* Enter the records behind a damaged header at the end of the newest segment. MLS_E_IO,
 * MLS_E_MEMORY, MLS_E_STOPPED. */
mls_code mls_prompt_scan_behind_damage(mls_prompt_log *log, mls_status *st);

/* Enter a record, or apply notes, whose header is at `offset` of `segment`: the new end
 * of the segment. The index has room for two more entries, the record and its parent. */
void mls_prompt_enter_header(mls_prompt_log *log, mls_prompt_segment *segment,
                             uint64_t offset, const mls_prompt_header *header);

/* Remove entry `number` from the index and the bytes of its record from the live ones,
 * unless it is removed already. The file is unchanged. */
void mls_prompt_forget_record(mls_prompt_log *log, uint32_t number);

/* Pin, unpin or delete the entry of the note's key, as the note records. Without such an
 * entry, or one of its ancestors, a pin sets `lacks_pinned`; other notes do nothing then.
 */
void mls_prompt_note_apply(mls_prompt_log *log, const mls_prompt_note *note);

/* ---- prompt_index_file.c ---- */

/* Read the index file into an empty log. Returns false, and leaves the log empty, if
 * there is none or it cannot be used. */
bool mls_prompt_index_load(mls_prompt_log *log);

/* Pack the index, and replace the index file atomically. The caller is the writer.
 * After an error the old file stays: MLS_E_IO, MLS_E_MEMORY, MLS_E_SIZE; MLS_E_FORMAT:
 * `index` is not a regular file. */
mls_code mls_prompt_index_save(mls_prompt_log *log, mls_status *st);

/* ---- prompt_open.c ---- */

/* Lock the mutex `state`; in the child of a fork, first make the log usable again. */
void mls_prompt_lock_state(mls_prompt_log *log);
void mls_prompt_unlock_state(mls_prompt_log *log);

/* ---- prompt_append.c: for the writer, without `state` ---- */

/* Records that are being appended to one segment. */
typedef struct mls_prompt_append {
    mls_prompt_log *log;
    int fd;
    uint32_t segment;
    uint64_t start, end;        /* of the new records */
    uint64_t started;           /* end of the bytes whose writeback has started */
    mls_prompt_header *headers; /* without borrowed pointers */
    uint64_t *offsets;
    size_t count, room;
    unsigned char *bytes; /* of all headers */
    size_t byte_count, byte_room;
    const mls_progress *progress;
    const mls_prompt_source *source; /* of the next record; or NULL */
} mls_prompt_append;

/* Begin to append about `bytes` bytes, to a new segment if the newest one would exceed
 * `limit` bytes. The caller ends it with mls_prompt_append_commit or
 * mls_prompt_append_abort, also on failure (abort).
 * MLS_E_IO, MLS_E_MEMORY, MLS_E_SIZE. */
mls_code mls_prompt_append_begin(mls_prompt_log *log, uint64_t bytes, uint64_t limit,
                                 const mls_progress *progress, mls_prompt_append *out,
                                 mls_status *st);

/* Write the payload of a record and remember its header, which has its sizes; sets its
 * `put` and `crc`. `tokens` and `parts` have header->token_count and header->part_count
 * entries. After an error (MLS_E_IO, MLS_E_MEMORY, MLS_E_SIZE, MLS_E_STOPPED) the caller
 * calls mls_prompt_append_abort. */
mls_code mls_prompt_append_record(mls_prompt_append *append, mls_prompt_header *header,
                                  const uint32_t *tokens, const mls_tensor *parts,
                                  mls_status *st);

/* mls_prompt_append_record for the record at `offset` of the file `fd`; `bytes` are the
 * bytes of its header. A damaged payload is skipped: `*is_good` is then false. */
mls_code mls_prompt_append_copy(mls_prompt_append *append, int fd, uint64_t offset,
                                const mls_prompt_header *header,
                                const unsigned char *bytes, bool *is_good,
                                mls_status *st);

/* Append notes in as few headers as possible. Errors as mls_prompt_append_record. */
mls_code mls_prompt_append_notes(mls_prompt_append *append, const mls_prompt_note *notes,
                                 size_t count, mls_status *st);

/* Write the headers, make all durable, enter the records into the log, and release
 * `append`. On failure the segment is as before, and `append` is released too. MLS_E_IO,
 * MLS_E_MEMORY, MLS_E_SIZE. */
mls_code mls_prompt_append_commit(mls_prompt_append *append, mls_status *st);
void mls_prompt_append_abort(mls_prompt_append *append);

/* ---- prompt_reclaim.c: for the writer ---- */

/* Evict and compact until `bytes` more bytes fit into `max_bytes`, and set `*fits` to
 * whether they do. Entries that are flagged MLS_PROMPT_KEPT stay; an eviction clears the
 * flags. If `bytes` exceeds `max_bytes`, nothing is evicted. `progress` (may be NULL)
 * can stop the compaction. MLS_E_IO, MLS_E_MEMORY, MLS_E_SIZE, MLS_E_STOPPED. */
mls_code mls_prompt_make_room(mls_prompt_log *log, uint64_t bytes, uint64_t max_bytes,
                              const mls_progress *progress, bool *fits, mls_status *st);

/* Compact the segments whose larger part is dead, and write the index file if it lacks
 * many records. `max_bytes`: the log's limit (UINT64_MAX: none), on which the length of a
 * segment depends; nothing is evicted. Failures are ignored, since no record is lost,
 * but for MLS_E_STOPPED of `progress` (may be NULL). */
mls_code mls_prompt_compact(mls_prompt_log *log, uint64_t max_bytes,
                            const mls_progress *progress, mls_status *st);

/* Copy the live records of the segments with the `count` numbers to the newest one, and
 * delete them. MLS_E_IO, MLS_E_MEMORY, MLS_E_SIZE, MLS_E_STOPPED: the segments from the
 * one that failed on are as before. */
mls_code mls_prompt_rewrite(mls_prompt_log *log, const uint32_t *numbers, size_t count,
                            const mls_progress *progress, mls_status *st);

/* Append notes, durably. Errors as mls_prompt_append_commit; nothing changed then. */
mls_code mls_prompt_write_notes(mls_prompt_log *log, const mls_prompt_note *notes,
                                size_t count, mls_status *st);

/* Return the bytes of all files except `used`, which is short. */
uint64_t mls_prompt_disk_bytes(const mls_prompt_log *log);

/* Set the last uses that other processes noted; failures are ignored. */
void mls_prompt_apply_uses(mls_prompt_log *log);

/* Append the key of a used record to the file `used`; failures are ignored. */
void mls_prompt_note_use(mls_prompt_log *log, const mls_prompt_key *key);

#endif
