/* knapsack: lists of (bytes, seconds), cut by Dantzig's bound. */
#include "planning/knapsack.h"

#include "base/memory.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { NOTHING = UINT32_MAX };

/* The list begins with the empty choice.  With each item every choice in it is there
 * twice, as it was and with the item, merged by bytes; most go at once, since the items
 * come in the best order and the bound is sharp.  What goes is not lost: choices stay
 * where they are made, and those that survive point back to them. */

/* A choice: that of `before`, and `item` with it. */
typedef struct pick {
    int64_t bytes;
    double seconds;
    uint32_t before; /* NOTHING: the empty choice */
    uint32_t item;   /* in the order of work */
} pick;

/* Whole items that fit: a choice, and all items from .. to - 1 after it. */
typedef struct whole {
    double seconds;
    uint32_t choice; /* or NOTHING */
    size_t from, to;
} whole;

typedef struct knapsack {
    const mls_knapsack_items *items;
    int64_t room;    /* budget, at most all bytes */
    uint32_t *order; /* owned: items in question, by seconds per byte */
    size_t count;
    int64_t *bytes_before; /* owned: sums over the items before one, in that order */
    double *seconds_before;
    pick *choices; /* owned */
    size_t made, space, most;
    uint32_t *list, *next; /* owned: choices, by bytes and by seconds, both rising */
    size_t length, list_space;
    whole best;
    double slack; /* differences below this are rounding */
    mls_poll poll;
    mls_status *st;
} knapsack;

/* ---- checks ---- */

/* Name the entry and what it is, the time first. */
static mls_code refuse_item(const mls_knapsack_items *items, size_t i, mls_status *st)
{
    const bool bad_time = !(items->seconds[i] >= 0) || !isfinite(items->seconds[i]);
    if (bad_time) {
        mls_fail(st, MLS_E_VALUE,
                 "seconds[%zu] is %g: choose a finite number, at least 0", i,
                 items->seconds[i]);
        mls_status_name(st, "seconds", strlen("seconds"));
        mls_status_got(st, "%g", items->seconds[i]);
    } else {
        mls_fail(st, MLS_E_VALUE, "bytes[%zu] is %" PRId64 ": bytes are at least 0", i,
                 items->bytes[i]);
        mls_status_name(st, "bytes", strlen("bytes"));
        mls_status_got(st, "%" PRId64, items->bytes[i]);
    }
    return st->code;
}

/* All seconds together go to `*all`, all bytes to `*bytes`. */
static mls_code check(const mls_knapsack_items *items, int64_t budget, double *all,
                      int64_t *bytes, mls_status *st)
{
    int64_t sum = 0;
    *all = 0;
    if (budget < 0) {
        return mls_fail(st, MLS_E_VALUE, "a budget of %" PRId64 " bytes is negative",
                        budget);
    }
    if (items->count > MLS_KNAPSACK_ITEMS) {
        return mls_fail(st, MLS_E_VALUE, "%zu operators: choose at most %d", items->count,
                        (int)MLS_KNAPSACK_ITEMS);
    }
    for (size_t i = 0; i < items->count; i++) {
        const double seconds = items->seconds[i];
        if (!(seconds >= 0) || !isfinite(seconds) || items->bytes[i] < 0) {
            return refuse_item(items, i, st);
        }
        if (__builtin_add_overflow(sum, items->bytes[i], &sum) || sum > INT64_MAX / 2) {
            return mls_fail(st, MLS_E_SIZE,
                            "all bytes together exceed 62 bits at bytes[%zu]", i);
        }
        *all += seconds;
    }
    *bytes = sum;
    return isfinite(*all) ? MLS_OK
                          : mls_fail(st, MLS_E_SIZE,
                                     "all seconds together exceed the range of a double");
}

/* ---- the order of work ---- */

/* Whether item a saves more seconds per byte than item b; of equals the larger one, then
 * the earlier one. */
static bool comes_first(const mls_knapsack_items *items, uint32_t a, uint32_t b)
{
    /* no item here is without bytes */
    const double x = items->seconds[a] / (double)items->bytes[a];
    const double y = items->seconds[b] / (double)items->bytes[b];
    if (x < y || y < x) {
        return x > y;
    }
    return items->bytes[a] != items->bytes[b] ? items->bytes[a] > items->bytes[b] : a < b;
}

/* Heap sort: in place, and as quick whatever comes. */
static void sift(const mls_knapsack_items *items, uint32_t *order, size_t at,
                 size_t count)
{
    const uint32_t moved = order[at];
    for (size_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && comes_first(items, order[child], order[child + 1])) {
            child++; /* the last to come is on top */
        }
        if (!comes_first(items, moved, order[child])) {
            break;
        }
        order[at] = order[child];
        at = child;
    }
    order[at] = moved;
}

/* Whether anybody still waits for the answer: a choice among many items may take long. */
static mls_code ask(const knapsack *k)
{
    return k->poll.go_on == NULL || k->poll.go_on(k->poll.context)
               ? MLS_OK
               : mls_fail(k->st, MLS_E_STOPPED, "the choice was stopped");
}

/* The item that comes last goes to the top, and from there to the end. */
static mls_code sort(const knapsack *k)
{
    const mls_knapsack_items *items = k->items;
    for (size_t at = k->count / 2; at-- > 0;) {
        sift(items, k->order, at, k->count);
    }
    for (size_t last = k->count; last-- > 1;) {
        const uint32_t top = k->order[0];
        k->order[0] = k->order[last];
        k->order[last] = top;
        sift(items, k->order, 0, last);
        if ((last & 8191) == 0 && ask(k) != MLS_OK) { /* a few milliseconds apart */
            return k->st->code;
        }
    }
    return MLS_OK;
}

/* Items that are not decided by themselves, sorted; with the sums before each. */
static mls_code put_in_order(knapsack *k)
{
    const mls_knapsack_items *items = k->items;
    for (size_t i = 0; i < items->count; i++) {
        if (items->bytes[i] > 0 && items->bytes[i] <= k->room && items->seconds[i] > 0) {
            k->order[k->count++] = (uint32_t)i;
        }
    }
    const mls_code code = sort(k);
    for (size_t i = 0; i < k->count && code == MLS_OK; i++) {
        k->bytes_before[i + 1] = k->bytes_before[i] + items->bytes[k->order[i]];
        k->seconds_before[i + 1] = k->seconds_before[i] + items->seconds[k->order[i]];
    }
    return code;
}

/* ---- bounds ---- */

/* The empty choice has no place of its own. */
static int64_t bytes_of(const knapsack *k, uint32_t choice)
{
    return choice == NOTHING ? 0 : k->choices[choice].bytes;
}

/* What keeping it spares; keeping nothing spares nothing. */
static double seconds_of(const knapsack *k, uint32_t choice)
{
    return choice == NOTHING ? 0 : k->choices[choice].seconds;
}

/* The seconds that a choice of `bytes` and `seconds` can come to with items from `from`
 * on, whole but for the last of them; `*to` is the first that does not fit as a whole.
 * `*to` goes down from where the last call left it: bytes rise from call to call. */
static double most_with(const knapsack *k, int64_t bytes, double seconds, size_t from,
                        size_t *to)
{
    const int64_t reach = k->bytes_before[from] + (k->room - bytes);
    /* the sums say how far whole items go; a part of the next one fills up the rest */
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

/* Remember the whole items of a bound if they are the best so far. */
static void note_whole(knapsack *k, uint32_t choice, double seconds, size_t from,
                       size_t to)
{
    const double sum = seconds + (k->seconds_before[to] - k->seconds_before[from]);
    if (sum > k->best.seconds) {
        k->best = (whole){.seconds = sum, .choice = choice, .from = from, .to = to};
    }
}

/* ---- lists ---- */

/* One text for all that can run short. */
static mls_code no_memory(const knapsack *k)
{
    return mls_fail(k->st, MLS_E_MEMORY, "no memory for %zu choices", k->made);
}

/* Room for as many more choices as the list is long, and for a list twice as long. */
static mls_code make_room(knapsack *k)
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

/* Two ways through the old list: as it is, and with item `at` added. */
typedef struct merge {
    size_t plain, with; /* places in the old list */
    size_t length;      /* of the new one */
    size_t to;          /* for most_with */
    double last;        /* seconds of the last one in the new list, or -1 */
} merge;

/* Append what is not worse than all before it and may yet beat the best. */
static bool append(knapsack *k, merge *m, size_t at, uint32_t choice, int64_t bytes,
                   double seconds)
{
    /* more bytes than the last one, and no more seconds */
    if (!(seconds > m->last)) {
        return false;
    }
    const double most = most_with(k, bytes, seconds, at + 1, &m->to);
    if (!(most > k->best.seconds + k->slack)) {
        return false;
    }
    m->last = seconds;
    k->next[m->length++] = choice;
    return true;
}

/* The next choice of the old list, with the item: it gets a place of its own if it stays.
 */
static void append_with(knapsack *k, merge *m, size_t at, int64_t bytes, double seconds)
{
    const uint32_t before = k->list[m->with++];
    if (append(k, m, at, (uint32_t)k->made, bytes, seconds)) {
        k->choices[k->made] = (pick){
            .bytes = bytes, .seconds = seconds, .before = before, .item = (uint32_t)at};
        note_whole(k, (uint32_t)k->made, seconds, at + 1, m->to);
        k->made++;
    }
}

/* Item `at` joins in: a new list from the old one, by rising bytes. */
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
            append_with(k, &m, at, with_bytes, with_seconds);
        } else {
            append(k, &m, at, plain, plain_bytes, seconds_of(k, plain));
            m.plain++;
        }
    }
    /* the new list takes the place of the old one, which is written over next time */
    uint32_t *old = k->list;
    k->list = k->next;
    k->next = old;
    k->length = m.length;
}

/* All items, or as many as the states allow; `*most` is what an unfinished list may yet
 * come to. */
static mls_code add_items(knapsack *k, double *most)
{
    size_t to = k->count;
    most_with(k, 0, 0, 0, &to);
    note_whole(k, NOTHING, 0, 0, to);
    mls_code code = MLS_OK;
    size_t at = 0;
    for (; at < k->count && k->length > 0 && code == MLS_OK; at++) {
        code = ask(k);
        /* each choice of the list may be made once more with this item */
        if (k->made + k->length > k->most) {
            break;
        }
        code = code == MLS_OK ? make_room(k) : code;
        if (code == MLS_OK) {
            add_item(k, at);
        }
    }
    /* none if all items joined in; else the best that any choice could become */
    *most = k->best.seconds;
    to = k->count;
    for (size_t i = 0; i < k->length && code == MLS_OK && at < k->count; i++) {
        const double each =
            most_with(k, bytes_of(k, k->list[i]), seconds_of(k, k->list[i]), at, &to);
        *most = each > *most ? each : *most;
    }
    return code;
}

/* ---- all of it ---- */

/* Sorted items, sums, and a list with the empty choice in it. */
static mls_code begin(knapsack *k)
{
    const size_t count = k->items->count;
    k->order = mls_alloc(count, sizeof *k->order);
    k->bytes_before = mls_alloc(count + 1, sizeof *k->bytes_before);
    k->seconds_before = mls_alloc(count + 1, sizeof *k->seconds_before);
    if (k->order == NULL || k->bytes_before == NULL || k->seconds_before == NULL) {
        return no_memory(k);
    }
    mls_code code = put_in_order(k);
    k->length = 1; /* the empty choice */
    code = code == MLS_OK ? make_room(k) : code;
    if (code == MLS_OK) {
        k->list[0] = NOTHING;
    }
    return code;
}

/* Everything that was allocated, whether or not all of it was. */
static void release(knapsack *k)
{
    mls_free(k->order);
    mls_free(k->bytes_before);
    mls_free(k->seconds_before);
    mls_free(k->choices);
    mls_free(k->list);
    mls_free(k->next);
}

/* Write down the best choice, and what it comes to. */
static void give(const knapsack *k, double most, double all, unsigned char *kept,
                 mls_knapsack_result *out)
{
    const mls_knapsack_items *items = k->items;
    for (size_t i = 0; i < items->count; i++) {
        kept[i] = items->bytes[i] == 0;
    }
    /* whole items after the choice, and then the choice itself */
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

/* Room beyond all bytes together is of no use, and keeps sums within 63 bits. */
mls_code mls_knapsack(const mls_knapsack_items *items, int64_t budget_bytes,
                      size_t states, mls_poll poll, unsigned char *kept,
                      mls_knapsack_result *out, mls_status *st)
{
    double all = 0, most = 0;
    int64_t bytes = 0;
    mls_code code = check(items, budget_bytes, &all, &bytes, st);
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
    code = begin(&k);
    if (code == MLS_OK) {
        code = add_items(&k, &most);
    }
    if (code == MLS_OK) {
        give(&k, most, all, kept, out);
    }
    release(&k);
    return code;
}
