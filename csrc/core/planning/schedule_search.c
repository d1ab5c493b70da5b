/* schedule_search: the fastest of all schedules of a short chain (schedules="any"):
 * Dijkstra's algorithm over memory states.
 *
 * Nodes are in one growing array. A hash table with open addressing finds them by key,
 * and a binary heap of node numbers orders the open ones.
 */
#include "planning/schedule_search.h"

#include "base/memory.h"
#include "base/size.h"
#include "planning/plan.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum {
    /* positions of a state's members in a key, in bits; `alone` is at 0 */
    SAVED_AT = MLS_SEARCH_BLOCKS + 1,
    HOST_AT = SAVED_AT + MLS_SEARCH_BLOCKS,
    LEFT_AT = HOST_AT + MLS_SEARCH_BLOCKS,
    POLL = 1023, /* nodes between two polls, minus one; a mask */
    FIRST_ROOM = 256,
    NONE = UINT32_MAX,
    CLOSED = UINT32_MAX - 1 /* `place` of a node that has left the heap */
};

/* A search of a thousand states takes a fraction of a millisecond, and most searches that
 * fit in memory take less than a second. So the only bound is the one in the header, and
 * nodes are small: 40 bytes each, plus 4 in the heap and 8 in the table. */

/* A state that was found, and the last step of the best path to it. */
typedef struct node {
    uint64_t key;    /* of pack_state */
    double cost;     /* extra seconds; unused in a search for the least peak */
    int64_t peak;    /* of the path; used only in a search for the least peak */
    uint32_t parent; /* NONE: the initial state */
    uint32_t place;  /* in the heap, or CLOSED */
    int8_t kind, block;
    bool is_offloaded; /* the block is offloaded right after the step */
} node;

typedef struct search {
    const mls_chain *chain;
    const mls_search_limits *limits;
    bool by_peak; /* the cost of a path is its peak, not its seconds */
    bool ran_out; /* a state was dropped, because there are `most` */
    size_t most;  /* limit of states */
    node *nodes;
    size_t count, room;
    uint32_t *table; /* node number + 1, or 0; its length is a power of 2 */
    size_t slots;    /* of the table */
    uint32_t *heap;  /* numbers of the open nodes, the best one first */
    size_t open;     /* nodes in the heap */
    mls_status *st;
} search;

/* The held memory. Bit k of `alone`: activation k, outside of saved tensors; activation 0
 * is always held and has no bit. Bit i of `saved` and `host`: the saved tensors of block
 * i, on the device or offloaded to the host. */
typedef struct state {
    uint64_t alone, saved, host;
    size_t left; /* remaining backward passes */
} state;

/* A node's state while its steps are tried. */
typedef struct decoded_node {
    state state;
    uint64_t readable;  /* activations that can be read, also inside saved tensors */
    int64_t live_bytes; /* held on the device, with the gradient that is held */
    uint32_t number;    /* of the node */
    double cost;        /* of the best path to the node, as is the peak */
    int64_t peak;
} decoded_node;

static const uint64_t one_bit = 1;

/* ---- keys ---- */

/* Returns the key of a state: all of its members in 64 bits. */
static uint64_t pack_state(const state *s)
{
    return s->alone | s->saved << SAVED_AT | s->host << HOST_AT |
           (uint64_t)s->left << LEFT_AT;
}

/* Splits a key into the state that it encodes. */
static state unpack_state(uint64_t key)
{
    const uint64_t blocks = (one_bit << MLS_SEARCH_BLOCKS) - 1;
    return (state){
        .alone = key & (blocks << 1 | 1),
        .saved = key >> SAVED_AT & blocks,
        .host = key >> HOST_AT & blocks,
        .left = (size_t)(key >> LEFT_AT),
    };
}

/* Returns the total of `bytes[i]` over the bits i that are set. */
static int64_t bytes_of(const int64_t *bytes, uint64_t bits)
{
    int64_t sum = 0;
    for (; bits != 0; bits &= bits - 1) {
        sum += bytes[__builtin_ctzll(bits)];
    }
    return sum;
}

/* ---- the heap ---- */

/* Returns whether node `a` leaves the heap before node `b`: the cheaper one. Of equal
 * nodes the newer one comes first, because it is more often closer to the end. */
static bool comes_before(const search *s, uint32_t a, uint32_t b)
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

/* Puts node `number` at `place` of the heap. A node stores its place, so that it can move
 * up when a better path is found. */
static void place_node(search *s, size_t place, uint32_t number)
{
    s->heap[place] = number;
    s->nodes[number].place = (uint32_t)place;
}

/* Moves the node at `place` of the heap up to its position. Costs only decrease, so nodes
 * only move up, except after a removal. */
static void move_up(search *s, size_t place)
{
    const uint32_t number = s->heap[place];
    while (place > 0 && comes_before(s, number, s->heap[(place - 1) / 2])) {
        place_node(s, place, s->heap[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    place_node(s, place, number);
}

/* Removes the first node of the heap and returns its number; the last one moves down from
 * the top to its place. */
static uint32_t pop_first(search *s)
{
    const uint32_t first = s->heap[0], last = s->heap[--s->open];
    s->nodes[first].place = CLOSED;
    size_t place = 0;
    for (size_t child = 1; child < s->open; child = 2 * place + 1) {
        if (child + 1 < s->open && comes_before(s, s->heap[child + 1], s->heap[child])) {
            child++;
        }
        if (!comes_before(s, s->heap[child], last)) {
            break;
        }
        place_node(s, place, s->heap[child]);
        place = child;
    }
    if (s->open > 0) {
        place_node(s, place, last);
    }
    return first;
}

/* ---- nodes ---- */

/* Returns a hash of a key: the finaliser of splitmix64, because keys differ in few
 * bits. */
static uint64_t hash_key(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Returns the slot of the table that has the node of `key`; if no node has it, the free
 * slot for it. The table is at most half full, so the loop finds one. */
static size_t slot_of(const search *s, uint64_t key)
{
    size_t slot = (size_t)hash_key(key) & (s->slots - 1);
    while (s->table[slot] != 0 && s->nodes[s->table[slot] - 1].key != key) {
        slot = (slot + 1) & (s->slots - 1);
    }
    return slot;
}

/* Fails with MLS_E_MEMORY. The message has the number of states, the limit that the user
 * can lower. */
static mls_code no_memory(search *s)
{
    return mls_fail(s->st, MLS_E_MEMORY, "no memory to search through %zu states",
                    s->count);
}

/* Doubles the room for nodes and the heap, and makes the table twice as long as that.
 * Memory grows with the states found, not with the limit. MLS_E_MEMORY: the search can
 * still be freed. */
static mls_code grow_tables(search *s)
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
    /* insert all keys into the new table */
    for (size_t i = 0; i < s->count; i++) {
        s->table[slot_of(s, s->nodes[i].key)] = (uint32_t)i + 1;
    }
    return MLS_OK;
}

/* Adds the path that ends with the node `path`, whose `place` is not read: a new state, a
 * better path, or no improvement. At the limit of states, a new one is dropped and
 * `ran_out` is set. MLS_E_MEMORY. */
static mls_code add_path(search *s, const node *path)
{
    if (s->count == s->room) {
        const mls_code code = grow_tables(s);
        if (code != MLS_OK) {
            return code;
        }
    }
    const size_t slot = slot_of(s, path->key);
    uint32_t number;
    /* a new state, unless the limit is reached */
    if (s->table[slot] == 0) {
        if (s->count >= s->most) {
            s->ran_out = true;
            return MLS_OK;
        }
        number = (uint32_t)s->count++;
        s->table[slot] = number + 1;
        s->nodes[number] = *path;
        place_node(s, s->open++, number);
    } else {
        number = s->table[slot] - 1;
        node *existing = &s->nodes[number];
        const bool better =
            s->by_peak ? path->peak < existing->peak : path->cost < existing->cost;
        /* closed nodes already have their best path */
        if (existing->place == CLOSED || !better) {
            return MLS_OK;
        }
        const uint32_t place = existing->place;
        *existing = *path;
        existing->place = place;
    }
    move_up(s, s->nodes[number].place);
    return MLS_OK;
}

/* ---- steps ---- */

/* Result of a step from a node (`from` in the functions below). `is_offloaded`: an
 * offload of the same block follows at once. */
typedef struct outcome {
    state state;
    int64_t peak;
    mls_step_kind kind;
    size_t block;
    bool is_offloaded;
} outcome;

/* Adds the result `o` of a step from `from` to the paths of `s`, unless it exceeds
 * limits->budget_bytes, or its seconds are not below limits->below; a search `by_peak`
 * has neither limit. Useless activations are removed first: those whose block is done,
 * and those that are also inside saved tensors. MLS_E_MEMORY. */
static mls_code add_outcome(search *s, const decoded_node *from, const outcome *o)
{
    if (!s->by_peak && o->peak > s->limits->budget_bytes) {
        return MLS_OK;
    }
    /* a save or load has no extra seconds, so if its block is offloaded, only the offload
     * counts */
    const mls_compute_step run = {
        .kind = (int32_t)(o->is_offloaded ? MLS_STEP_OFFLOAD : o->kind),
        .index = (int32_t)o->block};
    const double cost = from->cost + mls_step_extra(s->chain, &run);
    if (!s->by_peak && !(cost < s->limits->below)) {
        return MLS_OK;
    }
    state next = o->state;
    /* later steps do not read activations from the next backward block on */
    next.alone &= ((one_bit << next.left) - 1) & ~(next.saved << 1);
    return add_path(s, &(node){.key = pack_state(&next),
                               .cost = cost,
                               .peak = o->peak > from->peak ? o->peak : from->peak,
                               .parent = from->number,
                               .kind = (int8_t)o->kind,
                               .is_offloaded = o->is_offloaded,
                               .block = (int8_t)o->block});
}

/* Adds a result as it is, and also with the activation whose bit is `bit` dropped, if
 * that has its own memory; `o` is changed then. MLS_E_MEMORY. */
static mls_code add_outcome_both(search *s, const decoded_node *from, outcome *o,
                                 uint64_t bit)
{
    const mls_code code = add_outcome(s, from, o);
    if (code != MLS_OK || (o->state.alone & bit) == 0) {
        return code;
    }
    o->state.alone &= ~bit;
    return add_outcome(s, from, o);
}

/* Tries to run block i forward, with and without dropping its input. Skipped if the
 * output is held already or not needed any more. Like the functions below, returns only
 * MLS_E_MEMORY as an error. */
static mls_code try_forward(search *s, const decoded_node *from, size_t i)
{
    const mls_chain *c = s->chain;
    const uint64_t output = one_bit << (i + 1);
    /* the block whose backward pass is next is saved, never only run */
    if (i + 1 >= from->state.left || (from->readable & output) != 0) {
        return MLS_OK;
    }
    outcome o = {.state = from->state, .kind = MLS_STEP_FORWARD, .block = i};
    o.peak =
        from->live_bytes + c->activation_bytes[i + 1] + c->forward_temporary_bytes[i];
    o.state.alone |= output;
    return add_outcome_both(s, from, &o, one_bit << i);
}

/* Returns the held bytes without the separate output of block i. */
static int64_t bytes_without_output(const search *s, const decoded_node *from, size_t i)
{
    const bool alone = (from->state.alone >> (i + 1) & 1) != 0;
    return alone ? from->live_bytes - s->chain->activation_bytes[i + 1]
                 : from->live_bytes;
}

/* Adds results that offload the block whose bit is `bit` right after its save or load
 * `o`, with and without its input and output: waiting gains nothing, because the output
 * may stay. */
static mls_code add_offloaded(search *s, const decoded_node *from, outcome *o,
                              uint64_t bit)
{
    o->is_offloaded = true;
    o->state.saved &= ~bit;
    o->state.host |= bit;
    o->state.alone = (o->state.alone & ~bit) | (from->state.alone & bit) | bit << 1;
    /* with and without the input, and with and without the output */
    for (int dropped = 0; dropped < 2; dropped++) {
        outcome each = *o;
        const mls_code code = add_outcome_both(s, from, &each, bit << 1);
        if (code != MLS_OK || (o->state.alone & bit) == 0) {
            return code;
        }
        o->state.alone &= ~bit;
    }
    return MLS_OK;
}

/* Tries to save block i for its backward pass, with and without dropping its input, and,
 * if offloads are allowed, with an offload right after it. Skipped if the block is done,
 * or saved already. A separate output is dropped first, because making it twice is
 * invalid. */
static mls_code try_save(search *s, const decoded_node *from, size_t i)
{
    const mls_chain *c = s->chain;
    const uint64_t bit = one_bit << i;
    if (i >= from->state.left || ((from->state.saved | from->state.host) & bit) != 0) {
        return MLS_OK;
    }
    outcome o = {.state = from->state, .kind = MLS_STEP_SAVE, .block = i};
    o.peak = bytes_without_output(s, from, i) + c->saved_bytes[i] +
             c->saving_temporary_bytes[i];
    o.state.saved |= bit;
    o.state.alone &= ~(bit << 1);
    const mls_code code = add_outcome_both(s, from, &o, bit);
    return code == MLS_OK && s->limits->offload ? add_offloaded(s, from, &o, bit) : code;
}

/* Tries to load block i for its backward pass, or for an output that is not held; then
 * the output may stay while the rest is offloaded again. Skipped if the block is not on
 * the host. */
static mls_code try_load(search *s, const decoded_node *from, size_t i)
{
    const uint64_t bit = one_bit << i;
    /* if the output stayed, the load can wait until the backward pass needs it: until
     * then the output alone is smaller */
    const bool is_next = i + 1 == from->state.left;
    if ((from->state.host & bit) == 0 ||
        (!is_next && (from->state.alone & bit << 1) != 0)) {
        return MLS_OK;
    }
    outcome o = {.state = from->state, .kind = MLS_STEP_LOAD, .block = i};
    o.peak = bytes_without_output(s, from, i) + s->chain->saved_bytes[i];
    o.state.host &= ~bit;
    o.state.saved |= bit;
    o.state.alone &= ~(bit << 1);
    const mls_code code = add_outcome(s, from, &o);
    return code == MLS_OK && !is_next ? add_offloaded(s, from, &o, bit) : code;
}

/* Tries to run the next backward pass, or the only save or load that it lacks. Sets
 * `*done` if no other step needs to be tried. */
static mls_code try_backward(search *s, const decoded_node *from, bool *done)
{
    const mls_chain *c = s->chain;
    const size_t i = from->state.left - 1;
    const uint64_t bit = one_bit << i;
    *done = false;
    if ((from->readable & bit) == 0) {
        return MLS_OK;
    }
    const bool is_saved = (from->state.saved & bit) != 0,
               is_offloaded = (from->state.host & bit) != 0;
    const int64_t held_bytes = from->live_bytes + (is_saved ? 0 : c->saved_bytes[i]);
    const int64_t saving_peak =
        held_bytes + (is_saved || is_offloaded ? 0 : c->saving_temporary_bytes[i]);
    const int64_t freed_bytes =
        (is_saved ? c->saved_bytes[i] : 0) + mls_live_gradient(c, from->state.left) +
        ((from->state.alone & bit) != 0 ? c->activation_bytes[i] : 0);
    const int64_t limit = s->by_peak ? from->peak : s->limits->budget_bytes;
    outcome o = {.state = from->state, .kind = MLS_STEP_BACKWARD, .block = i};
    o.peak = held_bytes + mls_backward_makes(c, i);
    /* never better later: it fits, and it leaves no more memory held than before */
    *done =
        o.peak <= limit && saving_peak <= limit && c->gradient_bytes[i] <= freed_bytes;
    if (is_saved) {
        o.state.saved &= ~bit;
        o.state.left--;
        return add_outcome(s, from, &o);
    }
    if (!*done) {
        return MLS_OK;
    }
    o.kind = is_offloaded ? MLS_STEP_LOAD : MLS_STEP_SAVE;
    o.peak = saving_peak;
    o.state.host &= ~bit;
    o.state.saved |= bit;
    return add_outcome(s, from, &o);
}

/* ---- the search ---- */

/* Decodes the state of node `number`: the readable activations and the held bytes. */
static decoded_node decode_node(const search *s, uint32_t number)
{
    const mls_chain *c = s->chain;
    const node *at = &s->nodes[number];
    decoded_node decoded = {.state = unpack_state(at->key), .number = number};
    decoded.cost = at->cost;
    decoded.peak = at->peak;
    decoded.readable = decoded.state.alone | decoded.state.saved << 1 | 1;
    decoded.live_bytes = c->activation_bytes[0] +
                         mls_live_gradient(c, decoded.state.left) +
                         bytes_of(c->activation_bytes, decoded.state.alone) +
                         bytes_of(c->saved_bytes, decoded.state.saved);
    return decoded;
}

/* Tries all steps from node `number` that may be part of a best path. If the next
 * backward pass is possible without extra memory, it is the only step: every other step
 * needs no more memory after it. MLS_E_MEMORY. */
static mls_code expand_node(search *s, uint32_t number)
{
    /* a copy: the array of nodes may move */
    const decoded_node from = decode_node(s, number);
    bool done;
    mls_code code = try_backward(s, &from, &done);
    for (size_t i = 0; i < s->chain->blocks && code == MLS_OK && !done; i++) {
        if ((from.readable >> i & 1) != 0) {
            code = try_forward(s, &from, i);
            if (code == MLS_OK) {
                code = try_save(s, &from, i);
            }
        }
        if (code == MLS_OK && s->limits->offload) {
            code = try_load(s, &from, i);
        }
    }
    return code;
}

/* Returns a lower bound of every schedule's peak: a block's input, its saved tensors, and
 * the needs of its backward pass. */
static int64_t bound_least_peak(const mls_chain *c)
{
    const int64_t base = c->activation_bytes[0];
    int64_t least = base;
    for (size_t i = 0; i < c->blocks; i++) {
        const int64_t block_bytes = base + (i == 0 ? 0 : c->activation_bytes[i]) +
                                    c->saved_bytes[i] + mls_live_gradient(c, i + 1) +
                                    mls_backward_makes(c, i);
        least = block_bytes > least ? block_bytes : least;
    }
    return least;
}

/* Runs the search; `*end` is the best final node, NONE if there is none or the states ran
 * out. The first final state that leaves the heap is optimal: no step has a negative cost
 * or lowers a peak. MLS_E_MEMORY, MLS_E_STOPPED. */
static mls_code run_search(search *s, uint32_t *end)
{
    *end = NONE;
    /* at the beginning only the input is held, and at the end nothing else */
    const state begin = {.left = s->chain->blocks};
    /* every path reaches this peak, so lower peaks along a path need not be compared */
    mls_code code = add_path(s, &(node){.key = pack_state(&begin),
                                        .parent = NONE,
                                        .peak = bound_least_peak(s->chain)});
    for (size_t expanded = 0; code == MLS_OK && s->open > 0; expanded++) {
        const mls_poll *poll = &s->limits->poll;
        if ((expanded & POLL) == POLL && poll->go_on != NULL &&
            !poll->go_on(poll->context)) {
            return mls_fail(s->st, MLS_E_STOPPED, "the search was stopped");
        }
        const uint32_t number = pop_first(s);
        if (unpack_state(s->nodes[number].key).left == 0) {
            *end = number;
            return MLS_OK;
        }
        code = expand_node(s, number);
        /* the best path might contain states that were omitted */
        if (s->ran_out) {
            return code;
        }
    }
    return code;
}

/* Writes the steps that lead to node `end` into `runs`, in order. On failure the caller
 * frees what is written so far. */
static mls_code write_path(const search *s, uint32_t end, mls_schedule *runs)
{
    for (uint32_t number = end; s->nodes[number].parent != NONE;
         number = s->nodes[number].parent) {
        const node *n = &s->nodes[number];
        const size_t block = (size_t)n->block;
        mls_code code = MLS_OK;
        if (n->is_offloaded) { /* collected backwards: the later step comes first */
            code = mls_schedule_push(runs, MLS_STEP_OFFLOAD, block, s->st);
        }
        if (code == MLS_OK) {
            code = mls_schedule_push(runs, (mls_step_kind)n->kind, block, s->st);
        }
        if (code != MLS_OK) {
            return code;
        }
    }
    /* reverse: parents lead from the end to the beginning */
    for (size_t i = 0, j = runs->count; i + 1 < j; i++) {
        const mls_step step = runs->steps[--j];
        runs->steps[j] = runs->steps[i];
        runs->steps[i] = step;
    }
    return MLS_OK;
}

/* Runs the search, writes its best schedule to `*out`, and frees the nodes.
 * `has_schedule` is false if none fits, or if the search ran out of states (`ran_out`).
 * On failure `*out` is unchanged. */
static mls_code find_best(search *s, mls_search_result *out)
{
    uint32_t end;
    mls_search_result best = {0};
    mls_code code = run_search(s, &end);
    if (code == MLS_OK && end != NONE) {
        code = write_path(s, end, &best.runs);
        best.has_schedule = true;
        best.extra = s->nodes[end].cost;
        best.least = s->nodes[end].peak;
    }
    if (code == MLS_OK) {
        best.ran_out = s->ran_out;
        best.states = s->count;
        *out = best;
    } else {
        mls_schedule_fini(&best.runs);
    }
    mls_free(s->nodes);
    mls_free(s->heap);
    mls_free(s->table);
    return code;
}

/* Returns an empty search by peak or by seconds: no memory is allocated yet. Limits the
 * states to the numbers that a node can have. */
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

/* Costs are seconds; the peak must only stay within the budget. */
mls_code mls_search(const mls_chain *chain, const mls_search_limits *limits,
                    mls_search_result *out, mls_status *st)
{
    search s = search_of(chain, limits, false /* by seconds */, st);
    return find_best(&s, out);
}

/* Costs are peaks: the peak of a path is the largest peak of its steps. */
mls_code mls_search_least(const mls_chain *chain, const mls_search_limits *limits,
                          mls_search_result *out, mls_status *st)
{
    search s = search_of(chain, limits, true /* by peak */, st);
    return find_best(&s, out);
}

/* ---- the best schedule ---- */

/* Writes the `count` steps, with drops in the best places, to best->schedule, and
 * simulates them, so that every result is verified; sets best->totals. On failure the
 * caller frees the schedule. */
static mls_code write_best(const mls_chain *chain, const mls_step *steps, size_t count,
                           mls_best *best, mls_status *st)
{
    mls_compute_step *runs = mls_alloc(count, sizeof *runs);
    unsigned char *scratch = mls_alloc(mls_compute_steps_scratch(chain), 1);
    mls_code code = MLS_OK;
    if (runs == NULL || scratch == NULL) {
        code = mls_fail(st, MLS_E_MEMORY, "no memory for %zu steps", count);
    } else {
        count = mls_compute_steps_of(steps, count, runs);
        mls_compute_steps_tidy(chain, runs, &count, scratch);
        code = mls_compute_steps_write(runs, count, &best->schedule, st);
    }
    mls_free(runs);
    mls_free(scratch);
    if (code == MLS_OK) {
        code = mls_chain_simulate(chain, best->schedule.steps, best->schedule.count, NULL,
                                  &best->totals, st);
    }
    return code;
}

/* Writes the result of a search: the `count` steps with their drops, and `optimal` and
 * `states` from `result`. On failure `*out` is unchanged. */
static mls_code write_steps(const mls_chain *chain, const mls_step *steps, size_t count,
                            const mls_search_result *result, mls_best *out,
                            mls_status *st)
{
    mls_best best = {.optimal = !result->ran_out, .states = result->states};
    const mls_code code = write_best(chain, steps, count, &best, st);
    if (code == MLS_OK) {
        *out = best;
    } else {
        mls_schedule_fini(&best.schedule);
    }
    return code;
}

/* Fails for a budget that is too small for every schedule of a kind, which `kind` names
 * in the message. The status's "expected" has `least`, the least budget, for programs.
 * Returns MLS_E_CAPACITY. */
static mls_code fail_budget(const mls_chain *chain, int64_t budget, const char *kind,
                            int64_t least, mls_status *st)
{
    mls_fail(st, MLS_E_CAPACITY,
             "no schedule of %zu blocks was found that fits a budget of %" PRId64
             " bytes: the least that %s fits is %" PRId64,
             chain->blocks, budget, kind, least);
    mls_status_expected(st, "%" PRId64, least);
    return mls_status_got(st, "%" PRId64, budget);
}

/* Fails after an incomplete search, with the budget of a persistent schedule, which is
 * known to be sufficient. Returns MLS_E_CAPACITY, or the error of computing that
 * budget. */
static mls_code fail_incomplete_search(const mls_chain *chain, const mls_best_options *o,
                                       mls_status *st)
{
    int64_t least;
    const mls_code code = mls_plan_least_bytes(chain, o->offload, o->poll, &least, st);
    return code == MLS_OK
               ? fail_budget(chain, o->budget_bytes, "a persistent one", least, st)
               : code;
}

/* Fails after a search without a schedule. Searches again for the least memory, so that
 * the message shows which budget is sufficient. Returns MLS_E_CAPACITY, or the error of
 * that search. */
static mls_code fail_without_schedule(const mls_chain *chain,
                                      const mls_search_limits *limits,
                                      const mls_best_options *o, mls_status *st)
{
    mls_search_result result;
    const mls_code code = mls_search_least(chain, limits, &result, st);
    if (code != MLS_OK) {
        return code;
    }
    mls_schedule_fini(&result.runs);
    return result.has_schedule
               ? fail_budget(chain, o->budget_bytes, "any one", result.least, st)
               : fail_incomplete_search(chain, o, st);
}

/* Sets `*extra` to the seconds of the start schedule that other schedules may not need
 * (mls_step_extra); INFINITY without a start schedule. MLS_E_VALUE: it is invalid or
 * exceeds the budget. */
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
    /* the search only has to find smaller values */
    *extra = 0;
    for (size_t i = 0; i < o->start_count; i++) {
        const mls_compute_step run = {.kind = o->start[i].kind,
                                      .index = o->start[i].index};
        *extra += mls_step_extra(chain, &run);
    }
    return MLS_OK;
}

/* Finds the fastest schedule. Searches only for faster schedules than the start. If none
 * is found, the start is the fastest, or the best known if the search ran out of
 * states. */
mls_code mls_best_schedule(const mls_chain *chain, const mls_best_options *o,
                           mls_best *out, mls_status *st)
{
    mls_search_limits limits = {.offload = o->offload,
                                .budget_bytes = o->budget_bytes,
                                .states = o->states,
                                .poll = o->poll};
    mls_search_result result = {.ran_out = true};
    mls_code code = extra_of_start(chain, o, &limits.below, st);
    if (code == MLS_OK && chain->blocks <= MLS_SEARCH_BLOCKS) {
        code = mls_search(chain, &limits, &result, st);
    }
    if (code != MLS_OK) {
        return code;
    }
    if (result.has_schedule) {
        code = write_steps(chain, result.runs.steps, result.runs.count, &result, out, st);
    } else if (o->start != NULL) {
        code = write_steps(chain, o->start, o->start_count, &result, out, st);
    } else if (result.ran_out) {
        code = fail_incomplete_search(chain, o, st);
    } else {
        code = fail_without_schedule(chain, &limits, o, st);
    }
    mls_schedule_fini(&result.runs);
    return code;
}
