/* strategy: the rules by which each kind of strategy checkpoints a layer, and the
 * interval that follows the memory in use.
 *
 * The rules and constants come from the specification of checkpoint strategies: `index
 * > 10`, `1.5 * average`, `0.7 * count`, 10 and 30 seconds. Two things differ from its
 * source without changing a decision: the sum of sizes is kept, not recomputed each time,
 * and memory is read only when an adjustment is due, not each time.
 */
#include "activation/strategy.h"

#include "base/size.h"

#include <inttypes.h>
#include <math.h>
#include <time.h>

/* Returns whether `index` is a multiple of `interval`. On some processors a 64-bit
 * division takes several times as long as a 32-bit one. */
static inline bool is_multiple(int64_t index, int64_t interval)
{
    const uint64_t a = (uint64_t)index, b = (uint64_t)interval;
    return ((a | b) >> 32) == 0 ? (uint32_t)a % (uint32_t)b == 0 : a % b == 0;
}

enum { FIRST_INTERVAL = 2, LARGEST_INTERVAL = 10 };

/* ---- decisions ---- */

/* Returns 1 for every layer whose index is a multiple of `s->number`, and counts it.
 * Index 0 is a multiple of everything, so the first layer is always checkpointed. */
int mls_decide_interval(mls_strategy *s, const mls_decide_args *args, mls_status *st)
{
    (void)st;
    const bool is_chosen = is_multiple(args->index, s->number);
    s->checkpointed += is_chosen;
    return is_chosen;
}

/* Returns 1 for a layer that the user named to be checkpointed. A layer has one mark, so
 * excluded layers need no separate check. */
int mls_decide_selective(mls_strategy *s, const mls_decide_args *args, mls_status *st)
{
    (void)st;
    return mls_layer_mark_of(&s->named, &args->layer) == MLS_LAYER_CHECKPOINT;
}

/* Returns 1 for a layer whose activation has `s->number` bytes or more, and counts it. */
int mls_decide_size_based(mls_strategy *s, const mls_decide_args *args, mls_status *st)
{
    (void)st;
    const bool is_chosen = args->bytes >= (size_t)s->number;
    s->checkpointed += is_chosen;
    return is_chosen;
}

/* Returns 1 for every layer whose index is a multiple of the interval, which the caller
 * adjusts to the memory in use. */
int mls_decide_memory_aware(mls_strategy *s, const mls_decide_args *args, mls_status *st)
{
    (void)st;
    return is_multiple(args->index, s->interval);
}

/* Returns the layer with the name `key` in `*out`; a new one is added with an activation
 * of `bytes` bytes and no calls. MLS_E_SIZE: the sum of all sizes overflows;
 * MLS_E_MEMORY, MLS_E_CAPACITY: nothing was added. The sum is checked first, so every
 * added layer's bytes are in the sum. */
static mls_code find_or_add_layer(mls_strategy *s, const mls_layer_key *key, size_t bytes,
                                  mls_table_layer **out, mls_status *st)
{
    size_t total;
    *out = mls_layer_find(&s->seen, key);
    if (*out != NULL) {
        return MLS_OK;
    }
    if (!mls_size_add(s->total_bytes, bytes, &total)) {
        return mls_fail(st, MLS_E_SIZE,
                        "the activations of all layers have more bytes than memory can");
    }
    const mls_code code = mls_layer_add(&s->seen, key, out, st);
    if (code != MLS_OK) {
        return code;
    }
    (*out)->mark = mls_layer_mark_of(&s->named, key);
    (*out)->bytes = bytes;
    s->total_bytes = total;
    return MLS_OK;
}

/* Returns whether one of three heuristics asks for a checkpoint of a layer: it is larger
 * than 1.5 times the average of all layers seen, this is its first call, or its index is
 * among the last 30 % of their number. With the source's types: an integer is compared
 * with a double. */
static bool is_worth_it(const mls_strategy *s, const mls_table_layer *layer,
                        int64_t layer_index)
{
    const double count = (double)s->seen.count;
    const double average = (double)s->total_bytes / count;
    return (double)layer->bytes > average * 1.5 || layer->calls < 2 ||
           (double)layer_index > count * 0.7;
}

/* Returns 1 to checkpoint the layer, 0 not to, -1 on failure. Checkpoints nothing up to
 * and including the first layer beyond index 10. Excluded layers are counted too: they
 * are part of the average. */
int mls_decide_smart(mls_strategy *s, const mls_decide_args *args, mls_status *st)
{
    mls_table_layer *layer = NULL;
    if (find_or_add_layer(s, &args->layer, args->bytes, &layer, st) != MLS_OK) {
        return -1;
    }
    layer->calls++;
    if (s->collecting) {
        /* the layer that ends the collecting is not checkpointed either */
        s->collecting = args->index <= 10;
        return 0;
    }
    return layer->mark != MLS_LAYER_EXCLUDE && is_worth_it(s, layer, args->index);
}

/* ---- settings and state ---- */

/* Initialises a strategy. `number` is the setting of a kind that has one, such as the
 * interval (MLS_STRATEGY_KINDS; NULL: none); it must be above 0. `max_share` is the share
 * of the memory above which the interval shrinks: above 0 and at most 1 as a float32. The
 * two names are for messages; `now` is in ticks. */
mls_code mls_strategy_init(mls_strategy *out, const int64_t *number,
                           const char *number_name, double max_share,
                           const char *share_name, int64_t now, mls_status *st)
{
    if (number != NULL && *number <= 0) {
        return mls_fail(st, MLS_E_VALUE, "%s must be greater than 0, got %" PRId64,
                        number_name, *number);
    }
    /* NaN fails too */
    const float share = (float)max_share;
    if (!(share > 0.0F && share <= 1.0F)) {
        return mls_fail(st, MLS_E_VALUE, "%s must be above 0 and at most 1, got %g",
                        share_name, max_share);
    }
    *out = (mls_strategy){.max_share = share};
    out->number = number == NULL ? 0 : *number;
    mls_strategy_reset(out, now);
    return MLS_OK;
}

/* Forgets all layers and counters, and begins the interval again at time `now`, in
 * ticks. */
void mls_strategy_reset(mls_strategy *s, int64_t now)
{
    mls_layer_map_fini(&s->seen);
    s->total_bytes = 0;
    s->collecting = true;
    s->checkpointed = 0;
    s->interval = FIRST_INTERVAL;
    s->adjusted_at = now;
    s->high_count = 0;
}

/* Restores the counters of a pickled strategy. A pickle may be written by another
 * program: states that no sequence of decisions reaches are refused (MLS_E_VALUE).
 * `checkpointed` counts layers, `high_count` adjustments under high pressure.
 * `adjusted_at` is a clock value (at most MLS_MAX_TICKS) less a difference of two (at
 * most twice that), so its magnitude is at most three times MLS_MAX_TICKS. */
mls_code mls_strategy_restore(mls_strategy *s, int64_t checkpointed, int64_t interval,
                              int64_t adjusted_at, int64_t high_count, mls_status *st)
{
    if (checkpointed < 0 || interval < 1 || interval > LARGEST_INTERVAL ||
        high_count < 0 || adjusted_at < -3 * MLS_MAX_TICKS ||
        adjusted_at > 3 * MLS_MAX_TICKS) {
        return mls_fail(st, MLS_E_VALUE,
                        "no state of a strategy: %" PRId64 " layers, interval %" PRId64
                        ", %" PRId64 " times high pressure",
                        checkpointed, interval, high_count);
    }
    s->checkpointed = checkpointed;
    s->interval = interval;
    s->adjusted_at = adjusted_at;
    s->high_count = high_count;
    return MLS_OK;
}

/* Restores one layer of a pickled strategy. A known layer has had at least one call. */
mls_code mls_strategy_restore_layer(mls_strategy *s, const mls_layer_key *layer,
                                    size_t bytes, uint64_t calls, mls_status *st)
{
    if (calls == 0 || mls_layer_find(&s->seen, layer) != NULL) {
        mls_fail(st, MLS_E_VALUE, "the state of a strategy has a layer %s",
                 calls == 0 ? "that was never called" : "twice");
        return mls_status_name(st, layer->name.data, layer->name.length);
    }
    mls_table_layer *entry = NULL;
    const mls_code code = find_or_add_layer(s, layer, bytes, &entry, st);
    if (code == MLS_OK) {
        entry->calls = calls;
    }
    return code;
}

void mls_strategy_fini(mls_strategy *s)
{
    mls_layer_map_fini(&s->seen);
    mls_layer_map_fini(&s->named);
    *s = (mls_strategy){0};
}

/* ---- memory and time ---- */

/* Returns the seconds from the last adjustment to `now` (in ticks). As a double, as in
 * the source, which compares both of its limits with it. */
static double seconds_since(const mls_strategy *s, int64_t now)
{
    return (double)(now - s->adjusted_at) / (double)MLS_TICKS_PER_SECOND;
}

/* Equal to `seconds_since(s, now) >= 10`, without the division. */
bool mls_strategy_is_due(const mls_strategy *s, int64_t now)
{
    return now - s->adjusted_at >= 10 * MLS_TICKS_PER_SECOND;
}

/* Adjusts the interval to the memory in use: `used` of `total` bytes. Between 80 and 100
 * % of the share the interval is unchanged, so that it does not oscillate. */
void mls_strategy_adjust(mls_strategy *s, int64_t now, uint64_t used, uint64_t total)
{
    if (!mls_strategy_is_due(s, now)) {
        return;
    }
    const float pressure = (float)used / (float)total;
    if (pressure > s->max_share) {
        s->interval = s->interval > 1 ? s->interval - 1 : 1;
        s->high_count++;
    } else if (pressure < s->max_share * 0.8F) {
        /* low pressure keeps `high_count`; only pressure between the limits resets it */
        if (s->high_count == 0 || seconds_since(s, now) > 30) {
            s->interval =
                s->interval < LARGEST_INTERVAL ? s->interval + 1 : LARGEST_INTERVAL;
        }
    } else {
        s->high_count = 0;
    }
    s->adjusted_at = now;
}

/* Returns a monotonic time. Linux's coarse clock costs a few nanoseconds; the fine one
 * would take longer than the rest of a decision. */
int64_t mls_ticks_now(void)
{
#if defined(CLOCK_MONOTONIC_COARSE)
    const clockid_t clock = CLOCK_MONOTONIC_COARSE;
#elif defined(CLOCK_MONOTONIC_RAW_APPROX)
    const clockid_t clock = CLOCK_MONOTONIC_RAW_APPROX;
#else
    const clockid_t clock = CLOCK_MONOTONIC;
#endif
    struct timespec now = {0};
    (void)clock_gettime(clock, &now); /* cannot fail for an existing clock */
    return (int64_t)now.tv_sec * MLS_TICKS_PER_SECOND + now.tv_nsec / 100;
}

/* The comparison is negated so that NaN fails too. */
mls_code mls_ticks_from_seconds(double seconds, int64_t *out, mls_status *st)
{
    const double ticks = seconds * (double)MLS_TICKS_PER_SECOND;
    if (!(fabs(ticks) < (double)MLS_MAX_TICKS)) {
        return mls_fail(st, MLS_E_VALUE,
                        "the clock returned %g seconds, which is not a valid time",
                        seconds);
    }
    *out = llround(ticks);
    return MLS_OK;
}
