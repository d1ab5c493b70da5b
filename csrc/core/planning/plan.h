/* plan: the fastest persistent schedule within a memory budget; limits of exact plans,
 * default number of slots.
 *
 * plan_costs.h defines persistent schedules. Planning to the byte yields an optimum of
 * that class. Planning by slots yields an optimum for sizes that are rounded up to slots,
 * or the schedule that recomputes every block, if that fits and is faster.
 * Times are sums of doubles, so they are optimal up to rounding.
 */
#ifndef MLS_PLAN_H
#define MLS_PLAN_H

#include "planning/plan_dp_fronts.h"
#include "planning/plan_dp_slots.h"

enum {
    MLS_PLAN_EXACT_BLOCKS = 512,          /* longer chains are planned by slots */
    MLS_PLAN_EXACT_POINTS = 16 * 1000000, /* limit for all fronts, 16 bytes each */
    MLS_PLAN_AUTO_SLOTS = 500             /* if planning to the byte is too expensive */
};

/* Largest table of slots, in bytes. */
#define MLS_PLAN_TABLE_BYTES ((size_t)2 << 30)

/* A planning request. `pool` NULL: the calling thread does all work. The poll's function
 * NULL: planning is never stopped. */
typedef struct mls_plan_request {
    int64_t budget_bytes; /* includes activation 0 */
    size_t slots;         /* 0: to the byte, or by slots if that is too expensive */
    bool offload;         /* allow offloading; the chain must have rates */
    size_t most_points;   /* limit of points; 0: MLS_PLAN_EXACT_POINTS */
    mls_cpu cpu;
    mls_pool *pool;
    mls_poll poll;
} mls_plan_request;

/* How a schedule was found. */
typedef enum mls_plan_method {
    MLS_PLAN_BY_BYTES,
    MLS_PLAN_BY_SLOTS,
    MLS_PLAN_THAT_FITS /* slots were too coarse for a tight budget: the first schedule
                          that fits */
} mls_plan_method;

typedef struct mls_plan {
    mls_schedule schedule; /* owned */
    mls_plan_method method;
    size_t slots; /* of the search; 0 for MLS_PLAN_BY_BYTES */
} mls_plan;

/* Plans a checked chain. Free the plan with mls_plan_fini.
 * - MLS_E_CAPACITY: no schedule fits; `expected` is the least sufficient budget in bytes.
 * - MLS_E_VALUE: a negative budget, too many blocks or slots.
 * - MLS_E_SIZE: the table would exceed MLS_PLAN_TABLE_BYTES; the text has the possible
 *   number of slots.
 * - MLS_E_MEMORY.
 * - MLS_E_STOPPED: the poll returned false.
 */
mls_code mls_plan_make(const mls_chain *chain, const mls_plan_request *request,
                       mls_plan *out, mls_status *st);
void mls_plan_fini(mls_plan *plan); /* accepts a zeroed one; zeroes it */

/* Computes the least budget for which a schedule fits, including activation 0, in bytes.
 * `offload`: offloading is allowed; the chain must have rates then. MLS_E_VALUE,
 * MLS_E_MEMORY, MLS_E_STOPPED as for mls_plan_make. */
mls_code mls_plan_least_bytes(const mls_chain *chain, bool offload, mls_poll poll,
                              int64_t *out, mls_status *st);

/* The Pareto curve: useful budgets and the seconds of their schedules, from the least
 * budget to the one without recomputation. */
typedef struct mls_plan_curve {
    mls_plan_point *points; /* owned: budgets in bytes, seconds of all steps */
    size_t count;
    mls_plan_method method;
    size_t slots; /* as in mls_plan */
} mls_plan_curve;

/* Computes the curve of all budgets; ignores the request's `budget_bytes`. Errors as for
 * mls_plan_make. By slots, the points are budgets of whole slots. Free with
 * mls_plan_curve_fini. */
mls_code mls_plan_pareto(const mls_chain *chain, const mls_plan_request *request,
                         mls_plan_curve *out, mls_status *st);
void mls_plan_curve_fini(mls_plan_curve *curve); /* accepts a zeroed one; zeroes it */

#endif
