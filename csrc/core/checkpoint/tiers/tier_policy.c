/* tier_policy: an array of units by number, and the sum of bytes for each tier.
 *
 * Decisions sort a copy of the units and change nothing, so the owner may carry out a
 * plan or drop it and ask again. */
#include "checkpoint/tiers/tier_policy.h"

#include "base/memory.h"
#include "base/size.h"

#include <inttypes.h>
#include <stdlib.h>

/* Small enough that adding a quarter twice cannot overflow. */
#define MOST_SCORE (UINT64_C(1) << 60)

void mls_tier_moves_fini(mls_tier_moves *moves)
{
    mls_free(moves->list);
    *moves = (mls_tier_moves){0};
}

/* ---- units ---- */

/* Cold has an unlimited budget, so the same code handles all three tiers. */
void mls_tiers_init(mls_tiers *out, uint64_t hot_budget, uint64_t warm_budget)
{
    *out = (mls_tiers){0};
    for (int i = 0; i < MLS_TIER_COUNT; i++) {
        out->budgets[i] = MLS_TIERS_UNLIMITED;
    }
    out->budgets[MLS_TIER_HOT] = hot_budget;
    out->budgets[MLS_TIER_WARM] = warm_budget;
}

void mls_tiers_fini(mls_tiers *t)
{
    mls_free(t->units);
    *t = (mls_tiers){0};
}

/* A free number has no tier. */
bool mls_tiers_has(const mls_tiers *t, size_t unit)
{
    return unit < t->count && t->units[unit].tier != MLS_TIER_NONE;
}

/* Return a number for a new unit: a free one, or the next. SIZE_MAX: no memory. The
 * search for a free number is linear, since units are seldom removed; `vacant` skips it
 * if there is none. */
static size_t free_number(mls_tiers *t)
{
    if (t->vacant > 0) {
        size_t i = 0;
        while (t->units[i].tier != MLS_TIER_NONE) {
            i++;
        }
        return i;
    }
    mls_tier_unit *units = mls_grow(t->units, t->count, &t->room, sizeof *units);
    if (units == NULL) {
        return SIZE_MAX;
    }
    t->units = units;
    return t->count;
}

/* Sizes of real memory never reach this limit; sizes from a damaged file may. */
static mls_code fail_sum(mls_status *st)
{
    return mls_fail(st, MLS_E_SIZE, "the size of a tier exceeds 64 bits");
}

/* The sum is checked first. Only the allocation can fail after it, and both failures
 * leave `t` unchanged. */
mls_code mls_tiers_add(mls_tiers *t, uint64_t bytes, mls_tier tier, size_t *out,
                       mls_status *st)
{
    uint64_t sum;
    if (!mls_u64_add(t->bytes[tier], bytes, &sum)) {
        return fail_sum(st);
    }
    const size_t i = free_number(t);
    if (i == SIZE_MAX) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for one more unit");
    }
    if (i == t->count) {
        t->count++;
    } else {
        t->vacant--;
    }
    t->units[i] = (mls_tier_unit){.bytes = bytes, .tier = tier};
    t->bytes[tier] = sum;
    *out = i;
    return MLS_OK;
}

/* The use counts are dropped too. */
void mls_tiers_remove(mls_tiers *t, size_t unit)
{
    t->bytes[t->units[unit].tier] -= t->units[unit].bytes;
    t->units[unit] = (mls_tier_unit){.tier = MLS_TIER_NONE};
    t->vacant++;
}

/* The budget is not checked: the bytes already exist, and the owner makes space. */
mls_code mls_tiers_resize(mls_tiers *t, size_t unit, uint64_t bytes, mls_status *st)
{
    mls_tier_unit *u = &t->units[unit];
    uint64_t sum;
    if (!mls_u64_add(t->bytes[u->tier] - u->bytes, bytes, &sum)) {
        return fail_sum(st);
    }
    t->bytes[u->tier] = sum;
    u->bytes = bytes;
    return MLS_OK;
}

/* A score at its limit stays there until it ages. */
void mls_tiers_touch(mls_tiers *t, size_t unit)
{
    mls_tier_unit *u = &t->units[unit];
    u->score =
        u->score > MOST_SCORE - MLS_TIERS_USE ? MOST_SCORE : u->score + MLS_TIERS_USE;
    u->used_at = ++t->clock;
    u->uses++;
}

/* A count, since several users may pin a unit, and a move pins it too. */
void mls_tiers_pin(mls_tiers *t, size_t unit)
{
    t->units[unit].pins++;
}

void mls_tiers_unpin(mls_tiers *t, size_t unit)
{
    t->units[unit].pins--;
}

/* ---- one move ---- */

static uint64_t bytes_left(uint64_t budget, uint64_t used)
{
    return used > budget ? 0 : budget - used;
}

static mls_code fail_alone(const mls_tiers *t, size_t unit, mls_tier tier, mls_status *st)
{
    return mls_fail(st, MLS_E_CAPACITY,
                    "a unit of %" PRIu64
                    " bytes is more than the whole %s budget of %" PRIu64 " bytes",
                    t->units[unit].bytes, mls_tier_name(tier), t->budgets[tier]);
}

/* A unit always fits its current tier. The two errors differ because moving other units
 * can only help in the second case. */
mls_code mls_tiers_fits(const mls_tiers *t, size_t unit, mls_tier tier, mls_status *st)
{
    const mls_tier_unit *u = &t->units[unit];
    const uint64_t budget = t->budgets[tier];
    if (u->tier == tier) {
        return MLS_OK;
    }
    if (u->bytes > budget) {
        return fail_alone(t, unit, tier, st);
    }
    const uint64_t left = bytes_left(budget, t->bytes[tier]);
    if (budget != MLS_TIERS_UNLIMITED && u->bytes > left) {
        return mls_fail(st, MLS_E_CAPACITY,
                        "a unit of %" PRIu64
                        " bytes does not fit: of the %s budget of %" PRIu64
                        " bytes %" PRIu64 " are left",
                        u->bytes, mls_tier_name(tier), budget, left);
    }
    return MLS_OK;
}

/* The new tier counts the bytes from the start, since memory is allocated before the
 * copy. The old tier releases them at the end. */
mls_code mls_tiers_begin(mls_tiers *t, size_t unit, mls_tier to, mls_status *st)
{
    uint64_t sum;
    if (!mls_u64_add(t->bytes[to], t->units[unit].bytes, &sum)) {
        return fail_sum(st);
    }
    t->bytes[to] = sum;
    t->units[unit].pins++;
    return MLS_OK;
}

/* The old tier releases the bytes, or the new tier if the move failed. */
void mls_tiers_end(mls_tiers *t, size_t unit, mls_tier to, bool moved)
{
    mls_tier_unit *u = &t->units[unit];
    t->bytes[moved ? u->tier : to] -= u->bytes;
    u->tier = moved ? to : u->tier;
    u->pins--;
}

/* ---- ranking ---- */

typedef struct unit_rank {
    uint64_t weight, used_at, bytes;
    size_t unit;
    mls_tier from, to;
} unit_rank;

/* Most used first; then the nearer tier, then the latest use. The number comes last, so
 * that no two units are equal and the order is the same on every machine. */
static int compare_best(const void *left, const void *right)
{
    const unit_rank *a = left, *b = right;
    if (a->weight != b->weight) {
        return a->weight > b->weight ? -1 : 1;
    }
    if (a->from != b->from) {
        return a->from < b->from ? -1 : 1;
    }
    if (a->used_at != b->used_at) {
        return a->used_at > b->used_at ? -1 : 1;
    }
    return a->unit < b->unit ? -1 : 1;
}

/* A unit must be used a quarter more often to displace another one from the next nearer
 * tier. */
static uint64_t unit_weight(const mls_tier_unit *u)
{
    return u->score + u->score / 4 * (uint64_t)(MLS_TIER_COLD - u->tier);
}

/* Copies the sort key, because qsort passes no context. */
static unit_rank rank_unit(const mls_tiers *t, size_t unit, uint64_t weight)
{
    const mls_tier_unit *u = &t->units[unit];
    return (unit_rank){.weight = weight,
                       .used_at = u->used_at,
                       .bytes = u->bytes,
                       .unit = unit,
                       .from = u->tier,
                       .to = u->tier};
}

/* The list is large enough: no unit moves twice. */
static void push_move(mls_tier_moves *moves, const unit_rank *r, mls_tier to)
{
    moves->list[moves->count++] = (mls_tier_move){.unit = r->unit, .to = to};
}

/* ---- making space ---- */

typedef struct victims {
    unit_rank *list; /* large enough for all units */
    size_t count;
    uint64_t bytes;
} victims;

/* Drop units that are not needed to reach `need` bytes, the most used first. Units were
 * chosen in order of use, so one large unit at the end may be enough without the small
 * ones before it. */
static void drop_needless(victims *v, uint64_t need)
{
    size_t victim_count = 0;
    for (size_t i = v->count; i-- > 0;) {
        if (v->bytes - v->list[i].bytes >= need) {
            v->bytes -= v->list[i].bytes;
            v->list[i].to = MLS_TIER_NONE;
        }
    }
    for (size_t i = 0; i < v->count; i++) {
        if (v->list[i].to != MLS_TIER_NONE) {
            v->list[victim_count++] = v->list[i];
        }
    }
    v->count = victim_count;
}

/* Choose the least used units of a tier with at least `need` bytes in total. Returns
 * false if the movable units are not enough. Unit `except` is never chosen. */
static bool choose_victims(const mls_tiers *t, mls_tier tier, size_t except,
                           uint64_t need, victims *v)
{
    size_t victim_count = 0;
    v->count = 0;
    v->bytes = 0;
    for (size_t i = 0; need > 0 && i < t->count; i++) {
        const mls_tier_unit *u = &t->units[i];
        if (u->tier == tier && u->pins == 0 && i != except && u->bytes > 0) {
            v->list[victim_count++] = rank_unit(t, i, u->score);
        }
    }
    qsort(v->list, victim_count, sizeof *v->list, compare_best);
    for (size_t i = 0; i < victim_count / 2; i++) { /* reverse: least used first */
        const unit_rank other = v->list[i];
        v->list[i] = v->list[victim_count - 1 - i];
        v->list[victim_count - 1 - i] = other;
    }
    while (v->count < victim_count && v->bytes < need) {
        v->bytes += v->list[v->count++].bytes;
    }
    const bool enough = v->bytes >= need;
    drop_needless(v, need);
    return enough;
}

/* Bytes that must leave a tier before `bytes` more fit into it. */
static uint64_t excess_bytes(const mls_tiers *t, mls_tier tier, uint64_t leaving,
                             uint64_t bytes)
{
    const uint64_t left = bytes_left(t->budgets[tier], t->bytes[tier] - leaving);
    if (t->budgets[tier] == MLS_TIERS_UNLIMITED || bytes <= left) {
        return 0;
    }
    /* includes bytes that already exceed the budget */
    return t->bytes[tier] - leaving + bytes - t->budgets[tier];
}

/* Plan the moves of units that leave hot: to warm, after moving others to cold, or to
 * cold if warm cannot hold them. `second` is large enough for all units. */
static void plan_demotions(const mls_tiers *t, size_t unit, const victims *first,
                           victims *second, mls_tier_moves *out)
{
    const mls_tier_unit *u = &t->units[unit];
    const uint64_t leaving = u->tier == MLS_TIER_WARM ? u->bytes : 0;
    const uint64_t need = excess_bytes(t, MLS_TIER_WARM, leaving, first->bytes);
    const bool fits = choose_victims(t, MLS_TIER_WARM, unit, need, second);
    for (size_t i = 0; fits && i < second->count; i++) {
        push_move(out, &second->list[i], MLS_TIER_COLD);
    }
    for (size_t i = 0; i < first->count; i++) {
        push_move(out, &first->list[i], fits ? MLS_TIER_WARM : MLS_TIER_COLD);
    }
}

static mls_code fail_pinned(const mls_tiers *t, size_t unit, mls_tier tier,
                            mls_status *st)
{
    return mls_fail(st, MLS_E_CAPACITY,
                    "no room for a unit of %" PRIu64
                    " bytes: units in use or moving occupy too much of the %s budget of"
                    " %" PRIu64 " bytes",
                    t->units[unit].bytes, mls_tier_name(tier), t->budgets[tier]);
}

/* Changes nothing. The plan is valid while the caller holds its lock. */
mls_code mls_tiers_make_room(const mls_tiers *t, size_t unit, mls_tier tier,
                             mls_tier_moves *out, mls_status *st)
{
    const mls_tier_unit *u = &t->units[unit];
    mls_tier_moves moves = {0};
    victims first = {0}, second = {0};
    mls_code code = MLS_OK;
    if (u->bytes > t->budgets[tier]) {
        return fail_alone(t, unit, tier, st);
    }
    first.list = mls_alloc(t->count, sizeof *first.list);
    second.list = mls_alloc(t->count, sizeof *second.list);
    moves.list = mls_alloc(t->count, sizeof *moves.list);
    if (first.list == NULL || second.list == NULL || moves.list == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory to choose units to move");
        goto done;
    }
    /* a unit that is already in the tier and grew is part of the sum */
    const uint64_t unit_bytes = u->tier == tier ? u->bytes : 0;
    if (!choose_victims(t, tier, unit, excess_bytes(t, tier, unit_bytes, u->bytes),
                        &first)) {
        code = fail_pinned(t, unit, tier, st);
        goto done;
    }
    if (tier == MLS_TIER_HOT) {
        plan_demotions(t, unit, &first, &second, &moves);
    } else {
        for (size_t i = 0; i < first.count; i++) {
            push_move(&moves, &first.list[i], MLS_TIER_COLD);
        }
    }
    *out = moves;
    moves = (mls_tier_moves){0}; /* moved to the caller */
done:
    mls_free(first.list);
    mls_free(second.list);
    mls_tier_moves_fini(&moves);
    return code;
}

/* ---- rebalancing ---- */

static size_t rank_all(const mls_tiers *t, unit_rank *list, uint64_t left[MLS_TIER_COUNT])
{
    size_t count = 0;
    uint64_t used[MLS_TIER_COUNT];
    for (int i = 0; i < MLS_TIER_COUNT; i++) {
        used[i] = t->bytes[i];
    }
    for (size_t i = 0; i < t->count; i++) {
        const mls_tier_unit *u = &t->units[i];
        if (u->tier != MLS_TIER_NONE && u->pins == 0) {
            list[count++] = rank_unit(t, i, unit_weight(u));
            used[u->tier] -= u->bytes;
        }
    }
    for (int i = 0; i < MLS_TIER_COUNT; i++) {
        left[i] = bytes_left(t->budgets[i], used[i]);
    }
    qsort(list, count, sizeof *list, compare_best);
    return count;
}

/* The nearest tier with space for a unit. A unit that was never used does not move
 * nearer. */
static mls_tier choose_tier(const unit_rank *r, const uint64_t left[MLS_TIER_COUNT])
{
    const mls_tier nearest = r->weight > 0 ? MLS_TIER_HOT : r->from;
    for (mls_tier tier = nearest; tier < MLS_TIER_COLD; tier++) {
        if (r->bytes <= left[tier]) {
            return tier;
        }
    }
    return MLS_TIER_COLD;
}

/* Place units in ranking order; each uses the space that better units left. */
static void choose_tiers(unit_rank *list, size_t count, uint64_t left[MLS_TIER_COUNT])
{
    for (size_t i = 0; i < count; i++) {
        list[i].to = choose_tier(&list[i], left);
        if (list[i].to != MLS_TIER_COLD) {
            left[list[i].to] -= list[i].bytes;
        }
    }
}

/* Position of the next unit, from `at` on, that moves to hot, or from hot to warm. */
static size_t find_move(const unit_rank *list, size_t count, size_t at, bool to_hot)
{
    for (; at < count; at++) {
        const unit_rank *r = &list[at];
        if (to_hot ? r->to == MLS_TIER_HOT && r->from != MLS_TIER_HOT
                   : r->from == MLS_TIER_HOT && r->to == MLS_TIER_WARM) {
            break;
        }
    }
    return at;
}

/* Order the moves between hot and warm: move a unit to hot if it fits, else move one out.
 * So hot never exceeds its budget, and warm exceeds it at most by the units in transit.
 * The loop ends, since all incoming units fit once all outgoing units have left. */
static void order_exchange(const mls_tiers *t, const unit_rank *list, size_t count,
                           mls_tier_moves *out)
{
    uint64_t used = t->bytes[MLS_TIER_HOT];
    for (size_t i = 0; i < count; i++) { /* these moved to cold before */
        used -= list[i].from == MLS_TIER_HOT && list[i].to == MLS_TIER_COLD
                    ? list[i].bytes
                    : 0;
    }
    size_t up = find_move(list, count, 0, true);
    size_t down = find_move(list, count, 0, false);
    while (up < count || down < count) {
        const uint64_t left = bytes_left(t->budgets[MLS_TIER_HOT], used);
        if (up < count && (list[up].bytes <= left || down == count)) {
            push_move(out, &list[up], MLS_TIER_HOT);
            used += list[up].bytes;
            up = find_move(list, count, up + 1, true);
        } else {
            push_move(out, &list[down], MLS_TIER_WARM);
            used -= list[down].bytes;
            down = find_move(list, count, down + 1, false);
        }
    }
}

/* Moves to cold come first, least used first. Moves from cold to warm come last, when
 * their space is free. */
static void order_moves(const mls_tiers *t, const unit_rank *list, size_t count,
                        mls_tier_moves *out)
{
    for (size_t i = count; i-- > 0;) {
        if (list[i].to == MLS_TIER_COLD && list[i].from != MLS_TIER_COLD) {
            push_move(out, &list[i], MLS_TIER_COLD);
        }
    }
    order_exchange(t, list, count, out);
    for (size_t i = 0; i < count; i++) {
        if (list[i].to == MLS_TIER_WARM && list[i].from == MLS_TIER_COLD) {
            push_move(out, &list[i], MLS_TIER_WARM);
        }
    }
}

/* Scores age only after a successful decision: a failure changes nothing. Pinned units
 * age too. */
mls_code mls_tiers_rebalance(mls_tiers *t, mls_tier_moves *out, mls_status *st)
{
    uint64_t left[MLS_TIER_COUNT];
    mls_tier_moves moves = {.list = mls_alloc(t->count, sizeof *moves.list)};
    unit_rank *list = mls_alloc(t->count, sizeof *list);
    if (moves.list == NULL || list == NULL) {
        mls_free(list);
        mls_tier_moves_fini(&moves);
        return mls_fail(st, MLS_E_MEMORY, "no memory to place %zu units", t->count);
    }
    const size_t count = rank_all(t, list, left);
    choose_tiers(list, count, left);
    order_moves(t, list, count, &moves);
    for (size_t i = 0; i < t->count; i++) {
        t->units[i].score /= 2;
    }
    mls_free(list);
    *out = moves;
    return MLS_OK;
}
