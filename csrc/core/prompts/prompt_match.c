/* prompt_match: finds the longest stored prefix of a prompt and its records, compares
 * their headers, notes their use.
 *
 * The index is asked with `state` held; it only proposes records. Then, without it, the
 * header of each is read and compared. If one differs from its entry, the log is
 * read anew and the search repeated: another process may have compacted. A second failure
 * is damage: the entry is forgotten, so that the record is stored again.
 */
#include "prompts/prompt_log_state.h"

#include "base/memory.h"
#include "base/size.h"
#include "prompts/prompt_extra.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A search. */
typedef struct search {
    mls_prompt_log *log;
    const mls_prompt_prefix *prefix;
    unsigned char fingerprint[MLS_PROMPT_FINGERPRINT];
    mls_prompt_match *match; /* owned until the search succeeds */
    size_t room;             /* of match->hits */
    mls_prompt_key *keys;    /* of the hits, as the index has them */
    mls_prompt_key *parents; /* keys of the parents of the hits */
    size_t key_room, parent_room;
    const struct mls_prompt_file
        *sized; /* the file whose size is `file_bytes`, or NULL */
    uint64_t file_bytes;
    size_t header_room; /* bytes to read for a header: as many as the one before has */
} search;

enum { HITS_BETWEEN_REPORTS = 8 }; /* headers that are read before a signal is noticed */

static void release_hit(mls_prompt_hit *hit)
{
    mls_prompt_file_release(hit->file);
    mls_free(hit->bytes);
    hit->file = NULL;
    hit->bytes = NULL;
}

void mls_prompt_match_close(mls_prompt_match *match)
{
    for (size_t i = 0; i < match->count; i++) {
        release_hit(&match->hits[i]);
    }
}

/* Release the segments of a match, and free it. */
void mls_prompt_match_free(mls_prompt_match *match)
{
    if (match != NULL) {
        mls_prompt_match_close(match);
        mls_free(match->hits);
        mls_free(match->damage);
        mls_free(match);
    }
}

/* Append the damage of the record `hit`, with the reason `text`. MLS_E_MEMORY. */
static mls_code add_damage(mls_prompt_match *match, const mls_prompt_hit *hit,
                           const char *text, mls_status *st)
{
    mls_prompt_damage *damage =
        mls_realloc(match->damage, match->damage_count + 1, sizeof *match->damage);
    if (damage == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to report damage");
    }
    match->damage = damage;
    mls_prompt_damage *last = &damage[match->damage_count++];
    *last = (mls_prompt_damage){.segment = hit->segment, .offset = hit->offset};
    snprintf(last->text, sizeof last->text, "%s", text);
    return MLS_OK;
}

/* ---- proposals of the index ---- */

/* Add entry `number` of the index as a hit, with the key of its parent and its first
 * token `start`; the header is checked later. If its segment is gone or damaged, the hit
 * has no file. MLS_E_MEMORY; MLS_E_IO: the segment cannot be opened for another
 * reason. */
static mls_code add_index_hit(search *s, uint32_t number, const mls_prompt_key *parent,
                              size_t start, mls_status *st)
{
    mls_prompt_log *log = s->log;
    const mls_prompt_entry *entry = &log->index.entries[number];
    mls_prompt_match *match = s->match;
    mls_prompt_hit *hits = mls_grow(match->hits, match->count, &s->room, sizeof *hits);
    match->hits = hits != NULL ? hits : match->hits;
    mls_prompt_key *keys = mls_grow(s->keys, match->count, &s->key_room, sizeof *keys);
    s->keys = keys != NULL ? keys : s->keys;
    mls_prompt_key *parents =
        mls_grow(s->parents, match->count, &s->parent_room, sizeof *parents);
    s->parents = parents != NULL ? parents : s->parents;
    if (hits == NULL || keys == NULL || parents == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a match");
    }
    mls_prompt_hit hit = {.kind = entry->kind,
                          .start = start,
                          .end = entry->end,
                          .segment = entry->segment,
                          .offset = mls_prompt_entry_offset(entry)};
    mls_prompt_segment *segment = mls_prompt_segment_find(log, entry->segment);
    mls_code code = segment == NULL
                        ? mls_fail_os(st, ENOENT, "a segment is missing")
                        : mls_prompt_segment_hold(log, segment, &hit.file, st);
    if (code == MLS_E_MEMORY || (code == MLS_E_IO && st->os_error != ENOENT)) {
        return code;
    }
    keys[match->count] = entry->key;
    parents[match->count] = *parent;
    hits[match->count++] = hit;
    return MLS_OK;
}

/* Propose the records of `kind` that end 0 to `count` tokens after the block `parent`,
 * which ends at token `start` of the prompt. Errors as add_index_hit. */
static mls_code propose_branches(search *s, unsigned kind, const mls_prompt_key *parent,
                                 size_t start, size_t count, mls_status *st)
{
    mls_prompt_hash hash = mls_prompt_hash_begin(s->log->id, parent, kind);
    mls_code code = MLS_OK;
    for (size_t i = 0; code == MLS_OK && i <= count; i++) {
        const mls_prompt_key key = mls_prompt_hash_key(&hash);
        const uint32_t number = mls_prompt_index_find(&s->log->index, &key);
        if (number != MLS_PROMPT_NONE) {
            code = add_index_hit(s, number, parent, start, st);
        }
        if (i < count) {
            mls_prompt_hash_range(&hash, s->log->id, kind, s->prefix, start + i,
                                  start + i + 1);
        }
    }
    return code;
}

/* Propose the records, except blocks, that branch off after the block `parent`, which
 * ends at token `start`, and end before the next block does. Only kinds that the log has
 * are tried. */
static mls_code propose_kinds(search *s, const mls_prompt_key *parent, size_t start,
                              mls_status *st)
{
    const size_t left = s->prefix->count - start;
    const size_t most = mls_size_least(left, s->prefix->block_tokens - 1);
    mls_code code = MLS_OK;
    for (unsigned kind = 1; code == MLS_OK && kind < 256; kind++) {
        if ((s->log->index.kinds[kind / 64] >> kind % 64 & 1) != 0) {
            code = propose_branches(s, kind, parent, start, most, st);
        }
    }
    return code;
}

/* Propose the chain of blocks of the prompt as far as the index has it, and the records
 * that branch off from it. Errors as add_index_hit. */
static mls_code propose_chain(search *s, mls_status *st)
{
    const mls_prompt_prefix *prefix = s->prefix;
    const mls_prompt_index *index = &s->log->index;
    mls_prompt_hash hash =
        mls_prompt_hash_root(s->log->id, s->fingerprint, prefix->fingerprint_bytes);
    mls_prompt_key parent = mls_prompt_hash_key(&hash);
    uint32_t last = MLS_PROMPT_NONE;
    size_t start = 0;
    for (;;) {
        const bool has_branches =
            last == MLS_PROMPT_NONE
                ? index->root_branches
                : (index->entries[last].flags & MLS_PROMPT_BRANCHES) != 0;
        mls_code code = has_branches ? propose_kinds(s, &parent, start, st) : MLS_OK;
        if (code != MLS_OK || prefix->count - start < prefix->block_tokens) {
            return code;
        }
        hash = mls_prompt_hash_begin(s->log->id, &parent, 0);
        mls_prompt_hash_range(&hash, s->log->id, 0, prefix, start,
                              start + prefix->block_tokens);
        const mls_prompt_key key = mls_prompt_hash_key(&hash);
        const uint32_t number = mls_prompt_index_find(index, &key);
        if (number == MLS_PROMPT_NONE) {
            return MLS_OK;
        }
        code = add_index_hit(s, number, &parent, start, st);
        if (code != MLS_OK) {
            return code;
        }
        last = number;
        parent = key;
        start += prefix->block_tokens;
    }
}

/* ---- comparison with the stored headers ---- */

/* Return whether the header has exactly these `count` token ids. Memory has the byte
 * order of files: see safetensors_write.c. */
static bool tokens_equal(const mls_prompt_header *header, const uint32_t *tokens,
                         size_t count)
{
    return header->token_count == count &&
           (count == 0 || memcmp(header->tokens, tokens, 4 * count) == 0);
}

/* Return whether the header has exactly the extras of these tokens of the prompt. */
static bool extras_equal(const mls_prompt_header *header, const mls_prompt_prefix *prefix,
                         size_t start, size_t end)
{
    size_t count;
    const unsigned char *extras = mls_prompt_extras_between(prefix, start, end, &count);
    return header->extra_count == count &&
           (count == 0 || memcmp(header->extras, extras, MLS_PROMPT_EXTRA * count) == 0);
}

/* Return whether the header of hit `number` is of the record that the index proposed, for
 * this prompt. */
static bool header_matches_hit(const search *s, size_t number)
{
    const mls_prompt_hit *hit = &s->match->hits[number];
    const mls_prompt_header *header = &hit->header;
    return header->type == MLS_PROMPT_RECORD && header->kind == hit->kind &&
           header->end == hit->end && header->end >= hit->start &&
           header->end <= s->prefix->count &&
           mls_prompt_key_equal(&header->key, &s->keys[number]) &&
           mls_prompt_key_equal(&header->parent, &s->parents[number]) &&
           header->fingerprint_bytes == s->prefix->fingerprint_bytes &&
           memcmp(header->fingerprint, s->fingerprint, MLS_PROMPT_FINGERPRINT) == 0 &&
           tokens_equal(header, s->prefix->tokens + hit->start, hit->end - hit->start) &&
           extras_equal(header, s->prefix, hit->start, hit->end);
}

/* Read and compare the header of hit `number`, and store it in the hit. MLS_E_FORMAT,
 * MLS_E_CHECKSUM: damaged, or not the record of the entry; MLS_E_IO; MLS_E_MEMORY. */
static mls_code check_hit(search *s, size_t number, mls_status *st)
{
    mls_prompt_hit *hit = &s->match->hits[number];
    unsigned char *longer = NULL;
    struct stat info;
    if (hit->file == NULL) {
        return mls_fail(st, MLS_E_FORMAT, "the segment is missing or damaged");
    }
    if (hit->file != s->sized) { /* the segment may have been cut */
        if (fstat(hit->file->fd, &info) != 0) {
            return mls_fail_os(st, errno, "cannot examine the segment");
        }
        s->sized = hit->file;
        s->file_bytes = (uint64_t)info.st_size;
    }
    hit->bytes = mls_alloc(s->header_room, 1);
    if (hit->bytes == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a header");
    }
    mls_code code = mls_prompt_header_read(
        hit->file->fd, hit->offset,
        s->file_bytes > hit->offset ? s->file_bytes - hit->offset : 0, s->log->crc,
        hit->bytes, s->header_room, &longer, &hit->header, st);
    if (longer != hit->bytes) {
        mls_free(hit->bytes);
        hit->bytes = longer;
    }
    if (code == MLS_E_IO) {
        code = mls_fail_os(st, st->os_error,
                           "cannot read the record at offset %llu of " MLS_PROMPT_SEGMENT,
                           (unsigned long long)hit->offset, (unsigned)hit->segment);
    }
    if (code == MLS_OK && !header_matches_hit(s, number)) {
        code = mls_fail(st, MLS_E_FORMAT, "another record is stored there");
    }
    if (code == MLS_OK) {
        s->header_room = mls_size_least(hit->header.header_bytes, MLS_PROMPT_HEAD_READ);
    }
    return code;
}

/* Remove the entry of the damaged record of hit `number`, unless the record was replaced
 * meanwhile. */
static void forget_entry(search *s, size_t number)
{
    mls_prompt_log *log = s->log;
    mls_prompt_lock_state(log);
    const uint32_t entry = mls_prompt_index_find(&log->index, &s->keys[number]);
    if (entry != MLS_PROMPT_NONE &&
        log->index.entries[entry].segment == s->match->hits[number].segment &&
        mls_prompt_entry_offset(&log->index.entries[entry]) ==
            s->match->hits[number].offset) {
        mls_prompt_forget_record(log, entry);
    }
    mls_prompt_unlock_state(log);
}

/* For qsort: by end, then kind. */
static int compare_hits(const void *a, const void *b)
{
    const mls_prompt_hit *x = a, *y = b;
    return x->end != y->end ? (x->end < y->end ? -1 : 1)
                            : (x->kind < y->kind ? -1 : x->kind > y->kind);
}

static bool is_damage(mls_code code)
{
    return code == MLS_E_FORMAT || code == MLS_E_CHECKSUM;
}

/* Check all proposals, in the order of the chain, and keep the good ones; set the length
 * of the match to the end of its last good block. A damaged one sets `*damaged`, is
 * listed in the match, and loses its entry. Those behind a damaged block are dropped:
 * nothing after it can be restored. MLS_E_IO, MLS_E_MEMORY, MLS_E_STOPPED. */
static mls_code check_hits(search *s, bool *damaged, mls_status *st)
{
    mls_prompt_match *match = s->match;
    size_t good_count = 0;
    bool is_cut = false;
    mls_code code = MLS_OK;
    match->length = 0;
    s->sized = NULL;
    s->header_room = MLS_PROMPT_HEAD_READ;
    for (size_t i = 0; i < match->count; i++) {
        mls_prompt_hit *hit = &match->hits[i];
        const bool is_behind = is_cut && hit->start > match->length;
        if (code == MLS_OK && i % HITS_BETWEEN_REPORTS == 0 &&
            !mls_progress_report(s->log->progress, 0)) {
            code = mls_fail(st, MLS_E_STOPPED, "stopped");
        }
        const mls_code result =
            code != MLS_OK || is_behind ? MLS_E_STOPPED : check_hit(s, i, st);
        if (result == MLS_OK) {
            match->length = hit->kind == 0 ? hit->end : match->length;
            match->hits[good_count] = *hit;
            good_count++;
            continue;
        }
        if (is_damage(result)) {
            *damaged = true;
            is_cut = is_cut || hit->kind == 0;
            code = add_damage(match, hit, st->text, st);
            forget_entry(s, i);
        } else if (result != MLS_E_STOPPED) {
            code = result;
        }
        release_hit(hit);
    }
    match->count = good_count;
    return code;
}

/* ---- use ---- */

/* Record the use of the whole chain in the index, and of its last record in the file
 * `used`, for other processes. `state` is held. */
static void note_use(search *s)
{
    mls_prompt_log *log = s->log;
    const mls_prompt_match *match = s->match;
    log->clock += match->count > 0 && log->clock < UINT32_MAX;
    for (size_t i = match->count; i > 0; i--) {
        const uint32_t number =
            mls_prompt_index_find(&log->index, &match->hits[i - 1].header.key);
        if (number != MLS_PROMPT_NONE) {
            mls_prompt_index_touch(&log->index, number, log->clock);
        }
    }
    if (match->count > 0) {
        mls_prompt_note_use(log, &match->hits[match->count - 1].header.key);
    }
}

/* One attempt of a search: add hits with `state` held, check without it. Sets `*damaged`
 * if a proposal is damaged; otherwise records the use of the records. MLS_E_IO,
 * MLS_E_MEMORY, MLS_E_SIZE. */
static mls_code find_records(search *s, bool *damaged, mls_status *st)
{
    mls_prompt_log *log = s->log;
    mls_prompt_lock_state(log);
    mls_code code = mls_prompt_follow(log, st);
    if (code == MLS_OK) {
        code = propose_chain(s, st);
    }
    mls_prompt_unlock_state(log);
    if (code != MLS_OK || s->match->count == 0) {
        return code;
    }
    code = check_hits(s, damaged, st);
    if (code == MLS_OK && !*damaged) {
        mls_prompt_lock_state(log);
        note_use(s);
        mls_prompt_unlock_state(log);
    }
    return code;
}

/* Read the log anew and repeat the search, unless this process is writing: then its index
 * is current. Damage that is found again stays in the match. */
static mls_code repeat_search(search *s, mls_status *st)
{
    bool damaged = false;
    mls_prompt_lock_state(s->log);
    s->log->is_stale = s->log->is_stale || !s->log->is_writing;
    mls_prompt_unlock_state(s->log);
    mls_prompt_match_close(s->match);
    s->match->count = 0;
    s->match->damage_count = 0;
    return find_records(s, &damaged, st);
}

/* Find the records under the longest stored prefix. Search twice if the first attempt
 * found damage: the index may have been old. */
mls_code mls_prompt_match_new(mls_prompt_log *log, const mls_prompt_prefix *prefix,
                              mls_prompt_match **out, mls_status *st)
{
    search s = {.log = log, .prefix = prefix};
    bool damaged = false;
    memcpy(s.fingerprint, prefix->fingerprint, prefix->fingerprint_bytes);
    s.match = mls_alloc(1, sizeof *s.match);
    if (s.match == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a match");
    }
    mls_code code = find_records(&s, &damaged, st);
    if (code == MLS_OK && damaged) {
        code = repeat_search(&s, st);
    }
    mls_free(s.keys);
    mls_free(s.parents);
    if (code != MLS_OK) {
        mls_prompt_match_free(s.match);
        return code;
    }
    if (s.match->count > 1) {
        qsort(s.match->hits, s.match->count, sizeof *s.match->hits, compare_hits);
    }
    *out = s.match;
    return MLS_OK;
}

/* ---- the match ---- */

/* Hits are sorted by end, so the next block of the chain is behind the one before it. */
size_t mls_prompt_match_reach(const mls_prompt_match *match, const unsigned char *prefix,
                              size_t bytes, uint64_t token_bytes)
{
    size_t reach = 0;
    for (size_t i = 0; i < match->count; i++) {
        const mls_prompt_hit *hit = &match->hits[i];
        const mls_prompt_header *header = &hit->header;
        uint64_t expected;
        if (hit->kind != 0) {
            continue;
        }
        if (hit->start != reach || header->meta_bytes < bytes ||
            memcmp(header->meta, prefix, bytes) != 0 ||
            !mls_u64_mul(token_bytes, hit->end - hit->start, &expected) ||
            header->payload_bytes != expected) {
            break;
        }
        reach = hit->end;
    }
    return reach;
}
