/* plan_dp_slots_loops: inner loops of the solver by slots: the seconds of restarts and of
 * saves.
 *
 * They lower the seconds of a segment of blocks, for each number of slots of memory, to
 * the seconds of a better choice: a restart (`restart_tile`, `restart_row`) or a save
 * (`save_row`).
 *
 * The kernel file that includes this includes a header of simd/ first, defines COLUMNS,
 * the number of segments along t (their last block) that are processed together, and
 * names its table with MLS_PLAN_TABLE. Entries that do not fill a register are processed
 * one by one with the same operations.
 */
#ifndef MLS_PLAN_DP_SLOTS_LOOPS_H
#define MLS_PLAN_DP_SLOTS_LOOPS_H

#include <math.h>
#include <string.h>

/* Any address is valid. */
MLS_TARGET static inline floats load(const float *p)
{
    floats values;
    memcpy(&values, p, sizeof values);
    return values;
}

MLS_TARGET static inline void store(float *p, floats values)
{
    memcpy(p, &values, sizeof values);
}

/* Computes mls_plan_kernels.restart_tile (see plan_dp_slots_kernels.h) for one register
 * of entries, from m on, and for the COLUMNS columns from segment end `t` on, which is
 * j->t plus a multiple of COLUMNS: (s + i, t + l)[m] = min(itself, rest[i] + min over k
 * of (s + i, k - 1)[m] + ((k, t + l)[m - shift[k]] + plus[k])). The sums stay in
 * registers from the first restart k to the last. Prefetches the entries of the next
 * strip: they are in many short ranges, too short for the hardware prefetcher. */
MLS_TARGET static void tile_part(const mls_plan_tile *j, size_t t, size_t m)
{
    floats sums[MLS_PLAN_TILE][COLUMNS];
    float *cells[MLS_PLAN_TILE];
    MLS_UNROLLED
    for (size_t i = 0; i < MLS_PLAN_TILE; i++) {
        cells[i] = j->values + j->rows[j->s + i] + m;
        MLS_UNROLLED
        for (size_t l = 0; l < COLUMNS; l++) {
            sums[i][l] = repeat(INFINITY);
        }
    }
    for (size_t k = j->first; k < j->last; k++) {
        if (j->begin[k - j->first] > m) {
            continue;
        }
        const float *right = j->values + j->rows[k] + t * j->stride + m - j->shift[k];
        const floats plus = repeat(j->plus[k - j->first]);
        floats columns[COLUMNS];
        MLS_UNROLLED
        for (size_t l = 0; l < COLUMNS; l++) {
            columns[l] = load(right + l * j->stride) + plus;
            __builtin_prefetch(right + l * j->stride + MLS_PLAN_STRIP, 0, 2);
        }
        MLS_UNROLLED
        for (size_t i = 0; i < MLS_PLAN_TILE; i++) {
            const floats left = load(cells[i] + (k - 1) * j->stride);
            __builtin_prefetch(cells[i] + (k - 1) * j->stride + MLS_PLAN_STRIP, 0, 2);
            MLS_UNROLLED
            for (size_t l = 0; l < COLUMNS; l++) {
                sums[i][l] = least_f32(sums[i][l], left + columns[l]);
            }
        }
    }
    MLS_UNROLLED
    for (size_t i = 0; i < MLS_PLAN_TILE; i++) {
        const floats rest = repeat(j->rest[i]);
        MLS_UNROLLED
        for (size_t l = 0; l < COLUMNS; l++) {
            float *cell = cells[i] + (t + l) * j->stride;
            store(cell, least_f32(load(cell), sums[i][l] + rest));
        }
    }
}

/* Tries all restarts of the job for its tile of segments, entries j->from to before
 * j->to, one register of entries at a time. */
MLS_TARGET static void restart_tile(const mls_plan_tile *j)
{
    for (size_t m = j->from; m < j->to; m += FLOATS) {
        for (size_t l = 0; l < MLS_PLAN_TILE; l += COLUMNS) {
            tile_part(j, j->t + l, m);
        }
    }
}

/* Computes c = min(c, a + (b + plus)) for `count` entries: tries one restart for the
 * segment `c`, with the seconds `a` of its left and `b` of its right part. */
MLS_TARGET static void restart_row(float *c, const float *a, const float *b, float plus,
                                   size_t count)
{
    const floats more = repeat(plus);
    size_t m = 0;
    for (; m + FLOATS <= count; m += FLOATS) {
        const floats right = load(b + m) + more;
        store(c + m, least_f32(load(c + m), load(a + m) + right));
    }
    for (; m < count; m++) {
        const float sum = a[m] + (b[m] + plus);
        c[m] = sum < c[m] ? sum : c[m];
    }
}

/* Computes c = min(c, b + plus) for `count` entries: tries a save, with the seconds `b`
 * of the blocks after the saved one. */
MLS_TARGET static void save_row(float *c, const float *b, float plus, size_t count)
{
    const floats more = repeat(plus);
    size_t m = 0;
    for (; m + FLOATS <= count; m += FLOATS) {
        store(c + m, least_f32(load(c + m), load(b + m) + more));
    }
    for (; m < count; m++) {
        const float sum = b[m] + plus;
        c[m] = sum < c[m] ? sum : c[m];
    }
}

const mls_plan_kernels MLS_PLAN_TABLE = {
    .restart_tile = restart_tile, .restart_row = restart_row, .save_row = save_row};

#endif
