/* plan: the fastest schedule of a chain within a memory budget, among persistent ones.
 *
 * plan_costs.h says what persistent means.  To the byte, nothing of that class is faster;
 * with slots, nothing is whose sizes are rounded up to slots.  Times are compared as
 * doubles, sums of which differ by their rounding.
 */
#ifndef MLS_PLAN_H
#define MLS_PLAN_H

#include "planning/plan_exact.h"
#include "planning/plan_slots.h"

enum {
    MLS_PLAN_EXACT_BLOCKS = 512,          /* longer chains are planned by slots */
    MLS_PLAN_EXACT_POINTS = 16 * 1000000, /* of all fronts, 16 bytes each */
    MLS_PLAN_AUTO_SLOTS = 500
};

/* Memory that a table of slots may take. */
#define MLS_PLAN_TABLE_BYTES ((size_t)2 << 30)

/* What is wanted.  `pool` may be NULL, and so may the poll's function. */
typedef struct mls_plan_request {
    int64_t budget_bytes; /* activation 0 included */
    size_t slots;         /* 0: to the byte, or by slots where that takes too much */
    bool offload;         /* where the chain has rates */
    size_t most_points;   /* 0: MLS_PLAN_EXACT_POINTS */
    mls_cpu cpu;
    mls_pool *pool;
    mls_poll poll;
} mls_plan_request;

/* How a schedule was found. */
typedef enum mls_plan_method {
    MLS_PLAN_BY_BYTES,
    MLS_PLAN_BY_SLOTS,
    MLS_PLAN_THAT_FITS /* slots were too coarse for so tight a budget: the first found */
} mls_plan_method;

typedef struct mls_plan {
    mls_schedule schedule; /* owned */
    mls_plan_method method;
    size_t slots; /* of MLS_PLAN_BY_SLOTS, else 0 */
} mls_plan;

/* The chain was checked.  Gives: free with mls_plan_fini.
 * MLS_E_CAPACITY: no schedule fits; `expected` is the least budget that one fits, in
 * bytes.  MLS_E_VALUE: a negative budget, too many blocks or slots.  MLS_E_SIZE: a table
 * beyond MLS_PLAN_TABLE_BYTES; the text says how many slots are possible.  MLS_E_MEMORY.
 * MLS_E_STOPPED: the poll said so. */
mls_code mls_plan_make(const mls_chain *chain, const mls_plan_request *request,
                       mls_plan *out, mls_status *st);
void mls_plan_fini(mls_plan *plan); /* accepts a zeroed one; zeroes it */

/* The least budget that a schedule fits, activation 0 included.  MLS_E_VALUE,
 * MLS_E_MEMORY, MLS_E_STOPPED as above. */
mls_code mls_plan_least_bytes(const mls_chain *chain, bool offload, mls_poll poll,
                              int64_t *out, mls_status *st);

/* All budgets worth having and the seconds that they cost, from the least memory to that
 * with which nothing is recomputed. */
typedef struct mls_plan_curve {
    mls_plan_point *points; /* owned: budgets in bytes, seconds of all steps */
    size_t count;
    mls_plan_method method;
    size_t slots;
} mls_plan_curve;

/* As mls_plan_make, for all budgets; `budget_bytes` of the request is not used.  By slots
 * the points are those of budgets that are whole slots.  Gives: free with
 * mls_plan_curve_fini. */
mls_code mls_plan_pareto(const mls_chain *chain, const mls_plan_request *request,
                         mls_plan_curve *out, mls_status *st);
void mls_plan_curve_fini(mls_plan_curve *curve); /* accepts a zeroed one; zeroes it */

#endif
