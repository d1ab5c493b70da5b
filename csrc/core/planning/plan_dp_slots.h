/* plan_dp_slots: solves a chain with memory rounded to slots, by dynamic programming over
 * a table.
 *
 * The table has for each segment the value at 0, 1, ... `slots` slots. It is triangular
 * and is filled in square tiles of segments, so that loaded entries are used several
 * times before they leave the cache. The inner loops are min-plus products of small
 * tiles, with one kernel file for each instruction set.
 *
 * Values are float32: half the memory and twice the speed. All are sums of non-negative
 * numbers, so for n blocks their relative error is at most n parts in 16 million. The
 * schedule's time is then summed in doubles.
 */
#ifndef MLS_PLAN_DP_SLOTS_H
#define MLS_PLAN_DP_SLOTS_H

#include "planning/plan_costs.h"
#include "runtime/cpu_features.h"
#include "runtime/thread_pool.h"

/* The values of all segments. Initialise with zeros; free with mls_plan_table_fini. */
typedef struct mls_plan_table {
    const mls_plan_costs *costs; /* borrowed; must outlive the table */
    size_t padded;               /* blocks, rounded up to whole tiles */
    size_t stride;               /* entries of one segment */
    size_t *rows;  /* owned: entry m of s .. t is at rows[s] + t * stride + m */
    float *values; /* owned: seconds of recomputation and transfers */
} mls_plan_table;

/* Returns the bytes of a table; SIZE_MAX on overflow. */
size_t mls_plan_table_bytes(size_t blocks, size_t slots);

/* Solves every segment. The costs must be in slots. MLS_E_MEMORY, MLS_E_STOPPED; on
 * failure `*out` is zeroed. */
mls_code mls_plan_dp_slots(const mls_plan_costs *costs, mls_cpu cpu, mls_pool *pool,
                           mls_poll poll, mls_plan_table *out, mls_status *st);
void mls_plan_table_fini(mls_plan_table *table); /* accepts a zeroed one; zeroes it */

/* The mls_plan_value of a solved table: the extra seconds of s .. t within `memory`
 * slots. */
double mls_plan_dp_slots_value(const void *table, size_t s, size_t t, int64_t memory);

#endif
