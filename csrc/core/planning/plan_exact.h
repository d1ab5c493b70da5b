/* plan_exact: the persistent class to the byte.
 *
 * For each segment the solver keeps its front: the values that memory can buy, as points
 * (memory, seconds), each with more memory and fewer seconds than the one before.  The
 * front of a segment is the lower envelope of what its choices give.  To find out which
 * choices matter where, each front is also kept on a coarse grid: most choices are ruled
 * out for most of the grid by that alone, and only the rest is merged point by point.
 */
#ifndef MLS_PLAN_EXACT_H
#define MLS_PLAN_EXACT_H

#include "planning/plan_costs.h"
#include "runtime/thread_pool.h"

/* A point of a front: from `memory` on, `seconds` of recomputation and transfers. */
typedef struct mls_plan_point {
    int64_t memory;
    double seconds;
} mls_plan_point;

/* The points of one segment, by memory. */
typedef struct mls_plan_front {
    mls_plan_point *points; /* owned */
    size_t count;           /* 0: does not fit into the budget */
} mls_plan_front;

/* All fronts of a chain: zero it, fill it, free it. */
typedef struct mls_plan_fronts {
    size_t blocks;
    mls_plan_front *fronts; /* by mls_plan_cell */
    double *grid;           /* a row for each cell */
    int64_t step;           /* memory between two entries of the grid */
    size_t points;          /* in all fronts */
} mls_plan_fronts;

enum { MLS_PLAN_GRID = 64 }; /* intervals of the grid */

/* Solve every segment for all memory up to the budget.  `most_points` bounds what is
 * kept. MLS_E_SIZE: it is reached; MLS_E_MEMORY; MLS_E_STOPPED.  `*out` is zeroed on
 * failure. */
mls_code mls_plan_exact(const mls_plan_costs *costs, size_t most_points, mls_pool *pool,
                        mls_poll poll, mls_plan_fronts *out, mls_status *st);
void mls_plan_fronts_fini(mls_plan_fronts *fronts); /* accepts a zeroed one; zeroes it */

/* An mls_plan_value of fronts. */
double mls_plan_exact_value(const void *fronts, size_t s, size_t t, int64_t memory);

#endif
