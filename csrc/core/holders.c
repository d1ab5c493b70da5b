/* holders: parts looked up among the ranks of each pattern.
 *
 * For each group of a pattern its ranks are sorted by the part that they have: a part is
 * then found by halves.  Tensors are walked by the parts that are wanted of them, so that
 * the work grows with these and not with the ranks.
 */
#include "holders.h"

#include "meeting.h"
#include "mem.h"

#include <stdio.h>
#include <stdlib.h>

/* Who has a part. */
typedef struct holder {
    uint64_t part, rank;
} holder;

/* A pattern that was looked into. */
typedef struct known {
    mls_pattern pattern;
    holder *holders;     /* the ranks, by part, of the first group, of the second, ... */
    size_t count;        /* of ranks */
    const uint64_t *own; /* parts of the rank that asks; NULL: it is not one of them */
    size_t different[MLS_PATTERN_GROUPS]; /* parts that its ranks have of each group */
} known;

/* A wanted tensor in the index of a pattern. */
typedef struct listed {
    size_t tensor, pattern, shard;
} listed;

typedef struct search {
    const mls_catalog *catalog;
    const mls_pattern_ranks *patterns;
    known *known;
    size_t count; /* of patterns */
    listed *listed;
    size_t listed_count;
    uint64_t own;
    bool *needed;
    const listed *whole; /* places of a tensor of which all parts are there, or NULL */
    size_t whole_count;
} search;

/* For qsort: by part, then by rank, so that of several ranks that have one part the first
 * is found first. */
static int compare_holders(const void *a, const void *b)
{
    const holder *x = a, *y = b;
    return x->part != y->part   ? (x->part < y->part ? -1 : 1)
           : x->rank != y->rank ? (x->rank < y->rank ? -1 : 1)
                                : 0;
}

/* For qsort: by tensor, then as the patterns and their shards come. */
static int compare_listed(const void *a, const void *b)
{
    const listed *x = a, *y = b;
    return x->tensor != y->tensor     ? (x->tensor < y->tensor ? -1 : 1)
           : x->pattern != y->pattern ? (x->pattern < y->pattern ? -1 : 1)
           : x->shard != y->shard     ? (x->shard < y->shard ? -1 : 1)
                                      : 0;
}

/* Whether what is said of a pattern goes together with the index that was read. */
static mls_code check(const mls_pattern_ranks *ranks, const mls_pattern *pattern,
                      uint64_t world_size, mls_status *st)
{
    bool good = pattern->known && pattern->group_count == ranks->group_count;
    for (size_t i = 0; good && i < ranks->count; i++) {
        good = ranks->ranks[i] < world_size;
    }
    return good ? MLS_OK
                : mls_fail(st, MLS_E_FORMAT,
                           "the manifest says of rank %llu what its index does not",
                           (unsigned long long)ranks->index->rank);
}

/* Sort the ranks of a pattern, group by group. */
static mls_code learn(const mls_pattern_ranks *ranks, uint64_t own, uint64_t world_size,
                      known *out, mls_status *st)
{
    mls_code code = mls_pattern_init(ranks->index, &out->pattern, st);
    if (code == MLS_OK) {
        code = check(ranks, &out->pattern, world_size, st);
    }
    if (code != MLS_OK) {
        return code;
    }
    out->count = ranks->count;
    /* the caller has as many parts in memory */
    out->holders = mls_alloc(ranks->count * ranks->group_count, sizeof *out->holders);
    if (out->holders == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to look for %zu ranks",
                        ranks->count);
    }
    for (size_t group = 0; group < ranks->group_count; group++) {
        holder *holders = out->holders + group * ranks->count;
        for (size_t i = 0; i < ranks->count; i++) {
            const uint64_t *parts = ranks->parts + i * ranks->group_count;
            holders[i] = (holder){.part = parts[group], .rank = ranks->ranks[i]};
            out->own = ranks->ranks[i] == own ? parts : out->own;
        }
        qsort(holders, ranks->count, sizeof *holders, compare_holders);
    }
    return MLS_OK;
}

/* Where the wanted tensors are listed, or all of them, tensor by tensor.  The catalog
 * itself keeps one shard of each part, and so forgets patterns whose ranks may have other
 * parts. */
static mls_code list_wanted(search *s, const mls_part *const *wanted, mls_status *st)
{
    size_t all = 0;
    for (size_t i = 0; i < s->count; i++) {
        all += s->patterns[i].index->shard_count; /* all of them lie in memory */
    }
    s->listed = mls_alloc(all, sizeof *s->listed);
    if (s->listed == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to look for %zu shards", all);
    }
    for (size_t i = 0; i < s->count; i++) {
        const mls_index *index = s->patterns[i].index;
        for (size_t j = 0; j < index->shard_count; j++) {
            const size_t tensor = mls_catalog_find(s->catalog, &index->shards[j].id);
            if (wanted == NULL || wanted[tensor] != NULL) {
                s->listed[s->listed_count++] =
                    (listed){.tensor = tensor, .pattern = i, .shard = j};
            }
        }
    }
    qsort(s->listed, s->listed_count, sizeof *s->listed, compare_listed);
    return MLS_OK;
}

/* The first rank that has a part, of one group; UINT64_MAX: none. */
static uint64_t first_holder(const holder *holders, size_t count, uint64_t part)
{
    size_t low = 0, high = count;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (holders[middle].part < part) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < count && holders[low].part == part ? holders[low].rank : UINT64_MAX;
}

/* Who is to give a part of a tensor that is listed in `count` places.  The rank that asks
 * comes first, wherever it has the part: then copies of one part are read by everyone
 * from his own files, and not by all from the first rank's. */
static uint64_t choose(const search *s, const listed *places, size_t count, size_t part)
{
    uint64_t best = UINT64_MAX;
    for (size_t i = 0; i < count; i++) {
        const known *k = &s->known[places[i].pattern];
        const size_t group = k->pattern.groups[places[i].shard];
        if (k->own != NULL && k->own[group] == part) {
            return s->own;
        }
        const uint64_t rank = first_holder(k->holders + group * k->count, k->count, part);
        best = rank < best ? rank : best;
    }
    return best;
}

/* Mark the ranks that one tensor is read from.  The shards of one rank that are of one
 * tensor are as many places: each has its group. */
static void mark(const search *s, const listed *places, size_t count,
                 const mls_part *wanted)
{
    const mls_index_shard *facts = s->catalog->tensors[places->tensor].facts;
    mls_meeting meeting;
    size_t part;
    bool any = false;
    mls_meeting_init(&meeting, &facts->layout, facts->rank, facts->shape, wanted);
    while (mls_meeting_next(&meeting, &part)) {
        const uint64_t rank = choose(s, places, count, part);
        if (rank != UINT64_MAX) {
            s->needed[rank] = true;
            any = true;
        }
    }
    if (!any) {
        s->needed[s->patterns[places->pattern].index->rank] = true;
    }
}

/* How many places, from the one on, are of one tensor. */
static size_t same_tensor(const search *s, size_t from)
{
    size_t count = 1;
    while (from + count < s->listed_count &&
           s->listed[from + count].tensor == s->listed[from].tensor) {
        count++;
    }
    return count;
}

/* Look into all patterns; whatever comes of it, search_fini gives it back. */
static mls_code search_init(search *s, const mls_part *const *wanted, uint64_t world_size,
                            mls_status *st)
{
    mls_code code = MLS_OK;
    s->known = mls_alloc(s->count, sizeof *s->known);
    if (s->known == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %zu patterns", s->count);
    }
    for (size_t i = 0; code == MLS_OK && i < s->count; i++) {
        const uint64_t rank = s->patterns[i].index->rank;
        if (rank >= world_size) {
            code = mls_fail(st, MLS_E_FORMAT, "an index is of rank %llu of %llu",
                            (unsigned long long)rank, (unsigned long long)world_size);
        }
    }
    for (size_t i = 0; code == MLS_OK && i < s->count; i++) {
        code = learn(&s->patterns[i], s->own, world_size, &s->known[i], st);
    }
    return code == MLS_OK ? list_wanted(s, wanted, st) : code;
}

/* Accepts one that failed half way: patterns that were not looked into are zeroed, and
 * tables that there was no memory for are NULL. */
static void search_fini(search *s)
{
    for (size_t i = 0; s->known != NULL && i < s->count; i++) {
        mls_pattern_fini(&s->known[i].pattern);
        mls_free(s->known[i].holders);
    }
    mls_free(s->known);
    mls_free(s->listed);
}

/* The indexes are as good as their parsing made them, their ranks too: what the manifest
 * says beside them is asked for here. */
mls_code mls_holders_find(const mls_catalog *catalog, const mls_pattern_ranks *patterns,
                          size_t count, const mls_part *const *wanted, uint64_t own,
                          bool *needed, uint64_t world_size, mls_status *st)
{
    search s = {.catalog = catalog,
                .patterns = patterns,
                .count = count,
                .own = own,
                .needed = needed};
    const mls_code code = search_init(&s, wanted, world_size, st);
    for (size_t i = 0; code == MLS_OK && i < s.listed_count;) {
        const size_t places = same_tensor(&s, i);
        mark(&s, s.listed + i, places, wanted[s.listed[i].tensor]);
        i += places;
    }
    search_fini(&s);
    return code;
}

/* ---- whether all is there ----
 *
 * Before a checkpoint is replaced by one that nobody could load.  Ranks that save
 * together told which parts they have stored, so no index is read for this that would not
 * be read anyway; what is counted for a group holds for all tensors that it lists.
 */

/* Parts that sorted holders have, each counted once: replicas that nobody marked are
 * stored twice, which is a waste and no fault. */
static size_t count_parts(const holder *holders, size_t count)
{
    size_t different = 0;
    for (size_t i = 0; i < count; i++) {
        different += i == 0 || holders[i].part != holders[i - 1].part ? 1 : 0;
    }
    return different;
}

/* The error about a part that nobody has.  Mostly somebody has another's instead, so two
 * ranks of one part are told, too. */
static mls_code fail_missing(const mls_index_shard *facts, size_t part, size_t parts,
                             const holder *holders, size_t count, mls_status *st)
{
    const mls_tensor_id *id = &facts->id;
    char state[64] = "", twice[80] = "";
    for (size_t i = 1; i < count && twice[0] == '\0'; i++) {
        if (holders[i].part == holders[i - 1].part &&
            holders[i].rank != holders[i - 1].rank) {
            snprintf(twice, sizeof twice, "; ranks %llu and %llu both give part %llu",
                     (unsigned long long)holders[i - 1].rank,
                     (unsigned long long)holders[i].rank,
                     (unsigned long long)holders[i].part);
        }
    }
    if (id->has_state) {
        snprintf(state, sizeof state,
                 "state '%.*s': ", id->state.length < 40 ? (int)id->state.length : 40,
                 id->state.data);
    }
    mls_fail(st, MLS_E_FORMAT,
             "%spart %zu of %zu is missing: no rank gives it as replica 0%s", state, part,
             parts, twice);
    mls_status_name(st, id->name.data, id->name.length);
    return MLS_E_FORMAT;
}

/* Whether sorted holders have all of a tensor.  Only parts that have elements are walked,
 * and the first that nobody has ends it: however many parts a layout has, this takes no
 * more steps than there are holders. */
static mls_code check_tensor(const mls_index_shard *facts, const holder *holders,
                             size_t count, mls_status *st)
{
    const mls_layout none = {0};
    mls_meeting meeting;
    mls_part whole;
    mls_status ignored; /* good indexes have good layouts */
    size_t part, parts = 1;
    (void)mls_layout_part(&none, facts->rank, facts->shape, 0, &whole, &ignored);
    (void)mls_layout_parts(&facts->layout, &parts, &ignored);
    mls_meeting_init(&meeting, &facts->layout, facts->rank, facts->shape, &whole);
    while (mls_meeting_next(&meeting, &part)) {
        if (first_holder(holders, count, part) == UINT64_MAX) {
            return fail_missing(facts, part, parts, holders, count, st);
        }
    }
    return MLS_OK;
}

/* The group of a place among those of its pattern. */
static size_t group_at(const search *s, const listed *place)
{
    return s->known[place->pattern].pattern.groups[place->shard];
}

/* Whether a tensor is listed by the same groups as the last one that had all parts: then
 * it has all parts, too. */
static bool as_before(const search *s, const listed *places, size_t count)
{
    bool same = count == s->whole_count;
    for (size_t i = 0; same && i < count; i++) {
        same = places[i].pattern == s->whole[i].pattern &&
               group_at(s, &places[i]) == group_at(s, &s->whole[i]);
    }
    return same;
}

/* Whether the ranks of all places together have all of a tensor: for one that each rank
 * stores several parts of, or of which patterns store different ones.  What is found is
 * kept, since the tensors of a model are mostly cut alike. */
static mls_code check_together(search *s, const listed *places, size_t count,
                               size_t parts, mls_status *st)
{
    size_t all = 0, used = 0;
    for (size_t i = 0; i < count; i++) {
        all += s->known[places[i].pattern].count; /* all of them lie in memory */
    }
    holder *holders = mls_alloc(all, sizeof *holders);
    if (holders == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to look at %zu parts", all);
    }
    for (size_t i = 0; i < count; i++) {
        const known *k = &s->known[places[i].pattern];
        const size_t first = group_at(s, &places[i]) * k->count;
        for (size_t j = 0; j < k->count; j++) {
            holders[used++] = k->holders[first + j];
        }
    }
    qsort(holders, used, sizeof *holders, compare_holders);
    if (count_parts(holders, used) == parts) {
        s->whole = places;
        s->whole_count = count;
    }
    const mls_index_shard *facts = s->catalog->tensors[places->tensor].facts;
    const mls_code code = check_tensor(facts, holders, used, st);
    mls_free(holders);
    return code;
}

/* A tensor by the patterns that list it.  Nearly always one group has all of its parts,
 * or the same groups together as of the tensor before. */
static mls_code check_places(search *s, const listed *places, size_t count,
                             mls_status *st)
{
    size_t parts = 1;
    mls_status ignored; /* good indexes have good layouts */
    (void)mls_layout_parts(&s->catalog->tensors[places->tensor].facts->layout, &parts,
                           &ignored);
    for (size_t i = 0; i < count; i++) {
        if (s->known[places[i].pattern].different[group_at(s, &places[i])] == parts) {
            return MLS_OK;
        }
    }
    return as_before(s, places, count) ? MLS_OK
                                       : check_together(s, places, count, parts, st);
}

/* A tensor by a catalog of all ranks, which has its parts in order and each once.  This
 * is the way of indexes that are too different to have a pattern. */
static mls_code check_listed(const mls_catalog *catalog, const mls_catalog_tensor *tensor,
                             mls_status *st)
{
    size_t parts = 1;
    mls_status ignored;
    (void)mls_layout_parts(&tensor->facts->layout, &parts, &ignored);
    if (tensor->count == parts) {
        return MLS_OK;
    }
    holder *holders = mls_alloc(tensor->count, sizeof *holders);
    if (holders == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory to look at %zu parts",
                        tensor->count);
    }
    for (size_t i = 0; i < tensor->count; i++) {
        const mls_catalog_shard *from = &catalog->shards[tensor->from + i];
        holders[i] = (holder){.part = from->shard->part, .rank = from->index->rank};
    }
    const mls_code code = check_tensor(tensor->facts, holders, tensor->count, st);
    mls_free(holders);
    return code;
}

/* What a group has is counted once, for all tensors that are cut alike. */
mls_code mls_holders_check(const mls_catalog *catalog, const mls_pattern_ranks *patterns,
                           size_t count, uint64_t world_size, mls_status *st)
{
    mls_code code = MLS_OK;
    if (patterns == NULL) {
        for (size_t i = 0; code == MLS_OK && i < catalog->tensor_count; i++) {
            code = check_listed(catalog, &catalog->tensors[i], st);
        }
        return code;
    }
    search s = {
        .catalog = catalog, .patterns = patterns, .count = count, .own = UINT64_MAX};
    code = search_init(&s, NULL, world_size, st);
    for (size_t i = 0; code == MLS_OK && i < count; i++) {
        known *k = &s.known[i];
        for (size_t group = 0; group < k->pattern.group_count; group++) {
            k->different[group] = count_parts(k->holders + group * k->count, k->count);
        }
    }
    for (size_t i = 0; code == MLS_OK && i < s.listed_count;) {
        const size_t places = same_tensor(&s, i);
        code = check_places(&s, s.listed + i, places, st);
        i += places;
    }
    search_fini(&s);
    return code;
}
