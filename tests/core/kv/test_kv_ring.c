#include "kv/kv_ring.h"
#include "support/tensors.h"

#include <stdint.h>

static const mls_kernels *kernels(void)
{
    return mls_kernels_of(MLS_CPU_SCALAR);
}

/* Without elements, any number of tokens can be appended. */
TEST(positions_do_not_wrap)
{
    mls_kv_ring ring = {0};
    mls_tensor slots = tensor_of(NULL, MLS_F16, 3, (const size_t[]){0, 4, 3});
    REQUIRE(mls_kv_ring_init(&ring, &slots, 1, 1, &status) == MLS_OK);
    slots.shape[1] = INT64_MAX;
    CHECK(mls_kv_ring_append(&ring, kernels(), &slots, &status) == MLS_OK);
    CHECK(ring.next == INT64_MAX && ring.evicted == INT64_MAX - 4);
    slots.shape[1] = 1;
    CHECK_FAILS(mls_kv_ring_append(&ring, kernels(), &slots, &status), MLS_E_SIZE,
                "position 9223372036854775807 + 1 tokens does not fit into 63 bits");
    slots.shape[1] = SIZE_MAX;
    CHECK(mls_kv_ring_append(&ring, kernels(), &slots, &status) == MLS_E_SIZE);
    CHECK(ring.next == INT64_MAX && mls_kv_ring_length(&ring) == 4);
    mls_kv_ring_fini(&ring);
}

/* A filled ring is the ring whose slots and counters it got. */
TEST(a_ring_is_filled_or_refused)
{
    static int32_t memory[20];
    const size_t shape[] = {1, 7, 1}, all[] = {1, 20, 1};
    const mls_tensor slots = tensor_of(NULL, MLS_I32, 3, shape);
    mls_tensor tokens = tensor_of(memory, MLS_I32, 3, all);
    mls_kv_ring ring = {0}, copy = {0};
    for (int32_t i = 0; i < 20; i++) {
        memory[i] = i;
    }
    REQUIRE(mls_kv_ring_init(&ring, &slots, 1, 2, &status) == MLS_OK);
    REQUIRE(mls_kv_ring_init(&copy, &slots, 1, 2, &status) == MLS_OK);
    CHECK(mls_kv_ring_append(&ring, kernels(), &tokens, &status) == MLS_OK);
    CHECK(mls_kv_ring_trim(&ring, kernels(), 3, &status) == MLS_OK);
    CHECK(mls_kv_ring_fill(&copy, kernels(), &ring.slots, ring.oldest, ring.next,
                           ring.evicted, &status) == MLS_OK);
    CHECK(memcmp(copy.slots.data, ring.slots.data, 7 * sizeof(int32_t)) == 0);
    CHECK(copy.oldest == 15 && copy.next == 17 && copy.evicted == 13);
    const size_t counters[][3] = {
        {1, 17, 13},                   /* oldest among the sinks */
        {18, 17, 16},                  /* oldest behind the next one */
        {11, 17, 13},                  /* more than the ring has slots */
        {15, 17, 12},                  /* fewer evicted than are missing */
        {15, (size_t)1 << 63, 13},     /* too many */
        {SIZE_MAX, SIZE_MAX, SIZE_MAX} /* of a damaged file */
    };
    for (size_t i = 0; i < sizeof counters / sizeof counters[0]; i++) {
        CHECK(mls_kv_ring_fill(&copy, kernels(), &ring.slots, counters[i][0],
                               counters[i][1], counters[i][2],
                               &status) == MLS_E_CAPACITY);
    }
    CHECK_FAILS(mls_kv_ring_fill(&copy, kernels(), &tokens, 2, 0, 0, &status),
                MLS_E_SHAPE, "the slots have 20 positions, the cache 7");
    CHECK_FAILS(mls_kv_ring_fill(&copy, kernels(), &copy.slots, 2, 0, 0, &status),
                MLS_E_OVERLAP, "tokens share memory with the cache: pass a copy of them");
    CHECK(copy.oldest == 15 && copy.next == 17 && copy.evicted == 13);
    tokens.dtype = MLS_F32;
    CHECK_FAILS(mls_kv_ring_append(&ring, kernels(), &tokens, &status), MLS_E_DTYPE,
                "tokens are float32, the cache is int32: convert them first");
    tokens.shape[2] = 2;
    CHECK_FAILS(mls_kv_ring_append(&ring, kernels(), &tokens, &status), MLS_E_SHAPE,
                "tokens have shape (1, 20, 2), the cache (1, 7, 1): they may differ only "
                "in axis 1, the sequence");
    mls_kv_ring_fini(&ring);
    mls_kv_ring_fini(&copy);
}

TEST(a_ring_over_slots_without_room_is_refused)
{
    static int32_t memory[7];
    mls_tensor slots = tensor_of(memory, MLS_I32, 3, (const size_t[]){1, 7, 1});
    mls_kv_ring empty = {0}, refused = {0};
    CHECK_FAILS(mls_kv_ring_borrow(&refused, &slots, 1, 7, 0, 0, &status), MLS_E_CAPACITY,
                "7 sinks leave no room for other tokens in a capacity of 7: use fewer "
                "sinks or a larger capacity");
    CHECK(refused.slots.rank == 0);
    slots.shape[1] = 0;
    CHECK(mls_kv_ring_borrow(&empty, &slots, 1, 0, 3, 2, &status) == MLS_OK);
    CHECK(mls_kv_ring_length(&empty) == 0);
}
