/* strategy: which layers of a model to checkpoint, decided layer by layer.
 *
 * To checkpoint a layer means to drop its activation and to compute it again in the
 * backward pass.  Five strategies, each with settings that stay and a state that counts:
 *
 *   interval      every n-th layer
 *   selective     the layers that the user named
 *   size_based    layers with large activations
 *   memory_aware  every n-th layer, where n follows the memory in use
 *   smart         from sizes and counts that it collects itself
 *
 * Layer indexes are 0 or more: the caller has checked that.  A decision takes constant
 * time, whatever the number of layers.  Not thread-safe: the caller has a lock.
 *
 * Where the rules mix integers with floats, they do it in the types of the source that
 * they are from: pressures are float32, averages float64.
 */
#ifndef MLS_STRATEGY_H
#define MLS_STRATEGY_H

#include "layer_table.h"

/* ---- interval ---- */

typedef struct mls_interval {
    int64_t interval;     /* 1 or more */
    int64_t checkpointed; /* layers so far */
} mls_interval;

/* MLS_E_VALUE: the interval is not above 0; `*out` is untouched. */
mls_code mls_interval_init(mls_interval *out, int64_t interval, mls_status *st);

/* Whether the index is a multiple of the interval, which is counted. */
bool mls_interval_decide(mls_interval *s, int64_t layer_index);

/* ---- selective ---- */

/* Marks say all; there is no state. */
typedef struct mls_selective {
    mls_layer_table layers;
} mls_selective;

/* Whether the layer is marked MLS_LAYER_CHECKPOINT. */
bool mls_selective_decide(const mls_selective *s, const mls_layer_key *layer);

/* ---- size based ---- */

typedef struct mls_size_based {
    int64_t min_bytes;        /* 1 or more */
    int64_t checkpointed;     /* layers so far */
    mls_layer_table excluded; /* marked MLS_LAYER_EXCLUDE */
} mls_size_based;

/* Start with nothing excluded.  MLS_E_VALUE: the size is not above 0; `*out` is
 * untouched.  Gives: end `excluded` with mls_layer_table_fini. */
mls_code mls_size_based_init(mls_size_based *out, int64_t min_bytes, mls_status *st);

/* Whether the layer is excluded; then its size does not matter and need not be known. */
bool mls_size_based_excludes(const mls_size_based *s, const mls_layer_key *layer);

/* For a layer that is not excluded: whether `bytes` is at least the limit, which is
 * counted. */
bool mls_size_based_decide(mls_size_based *s, size_t bytes);

/* ---- memory aware ---- */

/* Ticks of 100 ns, and how far a clock's may lie from 0: what is computed from them
 * cannot overflow. */
#define MLS_TICKS_PER_SECOND INT64_C(10000000)
#define MLS_MAX_TICKS        (INT64_MAX / 4)

typedef struct mls_memory_aware {
    float max_share;     /* of the memory, above 0 and at most 1 */
    int64_t interval;    /* 1 to 10, begins with 2 */
    int64_t adjusted_at; /* ticks of the last adjustment */
    int64_t high;        /* adjustments under high pressure, none in between */
} mls_memory_aware;

/* MLS_E_VALUE: `max_share`, as a float32, is not above 0 and at most 1 (nor is NaN);
 * `*out` is untouched. */
mls_code mls_memory_aware_init(mls_memory_aware *out, double max_share, int64_t now,
                               mls_status *st);

/* Start again at `now` with the first interval. */
void mls_memory_aware_reset(mls_memory_aware *s, int64_t now);

/* Put back a state of a strategy with these settings.  MLS_E_VALUE: no such state, and
 * `s` is as it was. */
mls_code mls_memory_aware_restore(mls_memory_aware *s, int64_t interval,
                                  int64_t adjusted_at, int64_t high, mls_status *st);

/* Whether ten seconds have passed since the last adjustment.  Only then need the memory
 * be read. */
bool mls_memory_aware_is_due(const mls_memory_aware *s, int64_t now);

/* Adjust the interval to `used` bytes of `total` (above 0), if it is due: one less above
 * the share, one more below four fifths of it; the latter not within thirty seconds of
 * high pressure.  Asks again whether it is due, since another thread may have been here
 * while the memory was read. */
void mls_memory_aware_adjust(mls_memory_aware *s, int64_t now, uint64_t used,
                             uint64_t total);

/* Whether the index is a multiple of the present interval. */
bool mls_memory_aware_decide(const mls_memory_aware *s, int64_t layer_index);

/* A clock that never goes back, in ticks.  Quick and coarse: a few milliseconds. */
int64_t mls_ticks_now(void);

/* Seconds as ticks, rounded.  MLS_E_VALUE: not a number, or beyond MLS_MAX_TICKS. */
mls_code mls_ticks_from_seconds(double seconds, int64_t *out, mls_status *st);

/* ---- smart ---- */

/* `layers` has a `mark` for those excluded, copied from `excluded` when a layer is seen
 * first, so that each decision looks up one name. */
typedef struct mls_smart {
    mls_layer_table layers;   /* all that were seen: first size, calls */
    mls_layer_table excluded; /* marked MLS_LAYER_EXCLUDE */
    size_t total_bytes;       /* sum of the first sizes */
    bool ready;               /* a layer beyond index 10 was seen */
} mls_smart;

/* Count the layer, and decide.  Nothing is checkpointed up to and with the first layer
 * beyond index 10.  Afterwards: what is more than 1.5 times the average size, what was
 * seen only once, and what lies behind 0.7 times the number of layers.
 * MLS_E_MEMORY, MLS_E_CAPACITY, and MLS_E_SIZE where the sum of all sizes is beyond a
 * size: `*out` and the state are untouched. */
mls_code mls_smart_decide(mls_smart *s, const mls_layer_key *layer, size_t bytes,
                          int64_t layer_index, bool *out, mls_status *st);

/* Put back what was known of a layer.  MLS_E_VALUE: it is known already, or was never
 * called.  MLS_E_MEMORY, MLS_E_CAPACITY, MLS_E_SIZE as above. */
mls_code mls_smart_restore(mls_smart *s, const mls_layer_key *layer, size_t bytes,
                           uint64_t calls, mls_status *st);

/* Forget all layers; those excluded stay excluded. */
void mls_smart_reset(mls_smart *s);

void mls_smart_fini(mls_smart *s); /* accepts a zeroed one; zeroes it */

#endif
