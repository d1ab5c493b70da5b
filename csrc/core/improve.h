/* improve: the fastest schedule of any kind that can be found, and whether it is the
 * fastest there is.
 *
 * Short chains are searched through (search.h).  Where that asks for too many states, a
 * schedule found otherwise, the best persistent one say, is improved until nothing helps
 * any more:
 *
 *   - a forward that is run again is left out, what it made being kept since it was there
 *     last, where memory allows;
 *   - a save takes the place of an earlier forward of its block, where memory allows;
 *   - the part of the schedule between two moments, as far as it stays within a few
 *     blocks, is replaced by the best one there is.
 *
 * Each change makes the schedule faster and keeps its peak within the budget, so the
 * result is never worse than what it began with.
 */
#ifndef MLS_IMPROVE_H
#define MLS_IMPROVE_H

#include "chain.h"
#include "search.h"

#include <stdbool.h>
#include <stddef.h>

enum {
    MLS_IMPROVE_BLOCKS = 12,          /* of a part that is searched through */
    MLS_IMPROVE_STATES = 1 << 14,     /* of one such search */
    MLS_IMPROVE_ALL_STATES = 3 << 20, /* of all of them together */
    MLS_IMPROVE_ALL_RUNS = 100000000, /* that changes by hand may look at */
};

typedef struct mls_best_options {
    int64_t budget_bytes;
    bool offload;
    const mls_step *start; /* borrowed: a valid schedule within the budget, or NULL */
    size_t start_count;
    size_t states; /* of the search through all; 0: MLS_SEARCH_STATES */
    mls_poll poll; /* its function may be NULL */
} mls_best_options;

typedef struct mls_best {
    mls_schedule schedule; /* owned: release with mls_schedule_fini */
    mls_totals totals;
    bool optimal;  /* none is faster within the budget */
    size_t states; /* that were looked at */
} mls_best;

/* The chain was checked; it has rates where the host may be used.
 * MLS_E_CAPACITY: no schedule fits, or there are too many states to know and no schedule
 * to start from; `expected` is the least budget that is known to be enough, and the text
 * says for which schedules.  MLS_E_VALUE: the start is not valid, or exceeds the budget.
 * MLS_E_MEMORY, MLS_E_STOPPED.  `*out` is untouched then. */
mls_code mls_best_schedule(const mls_chain *chain, const mls_best_options *options,
                           mls_best *out, mls_status *st);

#endif
