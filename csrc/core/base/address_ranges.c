/* span: a merge sort of the runs that are there already, since tensors mostly lie in the
 * order in which they were made: no recursion, n log n at worst.
 */
#include "base/address_ranges.h"

/* The end of the run of rising addresses that starts at `from`. */
static size_t run_end(const mls_span *spans, size_t from, size_t count)
{
    size_t at = from < count ? from + 1 : count;
    while (at < count && spans[at - 1].low <= spans[at].low) {
        at++;
    }
    return at;
}

/* Merge two sorted runs, [0, half) and [half, count), into `to`. */
static void merge_runs(const mls_span *from, size_t half, size_t count, mls_span *to)
{
    size_t left = 0, right = half;
    for (size_t i = 0; i < count; i++) {
        const bool take_left =
            right == count || (left < half && from[left].low <= from[right].low);
        to[i] = from[take_left ? left++ : right++];
    }
}

/* Runs are merged by two, to and fro, until there is one. */
mls_span *mls_spans_sort(mls_span *spans, mls_span *spare, size_t count)
{
    size_t runs;
    do {
        runs = 0;
        for (size_t at = 0, end; at < count; at = end, runs++) {
            const size_t middle = run_end(spans, at, count);
            end = run_end(spans, middle, count);
            merge_runs(spans + at, middle - at, end - at, spare + at);
        }
        mls_span *const sorted = spare;
        spare = spans;
        spans = sorted;
    } while (runs > 1);
    return spans;
}

/* If nothing before overlapped, all spans before end where the last one ends or earlier:
 * it is enough to compare neighbours. */
bool mls_spans_tied(const mls_span *sorted, size_t count, const size_t *kinds, bool *tied,
                    size_t *pair)
{
    for (size_t i = 1; i < count; i++) {
        const mls_span *a = &sorted[i - 1], *b = &sorted[i];
        if (b->low >= a->high) {
            continue;
        }
        if (a->low != b->low || a->high != b->high ||
            kinds[a->owner] != kinds[b->owner]) {
            pair[0] = a->owner;
            pair[1] = b->owner;
            return false;
        }
        tied[a->owner] = true;
    }
    return true;
}
