/* plan_costs: converts a chain's bytes to a solver's units, and computes the least budget
 * that a plan needs.
 *
 * plan_costs.h defines segments s .. t and restarts at k.
 *
 * Sums of sizes are rounded to slots as sums, so that the parts of one peak are rounded
 * only once. Sizes that solvers add later (a held gradient, an activation below a
 * segment) are rounded separately. A sum of rounded-up numbers is at least the true one:
 * a schedule that fits in slots fits in bytes.
 */
#include "planning/plan_costs.h"

#include "base/memory.h"

#include <inttypes.h>
#include <math.h>

enum { ARRAYS = 10 }; /* in mls_plan_costs: 7 of sizes and 3 of seconds */

/* Conversion of bytes to units. Slots of an empty budget have 0 bytes: every size above 0
 * exceeds it. */
typedef struct unit_scale {
    int64_t bytes; /* of the whole budget above activation 0 */
    int64_t slots; /* 0: units are bytes */
} unit_scale;

/* Converts bytes to units of the scale, rounded up; sizes above the budget become one
 * slot more than the budget has. */
static int64_t units_of(unit_scale scale, int64_t bytes)
{
    if (scale.slots == 0) {
        return bytes;
    }
    if (bytes > scale.bytes) {
        return scale.slots + 1;
    }
    if (bytes == 0) {
        return 0;
    }
    int64_t product;
    if (!__builtin_mul_overflow(bytes, scale.slots, &product)) {
        return (product - 1) / scale.bytes + 1;
    }
    /* overflow: slots of `each` whole bytes are slightly smaller than the true slots, so
     * this rounds up a little more */
    const int64_t each = scale.bytes / scale.slots;
    const int64_t units = (bytes - 1) / each + 1;
    return units > scale.slots ? scale.slots + 1 : units;
}

/* Computes the sizes of block i in units of `scale`. A saved block and the memory above
 * it form one peak, which is rounded as a sum. */
static void fill_block(mls_plan_costs *c, const mls_chain *chain, size_t i,
                       unit_scale scale)
{
    const int64_t *activation = chain->activation_bytes;
    const int64_t *gradient = chain->gradient_bytes;
    const int64_t saved = chain->saved_bytes[i];
    const int64_t created_bytes = activation[i + 1] + chain->forward_temporary_bytes[i];
    c->saved[i] = units_of(scale, saved);
    c->hold[i] = i + 1 == c->blocks ? 0 : units_of(scale, gradient[i + 1]);
    c->save_first[i] = units_of(scale, saved + chain->saving_temporary_bytes[i]);
    c->save_last[i] = units_of(scale, saved + gradient[i + 1] + gradient[i] +
                                          chain->backward_temporary_bytes[i]);
    c->sweep_first[i] = units_of(scale, created_bytes);
    c->sweep[i] = units_of(scale, activation[i] + created_bytes);
}

/* Computes the times of block i. Transfers are not overlapped, so their time counts in
 * full; without `offload` it is infinite. */
static void fill_seconds(mls_plan_costs *c, const mls_chain *chain, size_t i,
                         bool offload)
{
    const double bytes = (double)chain->saved_bytes[i];
    c->forward[i] = chain->forward_seconds[i];
    c->before[i + 1] = c->before[i] + c->forward[i];
    c->offload_seconds[i] = offload && chain->offload_rate > 0
                                ? bytes / chain->offload_rate + bytes / chain->load_rate
                                : (double)INFINITY;
}

/* Allocates all arrays for n blocks at once, 8 bytes an entry: sizes first, then seconds.
 * Returns false if memory runs out. */
static bool make_arrays(mls_plan_costs *c, size_t n)
{
    int64_t *memory = mls_alloc(n + 1, ARRAYS * sizeof *memory);
    if (memory == NULL) {
        return false;
    }
    c->memory = memory;
    int64_t **const sizes[] = {&c->activation, &c->saved,       &c->hold, &c->save_first,
                               &c->save_last,  &c->sweep_first, &c->sweep};
    enum { SIZES = sizeof sizes / sizeof sizes[0] };
    for (size_t i = 0; i < SIZES; i++) {
        *sizes[i] = memory + i * (n + 1);
    }
    void *const rest = memory + SIZES * (n + 1); /* doubles from here on */
    c->forward = rest;
    c->before = c->forward + (n + 1);
    c->offload_seconds = c->before + (n + 1);
    return true;
}

/* Checks blocks, slots and budget (bytes, with activation 0) before any allocation:
 * MLS_E_VALUE, MLS_E_CAPACITY. Limits of memory are checked later, by the solvers. */
static mls_code check_request(const mls_chain *chain, int64_t budget, size_t slots,
                              mls_status *st)
{
    if (chain->blocks > MLS_PLAN_MAX_BLOCKS) {
        return mls_fail(st, MLS_E_VALUE,
                        "a chain of %zu blocks: plans are made for at most %d; take "
                        "several blocks as one",
                        chain->blocks, (int)MLS_PLAN_MAX_BLOCKS);
    }
    if (slots > MLS_PLAN_MAX_SLOTS) {
        return mls_fail(st, MLS_E_VALUE, "%zu slots: choose 1 to %d", slots,
                        (int)MLS_PLAN_MAX_SLOTS);
    }
    if (budget < 0) {
        return mls_fail(st, MLS_E_VALUE, "a budget of %" PRId64 " bytes is negative",
                        budget);
    }
    if (budget < chain->activation_bytes[0]) {
        return mls_fail(st, MLS_E_CAPACITY,
                        "a budget of %" PRId64
                        " bytes does not hold the input of %" PRId64,
                        budget, chain->activation_bytes[0]);
    }
    return MLS_OK;
}

/* Computes the costs of all blocks. Computes once everything that depends on a single
 * block or activation; solvers use it for every pair and triple of blocks. */
mls_code mls_plan_costs_init(mls_plan_costs *out, const mls_chain *chain,
                             int64_t budget_bytes, size_t slots, bool offload,
                             mls_status *st)
{
    const mls_code code = check_request(chain, budget_bytes, slots, st);
    if (code != MLS_OK) {
        return code;
    }
    const size_t n = chain->blocks;
    const unit_scale scale = {budget_bytes - chain->activation_bytes[0], (int64_t)slots};
    mls_plan_costs c = {.blocks = n, .budget = slots == 0 ? scale.bytes : scale.slots};
    if (!make_arrays(&c, n)) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for the sizes of %zu blocks", n);
    }
    for (size_t i = 0; i < n; i++) {
        fill_block(&c, chain, i, scale);
        fill_seconds(&c, chain, i, offload);
        c.activation[i] = units_of(scale, chain->activation_bytes[i]);
    }
    c.activation[n] = units_of(scale, chain->activation_bytes[n]);
    *out = c;
    return MLS_OK;
}

void mls_plan_costs_fini(mls_plan_costs *c)
{
    mls_free(c->memory);
    *c = (mls_plan_costs){0};
}

/* ---- the least budget ---- */

static int64_t max_size(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t min_size(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Returns the least memory for blocks s .. t, over all choices for s. `row[i]` is the
 * value of s .. s + i; `column[k]` is the value of k .. t, for k > s. A save or an
 * offload needs room for the blocks after s above the saved tensors of s, or above its
 * output. A restart at k needs room for k .. t above activation k, for s .. k - 1 again,
 * and for the forward passes with the held gradient. */
static int64_t least_segment_memory(const mls_plan_costs *c, size_t s, size_t t,
                                    const int64_t *row, const int64_t *column)
{
    const int64_t save = mls_plan_save_need(c, s, t);
    if (s == t) {
        return save;
    }
    int64_t best = max_size(save, c->saved[s] + column[s + 1]);
    if (isfinite(c->offload_seconds[s])) {
        best = min_size(best, max_size(save, c->activation[s + 1] + column[s + 1]));
    }
    int64_t sweep = 0;
    for (size_t k = s + 1; k <= t; k++) {
        sweep = mls_plan_sweep(c, s, k, sweep);
        const int64_t sides = max_size(c->activation[k] + column[k], row[k - 1 - s]);
        best = min_size(best, max_size(sides, sweep + c->hold[t]));
    }
    return best;
}

/* Fills the table of needs: entry (s, t) is the least memory for the blocks s .. t, as
 * least_segment_memory computes it. Goes column by column, each from the diagonal
 * upwards: then the entries below in the column and to the left in the row are known.
 * `column` is scratch space for c->blocks numbers. Returns false if the poll stops it. */
static bool fill_needs(const mls_plan_costs *c, mls_poll poll, int64_t *table,
                       int64_t *column)
{
    const size_t n = c->blocks;
    for (size_t t = 0; t < n; t++) {
        if (poll.go_on != NULL && !poll.go_on(poll.context)) {
            return false;
        }
        for (size_t s = t + 1; s-- > 0;) {
            column[s] =
                least_segment_memory(c, s, t, table + mls_plan_cell(n, s, s), column);
            table[mls_plan_cell(n, s, t)] = column[s];
        }
    }
    return true;
}

/* Computes the least memory of every segment. The recursion of the solvers, with peaks
 * instead of times. A cell is one number, because no memory size has to be tried. */
mls_code mls_plan_compute_needs(const mls_plan_costs *c, mls_poll poll,
                                mls_plan_needs *out, mls_status *st)
{
    const size_t n = c->blocks, cells = n * (n + 1) / 2;
    *out = (mls_plan_needs){.blocks = n};
    out->memory =
        mls_alloc(cells + n, sizeof *out->memory); /* the last n entries are a column */
    if (out->memory == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a table of %zu blocks", n);
    }
    if (!fill_needs(c, poll, out->memory, out->memory + cells)) {
        mls_plan_needs_fini(out);
        return mls_fail(st, MLS_E_STOPPED, "planning was stopped");
    }
    return MLS_OK;
}

void mls_plan_needs_fini(mls_plan_needs *needs)
{
    mls_free(needs->memory);
    *needs = (mls_plan_needs){0};
}

/* Every segment that fits has the same value, so a trace takes the first choice that
 * fits. */
double mls_plan_needs_value(const void *context, size_t s, size_t t, int64_t memory)
{
    const mls_plan_needs *needs = context;
    const bool fits = memory >= needs->memory[mls_plan_cell(needs->blocks, s, t)];
    return fits ? 0 : (double)INFINITY;
}

/* Returns the memory for keeping everything. Works from the last block back: saved blocks
 * are below the peaks of later blocks. */
int64_t mls_plan_memory_without_recomputation(const mls_plan_costs *c)
{
    const size_t last = c->blocks - 1;
    int64_t memory = 0;
    for (size_t s = c->blocks; s-- > 0;) {
        const int64_t need = mls_plan_save_need(c, s, last);
        memory = max_size(need, s == last ? 0 : c->saved[s] + memory);
    }
    return memory;
}
