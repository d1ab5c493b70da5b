/* schedule_search: the best of all valid schedules of a short chain; its most blocks and
 * states.
 *
 * A state describes the held memory: activations with their own memory, saved blocks on
 * the device or on the host, and the remaining backward passes. The search is Dijkstra's
 * algorithm over these states. It counts only avoidable seconds (plain forwards and
 * transfers); the rest is the same for all schedules, so this is A* with the rest as the
 * bound. These rules make it small without losing an optimum:
 *
 * - An activation is dropped right after a use, or kept until its next use: an earlier
 *   drop never costs memory.
 * - An activation that is inside saved tensors, or whose block's backward pass is done,
 *   is not held separately.
 * - A backward pass that fits and leaves no more memory held than before is done at once,
 *   with the save before it if that is all it lacks: every schedule could do it now.
 * - An offload follows directly after the save or load.
 *
 * The number of states limits memory and time; results report if the limit was reached.
 */
#ifndef MLS_SCHEDULE_SEARCH_H
#define MLS_SCHEDULE_SEARCH_H

#include "activation/chain.h"
#include "activation/compute_steps.h"
#include "planning/plan_costs.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MLS_SEARCH_BLOCKS = 19,      /* longest chain: a state has 64 bits */
    MLS_SEARCH_STATES = 1 << 20, /* default limit of a search, 52 bytes each */
};

/* Limits of a search. */
typedef struct mls_search_limits {
    bool offload; /* allow offloading; the chain must have rates */
    int64_t budget_bytes;
    double below;  /* search only for fewer extra seconds; INFINITY: no limit */
    size_t states; /* 0: MLS_SEARCH_STATES */
    mls_poll poll; /* its function may be NULL */
} mls_search_limits;

typedef struct mls_search_result {
    bool has_schedule; /* a best schedule was found */
    bool ran_out;      /* of states, before the search was complete */
    double extra;      /* its avoidable seconds, see mls_step_extra */
    int64_t least;     /* for mls_search_least: the least peak */
    size_t states;     /* visited */
    mls_schedule runs; /* steps without drops; owned: free with mls_schedule_fini */
} mls_search_result;

/* Finds the schedule with the fewest extra seconds within the budget; deterministic
 * across machines. The chain was checked and has at most MLS_SEARCH_BLOCKS blocks.
 * Returns MLS_OK also if nothing was found. MLS_E_MEMORY, MLS_E_STOPPED: `*out` is
 * unchanged. */
mls_code mls_search(const mls_chain *chain, const mls_search_limits *limits,
                    mls_search_result *out, mls_status *st);

/* Finds the least peak of all schedules, regardless of time. Ignores `budget_bytes` and
 * `below`; `runs` is one of the schedules with that peak. Errors as for mls_search. */
mls_code mls_search_least(const mls_chain *chain, const mls_search_limits *limits,
                          mls_search_result *out, mls_status *st);

typedef struct mls_best_options {
    int64_t budget_bytes;
    bool offload;
    const mls_step *start; /* borrowed: a valid schedule within the budget, or NULL */
    size_t start_count;
    size_t states; /* 0: MLS_SEARCH_STATES */
    mls_poll poll; /* its function may be NULL */
} mls_best_options;

typedef struct mls_best {
    mls_schedule schedule; /* owned: free with mls_schedule_fini */
    mls_totals totals;
    bool optimal;  /* no schedule within the budget is faster */
    size_t states; /* visited; 0: the chain is too long for a search */
} mls_best;

/* Finds the fastest schedule by search, with drops. Returns the start if the chain has
 * more than MLS_SEARCH_BLOCKS blocks, or if the search needs too many states. The chain
 * was checked; it must have rates if `offload` is set. On failure `*out` is unchanged.
 * - MLS_E_CAPACITY: no schedule fits, or the search is too long and there is no start.
 *   `expected` is the least budget known to be sufficient; the text names the class of
 *   schedules.
 * - MLS_E_VALUE: the start is invalid or exceeds the budget.
 * - MLS_E_MEMORY, MLS_E_STOPPED.
 */
mls_code mls_best_schedule(const mls_chain *chain, const mls_best_options *options,
                           mls_best *out, mls_status *st);

#endif
