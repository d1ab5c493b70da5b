#include "local_ranks.h"

/* Small slots, so that operations take many steps. */
static const mls_local_shape shapes[] = {
    {.world = 1},
    {.world = 2, .slot_bytes = 4096, .depth = 2},
    {.world = 2},
    {.world = 3, .slot_bytes = 4096, .depth = 3},
    {.world = 5, .slot_bytes = 4096},
};

enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static void everywhere(void (*run)(rank_case *c))
{
    for (size_t i = 0; i < SHAPES; i++) {
        in_threads(shapes[i], run);
#if !defined(WITHOUT_FORK)
        in_processes(shapes[i], run, -1);
#endif
    }
}

/* Element i of a rank's array: sums of these are not exact in float32. */
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

static const size_t lengths[] = {0, 1, 5, 4096, 40000, 70001};

static void reduce_all(rank_case *c)
{
    mls_status st;
    for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; k++) {
        const size_t n = lengths[k];
        float *data = array_of(c->rank, n);
        float *out = calloc(n + 1, sizeof *out);
        EXPECT(c,
               mls_local_all_reduce(c->g, &quick, data, out, n, &sum_f32, &st) == MLS_OK);
        EXPECT(c, mls_local_all_reduce(c->g, &quick, data, data, n, &sum_f32, &st) ==
                      MLS_OK);
        for (size_t i = 0; i < n; i++) {
            const float expected = total(c->world, i);
            const bool same =
                memcmp(&out[i], &expected, 4) == 0 && memcmp(&data[i], &out[i], 4) == 0;
            EXPECT(c, same);
            if (!same) {
                break;
            }
        }
        free(data);
        free(out);
    }
}

static void all_ranks_get_the_sum_in_the_order_of_ranks(void)
{
    everywhere(reduce_all);
}

/* Three arrays with shares of all lengths, the ranks' uneven and some empty. */
static size_t count_of(size_t segment, size_t rank, size_t world)
{
    switch (segment) {
    case 0:
        return 3 + rank;
    case 1:
        return rank + 1 == world ? 0 : 20000 + 37 * rank;
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
    mls_status st;
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
                                    .tally = {.squares = 99}};
    }
    EXPECT(c, mls_local_reduce_scatter(c->g, &quick, segments, SEGMENTS, &st) == MLS_OK);
    for (size_t s = 0; s < SEGMENTS; s++) {
        mls_tally expected = {0};
        const size_t mine = counts[s][c->rank];
        for (size_t i = 0; i < mine; i++) {
            const float value = total(c->world, starts[s] + i);
            const bool same = memcmp(&outs[s][i], &value, 4) == 0;
            EXPECT(c, same);
            if (!same) {
                break;
            }
        }
        mls_tensor t;
        EXPECT(c, mls_tensor_init(&t, outs[s], MLS_F32, 1, &mine, &st) == MLS_OK);
        mls_tally_of(MLS_CPU_SCALAR, NULL, &t, &expected);
        EXPECT(c, memcmp(&expected, &segments[s].tally, sizeof expected) == 0);
        if (s != 1) {
            free(outs[s]);
        }
        free(arrays[s]);
    }
    EXPECT(c, mls_local_reduce_scatter(c->g, &quick, NULL, 0, &st) == MLS_OK);
}

static void shares_are_summed_and_tallied_however_they_are_cut(void)
{
    everywhere(scatter);
}

/* Many steps of whole slots, an `out` that lies across cache lines, and a segment that
 * becomes wider on the way. */
static void scatter_large(rank_case *c)
{
    enum { COUNT = 1200007, WIDE = 70001 };
    mls_status st;
    size_t counts[2][2] = {{COUNT, COUNT - 5}, {WIDE, 3}};
    const size_t start = c->rank * COUNT, mine = counts[0][c->rank];
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
    EXPECT(c, mls_local_reduce_scatter(c->g, &quick, segments, 2, &st) == MLS_OK);
    size_t wrong = 0;
    for (size_t i = 0; i < mine; i++) {
        const float value = total(2, start + i);
        wrong += memcmp(&out[1 + i], &value, 4) != 0;
    }
    for (size_t i = 0; i < counts[1][c->rank]; i++) {
        const size_t at = c->rank * WIDE + i;
        const float value = 2 * (1 + (float)(at % 128) / 128);
        wrong += memcmp(&wide[1 + i], &value, 4) != 0;
    }
    EXPECT(c, wrong == 0 && memcmp(out, "\0\0\0\0", 4) == 0);
    mls_tensor t;
    mls_tally expected = {0};
    EXPECT(c, mls_tensor_init(&t, out + 1, MLS_F32, 1, &mine, &st) == MLS_OK);
    mls_tally_of(MLS_CPU_SCALAR, NULL, &t, &expected);
    EXPECT(c, memcmp(&expected, &segments[0].tally, sizeof expected) == 0);
    free(data);
    free(out);
    free(halves);
    free(wide);
}

static void large_sums_have_the_same_bits_with_every_instruction_set(void)
{
    for (int cpu = 0; cpu < MLS_CPU_COUNT; cpu++) {
        if (mls_cpu_offers((mls_cpu)cpu)) {
            threads_with((mls_cpu)cpu, (mls_local_shape){.world = 2}, scatter_large);
        }
    }
}

static unsigned char byte_of(size_t rank, size_t i)
{
    return (unsigned char)(rank * 31 + i * 7 + i / 251);
}

static void gather(rank_case *c)
{
    mls_status st;
    size_t sizes[RANKS_MOST], all = 0, start = 0;
    for (size_t r = 0; r < c->world; r++) {
        sizes[r] = r == 1 ? 0 : 9001 * r + 3;
        start += r < c->rank ? sizes[r] : 0;
        all += sizes[r];
    }
    unsigned char *mine = malloc(sizes[c->rank] + 1), *out = malloc(all + 1);
    for (size_t i = 0; i < sizes[c->rank]; i++) {
        mine[i] = byte_of(c->rank, i);
    }
    for (int round = 0; round < 2; round++) {
        memset(out, 0, all);
        memcpy(out + start, mine, sizes[c->rank]);
        const void *from = round == 0 ? mine : out + start; /* where it belongs */
        EXPECT(c, mls_local_all_gather(c->g, &quick, from, sizes, out, &st) == MLS_OK);
        size_t at = 0;
        for (size_t r = 0; r < c->world; r++) {
            for (size_t i = 0; i < sizes[r]; i++) {
                const bool same = out[at++] == byte_of(r, i);
                EXPECT(c, same);
                if (!same) {
                    r = c->world - 1;
                    break;
                }
            }
        }
    }
    free(mine);
    free(out);
}

static void bytes_of_all_ranks_are_gathered(void)
{
    everywhere(gather);
}

static void broadcast(rank_case *c)
{
    mls_status st;
    unsigned char *data = malloc(30000);
    for (size_t root = 0; root < c->world; root++) {
        for (size_t n = 0; n <= 30000; n += 7500) {
            for (size_t i = 0; i < n; i++) {
                data[i] = c->rank == root ? byte_of(root, i) : 0;
            }
            EXPECT(c, mls_local_broadcast(c->g, &quick, data, n, root, &st) == MLS_OK);
            size_t good = 0;
            while (good < n && data[good] == byte_of(root, good)) {
                good++;
            }
            EXPECT(c, good == n);
        }
    }
    free(data);
}

static void one_ranks_bytes_reach_all(void)
{
    everywhere(broadcast);
}

/* Rank a sends 4000 * a + 100 * b bytes to rank b. */
static size_t sent_bytes(size_t from, size_t to)
{
    return from == 2 ? 0 : 4000 * from + 100 * to;
}

static void trade(rank_case *c)
{
    mls_status st;
    size_t sent[RANKS_MOST], wanted[RANKS_MOST], out_bytes = 0, in_bytes = 0;
    for (size_t r = 0; r < c->world; r++) {
        sent[r] = sent_bytes(c->rank, r);
        wanted[r] = sent_bytes(r, c->rank);
        out_bytes += sent[r];
        in_bytes += wanted[r];
    }
    unsigned char *data = malloc(out_bytes + 1), *out = calloc(in_bytes + 1, 1);
    size_t at = 0;
    for (size_t r = 0; r < c->world; r++) {
        for (size_t i = 0; i < sent[r]; i++) {
            data[at++] = byte_of(c->rank * 10 + r, i);
        }
    }
    EXPECT(c, mls_local_all_to_all(c->g, &quick, data, sent, out, wanted, &st) == MLS_OK);
    at = 0;
    size_t wrong = 0;
    for (size_t r = 0; r < c->world; r++) {
        for (size_t i = 0; i < wanted[r]; i++) {
            wrong += out[at++] != byte_of(r * 10 + c->rank, i);
        }
    }
    EXPECT(c, wrong == 0);
    wanted[0] += c->rank + 1 == c->world; /* one rank wants what it does not get */
    const mls_code code =
        mls_local_all_to_all(c->g, &quick, data, sent, out, wanted, &st);
    EXPECT(c, code == MLS_E_PEER && strstr(st.text, "rank 0 sends") != NULL);
    EXPECT(c, mls_local_barrier(c->g, &quick, &st) == MLS_OK);
    free(data);
    free(out);
}

static void every_rank_sends_to_every_other(void)
{
    everywhere(trade);
}

typedef struct kept {
    unsigned char *data[RANKS_MOST];
    size_t sizes[RANKS_MOST];
    size_t world;
    bool refuse;
} kept;

static bool keep(void *context, const size_t *sizes, unsigned char **out)
{
    kept *k = context;
    for (size_t r = 0; !k->refuse && r < k->world; r++) {
        k->sizes[r] = sizes[r];
        k->data[r] = out[r] = malloc(sizes[r] + 1);
    }
    return !k->refuse;
}

static void collect(rank_case *c)
{
    mls_status st;
    for (int root = -1; root < (int)c->world; root++) {
        kept k = {.world = c->world};
        const mls_local_places places = {.place = keep, .context = &k};
        const size_t n = root == 0 ? c->rank : 6000 * c->rank + 4000;
        unsigned char *mine = malloc(n + 1);
        for (size_t i = 0; i < n; i++) {
            mine[i] = byte_of(c->rank, i);
        }
        EXPECT(c, mls_local_gather_bytes(c->g, &quick, mine, n, root, &places, &st) ==
                      MLS_OK);
        for (size_t r = 0; r < c->world; r++) {
            EXPECT(c, (k.data[r] != NULL) == (root < 0 || root == (int)c->rank));
            size_t wrong = 0;
            for (size_t i = 0; i < k.sizes[r]; i++) {
                wrong += k.data[r][i] != byte_of(r, i);
            }
            EXPECT(c, wrong == 0);
            free(k.data[r]);
        }
        free(mine);
    }
}

static void bytes_of_any_length_are_gathered(void)
{
    everywhere(collect);
}

static void refuse(rank_case *c)
{
    mls_status st;
    kept k = {.world = c->world, .refuse = c->rank == 0};
    const mls_local_places places = {.place = keep, .context = &k};
    const mls_code code =
        mls_local_gather_bytes(c->g, &quick, "abc", 3, -1, &places, &st);
    EXPECT(c, code == (c->rank == 0 ? MLS_E_MEMORY : MLS_OK));
    EXPECT(c, mls_local_barrier(c->g, &quick, &st) == MLS_E_PEER);
    EXPECT(c, strstr(st.text, "gather_bytes failed on rank 0") != NULL);
    for (size_t r = 0; r < c->world; r++) {
        free(k.data[r]);
    }
}

static void memory_that_runs_out_half_way_ends_the_group(void)
{
    in_threads((mls_local_shape){.world = 2}, refuse);
}

static void refuse_reductions(rank_case *c)
{
    mls_status st;
    float x = 1;
    const size_t counts[RANKS_MOST] = {1};
    mls_reduction wrong = sum_f32;
    wrong.divisor = 0;
    mls_segment segment = {.data = (const unsigned char *)&x,
                           .counts = counts,
                           .out = &x,
                           .reduction = wrong};
    EXPECT(c, mls_local_all_reduce(c->g, &quick, &x, &x, 1, &wrong, &st) == MLS_E_VALUE);
    EXPECT(c, mls_local_reduce_scatter(c->g, &quick, &segment, 1, &st) == MLS_E_VALUE);
    EXPECT(c, mls_local_barrier(c->g, &quick, &st) == MLS_OK);
}

static void reductions_that_make_no_sense_send_nothing(void)
{
    in_threads((mls_local_shape){.world = 3}, refuse_reductions);
}

static const test_case tests[] = {
    TEST(all_ranks_get_the_sum_in_the_order_of_ranks),
    TEST(shares_are_summed_and_tallied_however_they_are_cut),
    TEST(large_sums_have_the_same_bits_with_every_instruction_set),
    TEST(bytes_of_all_ranks_are_gathered),
    TEST(one_ranks_bytes_reach_all),
    TEST(every_rank_sends_to_every_other),
    TEST(bytes_of_any_length_are_gathered),
    TEST(memory_that_runs_out_half_way_ends_the_group),
    TEST(reductions_that_make_no_sense_send_nothing),
};

int main(void)
{
    return RUN_TESTS(tests);
}
