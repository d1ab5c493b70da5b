/* layer_map: a hash table from a layer's name to its bytes, its calls, and its mark by
 * the user (named or excluded).
 *
 * Open addressing with linear probing, at most half full. A slot stores half of the hash,
 * so most probes of other layers do not read the layer. It also stores the number of the
 * layer, counted from 1; 0 means empty.
 */
#include "activation/layer_map.h"

#include "base/memory.h"
#include "base/size.h"

#include <string.h>

/* Layer numbers fit a slot, and twice their count fits size_t. */
#define MAX_LAYERS ((size_t)1 << 31)

enum { FIRST_TEXT = 128 };

/* Mixes all bits of the caller's hash into the lower half, which the slots store. */
static uint32_t mix_hash(uint64_t hash)
{
    hash *= UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(hash ^ (hash >> 32));
}

/* Returns whether two names of equal length are the same. Faster than memcmp, because
 * names are short and usually equal. The last word overlaps the one before. */
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

/* Returns whether a layer has the name of the key; compares the full hash first. */
static bool is_layer(const mls_layer_map *table, const mls_table_layer *layer,
                     const mls_layer_key *key)
{
    return layer->hash == key->hash && layer->name_length == key->name.length &&
           (key->name.length == 0 ||
            same_bytes(table->text + layer->name_at, key->name.data, key->name.length));
}

/* Returns the slot of the layer with the name of `key`, or the empty slot for it. The
 * table must have slots; at least half of them are empty. */
static mls_layer_slot *slot_of(const mls_layer_map *table, const mls_layer_key *key)
{
    const uint32_t hash = mix_hash(key->hash);
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

/* Returns the layer with this name, or NULL. An empty table has no slots. */
mls_table_layer *mls_layer_find(const mls_layer_map *table, const mls_layer_key *key)
{
    if (table->slot_count == 0) {
        return NULL;
    }
    const uint32_t number = slot_of(table, key)->number;
    return number == 0 ? NULL : &table->layers[number - 1];
}

/* Replaces the table by one of `slot_count` slots, a power of two, and inserts all
 * layers again. The layers are distinct, so each takes its first empty slot without
 * comparisons. Returns false if memory runs out; nothing is changed then. */
static bool grow_slots(mls_layer_map *table, size_t slot_count)
{
    mls_layer_slot *slots = mls_alloc(slot_count, sizeof *slots);
    if (slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < table->count; i++) {
        const uint32_t hash = mix_hash(table->layers[i].hash);
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

/* Ensures room for one more layer and its slot. `room` is a power of two (mls_grow), so
 * the number of slots is one too. Returns false if memory runs out. A partial enlargement
 * is kept on failure; it is harmless. */
static bool reserve_layer(mls_layer_map *table)
{
    mls_table_layer *layers =
        mls_grow(table->layers, table->count, &table->room, sizeof *layers);
    if (layers == NULL) {
        return false;
    }
    table->layers = layers;
    return 2 * (table->count + 1) <= table->slot_count ||
           grow_slots(table, 2 * table->room);
}

/* Ensures room for a name of `length` bytes. Reserves twice the size needed, so that
 * copying stays linear in the total length. Returns false if memory runs out. */
static bool reserve_text(mls_layer_map *table, size_t length)
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

/* Returns the layer with this name in `*out`, and adds it if it is new. Reserves all
 * memory before writing, so a failure leaves no partial layer. */
mls_code mls_layer_add(mls_layer_map *table, const mls_layer_key *key,
                       mls_table_layer **out, mls_status *st)
{
    mls_table_layer *existing = mls_layer_find(table, key);
    if (existing != NULL) {
        *out = existing;
        return MLS_OK;
    }
    if (table->count >= MAX_LAYERS) {
        return mls_fail(st, MLS_E_CAPACITY, "more than %zu layers", MAX_LAYERS);
    }
    if (!reserve_layer(table) || !reserve_text(table, key->name.length)) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the table of layers");
    }
    /* nothing fails below; searched again because the slots may have moved */
    *slot_of(table, key) = (mls_layer_slot){.hash = mix_hash(key->hash),
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

/* Sets the mark of a layer, which may be new. If the call fails after adding the layer,
 * the layer is plain, which is harmless. */
mls_code mls_layer_set_mark(mls_layer_map *table, const mls_layer_key *key,
                            mls_layer_mark mark, mls_status *st)
{
    mls_table_layer *layer = NULL;
    const mls_code code = mls_layer_add(table, key, &layer, st);
    if (code != MLS_OK) {
        return code;
    }
    if (layer->mark != MLS_LAYER_UNMARKED && layer->mark != mark) {
        mls_fail(st, MLS_E_VALUE, "layers cannot be both checkpointed and excluded: %.*s",
                 (int)(key->name.length > 200 ? 200 : key->name.length), key->name.data);
        return mls_status_name(st, key->name.data, key->name.length);
    }
    layer->mark = mark;
    return MLS_OK;
}

/* A table without text can hold only an empty name. */
mls_str mls_layer_name(const mls_layer_map *table, const mls_table_layer *layer)
{
    return (mls_str){.data = table->text == NULL ? "" : table->text + layer->name_at,
                     .length = layer->name_length};
}

/* A zeroed table can be used again. */
void mls_layer_map_fini(mls_layer_map *table)
{
    mls_free(table->layers);
    mls_free(table->slots);
    mls_free(table->text);
    *table = (mls_layer_map){0};
}
