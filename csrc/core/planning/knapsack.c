/* knapsack: dynamic programming over lists of (bytes, seconds), pruned by Dantzig's
 * bound. */
#include "planning/knapsack.h"

#include "base/memory.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { NOTHING = UINT32_MAX };

/* The list begins with the empty choice. Each item doubles it: every choice without the
 * item and with it, merged by bytes. Most choices are pruned at once, because the items
 * come in the best order and the bound is tight. Pruned choices stay in memory, because
 * surviving choices refer to them. */

/* A choice: the choice `before` plus `item`. */
typedef struct pick {
    int64_t bytes;
    double seconds;
    uint32_t before; /* NOTHING: the empty choice */
    uint32_t item;   /* index in `order` */
} pick;

/* Whole items that fit: a choice, plus all items from .. to - 1 after it. */
typedef struct whole {
    double seconds;
    uint32_t choice; /* may be NOTHING */
    size_t from, to;
} whole;

typedef struct knapsack {
    const mls_knapsack_items *items;
    int64_t room;    /* the budget, at most all bytes */
    uint32_t *order; /* owned: undecided items, by seconds per byte */
    size_t count;
    int64_t *bytes_before; /* owned: prefix sums in that order */
    double *seconds_before;
    pick *choices; /* owned */
    size_t made, space, most;
    uint32_t *list, *next; /* owned: choices, ascending in both bytes and seconds */
    size_t length, list_space;
    whole best;
    double slack; /* smaller differences are rounding */
    mls_poll poll;
    mls_status *st;
} knapsack;

/* ---- checks ---- */

static mls_code check_items(const mls_knapsack_items *items, int64_t budget, double *all,
                            int64_t *bytes, mls_status *st)
{
    *all = 0;
    *bytes = 0;
    if (budget < 0) {
        return mls_fail(st, MLS_E_VALUE, "a budget of %" PRId64 " bytes is negative",
                        budget);
    }
    if (items->count > MLS_KNAPSACK_ITEMS) {
        return mls_fail(st, MLS_E_VALUE, "%zu operators: choose at most %d", items->count,
                        (int)MLS_KNAPSACK_ITEMS);
    }
    if (mls_check_seconds("seconds", items->seconds, items->count, all, st) != MLS_OK ||
        mls_check_bytes("bytes", items->bytes, items->count, NULL, bytes, st) != MLS_OK) {
        return st->code;
    }
    return isfinite(*all) ? MLS_OK
                          : mls_fail(st, MLS_E_SIZE,
                                     "all seconds together exceed the range of a double");
}

/* ---- the order of the items ---- */

/* Returns whether item a saves more seconds per byte than item b. Ties: the larger item
 * first, then the earlier one. */
static bool comes_first(const mls_knapsack_items *items, uint32_t a, uint32_t b)
{
    /* all items here have at least one byte */
    const double x = items->seconds[a] / (double)items->bytes[a];
    const double y = items->seconds[b] / (double)items->bytes[b];
    if (x < y || y < x) {
        return x > y;
    }
    return items->bytes[a] != items->bytes[b] ? items->bytes[a] > items->bytes[b] : a < b;
}

/* Heap sort: in place, and O(n log n) for any input. */
static void sift_down(const mls_knapsack_items *items, uint32_t *order, size_t at,
                      size_t count)
{
    const uint32_t moved = order[at];
    for (size_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && comes_first(items, order[child], order[child + 1])) {
            child++; /* the top is the item that comes last */
        }
        if (!comes_first(items, moved, order[child])) {
            break;
        }
        order[at] = order[child];
        at = child;
    }
    order[at] = moved;
}

/* Polls the caller, because many items may take long. */
static mls_code poll_caller(const knapsack *k)
{
    return k->poll.go_on == NULL || k->poll.go_on(k->poll.context)
               ? MLS_OK
               : mls_fail(k->st, MLS_E_STOPPED, "the choice was stopped");
}

/* Moves the last item in order to the top, and from there to the end. */
static mls_code sort_items(const knapsack *k)
{
    const mls_knapsack_items *items = k->items;
    for (size_t at = k->count / 2; at-- > 0;) {
        sift_down(items, k->order, at, k->count);
    }
    for (size_t last = k->count; last-- > 1;) {
        const uint32_t top = k->order[0];
        k->order[0] = k->order[last];
        k->order[last] = top;
        sift_down(items, k->order, 0, last);
        if ((last & 8191) == 0 &&
            poll_caller(k) != MLS_OK) { /* a few milliseconds apart */
            return k->st->code;
        }
    }
    return MLS_OK;
}

/* Sorts the undecided items and computes prefix sums. Items without bytes or seconds, or
 * larger than the budget, are decided already. */
static mls_code order_items(knapsack *k)
{
    const mls_knapsack_items *items = k->items;
    for (size_t i = 0; i < items->count; i++) {
        if (items->bytes[i] > 0 && items->bytes[i] <= k->room && items->seconds[i] > 0) {
            k->order[k->count++] = (uint32_t)i;
        }
    }
    const mls_code code = sort_items(k);
    for (size_t i = 0; i < k->count && code == MLS_OK; i++) {
        k->bytes_before[i + 1] = k->bytes_before[i] + items->bytes[k->order[i]];
        k->seconds_before[i + 1] = k->seconds_before[i] + items->seconds[k->order[i]];
    }
    return code;
}

/* ---- bounds ---- */

/* The empty choice has no entry. */
static int64_t bytes_of(const knapsack *k, uint32_t choice)
{
    return choice == NOTHING ? 0 : k->choices[choice].bytes;
}

/* Seconds saved by a choice; 0 for the empty one. */
static double seconds_of(const knapsack *k, uint32_t choice)
{
    return choice == NOTHING ? 0 : k->choices[choice].seconds;
}

/* Returns the most seconds that a choice of `bytes` and `seconds` can reach with items
 * from `from` on, the last of them as a fraction. `*to` becomes the first item that does
 * not fit whole. It only decreases between calls, because bytes ascend from call to call.
 */
static double bound_seconds(const knapsack *k, int64_t bytes, double seconds, size_t from,
                            size_t *to)
{
    const int64_t reach = k->bytes_before[from] + (k->room - bytes);
    /* the prefix sums determine how many whole items fit; a fraction of the next one
     * fills the rest */
    while (*to > from && k->bytes_before[*to] > reach) {
        --*to;
    }
    const double sum = seconds + (k->seconds_before[*to] - k->seconds_before[from]);
    if (*to == k->count) {
        return sum;
    }
    const uint32_t broken = k->order[*to];
    const double part =
        (double)(reach - k->bytes_before[*to]) / (double)k->items->bytes[broken];
    return sum + part * k->items->seconds[broken];
}

static void record_whole(knapsack *k, uint32_t choice, double seconds, size_t from,
                         size_t to)
{
    const double sum = seconds + (k->seconds_before[to] - k->seconds_before[from]);
    if (sum > k->best.seconds) {
        k->best = (whole){.seconds = sum, .choice = choice, .from = from, .to = to};
    }
}

/* ---- lists ---- */

static mls_code no_memory(const knapsack *k)
{
    return mls_fail(k->st, MLS_E_MEMORY, "no memory for %zu choices", k->made);
}

/* Ensures room for as many more choices as the list is long, and for a list twice as
 * long. */
static mls_code reserve_choices(knapsack *k)
{
    while (k->space < k->made + k->length) {
        const size_t space = k->space == 0 ? 256 : 2 * k->space;
        pick *choices = mls_realloc(k->choices, space, sizeof *choices);
        if (choices == NULL) {
            return no_memory(k);
        }
        k->choices = choices;
        k->space = space;
    }
    while (k->list_space < 2 * k->length) {
        const size_t space = k->list_space == 0 ? 256 : 2 * k->list_space;
        uint32_t *list = mls_realloc(k->list, space, sizeof *list);
        if (list == NULL) {
            return no_memory(k);
        }
        k->list = list;
        uint32_t *next = mls_realloc(k->next, space, sizeof *next);
        if (next == NULL) {
            return no_memory(k);
        }
        k->next = next;
        k->list_space = space;
    }
    return MLS_OK;
}

/* State of a merge of the old list with the same list plus item `at`. */
typedef struct merge {
    size_t plain, with; /* positions in the old list */
    size_t length;      /* of the new list */
    size_t to;          /* argument of bound_seconds */
    double last;        /* seconds of the last entry of the new list, or -1 */
} merge;

/* Appends a choice if it is not dominated by an earlier one and may still beat the best.
 */
static bool append_choice(knapsack *k, merge *m, size_t at, uint32_t choice,
                          int64_t bytes, double seconds)
{
    /* dominated: more bytes than the last one, but not more seconds */
    if (!(seconds > m->last)) {
        return false;
    }
    const double most = bound_seconds(k, bytes, seconds, at + 1, &m->to);
    if (!(most > k->best.seconds + k->slack)) {
        return false;
    }
    m->last = seconds;
    k->next[m->length++] = choice;
    return true;
}

/* Appends the next choice of the old list with the item added; it gets an entry only if
 * it is kept. */
static void append_with_item(knapsack *k, merge *m, size_t at, int64_t bytes,
                             double seconds)
{
    const uint32_t before = k->list[m->with++];
    if (append_choice(k, m, at, (uint32_t)k->made, bytes, seconds)) {
        k->choices[k->made] = (pick){
            .bytes = bytes, .seconds = seconds, .before = before, .item = (uint32_t)at};
        record_whole(k, (uint32_t)k->made, seconds, at + 1, m->to);
        k->made++;
    }
}

static void add_item(knapsack *k, size_t at)
{
    const int64_t bytes = k->items->bytes[k->order[at]];
    const double seconds = k->items->seconds[k->order[at]];
    merge m = {.to = k->count, .last = -1};
    while (m.plain < k->length || m.with < k->length) {
        int64_t with_bytes = INT64_MAX;
        double with_seconds = 0;
        if (m.with < k->length) {
            with_bytes = bytes_of(k, k->list[m.with]) + bytes;
            with_seconds = seconds_of(k, k->list[m.with]) + seconds;
            if (with_bytes > k->room) {
                m.with = k->length; /* all others are larger */
                continue;
            }
        }
        const uint32_t plain = m.plain < k->length ? k->list[m.plain] : NOTHING;
        const int64_t plain_bytes = m.plain < k->length ? bytes_of(k, plain) : INT64_MAX;
        const bool added =
            with_bytes < plain_bytes ||
            (with_bytes == plain_bytes && with_seconds > seconds_of(k, plain));
        if (added) {
            append_with_item(k, &m, at, with_bytes, with_seconds);
        } else {
            append_choice(k, &m, at, plain, plain_bytes, seconds_of(k, plain));
            m.plain++;
        }
    }
    /* swap the lists; the old one is overwritten next time */
    uint32_t *old = k->list;
    k->list = k->next;
    k->next = old;
    k->length = m.length;
}

/* Adds all items, or as many as the limit of states allows. `*most` is the best value
 * that an unfinished list could still reach. */
static mls_code add_items(knapsack *k, double *most)
{
    size_t to = k->count;
    bound_seconds(k, 0, 0, 0, &to);
    record_whole(k, NOTHING, 0, 0, to);
    mls_code code = MLS_OK;
    size_t at = 0;
    for (; at < k->count && k->length > 0 && code == MLS_OK; at++) {
        code = poll_caller(k);
        /* each choice of the list may be copied with this item */
        if (k->made + k->length > k->most) {
            break;
        }
        code = code == MLS_OK ? reserve_choices(k) : code;
        if (code == MLS_OK) {
            add_item(k, at);
        }
    }
    /* if items are left: the best value that any choice could still reach */
    *most = k->best.seconds;
    to = k->count;
    for (size_t i = 0; i < k->length && code == MLS_OK && at < k->count; i++) {
        const double each =
            bound_seconds(k, bytes_of(k, k->list[i]), seconds_of(k, k->list[i]), at, &to);
        *most = each > *most ? each : *most;
    }
    return code;
}

/* ---- the solver ---- */

static mls_code init_knapsack(knapsack *k)
{
    const size_t count = k->items->count;
    k->order = mls_alloc(count, sizeof *k->order);
    k->bytes_before = mls_alloc(count + 1, sizeof *k->bytes_before);
    k->seconds_before = mls_alloc(count + 1, sizeof *k->seconds_before);
    if (k->order == NULL || k->bytes_before == NULL || k->seconds_before == NULL) {
        return no_memory(k);
    }
    mls_code code = order_items(k);
    k->length = 1; /* the empty choice */
    code = code == MLS_OK ? reserve_choices(k) : code;
    if (code == MLS_OK) {
        k->list[0] = NOTHING;
    }
    return code;
}

static void free_knapsack(knapsack *k)
{
    mls_free(k->order);
    mls_free(k->bytes_before);
    mls_free(k->seconds_before);
    mls_free(k->choices);
    mls_free(k->list);
    mls_free(k->next);
}

static void write_result(const knapsack *k, double most, double all, unsigned char *kept,
                         mls_knapsack_result *out)
{
    const mls_knapsack_items *items = k->items;
    for (size_t i = 0; i < items->count; i++) {
        kept[i] = items->bytes[i] == 0;
    }
    /* whole items after the choice, then the choice itself */
    for (size_t at = k->best.from; at < k->best.to; at++) {
        kept[k->order[at]] = 1;
    }
    for (uint32_t c = k->best.choice; c != NOTHING; c = k->choices[c].before) {
        kept[k->order[k->choices[c].item]] = 1;
    }
    *out = (mls_knapsack_result){.states = k->made};
    double free_seconds = 0;
    for (size_t i = 0; i < items->count; i++) {
        out->bytes += kept[i] ? items->bytes[i] : 0;
        out->seconds += kept[i] ? 0 : items->seconds[i];
        free_seconds += items->bytes[i] == 0 ? items->seconds[i] : 0;
    }
    out->optimal = !(most > k->best.seconds + k->slack);
    const double least = all - free_seconds - most;
    out->least = out->optimal || least > out->seconds ? out->seconds : least;
    out->least = out->least < 0 ? 0 : out->least;
}

/* A budget above the sum of all bytes has no effect; limiting it keeps sums within 63
 * bits. */
mls_code mls_knapsack(const mls_knapsack_items *items, int64_t budget_bytes,
                      size_t states, mls_poll poll, unsigned char *kept,
                      mls_knapsack_result *out, mls_status *st)
{
    double all = 0, most = 0;
    int64_t bytes = 0;
    mls_code code = check_items(items, budget_bytes, &all, &bytes, st);
    if (code != MLS_OK) {
        return code;
    }
    knapsack k = {.items = items,
                  .room = budget_bytes < bytes ? budget_bytes : bytes,
                  .most = states == 0 ? MLS_KNAPSACK_STATES : states,
                  .best = {.seconds = -1, .choice = NOTHING},
                  .slack = 1e-12 * all,
                  .poll = poll,
                  .st = st};
    k.most = k.most < NOTHING ? k.most : NOTHING - 1;
    code = init_knapsack(&k);
    if (code == MLS_OK) {
        code = add_items(&k, &most);
    }
    if (code == MLS_OK) {
        write_result(&k, most, all, kept, out);
    }
    free_knapsack(&k);
    return code;
}
