/* knapsack: chooses the items to keep within a budget of bytes, so that recomputing the
 * others takes the fewest seconds.
 *
 * Items are processed in order of seconds per byte, best first. A list holds the useful
 * states, each with the bytes and seconds of a choice among the items so far; no state
 * has both more bytes and fewer seconds than another (G. Nemhauser, Z. Ullmann: "Discrete
 * dynamic programming and capital allocation", 1969). A state is pruned if, even with
 * fractions of the next items (G. Dantzig: "Discrete-variable extremum problems", 1957),
 * it cannot beat the best whole choice so far. Rounding those fractions down yields that
 * choice.
 */
#ifndef MLS_KNAPSACK_H
#define MLS_KNAPSACK_H

#include "base/status.h"
#include "planning/plan_costs.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MLS_KNAPSACK_STATES = 1 << 21, /* default; 24 bytes each, and 16 in the list */
    MLS_KNAPSACK_ITEMS = 1 << 22
};

/* Items, borrowed: seconds to recompute and bytes to keep each. */
typedef struct mls_knapsack_items {
    const double *seconds;
    const int64_t *bytes;
    size_t count;
} mls_knapsack_items;

typedef struct mls_knapsack_result {
    int64_t bytes;  /* of the kept items */
    double seconds; /* of the other items */
    double least;   /* lower bound for any choice; equals `seconds` if `optimal` */
    bool optimal;   /* up to rounding: 10^-12 of all seconds */
    size_t states;  /* number of states created */
} mls_knapsack_result;

/* Sets `kept[i]` to 1 or 0. `states` 0 means MLS_KNAPSACK_STATES. If the states run out,
 * the result is the best choice so far, and `least` bounds the possible improvement.
 * Items without bytes are always kept; items without seconds are not.
 * - MLS_E_VALUE (names the entry): negative or non-finite seconds, negative bytes or
 *   budget, too many items.
 * - MLS_E_SIZE: all bytes together exceed 62 bits, or the seconds overflow a double.
 * - MLS_E_MEMORY, MLS_E_STOPPED.
 * On failure `kept` and `*out` are unchanged.
 */
mls_code mls_knapsack(const mls_knapsack_items *items, int64_t budget_bytes,
                      size_t states, mls_poll poll, unsigned char *kept,
                      mls_knapsack_result *out, mls_status *st);

#endif
