/* prompt_index: an entry for each record in memory: its members and flags, and the bytes
 * that it takes.
 *
 * An entry has 44 bytes, and its place in a table of numbers at most 12: at most 67 bytes
 * a record, with the room to grow. Entries keep their numbers until the index is packed.
 * A removed entry stays, flagged, until then, and as long as a record has it as parent.
 */
#ifndef MLS_PROMPT_INDEX_H
#define MLS_PROMPT_INDEX_H

#include "base/status.h"
#include "prompts/prompt_record.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MLS_PROMPT_NONE UINT32_MAX /* no entry, no segment */

enum {
    MLS_PROMPT_REMOVED = 1, /* the entry has no record */
    MLS_PROMPT_PINNED = 2,
    MLS_PROMPT_BRANCHES = 4, /* records that are not full blocks have it as parent */
    MLS_PROMPT_KEPT = 8      /* stays in this eviction, which clears it */
};

typedef struct mls_prompt_entry {
    mls_prompt_key key;
    uint32_t segment; /* number of the segment that has the record */
    uint32_t place;   /* offset in it, in units of MLS_PROMPT_UNIT bytes */
    uint32_t units;   /* length of the record, in units */
    uint32_t used;    /* the log's clock at the last use */
    uint32_t parent;  /* entry of the parent; MLS_PROMPT_NONE: unknown, or the root */
    uint32_t end;     /* tokens of the prompt up to the end of the record */
    uint8_t kind, flags;
} mls_prompt_entry;

typedef struct mls_prompt_index {
    mls_prompt_entry *entries;
    size_t count, room;
    size_t removed;     /* entries that are flagged so */
    uint32_t *table;    /* numbers of entries; open addressing */
    size_t slots;       /* a power of two; 0 without a table */
    uint64_t kinds[4];  /* the set of kinds other than 0 that entries have had */
    bool root_branches; /* records that are not full blocks have no parent */
} mls_prompt_index;

void mls_prompt_index_fini(mls_prompt_index *index); /* accepts a zeroed struct */

/* Return the number of the entry with `key` if its record is not removed, else
 * MLS_PROMPT_NONE. */
uint32_t mls_prompt_index_find(const mls_prompt_index *index, const mls_prompt_key *key);

/* Return the number of the entry with `key`, removed or not, or MLS_PROMPT_NONE. */
uint32_t mls_prompt_index_find_any(const mls_prompt_index *index,
                                   const mls_prompt_key *key);

/* Provide room for `count` more entries. MLS_E_MEMORY; MLS_E_SIZE: the index would have
 * 2**31 - 1 entries or more. */
mls_code mls_prompt_index_reserve(mls_prompt_index *index, size_t count, mls_status *st);

/* Add a copy of `entry`, whose key only a removed entry may have; there must be room
 * (mls_prompt_index_reserve). Its ancestors become at least as recently used. Returns its
 * number. */
uint32_t mls_prompt_index_add(mls_prompt_index *index, const mls_prompt_entry *entry);

/* Return the number of the entry with `key`, removed or not. If none has it, add a
 * removed one that ends at token `end`: the parent of a record that is stored before it.
 * There must be room. */
uint32_t mls_prompt_index_require(mls_prompt_index *index, const mls_prompt_key *key,
                                  uint32_t end);

/* Set the parent of entry `child`, if the ends of both fit: so a chain is not circular
 * (in a forged store it may be; every loop over ancestors ends there too).
 * A `parent` that is not the number of an entry is ignored. */
void mls_prompt_index_link(mls_prompt_index *index, uint32_t child, uint32_t parent);

/* Flag entry `number` as removed. It must not be removed already. */
void mls_prompt_index_remove(mls_prompt_index *index, uint32_t number);

/* Set the time of the last use of entry `number` and of its ancestors to `clock`, the
 * current time of the log. */
void mls_prompt_index_touch(mls_prompt_index *index, uint32_t number, uint32_t clock);

/* Drop removed entries that are not the parent of a record; the others get new numbers.
 * MLS_E_MEMORY: nothing changed. */
mls_code mls_prompt_index_pack(mls_prompt_index *index, mls_status *st);

/* Return the bytes of memory that the index has allocated. */
size_t mls_prompt_index_bytes(const mls_prompt_index *index);

static inline uint64_t mls_prompt_entry_offset(const mls_prompt_entry *entry)
{
    return (uint64_t)entry->place * MLS_PROMPT_UNIT;
}

static inline uint64_t mls_prompt_entry_bytes(const mls_prompt_entry *entry)
{
    return (uint64_t)entry->units * MLS_PROMPT_UNIT;
}

#endif
