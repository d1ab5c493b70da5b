/* prompt_index: finds, adds, links and removes entries in memory by key; the last use of
 * a record and its ancestors. */
#include "prompts/prompt_index.h"

#include "base/memory.h"
#include "base/size.h"

#include <string.h>

void mls_prompt_index_fini(mls_prompt_index *index)
{
    mls_free(index->entries);
    mls_free(index->table);
    *index = (mls_prompt_index){0};
}

/* Return the slot of the table at which the search for `key` begins. Keys are hashes, so
 * eight of their bytes are a number for the table. */
static size_t first_slot(const mls_prompt_index *index, const mls_prompt_key *key)
{
    return (size_t)mls_load_le64(key->bytes) & (index->slots - 1);
}

/* Removed entries stay in the table, so that chains of slots have no gaps. */
uint32_t mls_prompt_index_find_any(const mls_prompt_index *index,
                                   const mls_prompt_key *key)
{
    if (index->slots == 0) {
        return MLS_PROMPT_NONE;
    }
    size_t slot = first_slot(index, key);
    for (uint32_t number; (number = index->table[slot]) != MLS_PROMPT_NONE;) {
        if (mls_prompt_key_equal(&index->entries[number].key, key)) {
            return number;
        }
        slot = (slot + 1) & (index->slots - 1);
    }
    return MLS_PROMPT_NONE;
}

static bool is_removed(const mls_prompt_index *index, uint32_t number)
{
    return (index->entries[number].flags & MLS_PROMPT_REMOVED) != 0;
}

uint32_t mls_prompt_index_find(const mls_prompt_index *index, const mls_prompt_key *key)
{
    const uint32_t number = mls_prompt_index_find_any(index, key);
    return number != MLS_PROMPT_NONE && is_removed(index, number) ? MLS_PROMPT_NONE
                                                                  : number;
}

/* Store the number of an entry in the first free slot for its key; the table has one. */
static void enter_number(mls_prompt_index *index, uint32_t number)
{
    size_t slot = first_slot(index, &index->entries[number].key);
    while (index->table[slot] != MLS_PROMPT_NONE) {
        slot = (slot + 1) & (index->slots - 1);
    }
    index->table[slot] = number;
}

/* Return the number of slots of a table for `count` entries, a power of two: at most
 * three quarters are used. */
static size_t slots_for(size_t count)
{
    size_t slots = 64;
    while (slots / 4 * 3 < count) {
        slots *= 2;
    }
    return slots;
}

/* Enter the numbers of all entries into an empty table. */
static void fill_table(mls_prompt_index *index)
{
    memset(index->table, 0xff, index->slots * sizeof *index->table);
    for (size_t i = 0; i < index->count; i++) {
        enter_number(index, (uint32_t)i);
    }
}

/* Provide room for `count` more entries. Room grows by a quarter: memory for each record
 * is limited, and appends stay cheap. */
mls_code mls_prompt_index_reserve(mls_prompt_index *index, size_t count, mls_status *st)
{
    size_t needed;
    if (!mls_size_add(index->count, count, &needed) || needed >= MLS_PROMPT_NONE / 2) {
        return mls_fail(st, MLS_E_SIZE, "a prompt store has too many records");
    }
    if (needed > index->room) {
        const size_t room = mls_size_most(needed, index->count + index->count / 4 + 16);
        mls_prompt_entry *entries =
            mls_realloc(index->entries, room, sizeof *index->entries);
        if (entries == NULL) {
            return mls_fail(st, MLS_E_MEMORY, "no memory for %zu records", room);
        }
        index->entries = entries;
        index->room = room;
    }
    const size_t slots = slots_for(needed);
    if (slots > index->slots) {
        uint32_t *table = mls_alloc(slots, sizeof *table);
        if (table == NULL) {
            return mls_fail(st, MLS_E_MEMORY, "no memory for %zu records", needed);
        }
        mls_free(index->table);
        index->table = table;
        index->slots = slots;
        fill_table(index);
    }
    return MLS_OK;
}

/* Record in the index that entries of this kind exist, and whether one of them has no
 * parent. */
static void note_kind(mls_prompt_index *index, const mls_prompt_entry *entry)
{
    if (entry->kind != 0) {
        index->kinds[entry->kind / 64] |= (uint64_t)1 << entry->kind % 64;
        index->root_branches = index->root_branches || entry->parent == MLS_PROMPT_NONE;
    }
}

/* Raise the time of the last use of entry `number` and of its ancestors to `used`, as far
 * as theirs is older: an ancestor is at least as recent as its descendants. */
static void raise_used(mls_prompt_index *index, uint32_t number, uint32_t used)
{
    while (number != MLS_PROMPT_NONE && index->entries[number].used < used) {
        index->entries[number].used = used;
        number = index->entries[number].parent;
    }
}

/* Add an entry, and return its number. A removed entry of the key is used again: records
 * that have it as parent are found, and it stays at least as recent as these. */
uint32_t mls_prompt_index_add(mls_prompt_index *index, const mls_prompt_entry *entry)
{
    uint32_t number = mls_prompt_index_find_any(index, &entry->key);
    uint32_t used = 0;
    uint8_t branches = 0;
    if (number == MLS_PROMPT_NONE) {
        number = (uint32_t)index->count++;
        index->entries[number] = *entry;
        enter_number(index, number);
    } else {
        used = index->entries[number].used;
        branches = index->entries[number].flags & MLS_PROMPT_BRANCHES;
        index->removed -= is_removed(index, number);
        index->entries[number] = *entry;
    }
    mls_prompt_entry *added = &index->entries[number];
    added->used = added->used > used ? added->used : used;
    added->flags |= branches;
    added->parent = MLS_PROMPT_NONE;
    mls_prompt_index_link(index, number, entry->parent);
    raise_used(index, added->parent, added->used);
    note_kind(index, added);
    return number;
}

/* Return the entry with a key, which is added if none has it. A new entry is added and
 * removed at once, so that it only reserves the number for its key. */
uint32_t mls_prompt_index_require(mls_prompt_index *index, const mls_prompt_key *key,
                                  uint32_t end)
{
    uint32_t number = mls_prompt_index_find_any(index, key);
    if (number == MLS_PROMPT_NONE) {
        const mls_prompt_entry entry = {
            .key = *key, .end = end, .parent = MLS_PROMPT_NONE};
        number = mls_prompt_index_add(index, &entry);
        mls_prompt_index_remove(index, number);
    }
    return number;
}

/* Set the parent of an entry, if it can be its parent. A parent is a block. A block ends
 * after its parent; any other record ends there or later. */
void mls_prompt_index_link(mls_prompt_index *index, uint32_t child, uint32_t parent)
{
    mls_prompt_entry *entry = &index->entries[child];
    if (parent >= index->count) {
        return;
    }
    mls_prompt_entry *above = &index->entries[parent];
    const bool is_block = entry->kind == 0;
    if (above->kind == 0 &&
        (is_block ? above->end < entry->end : above->end <= entry->end)) {
        entry->parent = parent;
        above->flags |= is_block ? 0 : MLS_PROMPT_BRANCHES;
    }
}

/* The flag of branches stays: other records may still have the entry as parent. */
void mls_prompt_index_remove(mls_prompt_index *index, uint32_t number)
{
    mls_prompt_entry *entry = &index->entries[number];
    entry->flags = MLS_PROMPT_REMOVED | (entry->flags & MLS_PROMPT_BRANCHES);
    index->removed++;
}

/* An ancestor is at least as recent as its descendants, so the walk ends at the first
 * entry with this time. */
void mls_prompt_index_touch(mls_prompt_index *index, uint32_t number, uint32_t clock)
{
    while (number != MLS_PROMPT_NONE && index->entries[number].used != clock) {
        index->entries[number].used = clock;
        number = index->entries[number].parent;
    }
}

/* Set marks[i] to 1 for each entry i that stays: records, and the parents of records. */
static void mark_needed(const mls_prompt_index *index, uint32_t *marks)
{
    for (uint32_t i = 0; i < index->count; i++) {
        if (!is_removed(index, i)) {
            marks[i] = 1;
            if (index->entries[i].parent != MLS_PROMPT_NONE) {
                marks[index->entries[i].parent] = 1;
            }
        }
    }
}

/* Drop the entries that are not needed. The new number of an entry is the number of
 * entries before it that stay. `numbers` has the marks first, and then the new
 * numbers. */
mls_code mls_prompt_index_pack(mls_prompt_index *index, mls_status *st)
{
    uint32_t *numbers = mls_alloc(index->count, sizeof *numbers);
    if (numbers == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to pack the index");
    }
    uint32_t remaining = 0;
    mark_needed(index, numbers);
    for (uint32_t i = 0; i < index->count; i++) {
        index->removed -= numbers[i] == 0;
        numbers[i] = numbers[i] == 0 ? MLS_PROMPT_NONE : remaining++;
    }
    for (uint32_t i = 0; i < index->count; i++) {
        if (numbers[i] != MLS_PROMPT_NONE) {
            mls_prompt_entry entry = index->entries[i];
            entry.parent =
                entry.parent == MLS_PROMPT_NONE ? entry.parent : numbers[entry.parent];
            index->entries[numbers[i]] = entry;
        }
    }
    mls_free(numbers);
    index->count = remaining;
    if (index->slots > 0) {
        fill_table(index);
    }
    return MLS_OK;
}

size_t mls_prompt_index_bytes(const mls_prompt_index *index)
{
    return index->room * sizeof *index->entries + index->slots * sizeof *index->table;
}
