/* search: Dijkstra's algorithm over what may be held.
 *
 * Nodes lie in one growing array; a table of open addressing finds them by their key, a
 * binary heap of node numbers orders those that are still open.
 */
#include "planning/schedule_search.h"

#include "base/memory.h"
#include "planning/plan.h"
#include "base/size.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum {
    SAVED_AT = MLS_SEARCH_BLOCKS + 1, /* bits of a key: alone, saved, host, left */
    HOST_AT = SAVED_AT + MLS_SEARCH_BLOCKS,
    LEFT_AT = HOST_AT + MLS_SEARCH_BLOCKS,
    POLL = 1023, /* nodes between two polls, less one; a mask */
    FIRST_ROOM = 256,
    NONE = UINT32_MAX,
    CLOSED = UINT32_MAX - 1 /* place in the heap of a node that is done with */
};

/* A search of a thousand states takes a fraction of a millisecond, and most that fit into
 * memory take less than a second; so there is no clever bound beyond what the header
 * says, and everything here is kept small instead: 40 bytes a node, 4 in the heap, 8 in
 * the table.
 */

/* One state, and the best known way to it. */
typedef struct node {
    uint64_t key;
    double cost;     /* extra seconds, or in a search for the least peak nothing */
    int64_t peak;    /* of the way; counts in a search for the least peak only */
    uint32_t parent; /* NONE: the beginning */
    uint32_t place;  /* in the heap, or CLOSED */
    int8_t kind, block;
    bool away; /* the block is offloaded right after the step */
} node;

typedef struct search {
    const mls_chain *chain;
    const mls_search_limits *limits;
    bool by_peak;
    bool ran_out;
    size_t most; /* states */
    node *nodes;
    size_t count, room;
    uint32_t *table; /* node number + 1, or 0; its length is a power of 2 */
    size_t slots;
    uint32_t *heap;
    size_t open;
    mls_status *st;
} search;

/* Bit k of `alone` is activation k, bit i of `saved` and `host` is block i.  Activation 0
 * is there all the time and has no bit. */
typedef struct state {
    uint64_t alone, saved, host;
    size_t left; /* backward passes to come */
} state;

/* A node taken apart, as it is expanded. */
typedef struct moment {
    state state;
    uint64_t there; /* activations that can be read */
    int64_t held;
    uint32_t node;
    double cost;
    int64_t peak;
} moment;

static const uint64_t one = 1;

/* ---- keys ---- */

static uint64_t pack(const state *s)
{
    return s->alone | s->saved << SAVED_AT | s->host << HOST_AT |
           (uint64_t)s->left << LEFT_AT;
}

/* The other way. */
static state unpack(uint64_t key)
{
    const uint64_t blocks = (one << MLS_SEARCH_BLOCKS) - 1;
    return (state){
        .alone = key & (blocks << 1 | 1),
        .saved = key >> SAVED_AT & blocks,
        .host = key >> HOST_AT & blocks,
        .left = (size_t)(key >> LEFT_AT),
    };
}

/* The sum over the bits that are set, lowest first. */
static int64_t bytes_of(const int64_t *bytes, uint64_t bits)
{
    int64_t sum = 0;
    for (; bits != 0; bits &= bits - 1) {
        sum += bytes[__builtin_ctzll(bits)];
    }
    return sum;
}

/* ---- the heap ---- */

/* Whether node a comes out before node b; of equals the newer one, which is nearer to the
 * end more often. */
static bool before(const search *s, uint32_t a, uint32_t b)
{
    const node *x = &s->nodes[a], *y = &s->nodes[b];
    if (s->by_peak) {
        return x->peak != y->peak ? x->peak < y->peak : a > b;
    }
    if (x->cost < y->cost || y->cost < x->cost) {
        return x->cost < y->cost;
    }
    return a > b;
}

/* A node knows its place, so that it can rise from there when a better way is found. */
static void put(search *s, size_t place, uint32_t number)
{
    s->heap[place] = number;
    s->nodes[number].place = (uint32_t)place;
}

/* Costs only ever fall: there is no sinking but from the top. */
static void rise(search *s, size_t place)
{
    const uint32_t number = s->heap[place];
    while (place > 0 && before(s, number, s->heap[(place - 1) / 2])) {
        put(s, place, s->heap[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    put(s, place, number);
}

/* The last one sinks from the top to where it belongs. */
static uint32_t take_first(search *s)
{
    const uint32_t first = s->heap[0], last = s->heap[--s->open];
    s->nodes[first].place = CLOSED;
    size_t place = 0;
    for (size_t child = 1; child < s->open; child = 2 * place + 1) {
        if (child + 1 < s->open && before(s, s->heap[child + 1], s->heap[child])) {
            child++;
        }
        if (!before(s, s->heap[child], last)) {
            break;
        }
        put(s, place, s->heap[child]);
        place = child;
    }
    if (s->open > 0) {
        put(s, place, last);
    }
    return first;
}

/* ---- nodes ---- */

/* splitmix64's finish: keys differ in few bits. */
static uint64_t hash(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* The slot that has the key, or the free one where it belongs.  The table is never more
 * than half full. */
static size_t slot_of(const search *s, uint64_t key)
{
    size_t slot = (size_t)hash(key) & (s->slots - 1);
    while (s->table[slot] != 0 && s->nodes[s->table[slot] - 1].key != key) {
        slot = (slot + 1) & (s->slots - 1);
    }
    return slot;
}

/* The states tell the user how far it got, and so what to lower. */
static mls_code no_memory(search *s)
{
    return mls_fail(s->st, MLS_E_MEMORY, "no memory to search through %zu states",
                    s->count);
}

/* Room grows with what is found, not with what was allowed. */
/* Twice the room, and a table twice as long as that. */
static mls_code grow(search *s)
{
    const size_t room = s->room == 0 ? FIRST_ROOM : 2 * s->room;
    node *nodes = mls_realloc(s->nodes, room, sizeof *nodes);
    if (nodes == NULL) {
        return no_memory(s);
    }
    s->nodes = nodes;
    uint32_t *heap = mls_realloc(s->heap, room, sizeof *heap);
    if (heap == NULL) {
        return no_memory(s);
    }
    s->heap = heap;
    uint32_t *table = mls_alloc(2 * room, sizeof *table);
    if (table == NULL) {
        return no_memory(s);
    }
    mls_free(s->table);
    s->table = table;
    s->slots = 2 * room;
    s->room = room;
    /* keys go to other slots in the new table */
    for (size_t i = 0; i < s->count; i++) {
        s->table[slot_of(s, s->nodes[i].key)] = (uint32_t)i + 1;
    }
    return MLS_OK;
}

/* A way to a state: new, better than the known one, or of no use. */
static mls_code reach(search *s, const node *way)
{
    if (s->count == s->room) {
        const mls_code code = grow(s);
        if (code != MLS_OK) {
            return code;
        }
    }
    const size_t slot = slot_of(s, way->key);
    uint32_t number;
    /* a new state, as long as there may be more of them */
    if (s->table[slot] == 0) {
        if (s->count >= s->most) {
            s->ran_out = true;
            return MLS_OK;
        }
        number = (uint32_t)s->count++;
        s->table[slot] = number + 1;
        s->nodes[number] = *way;
        put(s, s->open++, number);
    } else {
        number = s->table[slot] - 1;
        node *known = &s->nodes[number];
        const bool better =
            s->by_peak ? way->peak < known->peak : way->cost < known->cost;
        /* closed ones came out of the heap on their best way */
        if (known->place == CLOSED || !better) {
            return MLS_OK;
        }
        const uint32_t place = known->place;
        *known = *way;
        known->place = place;
    }
    rise(s, s->nodes[number].place);
    return MLS_OK;
}

/* ---- steps ---- */

/* What a step leads to; `away` says that an offload of the same block follows at once. */
typedef struct outcome {
    state state;
    int64_t peak;
    mls_step_kind kind;
    size_t block;
    bool away;
} outcome;

/* Go where a step leads, unless it takes too much.  What is of no use is not held there:
 * an activation whose block is through, or that lies in what is saved. */
static mls_code lead(search *s, const moment *m, const outcome *o)
{
    if (!s->by_peak && o->peak > s->limits->budget_bytes) {
        return MLS_OK;
    }
    const mls_action run = {.kind = (int32_t)(o->away ? MLS_STEP_OFFLOAD : o->kind),
                            .index = (int32_t)o->block};
    const double cost = m->cost + mls_run_extra(s->chain, &run);
    if (!s->by_peak && !(cost < s->limits->below)) {
        return MLS_OK;
    }
    state next = o->state;
    /* activations from the block on whose backward comes next are not read any more */
    next.alone &= ((one << next.left) - 1) & ~(next.saved << 1);
    return reach(s, &(node){.key = pack(&next),
                            .cost = cost,
                            .peak = o->peak > m->peak ? o->peak : m->peak,
                            .parent = m->node,
                            .kind = (int8_t)o->kind,
                            .away = o->away,
                            .block = (int8_t)o->block});
}

/* As it is, and with activation `bit` dropped, where it lies by itself. */
static mls_code lead_both(search *s, const moment *m, outcome *o, uint64_t bit)
{
    const mls_code code = lead(s, m, o);
    if (code != MLS_OK || (o->state.alone & bit) == 0) {
        return code;
    }
    o->state.alone &= ~bit;
    return lead(s, m, o);
}

/* Not when the output is there, or of no use any more. */
static mls_code try_forward(search *s, const moment *m, size_t i)
{
    const mls_chain *c = s->chain;
    const uint64_t output = one << (i + 1);
    /* the block next in line for backward is saved, never just run */
    if (i + 1 >= m->state.left || (m->there & output) != 0) {
        return MLS_OK;
    }
    outcome o = {.state = m->state, .kind = MLS_STEP_FORWARD, .block = i};
    o.peak = m->held + c->activation_bytes[i + 1] + c->forward_temporary_bytes[i];
    o.state.alone |= output;
    return lead_both(s, m, &o, one << i);
}

/* Bytes that are held once the output of block i does not lie by itself. */
static int64_t without_output(const search *s, const moment *m, size_t i)
{
    const bool alone = (m->state.alone >> (i + 1) & 1) != 0;
    return alone ? m->held - s->chain->activation_bytes[i + 1] : m->held;
}

/* What was just saved or loaded goes to the host at once: nothing is gained by keeping it
 * for a while, since the output may stay behind. */
static mls_code lead_away(search *s, const moment *m, outcome *o, uint64_t bit)
{
    o->away = true;
    o->state.saved &= ~bit;
    o->state.host |= bit;
    o->state.alone = (o->state.alone & ~bit) | (m->state.alone & bit) | bit << 1;
    /* the input may be dropped or not, and so may the output */
    for (int dropped = 0; dropped < 2; dropped++) {
        outcome each = *o;
        const mls_code code = lead_both(s, m, &each, bit << 1);
        if (code != MLS_OK || (o->state.alone & bit) == 0) {
            return code;
        }
        o->state.alone &= ~bit;
    }
    return MLS_OK;
}

/* A block is saved for its backward pass.  Its output is dropped first where it lies by
 * itself: made twice it would be refused. */
static mls_code try_save(search *s, const moment *m, size_t i)
{
    const mls_chain *c = s->chain;
    const uint64_t bit = one << i;
    if (i >= m->state.left || ((m->state.saved | m->state.host) & bit) != 0) {
        return MLS_OK;
    }
    outcome o = {.state = m->state, .kind = MLS_STEP_SAVE, .block = i};
    o.peak = without_output(s, m, i) + c->saved_bytes[i] + c->saving_temporary_bytes[i];
    o.state.saved |= bit;
    o.state.alone &= ~(bit << 1);
    const mls_code code = lead_both(s, m, &o, bit);
    return code == MLS_OK && s->limits->offload ? lead_away(s, m, &o, bit) : code;
}

/* Back from the host: for its backward, or for an output that is not there, which may
 * stay while the rest goes away again. */
static mls_code try_load(search *s, const moment *m, size_t i)
{
    const uint64_t bit = one << i;
    /* a load that nobody waits for can wait: what stayed behind is smaller */
    const bool next = i + 1 == m->state.left;
    if ((m->state.host & bit) == 0 || (!next && (m->state.alone & bit << 1) != 0)) {
        return MLS_OK;
    }
    outcome o = {.state = m->state, .kind = MLS_STEP_LOAD, .block = i};
    o.peak = without_output(s, m, i) + s->chain->saved_bytes[i];
    o.state.host &= ~bit;
    o.state.saved |= bit;
    o.state.alone &= ~(bit << 1);
    const mls_code code = lead(s, m, &o);
    return code == MLS_OK && !next ? lead_away(s, m, &o, bit) : code;
}

/* Backward, or the save or load that is all it lacks; `*done` says that nothing else
 * needs a look. */
static mls_code try_backward(search *s, const moment *m, bool *done)
{
    const mls_chain *c = s->chain;
    const size_t i = m->state.left - 1;
    const uint64_t bit = one << i;
    *done = false;
    if ((m->there & bit) == 0) {
        return MLS_OK;
    }
    const bool saved = (m->state.saved & bit) != 0, away = (m->state.host & bit) != 0;
    const int64_t held = m->held + (saved ? 0 : c->saved_bytes[i]);
    const int64_t saving = held + (saved || away ? 0 : c->saving_temporary_bytes[i]);
    const int64_t freed = (saved ? c->saved_bytes[i] : 0) +
                          mls_held_gradient(c, m->state.left) +
                          ((m->state.alone & bit) != 0 ? c->activation_bytes[i] : 0);
    const int64_t limit = s->by_peak ? m->peak : s->limits->budget_bytes;
    outcome o = {.state = m->state, .kind = MLS_STEP_BACKWARD, .block = i};
    o.peak = held + mls_backward_makes(c, i);
    /* now or never better: it fits, and leaves no more than there was before */
    *done = o.peak <= limit && saving <= limit && c->gradient_bytes[i] <= freed;
    if (saved) {
        o.state.saved &= ~bit;
        o.state.left--;
        return lead(s, m, &o);
    }
    if (!*done) {
        return MLS_OK;
    }
    o.kind = away ? MLS_STEP_LOAD : MLS_STEP_SAVE;
    o.peak = saving;
    o.state.host &= ~bit;
    o.state.saved |= bit;
    return lead(s, m, &o);
}

/* ---- the search ---- */

/* A node's state spelled out: what can be read, and how many bytes that is. */
static moment moment_of(const search *s, uint32_t number)
{
    const mls_chain *c = s->chain;
    const node *at = &s->nodes[number];
    moment m = {.state = unpack(at->key), .node = number};
    m.cost = at->cost;
    m.peak = at->peak;
    m.there = m.state.alone | m.state.saved << 1 | 1;
    m.held = c->activation_bytes[0] + mls_held_gradient(c, m.state.left) +
             bytes_of(c->activation_bytes, m.state.alone) +
             bytes_of(c->saved_bytes, m.state.saved);
    return m;
}

/* All steps that may be part of a best way.  Where the next backward pass can be had for
 * nothing it is the only one: whatever else is to be done takes no more memory after it.
 */
static mls_code expand(search *s, uint32_t number)
{
    /* a copy: the array of nodes may move as it grows */
    const moment m = moment_of(s, number);
    bool done;
    mls_code code = try_backward(s, &m, &done);
    for (size_t i = 0; i < s->chain->blocks && code == MLS_OK && !done; i++) {
        if ((m.there >> i & 1) != 0) {
            code = try_forward(s, &m, i);
            if (code == MLS_OK) {
                code = try_save(s, &m, i);
            }
        }
        if (code == MLS_OK && s->limits->offload) {
            code = try_load(s, &m, i);
        }
    }
    return code;
}

/* What every way holds at some moment: a block's input, what it saved, and what its
 * backward pass needs. */
static int64_t least_of_all(const mls_chain *c)
{
    const int64_t base = c->activation_bytes[0];
    int64_t least = base;
    for (size_t i = 0; i < c->blocks; i++) {
        const int64_t held = base + (i == 0 ? 0 : c->activation_bytes[i]) +
                             c->saved_bytes[i] + mls_held_gradient(c, i + 1) +
                             mls_backward_makes(c, i);
        least = held > least ? held : least;
    }
    return least;
}

/* The first end that comes out of the heap is the best one: no step has a negative cost,
 * and none lowers a peak. */
static mls_code run_search(search *s, uint32_t *end)
{
    *end = NONE;
    /* nothing is held at the beginning but the input, and nothing else at the end */
    const state begin = {.left = s->chain->blocks};
    mls_code code = reach(
        s, &(node){.key = pack(&begin), .parent = NONE, .peak = least_of_all(s->chain)});
    for (size_t taken = 0; code == MLS_OK && s->open > 0; taken++) {
        const mls_poll *poll = &s->limits->poll;
        if ((taken & POLL) == POLL && poll->go_on != NULL &&
            !poll->go_on(poll->context)) {
            return mls_fail(s->st, MLS_E_STOPPED, "the search was stopped");
        }
        const uint32_t number = take_first(s);
        if (unpack(s->nodes[number].key).left == 0) {
            *end = number;
            return MLS_OK;
        }
        code = expand(s, number);
        /* from here on the best way might be among those that were left out */
        if (s->ran_out) {
            return code;
        }
    }
    return code;
}

/* The way to a node, turned round. */
static mls_code trace(const search *s, uint32_t end, mls_schedule *runs)
{
    for (uint32_t at = end; s->nodes[at].parent != NONE; at = s->nodes[at].parent) {
        const node *n = &s->nodes[at];
        const size_t block = (size_t)n->block;
        mls_code code = MLS_OK;
        if (n->away) { /* backwards: what comes later goes first */
            code = mls_schedule_push(runs, MLS_STEP_OFFLOAD, block, s->st);
        }
        if (code == MLS_OK) {
            code = mls_schedule_push(runs, (mls_step_kind)n->kind, block, s->st);
        }
        if (code != MLS_OK) {
            return code;
        }
    }
    /* parents lead from the end to the beginning */
    for (size_t i = 0, j = runs->count; i + 1 < j; i++) {
        const mls_step step = runs->steps[--j];
        runs->steps[j] = runs->steps[i];
        runs->steps[i] = step;
    }
    return MLS_OK;
}

/* Search, trace, and give back all that was allocated. */
static mls_code find(search *s, mls_found *out)
{
    uint32_t end;
    mls_found found = {0};
    mls_code code = run_search(s, &end);
    if (code == MLS_OK && end != NONE) {
        code = trace(s, end, &found.runs);
        found.found = true;
        found.extra = s->nodes[end].cost;
        found.least = s->nodes[end].peak;
    }
    if (code == MLS_OK) {
        found.ran_out = s->ran_out;
        found.states = s->count;
        *out = found;
    } else {
        mls_schedule_fini(&found.runs);
    }
    mls_free(s->nodes);
    mls_free(s->heap);
    mls_free(s->table);
    return code;
}

/* One more state than the numbers can tell apart is never made. */
static search search_of(const mls_chain *chain, const mls_search_limits *limits,
                        bool by_peak, mls_status *st)
{
    const size_t most = limits->states == 0 ? MLS_SEARCH_STATES : limits->states;
    return (search){.chain = chain,
                    .limits = limits,
                    .by_peak = by_peak,
                    .most = most < CLOSED ? most : CLOSED - 1,
                    .st = st};
}

/* Seconds for costs; a peak need only stay within the budget. */
mls_code mls_search(const mls_chain *chain, const mls_search_limits *limits,
                    mls_found *out, mls_status *st)
{
    search s = search_of(chain, limits, false, st);
    return find(&s, out);
}

/* The same search with peaks for costs: the peak of a way is that of its worst step. */
mls_code mls_search_least(const mls_chain *chain, const mls_search_limits *limits,
                          mls_found *out, mls_status *st)
{
    search s = search_of(chain, limits, true, st);
    return find(&s, out);
}

/* ---- the best schedule ---- */

/* The drops placed, and all of it simulated: nothing leaves that was not looked at. */
static mls_code write_best(const mls_chain *chain, const mls_step *steps, size_t count,
                           mls_best *best, mls_status *st)
{
    mls_action *runs = mls_alloc(count, sizeof *runs);
    unsigned char *scratch = mls_alloc(mls_runs_scratch(chain), 1);
    mls_code code = MLS_OK;
    if (runs == NULL || scratch == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for %zu steps", count);
    } else {
        count = mls_runs_of(steps, count, runs);
        mls_runs_tidy(chain, runs, &count, scratch);
        code = mls_runs_write(runs, count, &best->schedule, st);
    }
    mls_free(runs);
    mls_free(scratch);
    if (code == MLS_OK) {
        code = mls_chain_simulate(chain, best->schedule.steps, best->schedule.count, NULL,
                                  &best->totals, st);
    }
    return code;
}

/* Give the steps with their drops; `optimal` and `states` as found. */
static mls_code give_steps(const mls_chain *chain, const mls_step *steps, size_t count,
                           const mls_found *found, mls_best *out, mls_status *st)
{
    mls_best best = {.optimal = !found->ran_out, .states = found->states};
    const mls_code code = write_best(chain, steps, count, &best, st);
    if (code == MLS_OK) {
        *out = best;
    } else {
        mls_schedule_fini(&best.schedule);
    }
    return code;
}

/* The least budget goes into `expected`, where programs find it. */
static mls_code refuse(const mls_chain *chain, int64_t budget, const char *which,
                       int64_t least, mls_status *st)
{
    mls_fail(st, MLS_E_CAPACITY,
             "no schedule of %zu blocks was found that fits a budget of %" PRId64
             " bytes: the least that %s fits is %" PRId64,
             chain->blocks, budget, which, least);
    mls_status_expected(st, "at least %" PRId64, least);
    mls_status_got(st, "%" PRId64, budget);
    return st->code;
}

/* Nothing was found, and not all was looked at: what is enough for a persistent schedule
 * is enough. */
static mls_code refuse_some(const mls_chain *chain, const mls_best_options *o,
                            mls_status *st)
{
    int64_t least;
    const mls_code code = mls_plan_least_bytes(chain, o->offload, o->poll, &least, st);
    return code == MLS_OK ? refuse(chain, o->budget_bytes, "a persistent one", least, st)
                          : code;
}

/* Nothing fits: say what would. */
static mls_code refuse_all(const mls_chain *chain, const mls_search_limits *limits,
                           const mls_best_options *o, mls_status *st)
{
    mls_found found;
    const mls_code code = mls_search_least(chain, limits, &found, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_schedule_fini(&found.runs);
    return found.found ? refuse(chain, o->budget_bytes, "any one", found.least, st)
                       : refuse_some(chain, o, st);
}

/* The seconds that the start could do without; INFINITY without a start. */
static mls_code extra_of_start(const mls_chain *chain, const mls_best_options *o,
                               double *extra, mls_status *st)
{
    mls_totals totals;
    *extra = INFINITY;
    if (o->start == NULL) {
        return MLS_OK;
    }
    const mls_code code =
        mls_chain_simulate(chain, o->start, o->start_count, NULL, &totals, st);
    if (code != MLS_OK) {
        return code;
    }
    if (totals.peak_bytes > o->budget_bytes) {
        return mls_fail(st, MLS_E_VALUE,
                        "the schedule to start from has a peak of %" PRId64
                        " bytes, above the budget of %" PRId64,
                        totals.peak_bytes, o->budget_bytes);
    }
    /* only less than this is of interest, so the search need not go further */
    *extra = 0;
    for (size_t i = 0; i < o->start_count; i++) {
        const mls_action run = {.kind = o->start[i].kind, .index = o->start[i].index};
        *extra += mls_run_extra(chain, &run);
    }
    return MLS_OK;
}

/* Only what is faster than the start is searched for: if nothing is found, the start is
 * the fastest, or if the search ran out of states, the best that is known. */
mls_code mls_best_schedule(const mls_chain *chain, const mls_best_options *o,
                           mls_best *out, mls_status *st)
{
    mls_search_limits limits = {.offload = o->offload,
                                .budget_bytes = o->budget_bytes,
                                .states = o->states,
                                .poll = o->poll};
    mls_found found = {.ran_out = true};
    mls_code code = extra_of_start(chain, o, &limits.below, st);
    if (code == MLS_OK && chain->blocks <= MLS_SEARCH_BLOCKS) {
        code = mls_search(chain, &limits, &found, st);
    }
    if (code != MLS_OK) {
        return code;
    }
    if (found.found) {
        code = give_steps(chain, found.runs.steps, found.runs.count, &found, out, st);
    } else if (o->start != NULL) {
        code = give_steps(chain, o->start, o->start_count, &found, out, st);
    } else if (found.ran_out) {
        code = refuse_some(chain, o, st);
    } else {
        code = refuse_all(chain, &limits, o, st);
    }
    mls_schedule_fini(&found.runs);
    return code;
}
