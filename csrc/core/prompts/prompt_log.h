/* prompt_log: a durable, checked store of records, each under a prefix of a prompt: its
 * files and its functions.
 *
 * A log is a folder:
 *   store             head of the store; its lock (flock) is the writer's lock
 *   segment-NNNNNNNN  records, appended: payload first, then header, then a sync
 *   index             entries of all records at some time; saves work at the next opening
 *   used              keys of records that readers used; may lack some
 *
 * A record belongs to the first `end` tokens of a prompt. One of kind 0, a block, covers
 * the last `block_tokens` of them; the others may end anywhere and have as parent the
 * last block that ends at or before theirs. A record is found if all blocks before it
 * are.
 *
 * Readers take no lock between processes: they follow the end of the newest segment, and
 * believe no entry before they have compared the record's header with the record that
 * they look for. One writer at a time appends. A log may be used by any number of
 * threads, and by the child of a fork.
 *
 * Functions that read new entries return MLS_E_SIZE if there are about 2**31 records.
 */
#ifndef MLS_PROMPT_LOG_H
#define MLS_PROMPT_LOG_H

#include "array/copy/copy.h"
#include "array/tensor.h"
#include "base/status.h"
#include "checkpoint/read/shard_read.h"
#include "crc32c/crc32c.h"
#include "prompts/prompt_record.h"
#include "runtime/thread_pool.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mls_prompt_log mls_prompt_log;
typedef struct mls_prompt_match mls_prompt_match;

/* A prompt, borrowed. `block_tokens` is at least 1. An extra identifies the content
 * of a placeholder token, such as an image: it counts for the record that has the token,
 * and for all records after it. */
typedef struct mls_prompt_prefix {
    const unsigned char *fingerprint;
    size_t fingerprint_bytes; /* 1 .. MLS_PROMPT_FINGERPRINT */
    const uint32_t *tokens;
    size_t count;
    size_t block_tokens;         /* 1 .. MLS_PROMPT_MAX_TOKENS */
    const unsigned char *extras; /* see mls_prompt_extras_check */
    size_t extra_count;
} mls_prompt_prefix;

/* Copy token ids from `view`, an array of integers, to memory that the caller frees with
 * mls_free, and set `*out` to it. It has one id for each element.
 * MLS_E_DTYPE: not integers of 32 or 64 bits; MLS_E_SHAPE: not one axis; MLS_E_VALUE: an
 * id below 0 or above 2**32 - 1; MLS_E_MEMORY. */
mls_code mls_prompt_tokens(const mls_tensor *view, uint32_t **out, mls_status *st);

/* Open the log in the folder `path` and read its records' entries. With `create`, a
 * missing folder is created, and a log in it if it is empty. Without write permission,
 * the log can only be read. The caller frees `*out` with mls_prompt_log_free; the kernels
 * must outlive it. `progress` (may be NULL), which must outlive it too, can stop the
 * reading of the files, at the opening and in later calls. It is called while the log is
 * locked, so it must not use the log.
 * MLS_E_IO; MLS_E_FORMAT: another folder, a newer version, a link; MLS_E_MEMORY;
 * MLS_E_STOPPED. */
mls_code mls_prompt_log_open(const char *path, bool create, const mls_kernels *kernels,
                             const mls_progress *progress, mls_prompt_log **out,
                             mls_status *st);

/* Write the index file if much was stored since the last one, and no other process
 * writes. Failures are ignored, also MLS_E_STOPPED: the next opening reads more of the
 * segments. */
void mls_prompt_log_save_index(mls_prompt_log *log);

/* Close and free a log. Accepts NULL. Its matches stay valid. No call may be in
 * progress. */
void mls_prompt_log_free(mls_prompt_log *log);

/* ---- matches ---- */

/* A record of a match. */
typedef struct mls_prompt_hit {
    unsigned kind;
    size_t start, end;            /* tokens of the prompt */
    mls_prompt_header header;     /* borrows the bytes below */
    unsigned char *bytes;         /* of the header; owned */
    struct mls_prompt_file *file; /* the open segment, which the hit holds */
    uint64_t offset;              /* of the record in its segment */
    uint32_t segment;
} mls_prompt_hit;

/* A damaged record, or a damaged header whose record is lost. */
typedef struct mls_prompt_damage {
    uint32_t segment;          /* number of its segment; 0: the file `store` */
    uint64_t offset;           /* of the record in it; 0: the head of the file */
    char text[MLS_TEXT_BYTES]; /* the reason */
} mls_prompt_damage;

/* Damage that was found. The owner frees `damage`. */
typedef struct mls_prompt_damage_list {
    mls_prompt_damage *damage;
    size_t count, room;
} mls_prompt_damage_list;

struct mls_prompt_match {
    mls_prompt_hit *hits; /* sorted by end, then kind */
    size_t count;
    size_t length;             /* tokens of the chain of blocks */
    mls_prompt_damage *damage; /* records that could not be read */
    size_t damage_count;
};

/* Find the records under the longest stored prefix of a prompt, and keep their segments
 * open. The token ids, the parent's key and the fingerprint of each record are compared.
 * Damaged records end the chain and are listed in `damage`. If nothing is stored, the
 * match has no hits and the length 0. The caller frees `*out` with mls_prompt_match_free.
 * MLS_E_MEMORY; MLS_E_IO: the folder cannot be read; MLS_E_STOPPED. `*out` is untouched
 * then. */
mls_code mls_prompt_match_new(mls_prompt_log *log, const mls_prompt_prefix *prefix,
                              mls_prompt_match **out, mls_status *st);
void mls_prompt_match_free(mls_prompt_match *match); /* accepts NULL */

/* Release the segments and the bytes of the headers of a match, whose numbers stay. May
 * be repeated. */
void mls_prompt_match_close(mls_prompt_match *match);

/* Return the end of the last of the adjacent blocks, from the first token on, whose meta
 * begins with the `bytes` bytes at `prefix`, and whose payload has `token_bytes` for each
 * token; 0 without one. */
size_t mls_prompt_match_reach(const mls_prompt_match *match, const unsigned char *prefix,
                              size_t bytes, uint64_t token_bytes);

/* A part to read, and its destination. */
typedef struct mls_prompt_request {
    size_t hit, part;          /* index of a record of the match, and of its part */
    mls_tensor into;           /* a view with as many bytes as the part, of any strides */
    mls_code code;             /* result; MLS_E_FORMAT, MLS_E_CHECKSUM: damaged */
    int os_error;              /* result; see mls_status */
    char text[MLS_TEXT_BYTES]; /* result: why */
} mls_prompt_request;

/* Read and verify the parts of `count` requests, and set the result of each; the threads
 * of `pool` share the requests. The destination of a damaged part is undefined.
 * MLS_E_STOPPED: `progress` stopped the work. MLS_E_IO, MLS_E_MEMORY: a part could not be
 * read, which is not damage. */
mls_code mls_prompt_read(const mls_prompt_match *match, mls_prompt_request *requests,
                         size_t count, const mls_kernels *kernels,
                         const mls_crc_kernels *crc, mls_pool *pool,
                         const mls_progress *progress, mls_status *st);

/* Read a piece of a part: as many bytes as `request->into` has, from byte `offset` of the
 * part on, all within the part. Before the call `*sum` is the checksum of the part's
 * bytes before `offset`, and afterwards of the piece too. It is compared with the stored
 * one after the last piece.
 * MLS_E_FORMAT, MLS_E_CHECKSUM: damaged; MLS_E_IO; MLS_E_MEMORY. */
mls_code mls_prompt_read_piece(const mls_prompt_match *match,
                               const mls_prompt_request *request, uint64_t offset,
                               const mls_kernels *kernels, const mls_crc_kernels *crc,
                               uint32_t *sum, mls_status *st);

/* ---- writing: between mls_prompt_lock and mls_prompt_unlock ---- */

/* Try to become the writer; never waits. Sets `*busy` if another writer is active, and
 * then locks nothing and returns MLS_OK. Cuts incomplete records that a killed writer
 * left behind.
 * MLS_E_IO (EACCES, EROFS: the log was opened for reading); MLS_E_MEMORY; MLS_E_STOPPED.
 * Nothing is locked then. */
mls_code mls_prompt_lock(mls_prompt_log *log, bool *busy, mls_status *st);
void mls_prompt_unlock(mls_prompt_log *log);

/* Provides parts that another device has. `fetch` sets `*out` to a view of one, which is
 * valid until the next call; false stops the put. */
typedef struct mls_prompt_source {
    bool (*fetch)(void *context, const mls_tensor *part, mls_tensor *out);
    void *context;
} mls_prompt_source;

/* A record to store. `parts` are borrowed views; with a source, those whose data is NULL
 * are fetched one by one. */
typedef struct mls_prompt_item {
    unsigned kind; /* 0: a block */
    size_t end;    /* tokens of the prompt up to the end of the record */
    const unsigned char *meta;
    size_t meta_bytes;
    const mls_tensor *parts;
    size_t part_count;
    const mls_prompt_source *source; /* or NULL */
    int result; /* 1: written; 0: it was stored; -1: no parent, or no room */
} mls_prompt_item;

/* Store the `count` records of one prompt, parents first, and set the result of each.
 * Evicts other records first if the log would exceed `max_bytes`; UINT64_MAX: unlimited.
 * Syncs once for each segment that is written to. On failure, segments that were complete
 * before stay; the rest is as before. `progress` (may be NULL) here and below can stop
 * the work, also a compaction.
 * MLS_E_VALUE: an item's end is wrong, or it has more tokens, parts or meta than a header
 * may have; nothing is stored then. MLS_E_SIZE: an item or the log is too large;
 * MLS_E_IO; MLS_E_MEMORY; MLS_E_STOPPED. */
mls_code mls_prompt_put(mls_prompt_log *log, const mls_prompt_prefix *prefix,
                        mls_prompt_item *items, size_t count, uint64_t max_bytes,
                        const mls_progress *progress, mls_status *st);

/* Change the state of the `count` records with indices `hits` in a match, durably.
 * MLS_PROMPT_DELETE removes those that are not the parent of another record;
 * MLS_PROMPT_DROP removes all. `*changed` receives the number of changed records.
 * MLS_E_IO; MLS_E_MEMORY; MLS_E_SIZE: nothing changed. MLS_E_STOPPED: all changed, but
 * the log is not compacted. */
mls_code mls_prompt_mark(mls_prompt_log *log, const mls_prompt_match *match,
                         const size_t *hits, size_t count, mls_prompt_operation operation,
                         const mls_progress *progress, size_t *changed, mls_status *st);

/* Evict the least recently used records until the log has at most `max_bytes`
 * (UINT64_MAX: evict none), and compact it. Pinned records and their ancestors stay, even
 * if they exceed `max_bytes`, unless an ancestor was removed; that is not an error.
 * `*freed` receives the number of bytes that the files have become shorter. MLS_E_IO;
 * MLS_E_MEMORY; MLS_E_SIZE; MLS_E_STOPPED; MLS_E_FORMAT: `index` is not a regular
 * file. */
mls_code mls_prompt_prune(mls_prompt_log *log, uint64_t max_bytes,
                          const mls_progress *progress, uint64_t *freed, mls_status *st);

/* Make the records that this log has shown durable: another process may have written
 * some, and not yet synced them. Needs no lock, and waits for no writer. MLS_E_IO,
 * MLS_E_MEMORY, MLS_E_FORMAT. */
mls_code mls_prompt_sync(mls_prompt_log *log, mls_status *st);

/* ---- the whole log ---- */

/* Read all records and compare checksums; report also headers that are damaged. With
 * `repair`, for which the log must be locked, damaged records are removed, and segments
 * with damaged headers are written anew; damage that the lock removed is reported too.
 * Sets `*out` to the `*count` damaged ones; the caller frees it with mls_free. After an
 * error it is not set. MLS_E_STOPPED; MLS_E_MEMORY; MLS_E_SIZE; MLS_E_IO: the removal
 * failed, or the log cannot be read for a reason that proves no damage, such as too many
 * open files. */
mls_code mls_prompt_verify(mls_prompt_log *log, bool repair, const mls_progress *progress,
                           mls_prompt_damage **out, size_t *count, mls_status *st);

/* One stored record. */
typedef struct mls_prompt_listed {
    mls_prompt_hit hit;
    bool is_pinned;
    uint32_t used; /* time of the last use: the larger, the later */
} mls_prompt_listed;

/* Call visit(context, ...) with each record whose header can be read, in the order of
 * segments and of places in them, until it returns false. Needs no lock. MLS_E_MEMORY,
 * MLS_E_IO, MLS_E_STOPPED. */
mls_code mls_prompt_list(mls_prompt_log *log,
                         bool (*visit)(void *context, const mls_prompt_listed *listed),
                         void *context, const mls_progress *progress, mls_status *st);

typedef struct mls_prompt_stats {
    uint64_t records, blocks, pinned, live_bytes, disk_bytes, segments, memory_bytes;
} mls_prompt_stats;

/* Read the changes of other processes and set `*out`. MLS_E_MEMORY, MLS_E_IO,
 * MLS_E_STOPPED: `*out` is unchanged. */
mls_code mls_prompt_stats_of(mls_prompt_log *log, mls_prompt_stats *out, mls_status *st);

#endif
