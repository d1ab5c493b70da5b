/* search: the best of all valid schedules, between two moments of a stretch of a chain.
 *
 * A state is what is held within the stretch: activations by themselves, saved blocks on
 * the device or on the host, backward passes to come.  The search is Dijkstra's over
 * these states.  Only seconds that could be done without are counted (plain forwards, and
 * transfers): what remains is the same for all schedules, so this is A* with all of that
 * as the bound.  What makes it small, without losing an optimum:
 *
 *   - An activation is dropped right after it was used, or kept until it is used again:
 *     an earlier drop never costs memory.
 *   - An activation that lies in what is saved, or whose block is through with backward,
 *     is not held by itself.
 *   - A backward pass that fits and leaves no more held than before is done at once, with
 *     the save before it if that is all it lacks: every schedule could have it done now.
 *   - What goes to the host goes right after it was saved or loaded.
 *
 * Memory and time are bounded by a number of states; who asks too much is told so.
 */
#ifndef MLS_SEARCH_H
#define MLS_SEARCH_H

#include "chain.h"
#include "plan_costs.h"
#include "runs.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MLS_SEARCH_BLOCKS = 19,      /* of a stretch, at most: a state is 64 bits */
    MLS_SEARCH_STATES = 1 << 20, /* of one search, unless told: 52 bytes each */
};

/* Blocks `first` .. `first + count - 1`.  Bit j of `alone` is activation first + j, bit j
 * of `saved` and `host` is block first + j; `left` is that of the whole chain. */
typedef struct mls_stretch_state {
    uint64_t alone, saved, host;
    size_t left;
} mls_stretch_state;

/* A stretch between two moments; `base` are the bytes held outside it all the time, but
 * no gradient. */
typedef struct mls_stretch {
    const mls_chain *chain;
    size_t first, count;
    bool input_stays; /* activation `first` is there all the time, and part of `base` */
    bool offload;     /* the host may be used */
    int64_t base;
    mls_stretch_state from, to;
} mls_stretch;

/* How far to go. */
typedef struct mls_search_limits {
    int64_t budget_bytes;
    double below;  /* look for less extra seconds only; INFINITY: for any */
    size_t states; /* 0: MLS_SEARCH_STATES */
    mls_poll poll; /* its function may be NULL */
} mls_search_limits;

typedef struct mls_found {
    bool found;        /* a way, which is the best one */
    bool ran_out;      /* of states, before it was known whether there is one */
    double extra;      /* its seconds that count, see mls_run_extra */
    int64_t least;     /* of mls_search_least: the least peak */
    size_t states;     /* that were looked at */
    mls_schedule runs; /* steps without drops; owned: release with mls_schedule_fini */
} mls_found;

/* The whole of a chain, from its first step to its last.  The chain was checked and has
 * at most MLS_SEARCH_BLOCKS blocks. */
mls_stretch mls_stretch_whole(const mls_chain *chain, bool offload);

/* The fewest extra seconds between the two moments within the budget; the same result on
 * every machine.  Nothing found is no failure.
 * MLS_E_MEMORY, MLS_E_STOPPED: `*out` is untouched. */
mls_code mls_search(const mls_stretch *stretch, const mls_search_limits *limits,
                    mls_found *out, mls_status *st);

/* The least peak of all ways, whatever they take; `budget_bytes` and `below` are not
 * looked at, and `runs` is one of these ways.  Failures as above. */
mls_code mls_search_least(const mls_stretch *stretch, const mls_search_limits *limits,
                          mls_found *out, mls_status *st);

#endif
