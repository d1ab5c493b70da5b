/* search: the best of all valid schedules of a short chain.
 *
 * A state is what is held: activations by themselves, saved blocks on the device or on
 * the host, backward passes to come.  The search is Dijkstra's over these states.  Only
 * seconds that could be done without are counted (plain forwards, and transfers): what
 * remains is the same for all schedules, so this is A* with all of that as the bound.
 * What makes it small, without losing an optimum:
 *
 *   - An activation is dropped right after it was used, or kept until it is used again:
 *     an earlier drop never costs memory.
 *   - An activation that lies in what is saved, or whose block is through with backward,
 *     is not held by itself.
 *   - A backward pass that fits and leaves no more held than before is done at once, with
 *     the save before it if that is all it lacks: every schedule could have it done now.
 *   - What goes to the host goes right after it was saved or loaded.
 *
 * Memory and time are bounded by a number of states; a caller that exceeds it is told.
 */
#ifndef MLS_SEARCH_H
#define MLS_SEARCH_H

#include "activation/chain.h"
#include "planning/plan_costs.h"
#include "activation/compute_steps.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MLS_SEARCH_BLOCKS = 19,      /* of a chain, at most: a state is 64 bits */
    MLS_SEARCH_STATES = 1 << 20, /* of one search, unless told: 52 bytes each */
};

/* How far to go. */
typedef struct mls_search_limits {
    bool offload; /* the host may be used: the chain has rates */
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

/* The fewest extra seconds within the budget; the same result on every machine.  The
 * chain was checked and has at most MLS_SEARCH_BLOCKS blocks.  Nothing found is no
 * failure. MLS_E_MEMORY, MLS_E_STOPPED: `*out` is untouched. */
mls_code mls_search(const mls_chain *chain, const mls_search_limits *limits,
                    mls_found *out, mls_status *st);

/* The least peak of all schedules, whatever they take; `budget_bytes` and `below` are not
 * looked at, and `runs` is one of these schedules.  Failures as above. */
mls_code mls_search_least(const mls_chain *chain, const mls_search_limits *limits,
                          mls_found *out, mls_status *st);

typedef struct mls_best_options {
    int64_t budget_bytes;
    bool offload;
    const mls_step *start; /* borrowed: a valid schedule within the budget, or NULL */
    size_t start_count;
    size_t states; /* 0: MLS_SEARCH_STATES */
    mls_poll poll; /* its function may be NULL */
} mls_best_options;

typedef struct mls_best {
    mls_schedule schedule; /* owned: release with mls_schedule_fini */
    mls_totals totals;
    bool optimal;  /* none is faster within the budget */
    size_t states; /* that were looked at; 0: the chain is too long for a search */
} mls_best;

/* The fastest schedule, drops included, by a search; or the start, if the chain has more
 * than MLS_SEARCH_BLOCKS blocks or asks for too many states.  The chain was checked; it
 * has rates if the host may be used.
 * MLS_E_CAPACITY: no schedule fits, or the search is too long and there is no start;
 * `expected` is the least budget that is known to be enough, and the text says for which
 * schedules.  MLS_E_VALUE: the start is not valid, or exceeds the budget.  MLS_E_MEMORY,
 * MLS_E_STOPPED.  `*out` is untouched then. */
mls_code mls_best_schedule(const mls_chain *chain, const mls_best_options *options,
                           mls_best *out, mls_status *st);

#endif
