/* overlap: whether two strided views, or two elements of one view, share a byte: a
 * bounded search for a sum of strides.
 *
 * The distance of two elements is a sum of strides, each times a factor. Two elements
 * share a byte if their distance is less than an item. So the question is whether a sum
 * with bounded factors can be in an interval. The search chooses the factor of the
 * largest stride first: for slices of packed arrays, the rest of the sum is then smaller
 * than this stride, which leaves one or two choices for each factor.
 */
#include "array/overlap.h"

#include <stdint.h>

enum {
    MAX_TERMS = 2 * MLS_MAX_RANK,
    MAX_STEPS = 1 << 18, /* of a search; some milliseconds */
};

/* A sum of `count` terms: term i is step[i] * factor, with any factor from 0 to most[i].
 * Steps are positive, distinct and descend. */
typedef struct sum {
    int count;
    bool is_huge; /* the sum does not fit; only for views that are not in memory */
    int64_t step[MAX_TERMS], most[MAX_TERMS];
    int64_t reach[MAX_TERMS + 1];  /* the largest sum of the terms from an index on */
    int64_t common[MAX_TERMS + 1]; /* their greatest common divisor; 0 without terms */
} sum;

/* Add the term step * n, with n from 0 to `most`, to the sum. Terms stay sorted by
 * descending step; a term with the same step is joined, and one that is always 0 is left
 * out. */
static void add_term(sum *s, int64_t step, int64_t most)
{
    int at = s->count;
    if (step == 0 || most == 0) {
        return;
    }
    while (at > 0 && s->step[at - 1] < step) {
        at--;
    }
    if (at > 0 && s->step[at - 1] == step) {
        s->most[at - 1] += most;
        return;
    }
    for (int i = s->count++; i > at; i--) {
        s->step[i] = s->step[i - 1];
        s->most[i] = s->most[i - 1];
    }
    s->step[at] = step;
    s->most[at] = most;
}

/* Return the greatest common divisor of two numbers that are not negative, with Euclid's
 * algorithm. The divisor of 0 and b is b. */
static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b != 0) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Compute `reach` and `common` for each index from the terms. Sets `is_huge` on overflow;
 * both arrays are then incomplete. */
static void finish_terms(sum *s)
{
    s->reach[s->count] = s->common[s->count] = 0;
    for (int i = s->count - 1; i >= 0; i--) {
        int64_t all;
        s->is_huge = s->is_huge || __builtin_mul_overflow(s->step[i], s->most[i], &all) ||
                     __builtin_add_overflow(s->reach[i + 1], all, &s->reach[i]) ||
                     s->reach[i] > INT64_MAX / 4;
        if (s->is_huge) {
            return;
        }
        s->common[i] = common_divisor(s->step[i], s->common[i + 1]);
    }
}

/* Return false only if the terms from index `from` on cannot have a sum in low .. high:
 * none of the multiples of their common divisor up to their largest sum is in it. True
 * does not prove that a sum is. */
static bool is_possible(const sum *s, int from, int64_t low, int64_t high)
{
    low = low < 0 ? 0 : low;
    high = high > s->reach[from] ? s->reach[from] : high;
    return low <= high && (low == 0 || (s->common[from] != 0 &&
                                        high / s->common[from] * s->common[from] >= low));
}

/* Return whether some sum of the terms is in the interval low .. high, both included.
 * Also true if that takes more than MAX_STEPS steps to decide. A search by backtracking:
 * term by term, it tries only factors that can still lead to the interval. */
static bool has_sum(sum *s, int64_t low, int64_t high)
{
    int64_t factor[MAX_TERMS],
        last[MAX_TERMS]; /* the factor of a term, and the last to try */
    int64_t used = 0;    /* the sum of the terms before index `k`, the current one */
    int k = 0;
    bool enters =
        true; /* term `k` is reached from the term before it, not from the next */
    finish_terms(s);
    if (s->is_huge) {
        return true;
    }
    if (!is_possible(s, 0, low, high) || s->count == 0) {
        return is_possible(s, 0, low, high);
    }
    for (int steps = 0; steps < MAX_STEPS; steps++) {
        const int64_t step = s->step[k];
        if (enters) {
            const int64_t least = low - used - s->reach[k + 1];
            factor[k] = least <= 0 ? 0 : (least + step - 1) / step;
            last[k] = (high - used) / step;
            last[k] = last[k] > s->most[k] ? s->most[k] : last[k];
            enters = false;
        }
        if (factor[k] > last[k]) { /* no factor is left: go on with the term before */
            if (k == 0) {
                return false;
            }
            k--;
            used -= s->step[k] * factor[k]++;
            continue;
        }
        const int64_t next = used + step * factor[k];
        if (!is_possible(s, k + 1, low - next, high - next)) {
            factor[k]++;
        } else if (k + 1 == s->count) {
            return true;
        } else {
            used = next;
            k++;
            enters = true;
        }
    }
    return true;
}

/* Return the bytes between neighbouring indices of an axis, without the sign. */
static int64_t step_of(const mls_tensor *t, int axis)
{
    const int64_t stride = t->strides[axis];
    return stride < 0 ? -stride : stride;
}

/* Return whether two views share a byte. Search for elements of `a` and `b` whose
 * addresses are closer than an item. A negative stride has the elements of a positive one
 * from the lowest address on. The factors of `b` are counted from its highest address, so
 * that all terms are positive. */
bool mls_tensor_overlap(const mls_tensor *a, const mls_tensor *b)
{
    uintptr_t low_a, high_a, low_b, high_b;
    if (!mls_tensor_range(a, &low_a, &high_a) || !mls_tensor_range(b, &low_b, &high_b) ||
        low_a >= high_b || low_b >= high_a) {
        return false;
    }
    const int64_t item_a = (int64_t)mls_tensor_item_bytes(a);
    const int64_t item_b = (int64_t)mls_tensor_item_bytes(b);
    const int64_t distance =
        (int64_t)(high_b - (uintptr_t)item_b) - (int64_t)low_a; /* to the last of b */
    sum s = {0};
    for (int axis = 0; axis < a->rank; axis++) {
        add_term(&s, step_of(a, axis), (int64_t)a->shape[axis] - 1);
    }
    for (int axis = 0; axis < b->rank; axis++) {
        add_term(&s, step_of(b, axis), (int64_t)b->shape[axis] - 1);
    }
    /* distance - sum is the distance from an element of `a` to one of `b`, which share a
     * byte if it is from -(item_b - 1) to item_a - 1 */
    return has_sum(&s, distance - (item_a - 1), distance + item_b - 1);
}

/* Write the axes with more than one index to `axes`, which has room for all axes, by
 * descending stride without regard to signs. Returns their number. */
static int sort_axes(const mls_tensor *t, int *axes)
{
    int count = 0;
    for (int axis = 0; axis < t->rank; axis++) {
        int at = t->shape[axis] > 1 ? count++ : -1;
        for (; at > 0 && step_of(t, axes[at - 1]) < step_of(t, axis); at--) {
            axes[at] = axes[at - 1];
        }
        if (at >= 0) {
            axes[at] = axis;
        }
    }
    return count;
}

/* Return whether each stride is at least the bytes that all smaller strides span, so that
 * elements cannot overlap: true for slices, transposes and reversals of packed arrays.
 * `axes` are `count` axes of `t`, sorted by descending stride. */
static bool is_nested(const mls_tensor *t, const int *axes, int count)
{
    int64_t reach = (int64_t)mls_tensor_item_bytes(t);
    for (int i = count - 1; i >= 0; i--) {
        const int64_t step = step_of(t, axes[i]);
        int64_t all;
        if (step < reach || __builtin_mul_overflow(step, t->shape[axes[i]] - 1, &all) ||
            __builtin_add_overflow(reach, all, &reach)) {
            return false;
        }
    }
    return true;
}

/* Return whether two elements of a view share a byte. Search for them by the outermost
 * axis (`first`) along which their indices differ. The second element has the higher
 * index there. Along the later axes their indices may differ in both directions, so
 * factors go from 0 to twice the largest difference. */
bool mls_tensor_overlaps_itself(const mls_tensor *t)
{
    uintptr_t low, high;
    int axes[MLS_MAX_RANK];
    if (mls_tensor_is_contiguous(t) || !mls_tensor_range(t, &low, &high)) {
        return false;
    }
    const int count = sort_axes(t, axes);
    if (is_nested(t, axes, count)) {
        return false;
    }
    const int64_t item = (int64_t)mls_tensor_item_bytes(t);
    for (int first = 0; first < count; first++) {
        sum s = {0};
        /* the sum for two elements at the same address: along `first` the
         * second is already one step ahead, and each later factor counts from the most
         * negative difference of the indices */
        int64_t middle = -step_of(t, axes[first]);
        if (middle == 0) {
            return true;
        }
        /* indices differ by 1 to shape - 1; `middle` has the first of these steps */
        add_term(&s, -middle, (int64_t)t->shape[axes[first]] - 2);
        for (int i = first + 1; i < count; i++) {
            const int64_t step = step_of(t, axes[i]);
            const int64_t most = (int64_t)t->shape[axes[i]] - 1;
            int64_t all;
            if (__builtin_mul_overflow(step, most, &all) ||
                __builtin_add_overflow(middle, all, &middle) || middle > INT64_MAX / 4) {
                return true;
            }
            add_term(&s, step, 2 * most);
        }
        if (has_sum(&s, middle - (item - 1), middle + item - 1)) {
            return true;
        }
    }
    return false;
}
