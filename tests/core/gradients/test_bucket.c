/* Buckets: the layout of their messages, and the arrays that they take. */
#include "gradients/bucket.h"
#include "support/tensors.h"

#include <string.h>

enum { WORLD = 3, WEIGHTS = 7, BIASES = 2 };

static const size_t weight_counts[WORLD] = {3, 3, 1};
static const size_t bias_counts[WORLD] = {1, 1, 0}; /* the last rank has none */

/* The data of one rank: float32 weights, int16 biases, and memory for its messages. */
typedef struct rank_data {
    _Alignas(16) float weights[WEIGHTS];
    int16_t biases[BIASES];
    _Alignas(16) unsigned char send[WORLD * 64];
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
                                   .reduction = {MLS_F32, MLS_F32, MLS_REDUCE_SUM, 1}};
    r->segments[1] = (mls_segment){.data = (const unsigned char *)r->biases,
                                   .counts = bias_counts,
                                   .reduction = {MLS_I16, MLS_I16, MLS_REDUCE_SUM, 1}};
    r->bucket =
        (mls_bucket){.segments = r->segments, .count = 2, .world = WORLD, .rank = rank};
}

TEST(parts_are_aligned_for_every_dtype)
{
    rank_data r;
    size_t bytes = 0;
    rank_init(&r, 2);
    CHECK(mls_bucket_bytes(&r.bucket, 0, &bytes, &status) == MLS_OK && bytes == 16 + 16);
    CHECK(mls_bucket_bytes(&r.bucket, 2, &bytes, &status) == MLS_OK && bytes == 16);
    mls_bucket_pack(&r.bucket, r.send);
    CHECK(memcmp(r.send, r.weights, 12) == 0 && memcmp(r.send + 16, r.biases, 2) == 0);
    CHECK(r.send[12] == 0 && r.send[18] == 0); /* padding does not leak memory content */
    CHECK(r.send[64] == 0xAA);                 /* a rank sends no message to itself */
}

TEST(sizes_beyond_memory_are_refused)
{
    size_t bytes = 77;
    const size_t counts[2] = {SIZE_MAX / 4 + 1, 1};
    mls_segment s = {.counts = counts,
                     .reduction = {MLS_F32, MLS_F32, MLS_REDUCE_SUM, 1}};
    mls_bucket b = {.segments = &s, .count = 1, .world = 2, .rank = 0};
    CHECK(mls_bucket_bytes(&b, 0, &bytes, &status) == MLS_E_SIZE && bytes == 77);
    CHECK(mls_bucket_bytes(&b, 1, &bytes, &status) == MLS_OK && bytes == 16);
}

TEST(arrays_must_fit_their_counts)
{
    static const size_t counts[] = {3, 0, 2}, many[] = {SIZE_MAX, 2, 3};
    float memory[5], part[3];
    const mls_tensor data = vector_of(memory, MLS_F32, 5),
                     out = vector_of(part, MLS_F32, 3);
    CHECK(mls_segment_check(&data, &out, counts, 3, 0, &status) == MLS_OK);
    CHECK(mls_segment_check(&data, &out, counts, 3, 1, &status) == MLS_E_VALUE);
    CHECK(mls_segment_check(&data, &out, counts, 2, 0, &status) == MLS_E_VALUE);
    CHECK_TEXT(status.text,
               "an array of 5 elements and an output of 3 do not fit counts that "
               "add up to 3, with 3 for this rank");
    CHECK_FAILS(mls_segment_check(&data, &out, many, 3, 2, &status), MLS_E_VALUE,
                "the parts of an array have more elements than memory");
    const mls_segment segment = {.counts = counts};
    CHECK(mls_segment_elements(&segment, 3) == 5 &&
          mls_segment_elements(&segment, 0) == 0);
}

TEST(output_is_the_ranks_part_or_separate_memory)
{
    static const size_t counts[] = {2, 3};
    float memory[5];
    const mls_tensor data = vector_of(memory, MLS_F32, 5),
                     rank_part = vector_of(memory + 2, MLS_F32, 3);
    CHECK(mls_segment_check(&data, &rank_part, counts, 2, 1, &status) == MLS_OK);
    const mls_tensor before = vector_of(memory + 1, MLS_F32, 3);
    CHECK_FAILS(mls_segment_check(&data, &before, counts, 2, 1, &status), MLS_E_OVERLAP,
                "the output shares memory with the array, and is not this rank's part of "
                "it in the same dtype");
    mls_tensor other = rank_part;
    other.dtype = MLS_I32;
    CHECK(mls_segment_check(&data, &other, counts, 2, 1, &status) == MLS_E_OVERLAP);
}

TEST(bucket_accepts_packed_aligned_arrays_only)
{
    _Alignas(8) float memory[8];
    mls_tensor t = vector_of(memory, MLS_F32, 4);
    CHECK(mls_bucket_takes(&t));
    t.swapped = true;
    CHECK(!mls_bucket_takes(&t));
    t = vector_of((unsigned char *)memory + 2, MLS_F32, 4);
    CHECK(!mls_bucket_takes(&t));
    t = vector_of(memory + 1, MLS_F32, 4);
    CHECK(mls_bucket_takes(&t));
    t.dtype = MLS_C64; /* as large as two floats, but aligned differently */
    t.strides[0] = 8;
    CHECK(!mls_bucket_takes(&t));
    t = vector_of(memory, MLS_F32, 4);
    t.strides[0] = 8;
    CHECK(!mls_bucket_takes(&t));
}

TEST(message_sizes_sum_to_the_bucket)
{
    rank_data r;
    size_t sent = 0, received = 0;
    rank_init(&r, 1);
    CHECK(mls_bucket_sent_bytes(&r.bucket, &sent, &status) == MLS_OK);
    CHECK(sent == 16 + 16 + 16); /* two arrays for rank 0, one for rank 2 */
    CHECK(mls_bucket_received_bytes(&r.bucket, &received, &status) == MLS_OK);
    CHECK(received == 2 * (16 + 16));
}

TEST(sums_are_computed_in_the_order_of_their_codes)
{
    enum { WORLD_4 = 4, ITEMS = 3000, MEMORY = WORLD_4 + MLS_SUM_SCRATCH };
    static float parts[WORLD_4][ITEMS], held[ITEMS], expected[ITEMS];
    static const size_t counts[WORLD_4] = {ITEMS, ITEMS, ITEMS, ITEMS};
    /* (0 + 1), then (2 + 3) + that + the memory */
    static const uint64_t codes[] = {WORLD_4, 2, 0, 1, MEMORY, 4, 2, 3, WORLD_4, MEMORY};
    const void *sources[WORLD_4];
    void *const memories[] = {held};
    const mls_sums sums = {codes, sizeof codes / sizeof *codes, memories};
    mls_segment s = {.counts = counts,
                     .reduction = {MLS_F32, MLS_F32, MLS_REDUCE_SUM, 1},
                     .sums = &sums};
    for (size_t i = 0; i < ITEMS; i++) {
        for (size_t rank = 0; rank < WORLD_4; rank++) {
            parts[rank][i] = (float)(i + 1) / (float)(rank + 3);
            sources[rank] = parts[rank] + 10;
        }
        held[i] = (float)i / 7;
        expected[i] = held[i];
    }
    for (size_t i = 10; i < ITEMS; i++) {
        const float left = parts[0][i] + parts[1][i], right = parts[2][i] + parts[3][i];
        expected[i] = (right + left) + held[i];
    }
    mls_segment_reduce(&s, mls_kernels_of(MLS_CPU_SCALAR), sources, WORLD_4, 10,
                       ITEMS - 10, mls_cached(), true);
    CHECK(memcmp(held, expected, sizeof held) == 0);
    CHECK(s.norm_partial.nonfinite == 0 && s.norm_partial.squares > 0);
}
