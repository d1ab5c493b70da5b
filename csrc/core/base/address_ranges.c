/* address_ranges: sorts address ranges, and finds arrays with the same memory (tied
 * weights) or a part of another's.
 *
 * Tensors are mostly allocated in address order, so the input has few sorted sequences.
 * The sort does not recurse and takes O(n log n) at worst.
 */
#include "base/address_ranges.h"

/* Return the end of the run of `ranges` that starts at index `from`: ranges whose `low`
 * does not decrease. `from` may be `count`. */
static size_t run_end(const mls_address_range *ranges, size_t from, size_t count)
{
    size_t end = from < count ? from + 1 : count;
    while (end < count && ranges[end - 1].low <= ranges[end].low) {
        end++;
    }
    return end;
}

/* Merge the ascending runs [0, half) and [half, count) of `from` into `to`; of ranges
 * with equal `low` the left one comes first. */
static void merge_runs(const mls_address_range *from, size_t half, size_t count,
                       mls_address_range *to)
{
    size_t left = 0, right = half;
    for (size_t i = 0; i < count; i++) {
        const bool takes_left =
            right == count || (left < half && from[left].low <= from[right].low);
        to[i] = from[takes_left ? left++ : right++];
    }
}

/* Sort ranges by `low`. A merge sort that uses existing runs: each pass merges
 * neighbouring pairs of them into the other array, until one run is left. */
mls_address_range *mls_address_ranges_sort(mls_address_range *ranges,
                                           mls_address_range *spare, size_t count)
{
    size_t runs;
    do {
        runs = 0;
        for (size_t at = 0, end; at < count; at = end, runs++) {
            const size_t middle = run_end(ranges, at, count);
            end = run_end(ranges, middle, count);
            merge_runs(ranges + at, middle - at, end - at, spare + at);
        }
        mls_address_range *const sorted = spare;
        spare = ranges;
        ranges = sorted;
    } while (runs > 1);
    return ranges;
}

/* Find owners of the same memory; false: a mixed pair was found. Packed arrays overlap
 * only if they are tied, so the inner loop mostly ends at once. */
bool mls_address_ranges_tied(const mls_address_range *sorted, size_t count,
                             mls_sharing (*compare)(const void *data, size_t a, size_t b),
                             const void *data, bool *tied, size_t *pair)
{
    for (size_t i = 0; i < count; i++) {
        const mls_address_range *a = &sorted[i];
        for (size_t j = i + 1; j < count && sorted[j].low < a->high; j++) {
            const size_t b = sorted[j].owner;
            const mls_sharing sharing = compare(data, a->owner, b);
            if (sharing == MLS_MIXED) {
                pair[0] = a->owner;
                pair[1] = b;
                return false;
            }
            if (sharing == MLS_TIED) {
                tied[a->owner < b ? a->owner : b] = true;
                break;
            }
        }
    }
    return true;
}
