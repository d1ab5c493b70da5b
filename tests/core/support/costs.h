/* costs: the costs of a chain, as the planners take them; for one test at a time. */
#ifndef MLS_TEST_COSTS_H
#define MLS_TEST_COSTS_H

#include "support/chains.h"
#include "support/runner.h"

static mls_plan_costs costs; /* of the current test */

AFTER_EACH
{
    mls_plan_costs_fini(&costs);
}

static inline mls_code set_costs(const mls_chain *chain, int64_t budget, size_t slots,
                                 bool offload)
{
    mls_plan_costs_fini(&costs);
    return mls_plan_costs_init(&costs, chain, budget, slots, offload, &status);
}

#endif
