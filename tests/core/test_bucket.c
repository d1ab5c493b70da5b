/* Buckets: every part reaches the rank that owns it, and is summed in the order of ranks.
 */
#include "bucket.h"
#include "runner.h"

#include <string.h>

enum { WORLD = 3, WEIGHTS = 7, BIASES = 2 };

static const size_t weight_counts[WORLD] = {3, 3, 1};
static const size_t bias_counts[WORLD] = {1, 1, 0}; /* the last rank has none */

/* What one rank has: float32 weights, int16 biases, and room for its parts of them. */
typedef struct rank_data {
    _Alignas(16) float weights[WEIGHTS];
    int16_t biases[BIASES];
    float weight_sums[WEIGHTS];
    int16_t bias_sums[BIASES];
    _Alignas(16) unsigned char send[WORLD * 64];
    _Alignas(16) unsigned char received[WORLD * 64];
    mls_segment segments[2];
    mls_bucket bucket;
} rank_data;

static void rank_init(rank_data *r, size_t rank)
{
    memset(r, 0, sizeof *r);
    for (int i = 0; i < WEIGHTS; i++) {
        r->weights[i] = (float)(i + 1) * (rank == 1 ? 1e8f : 1.0f);
    }
    for (int i = 0; i < BIASES; i++) {
        r->biases[i] = (int16_t)(10 * (int)rank + i);
    }
    memset(r->send, 0xAA, sizeof r->send);
    r->segments[0] = (mls_segment){.data = (const unsigned char *)r->weights,
                                   .counts = weight_counts,
                                   .out = r->weight_sums,
                                   .reduction = {MLS_F32, MLS_F32, MLS_REDUCE_SUM, 1}};
    r->segments[1] = (mls_segment){.data = (const unsigned char *)r->biases,
                                   .counts = bias_counts,
                                   .out = r->bias_sums,
                                   .reduction = {MLS_I16, MLS_I16, MLS_REDUCE_SUM, 1}};
    r->bucket =
        (mls_bucket){.segments = r->segments, .count = 2, .world = WORLD, .rank = rank};
}

/* What an engine does with the messages. */
static void exchange(rank_data *ranks)
{
    mls_status st;
    for (size_t from = 0; from < WORLD; from++) {
        const unsigned char *at = ranks[from].send;
        for (size_t to = 0; to < WORLD; to++) {
            size_t bytes = 0;
            if (to == from) {
                continue;
            }
            REQUIRE(mls_bucket_bytes(&ranks[from].bucket, to, &bytes, &st) == MLS_OK);
            const size_t before = from < to ? from : from - 1;
            if (bytes != 0) {
                memcpy(ranks[to].received + before * bytes, at, bytes);
            }
            at += bytes;
        }
    }
}

static void every_rank_gets_the_sums_of_its_parts_in_the_order_of_ranks(void)
{
    rank_data ranks[WORLD];
    const void *sources[WORLD];
    for (size_t rank = 0; rank < WORLD; rank++) {
        rank_init(&ranks[rank], rank);
        mls_bucket_pack(&ranks[rank].bucket, ranks[rank].send);
    }
    exchange(ranks);
    size_t start = 0;
    for (size_t rank = 0; rank < WORLD; rank++) {
        rank_data *r = &ranks[rank];
        mls_bucket_reduce(&r->bucket, mls_kernels_of(MLS_CPU_SCALAR), r->received,
                          sources);
        for (size_t i = 0; i < weight_counts[rank]; i++) {
            const float *all[] = {ranks[0].weights, ranks[1].weights, ranks[2].weights};
            const float first = all[0][start + i] + all[1][start + i];
            const float expected = first + all[2][start + i];
            CHECK(r->weight_sums[i] == expected);
        }
        CHECK(r->weight_sums[weight_counts[rank]] == 0);
        CHECK(bias_counts[rank] == 0 || r->bias_sums[0] == 30 + 3 * (int)rank);
        CHECK(r->segments[0].tally.squares > 0 && r->segments[0].tally.nonfinite == 0);
        start += weight_counts[rank];
    }
}

static void parts_start_where_any_element_may_lie(void)
{
    rank_data r;
    mls_status st;
    size_t bytes = 0;
    rank_init(&r, 2);
    CHECK(mls_bucket_bytes(&r.bucket, 0, &bytes, &st) == MLS_OK && bytes == 16 + 16);
    CHECK(mls_bucket_bytes(&r.bucket, 2, &bytes, &st) == MLS_OK && bytes == 16);
    mls_bucket_pack(&r.bucket, r.send);
    CHECK(memcmp(r.send, r.weights, 12) == 0 && memcmp(r.send + 16, r.biases, 2) == 0);
    CHECK(r.send[12] == 0 && r.send[18] == 0); /* padding says nothing of our memory */
    CHECK(r.send[64] == 0xAA);                 /* no message to itself */
}

static void sizes_beyond_memory_are_refused(void)
{
    mls_status st;
    size_t bytes = 77;
    const size_t counts[2] = {SIZE_MAX / 4 + 1, 1};
    mls_segment s = {.counts = counts,
                     .reduction = {MLS_F32, MLS_F32, MLS_REDUCE_SUM, 1}};
    mls_bucket b = {.segments = &s, .count = 1, .world = 2, .rank = 0};
    CHECK(mls_bucket_bytes(&b, 0, &bytes, &st) == MLS_E_SIZE && bytes == 77);
    CHECK(mls_bucket_bytes(&b, 1, &bytes, &st) == MLS_OK && bytes == 16);
}

static const test_case tests[] = {
    TEST(every_rank_gets_the_sums_of_its_parts_in_the_order_of_ranks),
    TEST(parts_start_where_any_element_may_lie),
    TEST(sizes_beyond_memory_are_refused),
};

int main(void)
{
    return RUN_TESTS(tests);
}
