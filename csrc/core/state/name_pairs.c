/* name_pairs: one pass while the lists agree, then a hash table with open addressing and
 * linear probing, at most half full. */
#include "state/name_pairs.h"

#include "base/memory.h"
#include "base/size.h"

/* A name of `b`. A matched name stays in the table, so that probing continues past it. */
typedef struct slot {
    uint64_t hash;
    size_t position; /* position in `b` plus 1; 0: empty */
    bool taken;
} slot;

typedef struct table {
    slot *slots;
    size_t mask;
} table;

static mls_code table_init(table *t, const mls_str *b, size_t first, size_t count,
                           mls_status *st)
{
    size_t room = 16;
    while (room / 2 < count - first) {
        if (!mls_size_mul(room, 2, &room)) {
            return mls_fail(st, MLS_E_MEMORY, "no memory to match %zu names", count);
        }
    }
    t->slots = mls_alloc(room, sizeof *t->slots);
    if (t->slots == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to match %zu names", count);
    }
    t->mask = room - 1;
    for (size_t i = first; i < count; i++) {
        const uint64_t hash = mls_str_hash(0, b[i]);
        size_t at = hash & t->mask;
        while (t->slots[at].position != 0) {
            at = (at + 1) & t->mask;
        }
        t->slots[at] = (slot){.hash = hash, .position = i + 1};
    }
    return MLS_OK;
}

/* Marks the first equal unmatched name as taken, and returns its position. */
static size_t table_take(table *t, const mls_str *b, mls_str name)
{
    const uint64_t hash = mls_str_hash(0, name);
    for (size_t at = hash & t->mask; t->slots[at].position != 0;
         at = (at + 1) & t->mask) {
        slot *s = &t->slots[at];
        if (!s->taken && s->hash == hash && mls_str_equal(b[s->position - 1], name)) {
            s->taken = true;
            return s->position - 1;
        }
    }
    return MLS_NO_PARTNER;
}

/* Marks the matched names of `b` in `rest`, then keeps the positions of the others. */
static size_t list_rest(const size_t *partners, size_t a_count, size_t b_count,
                        size_t first, size_t *rest)
{
    size_t count = 0;
    for (size_t i = first; i < b_count; i++) {
        rest[i] = i;
    }
    for (size_t i = first; i < a_count; i++) {
        if (partners[i] != MLS_NO_PARTNER) {
            rest[partners[i]] = MLS_NO_PARTNER;
        }
    }
    for (size_t i = first; i < b_count; i++) {
        if (rest[i] != MLS_NO_PARTNER) {
            rest[count++] = rest[i];
        }
    }
    return count;
}

/* Often both are the same object, so the pointers are equal. */
static bool same_name(mls_str a, mls_str b)
{
    return a.length == b.length && (a.data == b.data || mls_str_equal(a, b));
}

mls_code mls_pair_names(const mls_str *a, size_t a_count, const mls_str *b,
                        size_t b_count, size_t *partners, size_t *rest,
                        size_t *rest_count, mls_status *st)
{
    const size_t shorter = a_count < b_count ? a_count : b_count;
    table t = {0};
    size_t first = 0;
    for (; first < shorter && same_name(a[first], b[first]); first++) {
        partners[first] = first;
    }
    if (first < a_count) {
        if (table_init(&t, b, first, b_count, st) != MLS_OK) {
            return st->code;
        }
        for (size_t i = first; i < a_count; i++) {
            partners[i] = table_take(&t, b, a[i]);
        }
        mls_free(t.slots);
    }
    *rest_count = list_rest(partners, a_count, b_count, first, rest);
    return MLS_OK;
}
