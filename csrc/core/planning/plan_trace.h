/* plan_trace: the construction of a schedule from a solver's values. */
#ifndef MLS_PLAN_TRACE_H
#define MLS_PLAN_TRACE_H

#include "planning/plan_costs.h"

/* A solver's value: the seconds of recomputation for s .. t with this memory, which may
 * be negative; INFINITY if the segment does not fit. */
typedef double (*mls_plan_value)(const void *context, size_t s, size_t t, int64_t memory);

/* Writes the schedule for 0 .. n - 1 within the budget that attains the solver's value,
 * by evaluating the choices of each segment again. The caller owns the steps.
 * MLS_E_MEMORY; MLS_E_CAPACITY: the value is INFINITY; MLS_E_STOPPED. */
mls_code mls_plan_trace(const mls_plan_costs *costs, mls_plan_value value,
                        const void *context, mls_poll poll, mls_schedule *out,
                        mls_status *st);

#endif
