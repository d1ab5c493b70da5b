/* strategy: which layers of a model to checkpoint, decided layer by layer.
 *
 * To checkpoint a layer means to drop its activation and to compute it again in the
 * backward pass.  A strategy is a kind, settings that stay and a state that counts.  A
 * kind is a line of MLS_STRATEGY_KINDS and a function that decides:
 *
 *   interval      every n-th layer
 *   selective     the layers that the user named
 *   size_based    layers with large activations
 *   memory_aware  every n-th layer, where n follows the memory in use
 *   smart         from sizes and counts that it collects itself
 *
 * A decision takes constant time, whatever the number of layers.  Not thread-safe: the
 * caller has a lock.
 *
 * Where the rules mix integers with floats, they do it in the types of the source that
 * they are from: pressures are float32, averages float64.
 */
#ifndef MLS_STRATEGY_H
#define MLS_STRATEGY_H

#include "activation/layer_map.h"

/* What a decision needs, and what it leaves alone. */
enum {
    MLS_NEEDS_NAME = 1,
    MLS_NEEDS_BYTES = 2,
    MLS_SKIPS_EXCLUDED = 4, /* excluded layers are not decided about */
    MLS_NEEDS_MEMORY = 8,   /* mls_strategy_adjust is called when it is due */
    MLS_IS_CONSTANT = 16,   /* a decision changes nothing: it needs no lock */
    MLS_CAN_FAIL = 32,
    MLS_MAY_LACK_NUMBER = 64
};

/* All kinds: a name, the class, what its number is called (NULL: none), the flags. */
#define MLS_STRATEGY_KINDS(KIND)                                                         \
    KIND(interval, IntervalStrategy, "interval", 0)                                      \
    KIND(selective, SelectiveStrategy, NULL, MLS_NEEDS_NAME | MLS_IS_CONSTANT)           \
    KIND(size_based, SizeBasedStrategy, "min_size_bytes",                                \
         MLS_NEEDS_BYTES | MLS_SKIPS_EXCLUDED)                                           \
    KIND(memory_aware, MemoryAwareStrategy, "total_memory",                              \
         MLS_NEEDS_MEMORY | MLS_MAY_LACK_NUMBER)                                         \
    KIND(smart, SmartStrategy, NULL, MLS_NEEDS_NAME | MLS_NEEDS_BYTES | MLS_CAN_FAIL)

/* A layer to decide about; `index` is 0 or more, which the caller has checked. */
typedef struct mls_layer_question {
    mls_layer_key layer; /* if MLS_NEEDS_NAME */
    size_t bytes;        /* of its activation, if MLS_NEEDS_BYTES */
    int64_t index;
} mls_layer_question;

typedef struct mls_strategy {
    int64_t number;        /* above 0, or 0: none was given */
    mls_layer_table named; /* by the user, with marks; constant once made */
    int64_t checkpointed;  /* layers so far, of those that count them */

    float max_share;     /* of the memory, above 0 and at most 1 */
    int64_t interval;    /* 1 to 10, follows the memory */
    int64_t adjusted_at; /* ticks of the last adjustment */
    int64_t high;        /* adjustments under high pressure, none in between */

    mls_layer_table seen; /* by smart: first size, calls, mark as in `named` */
    size_t total_bytes;   /* sum of the first sizes */
    bool collecting;      /* no layer beyond index 10 was seen */
} mls_strategy;

/* 1: checkpoint the layer, 0: do not, -1: `st` says why it could not be decided, and the
 * state is as it was; `st` may be NULL without MLS_CAN_FAIL.  MLS_E_MEMORY,
 * MLS_E_CAPACITY, MLS_E_SIZE. */
typedef int mls_decide(mls_strategy *s, const mls_layer_question *q, mls_status *st);

#define MLS_DECLARE_DECIDE(kind, class, number, flags) mls_decide mls_decide_##kind;
MLS_STRATEGY_KINDS(MLS_DECLARE_DECIDE)
#undef MLS_DECLARE_DECIDE

/* Ticks of 100 ns, and how far a clock's may lie from 0: what is computed from them
 * cannot overflow. */
#define MLS_TICKS_PER_SECOND INT64_C(10000000)
#define MLS_MAX_TICKS        (INT64_MAX / 4)

/* A strategy at the beginning, with no layers named: mark them in `named`.  `number` is
 * borrowed, and NULL if there is none.  Messages call the two `number_name` and
 * `share_name`.  MLS_E_VALUE: the number is not above 0, or
 * `max_share`, as a float32, is not above 0 and at most 1 (nor is NaN); `*out` is
 * untouched.  Gives: end it with mls_strategy_fini. */
mls_code mls_strategy_init(mls_strategy *out, const int64_t *number,
                           const char *number_name, double max_share,
                           const char *share_name, int64_t now, mls_status *st);

/* Begin again at `now`; settings stay. */
void mls_strategy_reset(mls_strategy *s, int64_t now);

/* Put back what was counted.  MLS_E_VALUE: no decisions lead to it; `s` is as it was. */
mls_code mls_strategy_restore(mls_strategy *s, int64_t checkpointed, int64_t interval,
                              int64_t adjusted_at, int64_t high, mls_status *st);

/* Put back what was known of a layer.  MLS_E_VALUE: it is known already, or was never
 * called.  MLS_E_MEMORY, MLS_E_CAPACITY, MLS_E_SIZE: the sum of all sizes is beyond a
 * size. */
mls_code mls_strategy_restore_layer(mls_strategy *s, const mls_layer_key *layer,
                                    size_t bytes, uint64_t calls, mls_status *st);

/* Whether ten seconds have passed since the last adjustment.  Only then need the memory
 * be read. */
bool mls_strategy_is_due(const mls_strategy *s, int64_t now);

/* Adjust the interval to `used` bytes of `total` (above 0), if it is due: one less above
 * the share, one more below four fifths of it; the latter not within thirty seconds of
 * high pressure.  Asks again whether it is due, since another thread may have been here
 * while the memory was read. */
void mls_strategy_adjust(mls_strategy *s, int64_t now, uint64_t used, uint64_t total);

void mls_strategy_fini(mls_strategy *s); /* accepts a zeroed one; zeroes it */

/* A clock that never goes back, in ticks.  Quick and coarse: a few milliseconds. */
int64_t mls_ticks_now(void);

/* Seconds as ticks, rounded.  MLS_E_VALUE: not a number, or beyond MLS_MAX_TICKS. */
mls_code mls_ticks_from_seconds(double seconds, int64_t *out, mls_status *st);

#endif
