/* plan_costs: persistent schedules and their costs as solvers see them; the most blocks
 * and slots of a plan.
 *
 * A segment s .. t is a range of blocks: s is the first and t the last one, both
 * included. k, with s < k <= t, is the block at which a restart divides it. A persistent
 * schedule of a segment starts with activation s, which the surrounding schedule holds,
 * and with gradient t + 1, except for the last block. It does one of these:
 *
 *     save s, solve s + 1 .. t, backward s;
 *     save s, offload s, solve s + 1 .. t, drop s + 1, load s, backward s;
 *     forward s .. k - 1 keeping activations s and k only, solve k .. t, drop k, solve
 *     s .. k - 1 again from activation s.
 *
 * For s = t only "save s, backward s" is possible. (Beaumont et al., "Optimal
 * checkpointing for heterogeneous chains", 2019.)
 *
 * A solver computes the time for recomputation and transfers as a function of the memory
 * above activation s; all other time is the same in every schedule. Memory is counted in
 * units: bytes, or slots of the budget; every size is rounded up to slots.
 */
#ifndef MLS_PLAN_COSTS_H
#define MLS_PLAN_COSTS_H

#include "activation/chain.h"

enum { MLS_PLAN_MAX_BLOCKS = 8192, MLS_PLAN_MAX_SLOTS = 1 << 20 };

/* All arrays are owned and have one entry for each block; `activation` and `before` have
 * one more. If units are slots, no entry exceeds `budget` + 1. */
typedef struct mls_plan_costs {
    size_t blocks;
    int64_t budget;               /* above activation 0 */
    int64_t *activation, *saved;  /* sizes, as in mls_chain */
    int64_t *hold;                /* gradient t + 1 while s .. t runs; 0 for the last t */
    int64_t *save_first;          /* peak of save s, without the held gradient */
    int64_t *save_last;           /* peak of backward s */
    int64_t *sweep_first, *sweep; /* peak of forward j for j = s, and for j > s */
    double *forward, *before;     /* seconds of a block; sum over the blocks before it */
    double *offload_seconds;      /* an offload with its load; INFINITY: not allowed */
    void *memory;
} mls_plan_costs;

/* Computes the costs of a checked chain, which is not kept. `budget_bytes` includes
 * activation 0. `slots` 0 counts bytes. `offload`: offloading is allowed, if the chain
 * has rates. Free with mls_plan_costs_fini. MLS_E_VALUE: more blocks or slots than the
 * limits above; a negative budget. MLS_E_CAPACITY: a budget below activation 0.
 * MLS_E_MEMORY. */
mls_code mls_plan_costs_init(mls_plan_costs *out, const mls_chain *chain,
                             int64_t budget_bytes, size_t slots, bool offload,
                             mls_status *st);
void mls_plan_costs_fini(mls_plan_costs *costs); /* accepts a zeroed one; zeroes it */

/* Returns the memory that saving s at the start of s .. t needs without the segment s + 1
 * .. t: the larger peak of save s and backward s. */
static inline int64_t mls_plan_save_need(const mls_plan_costs *c, size_t s, size_t t)
{
    const int64_t first = c->hold[t] + c->save_first[s];
    return first > c->save_last[s] ? first : c->save_last[s];
}

/* Returns the largest peak of the forward passes of blocks s .. k - 1, which make
 * activation k. `earlier` is that of s .. k - 2; 0 for k = s + 1. */
static inline int64_t mls_plan_sweep(const mls_plan_costs *c, size_t s, size_t k,
                                     int64_t earlier)
{
    const int64_t peak = k == s + 1 ? c->sweep_first[s] : c->sweep[k - 1];
    return peak > earlier ? peak : earlier;
}

/* Returns the index of s .. t (s <= t < n) in a triangular table of the segments of n
 * blocks: row by row, with one row for each s. */
static inline size_t mls_plan_cell(size_t n, size_t s, size_t t)
{
    return s * n - s * (s + 1) / 2 + t;
}

/* Called now and then during long work; returns false to stop it. */
typedef struct mls_poll {
    bool (*go_on)(void *context);
    void *context;
} mls_poll;

/* The needs of a chain: the least memory for each segment. Initialise with zeros; free
 * with mls_plan_needs_fini. */
typedef struct mls_plan_needs {
    size_t blocks;
    int64_t *memory; /* owned; by mls_plan_cell, above activation s */
} mls_plan_needs;

/* Fills the table of needs; ignores the costs' `budget`. MLS_E_MEMORY, MLS_E_STOPPED; on
 * failure `*out` is zeroed. */
mls_code mls_plan_compute_needs(const mls_plan_costs *costs, mls_poll poll,
                                mls_plan_needs *out, mls_status *st);
void mls_plan_needs_fini(mls_plan_needs *needs); /* accepts zeroed ones; zeroes them */

/* The mls_plan_value of needs: 0 if a segment fits, which is not its time. A trace with
 * it yields some schedule that fits, if one exists. */
double mls_plan_needs_value(const void *needs, size_t s, size_t t, int64_t memory);

/* Returns the least memory above activation 0 with which nothing is recomputed. */
int64_t mls_plan_memory_without_recomputation(const mls_plan_costs *costs);

#endif
