/* strategy: the kinds of strategies, their settings and state; strategy.c has their
 * rules.
 *
 * To checkpoint a layer means to discard its activation and to recompute it in the
 * backward pass. A strategy has a kind, constant settings, and a state. A kind is a line
 * of MLS_STRATEGY_KINDS and a decision function:
 *
 *     interval      every n-th layer
 *     selective     the layers that the user named
 *     size_based    layers with large activations
 *     memory_aware  every n-th layer; n depends on the memory in use
 *     smart         uses sizes and counts that it collects
 *
 * A decision takes constant time, independent of the number of layers. Not thread-safe:
 * the caller must hold a lock.
 *
 * Mixed integer and float arithmetic uses the types of the source of these rules:
 * pressures are float32, averages float64.
 */
#ifndef MLS_STRATEGY_H
#define MLS_STRATEGY_H

#include "activation/layer_map.h"

/* Properties of a kind. */
enum {
    MLS_NEEDS_NAME = 1,
    MLS_NEEDS_BYTES = 2,
    MLS_SKIPS_EXCLUDED = 4, /* the caller decides for excluded layers */
    MLS_NEEDS_MEMORY = 8,   /* the caller runs mls_strategy_adjust when it is due */
    MLS_IS_CONSTANT = 16,   /* a decision changes no state, so it needs no lock */
    MLS_CAN_FAIL = 32,
    MLS_MAY_LACK_NUMBER = 64
};

/* All kinds: name, Python class, name of its number (NULL: none), flags. */
#define MLS_STRATEGY_KINDS(KIND)                                                         \
    KIND(interval, IntervalStrategy, "interval", 0)                                      \
    KIND(selective, SelectiveStrategy, NULL, MLS_NEEDS_NAME | MLS_IS_CONSTANT)           \
    KIND(size_based, SizeBasedStrategy, "min_size_bytes",                                \
         MLS_NEEDS_BYTES | MLS_SKIPS_EXCLUDED)                                           \
    KIND(memory_aware, MemoryAwareStrategy, "total_memory",                              \
         MLS_NEEDS_MEMORY | MLS_MAY_LACK_NUMBER)                                         \
    KIND(smart, SmartStrategy, NULL, MLS_NEEDS_NAME | MLS_NEEDS_BYTES | MLS_CAN_FAIL)

/* Arguments of a decision; the caller has checked that `index` is at least 0. */
typedef struct mls_decide_args {
    mls_layer_key layer; /* if MLS_NEEDS_NAME */
    size_t bytes;        /* of its activation, if MLS_NEEDS_BYTES */
    int64_t index;
} mls_decide_args;

typedef struct mls_strategy {
    int64_t number; /* the setting named in MLS_STRATEGY_KINDS, above 0; 0: not given */
    mls_layer_map named;  /* by the user, with marks; constant after construction */
    int64_t checkpointed; /* number of checkpointed layers, for kinds that count them */

    float max_share;     /* of the memory, above 0 and at most 1 */
    int64_t interval;    /* of memory_aware: 1 to 10, adjusted to the memory in use */
    int64_t adjusted_at; /* ticks of the last adjustment */
    /* adjustments under high pressure since the last moderate pressure */
    int64_t high_count;

    mls_layer_map seen; /* by smart: first size, calls, mark as in `named` */
    size_t total_bytes; /* sum of the first sizes */
    bool collecting;    /* no layer beyond index 10 was seen */
} mls_strategy;

/* Returns 1 to checkpoint the layer, 0 not to, and -1 on failure, with `st` filled and
 * the state unchanged. `st` may be NULL without MLS_CAN_FAIL. MLS_E_MEMORY,
 * MLS_E_CAPACITY, MLS_E_SIZE. */
typedef int mls_decide(mls_strategy *s, const mls_decide_args *args, mls_status *st);

#define MLS_DECLARE_DECIDE(kind, class, number, flags) mls_decide mls_decide_##kind;
MLS_STRATEGY_KINDS(MLS_DECLARE_DECIDE)
#undef MLS_DECLARE_DECIDE

/* Ticks of 100 ns, and the largest magnitude of a clock value, so that differences cannot
 * overflow. */
#define MLS_TICKS_PER_SECOND INT64_C(10000000)
#define MLS_MAX_TICKS        (INT64_MAX / 4)

/* Initialises a strategy without named layers; the caller marks these in `named`.
 * `number` is borrowed, and may be NULL. `number_name` and `share_name` are the names for
 * messages. End with mls_strategy_fini. MLS_E_VALUE: the number is not above 0, or
 * `max_share` as a float32 is not above 0 and at most 1 (NaN fails too); `*out` is
 * unchanged. */
mls_code mls_strategy_init(mls_strategy *out, const int64_t *number,
                           const char *number_name, double max_share,
                           const char *share_name, int64_t now, mls_status *st);

/* Resets the state at time `now`; keeps the settings. */
void mls_strategy_reset(mls_strategy *s, int64_t now);

/* Restores the state. MLS_E_VALUE: no sequence of decisions reaches it; `s` is
 * unchanged. */
mls_code mls_strategy_restore(mls_strategy *s, int64_t checkpointed, int64_t interval,
                              int64_t adjusted_at, int64_t high_count, mls_status *st);

/* Restores the state of a layer. MLS_E_VALUE: the layer is known already, or `calls` is
 * 0. MLS_E_SIZE: the sum of all sizes overflows. MLS_E_MEMORY, MLS_E_CAPACITY. */
mls_code mls_strategy_restore_layer(mls_strategy *s, const mls_layer_key *layer,
                                    size_t bytes, uint64_t calls, mls_status *st);

/* Returns whether ten seconds have passed since the last adjustment. Memory needs to be
 * read only then. */
bool mls_strategy_is_due(const mls_strategy *s, int64_t now);

/* Adjusts the interval to `used` bytes of `total` (above 0), if an adjustment is due.
 * Above the share, the interval shrinks by one. Below 80 % of the share, it grows by one;
 * but after high pressure, and until moderate pressure resets `high_count`, only if more
 * than 30 seconds have passed since the last adjustment. Checks again whether it is due,
 * because another thread may have adjusted while the caller read the memory. */
void mls_strategy_adjust(mls_strategy *s, int64_t now, uint64_t used, uint64_t total);

void mls_strategy_fini(mls_strategy *s); /* accepts a zeroed one; zeroes it */

/* Returns a monotonic time in ticks. Fast but coarse: a few milliseconds. */
int64_t mls_ticks_now(void);

/* Converts seconds to ticks, rounded. MLS_E_VALUE: NaN, or beyond MLS_MAX_TICKS. */
mls_code mls_ticks_from_seconds(double seconds, int64_t *out, mls_status *st);

#endif
