#include "support/cpus.h"
#include "support/shm_ranks.h"

/* Element i of a rank's array: the sums are not exact in float32. */
static float element(size_t rank, size_t i)
{
    return (float)(i % 1013) * 0.37F + (float)rank * 1e-3F + (i % 7 == 0 ? 1e6F : 0.0F);
}

static float total(size_t world, size_t i)
{
    float sum = element(0, i);
    for (size_t r = 1; r < world; r++) {
        sum += element(r, i);
    }
    return sum;
}

/* How many of `count` elements differ from the sums that begin at element `start`. */
static size_t wrong_sums(const float *got, size_t world, size_t start, size_t count)
{
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        const float value = total(world, start + i);
        wrong += memcmp(&got[i], &value, sizeof value) != 0;
    }
    return wrong;
}

static const mls_reduction sum_f32 = {
    .dtype = MLS_F32, .out_dtype = MLS_F32, .op = MLS_REDUCE_SUM, .divisor = 1};

static float *array_of(size_t rank, size_t n)
{
    float *array = malloc((n + 1) * sizeof *array);
    for (size_t i = 0; i < n; i++) {
        array[i] = element(rank, i);
    }
    return array;
}

static bool large; /* arrays that threads read directly */

/* Three arrays whose shares have all kinds of lengths: uneven, and some empty. */
static size_t count_of(size_t segment, size_t rank, size_t world)
{
    switch (segment) {
    case 0:
        return 3 + rank;
    case 1:
        return rank + 1 == world ? 0 : (large ? 300000 : 20000) + 37 * rank;
    default:
        return rank == 0 ? 9000 : 0;
    }
}

static void scatter(rank_case *c)
{
    enum { SEGMENTS = 3 };
    mls_segment segments[SEGMENTS];
    size_t counts[SEGMENTS][RANKS_MOST], starts[SEGMENTS] = {0};
    float *arrays[SEGMENTS], *outs[SEGMENTS];
    for (size_t s = 0; s < SEGMENTS; s++) {
        size_t n = 0;
        for (size_t r = 0; r < c->world; r++) {
            counts[s][r] = count_of(s, r, c->world);
            starts[s] += r < c->rank ? counts[s][r] : 0;
            n += counts[s][r];
        }
        arrays[s] = array_of(c->rank, n);
        outs[s] = s == 1 ? arrays[s] + starts[s] /* in place */
                         : calloc(counts[s][c->rank] + 1, sizeof(float));
        segments[s] = (mls_segment){.data = (const unsigned char *)arrays[s],
                                    .counts = counts[s],
                                    .out = outs[s],
                                    .reduction = sum_f32,
                                    .norm_partial = {.squares = 99}};
    }
    EXPECT(c, mls_shm_reduce_scatter(c->g, &quick, segments, SEGMENTS, true, &c->st) ==
                  MLS_OK);
    for (size_t s = 0; s < SEGMENTS; s++) {
        mls_norm_partial expected = {0};
        const size_t count = counts[s][c->rank];
        EXPECT(c, wrong_sums(outs[s], c->world, starts[s], count) == 0);
        mls_tensor t;
        EXPECT(c, mls_tensor_init(&t, outs[s], MLS_F32, 1, &count, &c->st) == MLS_OK);
        mls_norm_partial_of(MLS_CPU_SCALAR, NULL, &t, &expected);
        EXPECT(c, memcmp(&expected, &segments[s].norm_partial, sizeof expected) == 0);
        if (s != 1) {
            free(outs[s]);
        }
        free(arrays[s]);
    }
    EXPECT(c, mls_shm_reduce_scatter(c->g, &quick, NULL, 0, true, &c->st) == MLS_OK);
    const size_t n = large ? 300007 : 40000;
    float *data = array_of(c->rank, n);
    EXPECT(c,
           mls_shm_all_reduce(c->g, &quick, data, data, n, &sum_f32, &c->st) == MLS_OK);
    EXPECT(c, wrong_sums(data, c->world, 0, n) == 0);
    free(data);
}

TEST(shares_are_summed_with_norms_however_they_are_cut)
{
    for (int i = 0; i < 2; i++) {
        large = i == 1;
        everywhere(scatter);
    }
}

/* Many steps of whole slots, an `out` that is not aligned to cache lines, and a segment
 * that becomes wider on the way. */
static void scatter_large(rank_case *c)
{
    enum { COUNT = 1200007, WIDE = 70001 };
    size_t counts[2][2] = {{COUNT, COUNT - 5}, {WIDE, 3}};
    const size_t start = c->rank * COUNT, count = counts[0][c->rank];
    float *data = array_of(c->rank, 2 * COUNT), *out = calloc(COUNT + 1, sizeof *out);
    uint16_t *halves = calloc(WIDE + 3, sizeof *halves);
    float *wide = calloc(WIDE + 1, sizeof *wide);
    for (size_t i = 0; i < WIDE + 3; i++) {
        halves[i] = (uint16_t)(0x3F80 + i % 128); /* 1 to 2 */
    }
    mls_reduction widened = sum_f32;
    widened.dtype = MLS_BF16;
    mls_segment segments[2] = {{.data = (const unsigned char *)data,
                                .counts = counts[0],
                                .out = out + 1,
                                .reduction = sum_f32},
                               {.data = (const unsigned char *)halves,
                                .counts = counts[1],
                                .out = wide + 1,
                                .reduction = widened}};
    EXPECT(c, mls_shm_reduce_scatter(c->g, &quick, segments, 2, true, &c->st) == MLS_OK);
    size_t wrong = wrong_sums(out + 1, 2, start, count);
    for (size_t i = 0; i < counts[1][c->rank]; i++) {
        const size_t at = c->rank * WIDE + i;
        const float value = 2 * (1 + (float)(at % 128) / 128);
        wrong += memcmp(&wide[1 + i], &value, 4) != 0;
    }
    EXPECT(c, wrong == 0 && memcmp(out, "\0\0\0\0", 4) == 0);
    mls_tensor t;
    mls_norm_partial expected = {0};
    EXPECT(c, mls_tensor_init(&t, out + 1, MLS_F32, 1, &count, &c->st) == MLS_OK);
    mls_norm_partial_of(MLS_CPU_SCALAR, NULL, &t, &expected);
    EXPECT(c, memcmp(&expected, &segments[0].norm_partial, sizeof expected) == 0);
    free(data);
    free(out);
    free(halves);
    free(wide);
}

/* Both operations, with arrays that change as soon as each has returned. */
static void overwrite(rank_case *c)
{
    enum { COUNT = 100001 };
    const size_t counts[2] = {COUNT, COUNT};
    float *data = calloc(2 * COUNT, sizeof *data), *out = calloc(2 * COUNT, sizeof *out);
    mls_segment segment = {.data = (const unsigned char *)data,
                           .counts = counts,
                           .out = out,
                           .reduction = sum_f32};
    size_t wrong = 0;
    for (int round = 0; round < 6; round++) {
        const bool all = round % 2 == 1;
        for (size_t i = 0; i < 2 * COUNT; i++) {
            data[i] = (float)(round + (int)c->rank);
        }
        if (c->rank == 1) {
            usleep(5 * 1000); /* the last to arrive is the last to read */
        }
        EXPECT(c, (all ? mls_shm_all_reduce(c->g, &quick, data, out, 2 * COUNT, &sum_f32,
                                            &c->st)
                       : mls_shm_reduce_scatter(c->g, &quick, &segment, 1, true,
                                                &c->st)) == MLS_OK);
        for (size_t i = 0; i < (all ? 2 * COUNT : COUNT); i++) {
            wrong += out[i] != (float)(2 * round + 1);
        }
    }
    EXPECT(c, wrong == 0);
    free(data);
    free(out);
}

TEST(no_rank_returns_before_all_have_read)
{
    in_threads((mls_shm_shape){.world = 2}, overwrite);
}

/* Rank 0 has no share, waits for rank 1 to read its array, gives up and frees it. */
static void give_up(rank_case *c)
{
    enum { COUNT = 2000000 };
    const size_t counts[2] = {0, COUNT};
    uint16_t *data = malloc(COUNT * sizeof *data), *out = calloc(COUNT, sizeof *out);
    for (size_t i = 0; i < COUNT; i++) {
        data[i] = 0x3C00; /* 1 */
    }
    mls_segment segment = {.data = (const unsigned char *)data,
                           .counts = counts,
                           .out = out,
                           .reduction = sum_f32};
    segment.reduction.dtype = segment.reduction.out_dtype = MLS_F16;
    EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_OK);
    const mls_shm_call hasty = {.timeout = c->rank == 0 ? 0.002 : 20};
    const mls_code code = mls_shm_reduce_scatter(c->g, &hasty, &segment, 1, true, &c->st);
    size_t wrong = 0;
    if (c->rank == 0) {
        memset(data, 0, COUNT * sizeof *data);
    }
    for (size_t i = 0; c->rank == 1 && code == MLS_OK && i < COUNT; i++) {
        wrong += out[i] != 0x4000; /* 2 */
    }
    EXPECT(c, wrong == 0);
    free(data);
    free(out);
}

TEST(a_sum_counts_only_if_all_arrays_were_whole)
{
    for (int round = 0; round < 5; round++) {
        in_threads((mls_shm_shape){.world = 2}, give_up);
    }
}

TEST(large_sums_have_the_same_bits_with_every_instruction_set)
{
    EACH_CPU (cpu) {
        threads_with(cpu, (mls_shm_shape){.world = 2}, scatter_large);
    }
}

static void refuse_reductions(rank_case *c)
{
    float x = 1;
    const size_t counts[RANKS_MOST] = {1};
    mls_reduction wrong = sum_f32;
    wrong.divisor = 0;
    mls_segment segment = {.data = (const unsigned char *)&x,
                           .counts = counts,
                           .out = &x,
                           .reduction = wrong};
    EXPECT(c, mls_shm_all_reduce(c->g, &quick, &x, &x, 1, &wrong, &c->st) == MLS_E_VALUE);
    EXPECT(c, mls_shm_reduce_scatter(c->g, &quick, &segment, 1, true, &c->st) ==
                  MLS_E_VALUE);
    EXPECT(c, mls_shm_barrier(c->g, &quick, &c->st) == MLS_OK);
}

TEST(invalid_reductions_send_no_data)
{
    in_threads((mls_shm_shape){.world = 3}, refuse_reductions);
}
