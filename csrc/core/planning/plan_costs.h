/* plan_costs: what the persistent class of schedules looks like to a solver, and
 * schedules from what a solver found.
 *
 * A persistent schedule of blocks s .. t starts with activation s held, which is somebody
 * else's, and with gradient t + 1, but for the last block.  It does one of these:
 *
 *   save s, solve s + 1 .. t, backward s;
 *   save s, offload s, solve s + 1 .. t, drop s + 1, load s, backward s;
 *   forward s .. k - 1 keeping activations s and k only, solve k .. t, drop k, solve
 *   s .. k - 1 again from activation s.
 *
 * Of the first two only "save s, backward s" is left where s = t.  (Beaumont et al.,
 * "Optimal checkpointing for heterogeneous chains", 2019.)
 *
 * What a solver computes is the time for recomputation and transfers, as a function of
 * the memory above activation s; everything else takes the same time in all schedules.
 * Memory is counted in units: bytes, or slots of the budget, to which every size is
 * rounded up.
 */
#ifndef MLS_PLAN_COSTS_H
#define MLS_PLAN_COSTS_H

#include "activation/chain.h"

enum { MLS_PLAN_MAX_BLOCKS = 8192, MLS_PLAN_MAX_SLOTS = 1 << 20 };

/* All arrays are owned and have one entry for each block, `activation` and `before` one
 * more.  Nothing exceeds `budget` + 1 where units are slots. */
typedef struct mls_plan_costs {
    size_t blocks;
    int64_t budget; /* above activation 0 */
    int64_t *activation, *saved;
    int64_t *hold;                /* gradient t + 1 while s .. t runs; 0 for the last t */
    int64_t *save_first;          /* peak of save s, but for the gradient that is held */
    int64_t *save_last;           /* peak of backward s */
    int64_t *sweep_first, *sweep; /* peak of forward j where j = s, where j > s */
    double *forward, *before;     /* seconds of a block; sum over those before it */
    double *away; /* seconds to the host and back; INFINITY: not offered */
    void *memory;
} mls_plan_costs;

/* `budget_bytes` includes activation 0.  `slots` 0 counts bytes.  The chain was checked;
 * it is not kept.  Gives: free with mls_plan_costs_fini.
 * MLS_E_VALUE: more blocks or slots than above; a negative budget.  MLS_E_CAPACITY: a
 * budget below activation 0.  MLS_E_MEMORY. */
mls_code mls_plan_costs_init(mls_plan_costs *out, const mls_chain *chain,
                             int64_t budget_bytes, size_t slots, bool offload,
                             mls_status *st);
void mls_plan_costs_fini(mls_plan_costs *costs); /* accepts a zeroed one; zeroes it */

/* What saving s at the head of s .. t needs by itself: the peaks of save s and of
 * backward s. */
static inline int64_t mls_plan_save_need(const mls_plan_costs *c, size_t s, size_t t)
{
    const int64_t first = c->hold[t] + c->save_first[s];
    return first > c->save_last[s] ? first : c->save_last[s];
}

/* The largest forward peak of s .. k, from that of s .. k - 1 (0 for k = s + 1). */
static inline int64_t mls_plan_sweep(const mls_plan_costs *c, size_t s, size_t k,
                                     int64_t earlier)
{
    const int64_t peak = k == s + 1 ? c->sweep_first[s] : c->sweep[k - 1];
    return peak > earlier ? peak : earlier;
}

/* A cell of a triangular table of segments, row by row: s <= t < n. */
static inline size_t mls_plan_cell(size_t n, size_t s, size_t t)
{
    return s * n - s * (s + 1) / 2 + t;
}

/* Asked now and then by long work; false stops it. */
typedef struct mls_poll {
    bool (*go_on)(void *context);
    void *context;
} mls_poll;

/* The least memory for each segment: zero it, fill it, free it. */
typedef struct mls_plan_needs {
    size_t blocks;
    int64_t *memory; /* owned; by mls_plan_cell, above activation s */
} mls_plan_needs;

/* `budget` of the costs plays no part.  MLS_E_MEMORY, MLS_E_STOPPED; `*out` is zeroed on
 * failure. */
mls_code mls_plan_least(const mls_plan_costs *costs, mls_poll poll, mls_plan_needs *out,
                        mls_status *st);
void mls_plan_needs_fini(mls_plan_needs *needs); /* accepts zeroed ones; zeroes them */

/* An mls_plan_value of needs: 0 where a segment fits, which is not what it costs. Traced,
 * it gives a schedule that fits wherever one does, and no more than that. */
double mls_plan_fits(const void *needs, size_t s, size_t t, int64_t memory);

/* The memory above activation 0 with which nothing is recomputed. */
int64_t mls_plan_enough(const mls_plan_costs *costs);

/* What a solver found: seconds of recomputation for s .. t with that much memory, which
 * may be negative; INFINITY where it does not fit. */
typedef double (*mls_plan_value)(const void *context, size_t s, size_t t, int64_t memory);

/* Write the schedule that has the value of 0 .. n - 1 within the budget, by trying the
 * choices of each segment anew.  Gives: the steps.  MLS_E_MEMORY; MLS_E_CAPACITY where
 * the value is INFINITY; MLS_E_STOPPED. */
mls_code mls_plan_trace(const mls_plan_costs *costs, mls_plan_value value,
                        const void *context, mls_poll poll, mls_schedule *out,
                        mls_status *st);

#endif
