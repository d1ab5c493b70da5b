/* layer_table: facts about layers, found by the layer's name in constant time.
 *
 * Open addressing with linear probing, at most half full.  A slot holds half of the hash,
 * so that nearly every probe of another layer is passed over without a look at it.
 */
#include "activation/layer_map.h"

#include "base/memory.h"
#include "base/size.h"

#include <string.h>

/* Numbers fit a slot, and twice their count a size. */
#define MAX_LAYERS ((size_t)1 << 31)

enum { FIRST_ROOM = 8, FIRST_TEXT = 128 };

/* All bits of the caller's hash reach the lower half, which is what a slot holds. */
static uint32_t mixed(uint64_t hash)
{
    hash *= UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(hash ^ (hash >> 32));
}

/* Whether `length` bytes are the same.  Names are short, and most comparisons are of
 * equal ones: a call of memcmp would take longer.  The last word overlaps the one before.
 */
static bool same_bytes(const char *a, const char *b, size_t length)
{
    uint64_t x, y;
    if (length < sizeof x) {
        size_t at = 0;
        while (at < length && a[at] == b[at]) {
            at++;
        }
        return at == length;
    }
    for (size_t at = 0; at + sizeof x < length; at += sizeof x) {
        memcpy(&x, a + at, sizeof x);
        memcpy(&y, b + at, sizeof y);
        if (x != y) {
            return false;
        }
    }
    memcpy(&x, a + length - sizeof x, sizeof x);
    memcpy(&y, b + length - sizeof y, sizeof y);
    return x == y;
}

/* The layer's own name against a key's; the whole hash first. */
static bool is_layer(const mls_layer_table *table, const mls_table_layer *layer,
                     const mls_layer_key *key)
{
    return layer->hash == key->hash && layer->name_length == key->name.length &&
           (key->name.length == 0 ||
            same_bytes(table->text + layer->name_at, key->name.data, key->name.length));
}

/* The slot of the layer, or the empty one where it belongs.  The table has slots, and
 * half of them are empty. */
static mls_layer_slot *slot_of(const mls_layer_table *table, const mls_layer_key *key)
{
    const uint32_t hash = mixed(key->hash);
    const size_t mask = table->slot_count - 1;
    for (size_t at = hash & mask;; at = (at + 1) & mask) {
        mls_layer_slot *slot = &table->slots[at];
        if (slot->number == 0 ||
            (slot->hash == hash &&
             is_layer(table, &table->layers[slot->number - 1], key))) {
            return slot;
        }
    }
}

/* An empty table has no slots to look at. */
mls_table_layer *mls_layer_find(const mls_layer_table *table, const mls_layer_key *key)
{
    if (table->slot_count == 0) {
        return NULL;
    }
    const uint32_t number = slot_of(table, key)->number;
    return number == 0 ? NULL : &table->layers[number - 1];
}

/* Twice as many slots, all layers put into them anew: their hashes are all different
 * layers', so the first empty slot is theirs. */
static bool grow_slots(mls_layer_table *table, size_t slot_count)
{
    mls_layer_slot *slots = mls_alloc(slot_count, sizeof *slots);
    if (slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < table->count; i++) {
        const uint32_t hash = mixed(table->layers[i].hash);
        size_t at = hash & (slot_count - 1);
        while (slots[at].number != 0) {
            at = (at + 1) & (slot_count - 1);
        }
        slots[at] = (mls_layer_slot){.hash = hash, .number = (uint32_t)(i + 1)};
    }
    mls_free(table->slots);
    table->slots = slots;
    table->slot_count = slot_count;
    return true;
}

/* Room for one more layer and its slot.  What was enlarged stays so on failure, which
 * does no harm. */
static bool reserve_layer(mls_layer_table *table)
{
    if (table->count == table->room) {
        const size_t room = table->room == 0 ? FIRST_ROOM : 2 * table->room;
        mls_table_layer *layers = mls_realloc(table->layers, room, sizeof *layers);
        if (layers == NULL) {
            return false;
        }
        table->layers = layers;
        table->room = room;
    }
    return 2 * (table->count + 1) <= table->slot_count ||
           grow_slots(table, 2 * table->room);
}

/* Room for the bytes of one more name.  Twice what is needed, so that text is copied in
 * proportion to its length, however many names come one by one. */
static bool reserve_text(mls_layer_table *table, size_t length)
{
    size_t needed, room;
    if (!mls_size_add(table->text_bytes, length, &needed)) {
        return false;
    }
    if (needed <= table->text_room) {
        return true;
    }
    if (!mls_size_mul(needed, 2, &room)) {
        return false;
    }
    room = room < FIRST_TEXT ? FIRST_TEXT : room;
    char *text = mls_realloc(table->text, room, 1);
    if (text == NULL) {
        return false;
    }
    table->text = text;
    table->text_room = room;
    return true;
}

/* All memory is asked for before anything is written: on failure no layer is half there.
 */
mls_code mls_layer_add(mls_layer_table *table, const mls_layer_key *key,
                       mls_table_layer **out, mls_status *st)
{
    mls_table_layer *known = mls_layer_find(table, key);
    if (known != NULL) {
        *out = known;
        return MLS_OK;
    }
    if (table->count >= MAX_LAYERS) {
        return mls_fail(st, MLS_E_CAPACITY, "more than %zu layers", MAX_LAYERS);
    }
    if (!reserve_layer(table) || !reserve_text(table, key->name.length)) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the table of layers");
    }
    /* nothing fails from here on; the slot is looked for anew, as slots may have moved */
    *slot_of(table, key) = (mls_layer_slot){.hash = mixed(key->hash),
                                            .number = (uint32_t)(table->count + 1)};
    mls_table_layer *layer = &table->layers[table->count++];
    *layer = (mls_table_layer){
        .hash = key->hash, .name_at = table->text_bytes, .name_length = key->name.length};
    if (key->name.length > 0) {
        memcpy(table->text + table->text_bytes, key->name.data, key->name.length);
        table->text_bytes += key->name.length;
    }
    *out = layer;
    return MLS_OK;
}

/* A layer that is added plain by a failing call does no harm: it has no mark. */
mls_code mls_layer_set_mark(mls_layer_table *table, const mls_layer_key *key,
                            mls_layer_mark mark, mls_status *st)
{
    mls_table_layer *layer = NULL;
    const mls_code code = mls_layer_add(table, key, &layer, st);
    if (code != MLS_OK) {
        return code;
    }
    if (layer->mark != MLS_LAYER_PLAIN && layer->mark != mark) {
        mls_fail(st, MLS_E_VALUE, "layers cannot be both checkpointed and excluded: %.*s",
                 (int)(key->name.length > 200 ? 200 : key->name.length), key->name.data);
        mls_status_name(st, key->name.data, key->name.length);
        return MLS_E_VALUE;
    }
    layer->mark = mark;
    return MLS_OK;
}

/* An empty name may lie in a table without text. */
mls_text mls_layer_name(const mls_layer_table *table, const mls_table_layer *layer)
{
    return (mls_text){.data = table->text == NULL ? "" : table->text + layer->name_at,
                      .length = layer->name_length};
}

/* Zeroed, a table can be used anew. */
void mls_layer_table_fini(mls_layer_table *table)
{
    mls_free(table->layers);
    mls_free(table->slots);
    mls_free(table->text);
    *table = (mls_layer_table){0};
}
