/* plan_slots: the persistent class with memory counted in slots.
 *
 * A table has for each segment the value at 0, 1, ... `slots` slots.  The table is
 * triangular and is filled in square tiles of segments, so that what a processor reads is
 * used several times before it leaves the cache; the inner loops are min-plus products of
 * small tiles, in one kernel file for each instruction set.
 *
 * Values are float32: half the memory, twice the speed.  All are sums of what is not
 * negative, so that of n blocks they are right to n parts in 16 million; the schedule's
 * own time is then added up in doubles.
 */
#ifndef MLS_PLAN_SLOTS_H
#define MLS_PLAN_SLOTS_H

#include "planning/plan_costs.h"
#include "runtime/cpu_features.h"
#include "runtime/thread_pool.h"

/* The values of all segments: zero it, fill it, free it. */
typedef struct mls_plan_table {
    const mls_plan_costs *costs; /* borrowed: they outlive the table */
    size_t padded;               /* blocks, rounded up to whole tiles */
    size_t stride;               /* entries of one segment */
    size_t *rows;  /* owned: entry m of s .. t is at rows[s] + t * stride + m */
    float *values; /* owned: seconds of recomputation and transfers */
} mls_plan_table;

/* Bytes of a table; SIZE_MAX where they do not fit into a size_t. */
size_t mls_plan_table_bytes(size_t blocks, size_t slots);

/* Solve every segment.  The costs are in slots.
 * MLS_E_MEMORY; MLS_E_STOPPED.  `*out` is zeroed on failure. */
mls_code mls_plan_slots(const mls_plan_costs *costs, mls_cpu cpu, mls_pool *pool,
                        mls_poll poll, mls_plan_table *out, mls_status *st);
void mls_plan_table_fini(mls_plan_table *table); /* accepts a zeroed one; zeroes it */

/* An mls_plan_value of a table. */
double mls_plan_slots_value(const void *table, size_t s, size_t t, int64_t memory);

#endif
