/* holders: parts looked up among the ranks of each pattern.
 *
 * For each group of a pattern its ranks are sorted by the part that they have: a part is
 * then found by halves.  Tensors are walked by the parts that are wanted of them, so that
 * the work grows with these and not with the ranks.
 */
#include "holders.h"

#include "meeting.h"
#include "mem.h"

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

/* For qsort: by tensor, then as the patterns come. */
static int compare_listed(const void *a, const void *b)
{
    const listed *x = a, *y = b;
    return x->tensor != y->tensor     ? (x->tensor < y->tensor ? -1 : 1)
           : x->pattern != y->pattern ? (x->pattern < y->pattern ? -1 : 1)
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

/* Where the wanted tensors are listed, tensor by tensor.  The catalog itself keeps one
 * shard of each part, and so forgets patterns whose ranks may have other parts. */
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
            if (wanted[tensor] != NULL) {
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

/* Everything in one search, which is given back in one place. */
static mls_code find(search *s, const mls_part *const *wanted, uint64_t world_size,
                     mls_status *st)
{
    mls_code code = MLS_OK;
    for (size_t i = 0; code == MLS_OK && i < s->count; i++) {
        code = learn(&s->patterns[i], s->own, world_size, &s->known[i], st);
    }
    if (code == MLS_OK) {
        code = list_wanted(s, wanted, st);
    }
    for (size_t i = 0; code == MLS_OK && i < s->listed_count;) {
        size_t count = 1;
        while (i + count < s->listed_count &&
               s->listed[i + count].tensor == s->listed[i].tensor) {
            count++;
        }
        mark(s, s->listed + i, count, wanted[s->listed[i].tensor]);
        i += count;
    }
    return code;
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
                .needed = needed,
                .known = mls_alloc(count, sizeof *s.known)};
    mls_code code = MLS_OK;
    if (s.known == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for %zu patterns", count);
    }
    for (size_t i = 0; code == MLS_OK && i < count; i++) {
        if (patterns[i].index->rank >= world_size) {
            code = mls_fail(st, MLS_E_FORMAT, "an index is of rank %llu of %llu",
                            (unsigned long long)patterns[i].index->rank,
                            (unsigned long long)world_size);
        }
    }
    if (code == MLS_OK) {
        code = find(&s, wanted, world_size, st);
    }
    for (size_t i = 0; i < count; i++) {
        mls_pattern_fini(&s.known[i].pattern);
        mls_free(s.known[i].holders);
    }
    mls_free(s.known);
    mls_free(s.listed);
    return code;
}
