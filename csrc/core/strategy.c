/* strategy: which layers of a model to checkpoint, decided layer by layer.
 *
 * The rules are those of the specification of checkpoint strategies, with its literals:
 * `index > 10`, `1.5 * average`, `0.7 * count`, 10 and 30 seconds.  Two things differ,
 * and no decision does: the sum of sizes runs along, where the source adds all of them up
 * each time, and memory is read when an adjustment is due, where the source reads it each
 * time.
 */
#include "strategy.h"

#include "size.h"

#include <inttypes.h>
#include <math.h>
#include <time.h>

/* Whether `index` is a multiple of `interval`.  Dividing 64 bits takes some processors
 * several times as long as 32 bits. */
static inline bool is_multiple(int64_t index, int64_t interval)
{
    const uint64_t a = (uint64_t)index, b = (uint64_t)interval;
    return ((a | b) >> 32) == 0 ? (uint32_t)a % (uint32_t)b == 0 : a % b == 0;
}

/* ---- interval ---- */

mls_code mls_interval_init(mls_interval *out, int64_t interval, mls_status *st)
{
    if (interval <= 0) {
        return mls_fail(st, MLS_E_VALUE, "interval must be greater than 0, got %" PRId64,
                        interval);
    }
    *out = (mls_interval){.interval = interval};
    return MLS_OK;
}

/* Index 0 is a multiple of everything: the first layer is always checkpointed. */
bool mls_interval_decide(mls_interval *s, int64_t layer_index)
{
    const bool chosen = is_multiple(layer_index, s->interval);
    s->checkpointed += chosen;
    return chosen;
}

/* ---- selective ---- */

/* No layer has two marks, so the one that excludes need not be asked for first. */
bool mls_selective_decide(const mls_selective *s, const mls_layer_key *layer)
{
    return mls_layer_mark_of(&s->layers, layer) == MLS_LAYER_CHECKPOINT;
}

/* ---- size based ---- */

mls_code mls_size_based_init(mls_size_based *out, int64_t min_bytes, mls_status *st)
{
    if (min_bytes <= 0) {
        return mls_fail(st, MLS_E_VALUE,
                        "min_size_bytes must be greater than 0, got %" PRId64, min_bytes);
    }
    *out = (mls_size_based){.min_bytes = min_bytes};
    return MLS_OK;
}

/* Only marks of one kind are in this table, but it is asked as the others are. */
bool mls_size_based_excludes(const mls_size_based *s, const mls_layer_key *layer)
{
    return mls_layer_mark_of(&s->excluded, layer) == MLS_LAYER_EXCLUDE;
}

/* What has exactly the limit is large. */
bool mls_size_based_decide(mls_size_based *s, size_t bytes)
{
    const bool chosen = bytes >= (size_t)s->min_bytes;
    s->checkpointed += chosen;
    return chosen;
}

/* ---- memory aware ---- */

enum { FIRST_INTERVAL = 2, LARGEST_INTERVAL = 10 };

mls_code mls_memory_aware_init(mls_memory_aware *out, double max_share, int64_t now,
                               mls_status *st)
{
    /* the comparison fails for NaN too */
    const float share = (float)max_share;
    if (!(share > 0.0F && share <= 1.0F)) {
        return mls_fail(st, MLS_E_VALUE,
                        "max_memory_percentage must be above 0 and at most 1, got %g",
                        max_share);
    }
    out->max_share = share;
    mls_memory_aware_reset(out, now);
    return MLS_OK;
}

/* The share stays. */
void mls_memory_aware_reset(mls_memory_aware *s, int64_t now)
{
    s->interval = FIRST_INTERVAL;
    s->adjusted_at = now;
    s->high = 0;
}

/* A pickle may have been written by anybody: what no decision can lead to is refused. */
mls_code mls_memory_aware_restore(mls_memory_aware *s, int64_t interval,
                                  int64_t adjusted_at, int64_t high, mls_status *st)
{
    if (interval < 1 || interval > LARGEST_INTERVAL || high < 0 ||
        adjusted_at < -3 * MLS_MAX_TICKS || adjusted_at > 3 * MLS_MAX_TICKS) {
        return mls_fail(st, MLS_E_VALUE,
                        "no state of a strategy: interval %" PRId64 ", %" PRId64
                        " times high pressure",
                        interval, high);
    }
    s->interval = interval;
    s->adjusted_at = adjusted_at;
    s->high = high;
    return MLS_OK;
}

/* Seconds as the source has them, a double: both limits are compared with it. */
static double seconds_since(const mls_memory_aware *s, int64_t now)
{
    return (double)(now - s->adjusted_at) / (double)MLS_TICKS_PER_SECOND;
}

/* The same as `seconds_since(s, now) >= 10` without the division. */
bool mls_memory_aware_is_due(const mls_memory_aware *s, int64_t now)
{
    return now - s->adjusted_at >= 10 * MLS_TICKS_PER_SECOND;
}

/* Between 80 and 100 % of the share the interval stays: it would swing to and fro
 * otherwise. */
void mls_memory_aware_adjust(mls_memory_aware *s, int64_t now, uint64_t used,
                             uint64_t total)
{
    if (!mls_memory_aware_is_due(s, now)) {
        return;
    }
    const float pressure = (float)used / (float)total;
    if (pressure > s->max_share) {
        s->interval = s->interval > 1 ? s->interval - 1 : 1;
        s->high++;
    } else if (pressure < s->max_share * 0.8F) {
        /* low pressure leaves `high` as it is: only what lies between takes it back */
        if (s->high == 0 || seconds_since(s, now) > 30) {
            s->interval =
                s->interval < LARGEST_INTERVAL ? s->interval + 1 : LARGEST_INTERVAL;
        }
    } else {
        s->high = 0;
    }
    s->adjusted_at = now;
}

/* As for a fixed interval, but nobody counts. */
bool mls_memory_aware_decide(const mls_memory_aware *s, int64_t layer_index)
{
    return is_multiple(layer_index, s->interval);
}

/* Linux's coarse clock is a few nanoseconds of reading memory; the fine one would take
 * longer than the rest of a decision. */
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
    (void)clock_gettime(clock, &now); /* cannot fail for a clock that exists */
    return (int64_t)now.tv_sec * MLS_TICKS_PER_SECOND + now.tv_nsec / 100;
}

/* The comparison fails for NaN too. */
mls_code mls_ticks_from_seconds(double seconds, int64_t *out, mls_status *st)
{
    const double ticks = seconds * (double)MLS_TICKS_PER_SECOND;
    if (!(fabs(ticks) < (double)MLS_MAX_TICKS)) {
        return mls_fail(st, MLS_E_VALUE, "the clock shows %g seconds", seconds);
    }
    *out = llround(ticks);
    return MLS_OK;
}

/* ---- smart ---- */

/* A layer that is seen for the first time, or was before.  The sum is checked first, so
 * that a layer without its bytes in the sum never exists. */
static mls_code meet(mls_smart *s, const mls_layer_key *key, size_t bytes,
                     mls_table_layer **out, mls_status *st)
{
    size_t total;
    *out = mls_layer_find(&s->layers, key);
    if (*out != NULL) {
        return MLS_OK;
    }
    if (!mls_size_add(s->total_bytes, bytes, &total)) {
        return mls_fail(st, MLS_E_SIZE,
                        "the activations of all layers have more bytes than memory can");
    }
    const mls_code code = mls_layer_add(&s->layers, key, out, st);
    if (code != MLS_OK) {
        return code;
    }
    (*out)->mark = mls_layer_mark_of(&s->excluded, key);
    (*out)->bytes = bytes;
    s->total_bytes = total;
    return MLS_OK;
}

/* The three heuristics, in the source's types: a long is compared with a double. */
static bool is_worth_it(const mls_smart *s, const mls_table_layer *layer,
                        int64_t layer_index)
{
    const double count = (double)s->layers.count;
    const double average = (double)s->total_bytes / count;
    return (double)layer->bytes > average * 1.5 || layer->calls < 2 ||
           (double)layer_index > count * 0.7;
}

/* Layers are counted before all else, those excluded too: they are part of the average.
 */
mls_code mls_smart_decide(mls_smart *s, const mls_layer_key *layer, size_t bytes,
                          int64_t layer_index, bool *out, mls_status *st)
{
    mls_table_layer *known = NULL;
    const mls_code code = meet(s, layer, bytes, &known, st);
    if (code != MLS_OK) {
        return code;
    }
    known->calls++;
    if (!s->ready) {
        /* the layer that ends the collecting is not checkpointed either */
        s->ready = layer_index > 10;
        *out = false;
    } else {
        *out = known->mark != MLS_LAYER_EXCLUDE && is_worth_it(s, known, layer_index);
    }
    return MLS_OK;
}

/* Calls are at least one, since a layer is known by being asked about. */
mls_code mls_smart_restore(mls_smart *s, const mls_layer_key *layer, size_t bytes,
                           uint64_t calls, mls_status *st)
{
    if (calls == 0 || mls_layer_find(&s->layers, layer) != NULL) {
        mls_fail(st, MLS_E_VALUE, "the state of a strategy has a layer %s",
                 calls == 0 ? "that was never called" : "twice");
        mls_status_name(st, layer->name.data, layer->name.length);
        return MLS_E_VALUE;
    }
    mls_table_layer *known = NULL;
    const mls_code code = meet(s, layer, bytes, &known, st);
    if (code == MLS_OK) {
        known->calls = calls;
    }
    return code;
}

void mls_smart_reset(mls_smart *s)
{
    mls_layer_table_fini(&s->layers);
    s->total_bytes = 0;
    s->ready = false;
}

void mls_smart_fini(mls_smart *s)
{
    mls_layer_table_fini(&s->layers);
    mls_layer_table_fini(&s->excluded);
    *s = (mls_smart){0};
}
