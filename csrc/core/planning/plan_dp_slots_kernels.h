/* plan_dp_slots_kernels: types and tables of the inner loops' files; private to
 * plan_dp_slots*.c.
 *
 * Each kernel file defines one table; plan_dp_slots.c chooses the table. mls_cpu_offers
 * tests whether the processor supports its instruction set. All kernels do the same
 * additions and comparisons in the same order, so their results are equal bit for bit.
 */
#ifndef MLS_PLAN_DP_SLOTS_KERNELS_H
#define MLS_PLAN_DP_SLOTS_KERNELS_H

#include "runtime/cpu_features.h"

#include <stddef.h>
#include <stdint.h>

enum {
    MLS_PLAN_TILE = 4,   /* segments along each side of a kernel's tile */
    MLS_PLAN_LANES = 16, /* a multiple of every kernel's register width */
    MLS_PLAN_STRIP = 64  /* entries processed at a time */
};

/* A tile of segments, with first blocks s .. s + 3 and last blocks t .. t + 3, and the
 * restarts k from `first` to before `last` to try for all of them. Entry m of segment s
 * .. t is at rows[s] + t * stride + m. Restart k applies from entry begin[k - first] on,
 * a multiple of MLS_PLAN_LANES that is at least shift[k], the slots of activation k. It
 * costs plus[k - first], and rest[i] more for row i of the tile. */
typedef struct mls_plan_tile {
    float *values;
    const size_t *rows;
    size_t stride;
    const uint32_t *shift, *begin;
    const float *plus;
    float rest[MLS_PLAN_TILE];
    size_t s, t, first, last;
    size_t from, to; /* range of entries, multiples of MLS_PLAN_LANES */
} mls_plan_tile;

typedef struct mls_plan_kernels {
    /* with (s, t)[m] for entry m of segment s .. t, its seconds within m slots:
     * (s, t)[m] = minimum of itself and, for all k, rest + (s, k - 1)[m] + ((k, t)[m -
     * shift[k]] + plus) */
    void (*restart_tile)(const mls_plan_tile *job);
    /* c[m] = minimum of c[m] and a[m] + (b[m] + plus) */
    void (*restart_row)(float *c, const float *a, const float *b, float plus,
                        size_t count);
    /* c[m] = minimum of c[m] and b[m] + plus */
    void (*save_row)(float *c, const float *b, float plus, size_t count);
} mls_plan_kernels;

/* The tables; constant. */
MLS_CPU_TABLES(mls_plan_kernels, mls_plan);

#endif
