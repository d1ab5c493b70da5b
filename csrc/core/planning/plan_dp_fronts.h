/* plan_dp_fronts: solves a chain to the byte, by dynamic programming over Pareto fronts.
 *
 * For each segment the solver keeps a front: the Pareto-optimal points (memory, seconds),
 * each with more memory and fewer seconds than the one before. The front of a segment is
 * the lower envelope of its choices' values. Each front is also kept on a coarse grid, to
 * find out which choices matter at which memory. The grid alone rules out most choices in
 * most intervals; only the others are merged point by point.
 */
#ifndef MLS_PLAN_DP_FRONTS_H
#define MLS_PLAN_DP_FRONTS_H

#include "planning/plan_costs.h"
#include "runtime/thread_pool.h"

/* A point of a front: `seconds` of recomputation and transfers from `memory` on. */
typedef struct mls_plan_point {
    int64_t memory;
    double seconds;
} mls_plan_point;

/* The points of one segment, by memory. */
typedef struct mls_plan_front {
    mls_plan_point *points; /* owned */
    size_t count;           /* 0: does not fit the budget */
} mls_plan_front;

/* All fronts of a chain. Initialise with zeros; free with mls_plan_fronts_fini. */
typedef struct mls_plan_fronts {
    size_t blocks;
    mls_plan_front *fronts; /* by mls_plan_cell */
    double *grid;           /* a row for each cell */
    int64_t step;           /* memory between two grid entries */
    size_t points;          /* in all fronts */
} mls_plan_fronts;

enum { MLS_PLAN_GRID = 64 }; /* intervals of the grid */

/* Solves every segment for all memory up to the budget. `most_points` limits the points
 * of all fronts. MLS_E_SIZE: the limit is reached; MLS_E_MEMORY; MLS_E_STOPPED. On
 * failure `*out` is zeroed. */
mls_code mls_plan_dp_fronts(const mls_plan_costs *costs, size_t most_points,
                            mls_pool *pool, mls_poll poll, mls_plan_fronts *out,
                            mls_status *st);
void mls_plan_fronts_fini(mls_plan_fronts *fronts); /* accepts a zeroed one; zeroes it */

/* The mls_plan_value of solved fronts: the extra seconds of s .. t within `memory`
 * bytes. */
double mls_plan_dp_fronts_value(const void *fronts, size_t s, size_t t, int64_t memory);

#endif
