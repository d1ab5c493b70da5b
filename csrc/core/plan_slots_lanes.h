/* plan_slots_lanes: the loops of a kernel file, which comes with
 *
 *   TARGET      the function attribute that allows its instructions
 *   LANES       doubles in one register
 *   COLUMNS     segments along t that are worked on at a time: 2 or 4
 *   doubles     the register
 *   load, store, repeat, add, subtract, least
 *
 * and names its table with MLS_PLAN_TABLE.  Included once by each kernel file.  What
 * fills no register is done one by one with the same operations.
 */
#ifndef MLS_PLAN_SLOTS_LANES_H
#define MLS_PLAN_SLOTS_LANES_H

/* Loops over a tile are short and constant: written out, they need no memory. */
#if defined(__clang__)
#    define MLS_UNROLL _Pragma("unroll")
#else
#    define MLS_UNROLL _Pragma("GCC unroll 4")
#endif

/* One register's worth of entries of a tile, `COLUMNS` segments wide, for all restarts.
 * The sums stay in registers from the first restart to the last. */
TARGET static void tile_part(const mls_plan_tile *j, size_t t, size_t m)
{
    doubles sums[MLS_PLAN_TILE][COLUMNS];
    double *cells[MLS_PLAN_TILE];
    MLS_UNROLL
    for (size_t i = 0; i < MLS_PLAN_TILE; i++) {
        cells[i] = j->values + j->rows[j->s + i] + m;
        MLS_UNROLL
        for (size_t l = 0; l < COLUMNS; l++) {
            sums[i][l] = load(cells[i] + (t + l) * j->stride);
        }
    }
    for (size_t k = j->first; k < j->last; k++) {
        if (j->begin[k] > m) {
            continue;
        }
        const double *right = j->values + j->rows[k] + t * j->stride + m - j->shift[k];
        doubles columns[COLUMNS];
        MLS_UNROLL
        for (size_t l = 0; l < COLUMNS; l++) {
            columns[l] = load(right + l * j->stride);
        }
        MLS_UNROLL
        for (size_t i = 0; i < MLS_PLAN_TILE; i++) {
            const doubles left = load(cells[i] + (k - 1) * j->stride);
            MLS_UNROLL
            for (size_t l = 0; l < COLUMNS; l++) {
                sums[i][l] = least(sums[i][l], add(left, columns[l]));
            }
        }
    }
    MLS_UNROLL
    for (size_t i = 0; i < MLS_PLAN_TILE; i++) {
        MLS_UNROLL
        for (size_t l = 0; l < COLUMNS; l++) {
            store(cells[i] + (t + l) * j->stride, sums[i][l]);
        }
    }
}

TARGET static void tile(const mls_plan_tile *j)
{
    for (size_t m = j->from; m < j->to; m += LANES) {
        for (size_t l = 0; l < MLS_PLAN_TILE; l += COLUMNS) {
            tile_part(j, j->t + l, m);
        }
    }
}

/* Two lists added, where that is less. */
TARGET static void row(double *c, const double *a, const double *b, size_t count)
{
    size_t m = 0;
    for (; m + LANES <= count; m += LANES) {
        store(c + m, least(load(c + m), add(load(a + m), load(b + m))));
    }
    for (; m < count; m++) {
        const double sum = a[m] + b[m];
        c[m] = sum < c[m] ? sum : c[m];
    }
}

/* One list moved, where that is less. */
TARGET static void keep(double *c, const double *b, double minus, double plus,
                        size_t count)
{
    const doubles less = repeat(minus), more = repeat(plus);
    size_t m = 0;
    for (; m + LANES <= count; m += LANES) {
        const doubles moved = add(subtract(load(b + m), less), more);
        store(c + m, least(load(c + m), moved));
    }
    for (; m < count; m++) {
        const double moved = (b[m] - minus) + plus;
        c[m] = moved < c[m] ? moved : c[m];
    }
}

const mls_plan_kernels MLS_PLAN_TABLE = {.tile = tile, .row = row, .keep = keep};

#endif
