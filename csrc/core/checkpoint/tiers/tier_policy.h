/* tiers: which units of a state are kept hot, warm or cold, under budgets of bytes.
 *
 * A unit is what moves together, such as a parameter and its optimizer states.  Here it
 * is a number of bytes, where it is, and how often it was used; whoever owns the bytes
 * moves them and says so.
 *
 * What is decided, and why.  To use a unit that is farther away costs time in proportion
 * to its bytes, so a byte of a budget is worth as much as its unit is used often: units
 * are taken in the order of their use, those that do not fit being passed over (the
 * greedy choice of G. Dantzig: "Discrete-variable extremum problems", 1957).  Uses are
 * counted with ageing, halved at each rebalance (J. Robinson, M. Devarakonda: "Data cache
 * management using frequency-based replacement", 1990), and a unit keeps its place unless
 * another one was used a quarter more often, so that equals do not take turns.
 *
 * While a unit moves it is in two places, and counts in both: the budget of the tier it
 * leaves is right again once the move has ended.  Not thread-safe: the caller has a lock.
 */
#ifndef MLS_TIERS_H
#define MLS_TIERS_H

#include "checkpoint/index/index.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a budget is that has no limit, and what one use adds to a score. */
#define MLS_TIERS_UNLIMITED UINT64_MAX
#define MLS_TIERS_USE       (UINT64_C(1) << 20)

typedef struct mls_tier_unit {
    uint64_t bytes;
    uint64_t score;   /* uses, each worth MLS_TIERS_USE, with ageing */
    uint64_t used_at; /* which use of any unit was its last; 0: never used */
    uint64_t uses;    /* in all */
    uint32_t pins;    /* above 0: in use or moving, and stays where it is */
    mls_tier tier;    /* MLS_TIER_NONE: there is no unit of this number */
} mls_tier_unit;

/* Starts by mls_tiers_init.  Numbers of units are given again once they are free. */
typedef struct mls_tiers {
    mls_tier_unit *units;
    size_t count, room, vacant; /* numbers given, allocated, and free below `count` */
    uint64_t budgets[MLS_TIER_COUNT]; /* of hot and warm; cold has none */
    uint64_t bytes[MLS_TIER_COUNT];   /* in each tier, moves under way in both */
    uint64_t clock;                   /* uses of all units */
} mls_tiers;

/* A unit that is to move. */
typedef struct mls_tier_move {
    size_t unit;
    mls_tier to;
} mls_tier_move;

/* Moves in the order in which they keep within the budgets. */
typedef struct mls_tier_moves {
    mls_tier_move *list;
    size_t count;
} mls_tier_moves;

void mls_tier_moves_fini(mls_tier_moves *moves); /* accepts a zeroed one; zeroes it */

/* Start without units.  Gives: mls_tiers_fini. */
void mls_tiers_init(mls_tiers *out, uint64_t hot_budget, uint64_t warm_budget);

void mls_tiers_fini(mls_tiers *t); /* accepts a zeroed one; zeroes it */

/* Take in a unit that is in `tier` already, whatever the budgets say.
 * MLS_E_MEMORY; MLS_E_SIZE: more bytes than 64 bits count.  `t` and `*out` are
 * untouched. */
mls_code mls_tiers_add(mls_tiers *t, uint64_t bytes, mls_tier tier, size_t *out,
                       mls_status *st);

/* Whether there is a unit of this number. */
bool mls_tiers_has(const mls_tiers *t, size_t unit);

/* All below want the number of a unit that is there. */

/* Forget a unit, which is not moving. */
void mls_tiers_remove(mls_tiers *t, size_t unit);

/* A unit that is not moving has other bytes now.  MLS_E_SIZE, and nothing changed. */
mls_code mls_tiers_resize(mls_tiers *t, size_t unit, uint64_t bytes, mls_status *st);

/* Count a use. */
void mls_tiers_touch(mls_tiers *t, size_t unit);

/* Keep a unit where it is, and allow it to move again: as often the one as the other. */
void mls_tiers_pin(mls_tiers *t, size_t unit);
void mls_tiers_unpin(mls_tiers *t, size_t unit);

/* Look whether a unit may go to a tier as things are.
 * MLS_E_CAPACITY: the unit alone exceeds the budget, or what is there leaves too little
 * of it; the text says how much. */
mls_code mls_tiers_fits(const mls_tiers *t, size_t unit, mls_tier tier, mls_status *st);

/* A move begins: the unit is pinned and counts in both tiers.  MLS_E_SIZE, and nothing
 * changed.  Ends with mls_tiers_end, which says whether the unit is there now. */
mls_code mls_tiers_begin(mls_tiers *t, size_t unit, mls_tier to, mls_status *st);
void mls_tiers_end(mls_tiers *t, size_t unit, mls_tier to, bool moved);

/* What must move away so that a unit fits into a tier: the least used units, the longest
 * unused first, without those that a larger one made needless.  From hot they go to warm,
 * from where others go cold in their turn, or cold at once where warm cannot take them.
 * Gives: mls_tier_moves_fini.  MLS_E_CAPACITY: the unit alone exceeds the budget, or what
 * is pinned leaves too little of it.  MLS_E_MEMORY.  `*out` is untouched on failure. */
mls_code mls_tiers_make_room(const mls_tiers *t, size_t unit, mls_tier tier,
                             mls_tier_moves *out, mls_status *st);

/* Where all units should be, by what they were used; then scores are halved.  What was
 * never used is not brought nearer, and goes only where it must.  Pinned units stay.
 * Gives: mls_tier_moves_fini.  MLS_E_MEMORY: `t` and `*out` are untouched. */
mls_code mls_tiers_rebalance(mls_tiers *t, mls_tier_moves *out, mls_status *st);

#endif
