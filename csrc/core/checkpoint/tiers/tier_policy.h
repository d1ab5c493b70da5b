/* tier_policy: decides which units of a state are hot, warm or cold, within byte budgets.
 *
 * A unit is the smallest movable group, such as a parameter and its optimizer states.
 * This module knows only its size, tier and use counts. The owner of the bytes moves them
 * and reports each move.
 *
 * Policy:
 * - Accessing a unit in a farther tier takes time proportional to its size, so a byte of
 *   budget is worth as much as its unit's use count. Units are chosen in order of use;
 *   units that do not fit are skipped (the greedy choice of G. Dantzig:
 *   "Discrete-variable extremum problems", 1957).
 * - Use counts age: each rebalance halves them (J. Robinson, M. Devarakonda: "Data cache
 *   management using frequency-based replacement", 1990).
 * - A unit keeps its tier unless another unit was used a quarter more often, so that
 *   equally used units do not swap repeatedly.
 *
 * A moving unit exists in two tiers and counts in both. The source tier's budget is exact
 * again when the move ends. Not thread-safe: the caller holds a lock. */
#ifndef MLS_TIER_POLICY_H
#define MLS_TIER_POLICY_H

#include "base/status.h"
#include "checkpoint/index/index.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* An unlimited budget, and the score of one use. */
#define MLS_TIERS_UNLIMITED UINT64_MAX
#define MLS_TIERS_USE       (UINT64_C(1) << 20)

typedef struct mls_tier_unit {
    uint64_t bytes;
    uint64_t score;   /* uses with ageing, MLS_TIERS_USE each */
    uint64_t used_at; /* clock value of the last use; 0: never used */
    uint64_t uses;    /* total uses */
    uint32_t pins;    /* above 0: in use or moving, and must not move */
    mls_tier tier;    /* MLS_TIER_NONE: this number is free */
} mls_tier_unit;

/* Initialize with mls_tiers_init. Numbers of removed units are reused. */
typedef struct mls_tiers {
    mls_tier_unit *units;
    size_t count, room, vacant;       /* numbers given so far, numbers allocated, and free
                                         numbers below `count` */
    uint64_t budgets[MLS_TIER_COUNT]; /* of hot and warm; cold is unlimited */
    uint64_t bytes[MLS_TIER_COUNT];   /* bytes in each tier; moving units count in both */
    uint64_t clock;                   /* total uses of all units */
} mls_tiers;

/* A unit and its new tier. */
typedef struct mls_tier_move {
    size_t unit;
    mls_tier to;
} mls_tier_move;

/* Moves, in an order that keeps within the budgets. */
typedef struct mls_tier_moves {
    mls_tier_move *list;
    size_t count;
} mls_tier_moves;

void mls_tier_moves_fini(mls_tier_moves *moves); /* accepts a zeroed one; zeroes it */

/* Initialize without units. Gives: mls_tiers_fini. */
void mls_tiers_init(mls_tiers *out, uint64_t hot_budget, uint64_t warm_budget);

void mls_tiers_fini(mls_tiers *t); /* accepts a zeroed one; zeroes it */

/* Add a unit that is already in `tier`, even if it exceeds the budget. MLS_E_MEMORY;
 * MLS_E_SIZE: the sum exceeds 64 bits. `t` and `*out` are untouched on failure. */
mls_code mls_tiers_add(mls_tiers *t, uint64_t bytes, mls_tier tier, size_t *out,
                       mls_status *st);

/* Return whether a unit has this number. */
bool mls_tiers_has(const mls_tiers *t, size_t unit);

/* All functions below require the number of an existing unit. */

/* Remove a unit that is not moving. */
void mls_tiers_remove(mls_tiers *t, size_t unit);

/* Change the size of a unit that is not moving. MLS_E_SIZE: nothing changed. */
mls_code mls_tiers_resize(mls_tiers *t, size_t unit, uint64_t bytes, mls_status *st);

/* Count a use. */
void mls_tiers_touch(mls_tiers *t, size_t unit);

/* Prevent a unit from moving, and allow it again. Calls must be balanced. */
void mls_tiers_pin(mls_tiers *t, size_t unit);
void mls_tiers_unpin(mls_tiers *t, size_t unit);

/* Check whether a unit fits into a tier without moving others.
 * MLS_E_CAPACITY: the unit alone exceeds the budget, or the tier has too little space
 * left; the text contains the sizes. */
mls_code mls_tiers_fits(const mls_tiers *t, size_t unit, mls_tier tier, mls_status *st);

/* Begin a move: the unit is pinned and counts in both tiers. MLS_E_SIZE: nothing changed.
 * End it with mls_tiers_end; `moved` is false if the move failed. */
mls_code mls_tiers_begin(mls_tiers *t, size_t unit, mls_tier to, mls_status *st);
void mls_tiers_end(mls_tiers *t, size_t unit, mls_tier to, bool moved);

/* Plan the moves that make space for a unit in a tier. Candidates are the least used
 * units, ties by the earliest last use; units that a larger candidate makes unnecessary
 * stay. Units from hot move to warm, which may move others from warm to cold; if warm
 * cannot hold them, they move to cold. Gives: mls_tier_moves_fini.
 * MLS_E_CAPACITY: the unit alone exceeds the budget, or pinned units leave too little of
 * it. MLS_E_MEMORY. `*out` is untouched on failure. */
mls_code mls_tiers_make_room(const mls_tiers *t, size_t unit, mls_tier tier,
                             mls_tier_moves *out, mls_status *st);

/* Plan the tier of every unit by its use, then halve all scores. A unit that was never
 * used does not move nearer, and moves only if its tier has no space. Pinned units stay.
 * Gives: mls_tier_moves_fini. MLS_E_MEMORY: `t` and `*out` are untouched. */
mls_code mls_tiers_rebalance(mls_tiers *t, mls_tier_moves *out, mls_status *st);

#endif
