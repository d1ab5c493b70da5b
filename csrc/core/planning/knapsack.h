/* knapsack: what to keep within a budget of bytes, so that the seconds to make the rest
 * again are fewest.
 *
 * Items are taken in order of seconds per byte, best first.  A list holds the states
 * worth having, each the bytes and seconds of a choice among the items so far; none has
 * both more bytes and fewer seconds than another (G. Nemhauser, Z. Ullmann: "Discrete
 * dynamic programming and capital allocation", 1969).  A state goes when even with the
 * next items filled in by fractions (G. Dantzig: "Discrete-variable extremum problems",
 * 1957) it cannot beat the best whole choice known; those fractions rounded down give
 * that choice.
 */
#ifndef MLS_KNAPSACK_H
#define MLS_KNAPSACK_H

#include "base/status.h"
#include "planning/plan_costs.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MLS_KNAPSACK_STATES = 1 << 21, /* unless told: 24 bytes each, and 16 in the list */
    MLS_KNAPSACK_ITEMS = 1 << 22
};

/* Items, borrowed: what each costs to make again, and to keep. */
typedef struct mls_knapsack_items {
    const double *seconds;
    const int64_t *bytes;
    size_t count;
} mls_knapsack_items;

typedef struct mls_knapsack_result {
    int64_t bytes;  /* of what is kept */
    double seconds; /* of what is not */
    double least;   /* no choice takes less than this; `seconds` where `optimal` */
    bool optimal;   /* but for rounding: one part in 10^12 of all seconds */
    size_t states;  /* that were made */
} mls_knapsack_result;

/* Sets `kept[i]` to 1 or 0.  `states` 0: MLS_KNAPSACK_STATES; when they are used up, the
 * best choice so far is the result and `least` says how much better one might be.  What
 * has no bytes is kept, what takes no seconds is not.
 * MLS_E_VALUE, naming the entry: seconds that are negative or no number, negative bytes
 * or budget, too many items.  MLS_E_SIZE: all bytes together exceed 62 bits, or the
 * seconds a double's range.  MLS_E_MEMORY, MLS_E_STOPPED: `kept` and `*out` are
 * untouched. */
mls_code mls_knapsack(const mls_knapsack_items *items, int64_t budget_bytes,
                      size_t states, mls_poll poll, unsigned char *kept,
                      mls_knapsack_result *out, mls_status *st);

#endif
