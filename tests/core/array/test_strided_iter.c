/* Strided iterators compared with plain nested loops: every pair of elements once, in
 * runs as long as the memory allows; packing and byte swapping of items. */
#include "array/strided_iter.h"
#include "support/runner.h"

#include <stdint.h>
#include <stdlib.h>

enum { SIDE = 3, COUNT = SIDE * SIDE * SIDE, MOST = 600 };

/* The address of an element of `a`, and of the element of `b` with the same index. */
typedef struct place {
    ptrdiff_t a, b;
} place;

static int by_place(const void *left, const void *right)
{
    const place *x = left, *y = right;
    if (x->a != y->a) {
        return x->a < y->a ? -1 : 1;
    }
    return x->b < y->b ? -1 : x->b > y->b;
}

/* All places of two views of rank 3 by nested loops, sorted. */
static size_t expect(const mls_tensor *a, const mls_tensor *b, place *places)
{
    size_t count = 0;
    for (size_t i = 0; i < a->shape[0]; i++) {
        for (size_t j = 0; j < a->shape[1]; j++) {
            for (size_t k = 0; k < a->shape[2]; k++) {
                const ptrdiff_t n[3] = {(ptrdiff_t)i, (ptrdiff_t)j, (ptrdiff_t)k};
                place at = {0, 0};
                for (int axis = 0; axis < 3; axis++) {
                    at.a += n[axis] * a->strides[axis];
                    at.b += n[axis] * b->strides[axis];
                }
                places[count++] = at;
            }
        }
    }
    qsort(places, count, sizeof *places, by_place);
    return count;
}

/* The same by an iterator; stores the number of runs in `runs`. */
static size_t collect(const mls_tensor *a, const mls_tensor *b, place *places,
                      size_t *runs)
{
    mls_strided_iter w, sought;
    ptrdiff_t a_at = 0, b_at = 0;
    size_t count = 0;
    *runs = 0;
    if (!mls_strided_iter_init(&w, a, b)) {
        return 0;
    }
    sought = w;
    do {
        ptrdiff_t a_sought = -1, b_sought = -1;
        mls_strided_iter_seek(&sought, *runs, &a_sought, &b_sought);
        CHECK(a_sought == a_at && b_sought == b_at);
        CHECK(memcmp(sought.index, w.index, (size_t)w.rank * sizeof w.index[0]) == 0);
        for (size_t i = 0; i < w.length && count < MOST; i++) {
            places[count].a = a_at + (ptrdiff_t)i * w.a_step;
            places[count++].b = b_at + (ptrdiff_t)i * w.b_step;
        }
        ++*runs;
    } while (mls_strided_iter_next(&w, &a_at, &b_at));
    qsort(places, count, sizeof *places, by_place);
    return count;
}

static mls_tensor view(size_t x, size_t y, size_t z, ptrdiff_t sx, ptrdiff_t sy,
                       ptrdiff_t sz)
{
    return (mls_tensor){
        .dtype = MLS_F16, .rank = 3, .shape = {x, y, z}, .strides = {sx, sy, sz}};
}

/* Every order, sign and spacing of the strides of both views. */
TEST(every_element_pair_is_visited_once)
{
    static const ptrdiff_t strides[][3] = {
        {18, 6, 2},  {2, 6, 18}, {6, 18, 2}, {18, 6, -2}, {-18, -6, 2}, {-18, -6, -2},
        {100, 6, 2}, {0, 6, 2},  {0, 0, 0},  {18, 0, 2},  {7, 21, 3},   {1, 1, 1}};
    static const size_t lengths[] = {0, 1, 2, SIDE, 5};
    enum { N = sizeof strides / sizeof strides[0] };
    static place expected[MOST], visited[MOST];
    for (int pair = 0; pair < N * N; pair++) {
        const ptrdiff_t *s = strides[pair / N], *t = strides[pair % N];
        for (int l = 0; l < 125; l++) {
            const size_t x = lengths[l / 25], y = lengths[l / 5 % 5], z = lengths[l % 5];
            const mls_tensor a = view(x, y, z, s[0], s[1], s[2]);
            const mls_tensor b = view(x, y, z, t[0], t[1], t[2]);
            size_t runs;
            const size_t count = expect(&a, &b, expected);
            CHECK(collect(&a, &b, visited, &runs) == count);
            for (size_t i = 0; i < count; i++) {
                CHECK(expected[i].a == visited[i].a && expected[i].b == visited[i].b);
            }
        }
    }
}

static size_t runs_of(const mls_tensor *a, const mls_tensor *b)
{
    static place visited[MOST];
    size_t runs;
    collect(a, b, visited, &runs);
    return runs;
}

TEST(contiguous_runs_have_maximal_length)
{
    const mls_tensor packed = view(SIDE, SIDE, SIDE, 18, 6, 2);
    const mls_tensor turned = view(SIDE, SIDE, SIDE, 2, 6, 18);
    const mls_tensor rows = view(SIDE, SIDE, SIDE, 100, 6, 2);
    const mls_tensor backward = view(SIDE, SIDE, SIDE, -18, -6, -2);
    CHECK(runs_of(&packed, &packed) == 1);
    CHECK(runs_of(&turned, &turned) == 1); /* any order of axes */
    CHECK(runs_of(&packed, &rows) == SIDE);
    CHECK(runs_of(&rows, &packed) == SIDE);
    CHECK(runs_of(&packed, &turned) == SIDE * SIDE);
    CHECK(runs_of(&backward, &packed) == 1);
}

TEST(a_missing_second_view_follows_the_first)
{
    const mls_tensor rows = view(2, SIDE, SIDE, 100, 6, 2);
    mls_strided_iter w;
    ptrdiff_t a = 0, b = 0;
    REQUIRE(mls_strided_iter_init(&w, &rows, NULL));
    CHECK(w.length == SIDE * SIDE && w.a_step == 2 && w.b_step == 2);
    CHECK(mls_strided_iter_next(&w, &a, &b) && a == 100 && b == 100);
    CHECK(!mls_strided_iter_next(&w, &a, &b));
}

TEST(a_scalar_is_one_run_of_one_element)
{
    const mls_tensor scalar = {.dtype = MLS_F64, .rank = 0};
    mls_strided_iter w;
    ptrdiff_t a = 0, b = 0;
    REQUIRE(mls_strided_iter_init(&w, &scalar, &scalar));
    CHECK(w.length == 1 && w.a_step == 8 && w.b_step == 8);
    CHECK(!mls_strided_iter_next(&w, &a, &b));
}

/* Items from unaligned addresses, forwards, backwards and overlapping. */
TEST(items_are_gathered_by_any_stride)
{
    unsigned char from[400], packed[64 + 1];
    for (size_t i = 0; i < sizeof from; i++) {
        from[i] = (unsigned char)(i * 7);
    }
    for (size_t item = 1; item <= 8; item *= 2) {
        for (ptrdiff_t stride = -17; stride <= 17; stride++) {
            memset(packed, 0xEE, sizeof packed);
            mls_gather(packed, from + 201, stride, item, 8);
            for (ptrdiff_t i = 0; i < 8; i++) {
                CHECK(memcmp(packed + (size_t)i * item, from + 201 + i * stride, item) ==
                      0);
            }
            CHECK(packed[8 * item] == 0xEE);
        }
    }
}

TEST(units_are_byte_swapped)
{
    unsigned char bytes[] = {1, 2, 3, 4, 5, 6, 7, 8};
    mls_swap_items(bytes, 8, mls_swap_unit(MLS_C64));
    CHECK(memcmp(bytes, "\4\3\2\1\10\7\6\5", 8) == 0);
    mls_swap_items(bytes, 8, mls_swap_unit(MLS_I64));
    CHECK(memcmp(bytes, "\5\6\7\10\1\2\3\4", 8) == 0);
    mls_swap_items(bytes, 4, mls_swap_unit(MLS_BF16));
    CHECK(memcmp(bytes, "\6\5\10\7\1\2\3\4", 8) == 0);
    mls_swap_items(bytes, 8, mls_swap_unit(MLS_U8));
    CHECK(memcmp(bytes, "\6\5\10\7\1\2\3\4", 8) == 0);
    for (size_t unit = 2; unit <= 8; unit *= 2) { /* more than a register, and a rest */
        unsigned char items[96];
        for (size_t i = 0; i < sizeof items; i++) {
            items[i] = (unsigned char)i;
        }
        mls_swap_items(items, 88, unit);
        for (size_t i = 0; i < 88; i++) {
            CHECK(items[i] == i / unit * unit + unit - 1 - i % unit);
        }
        CHECK(items[88] == 88);
    }
}
