#include "kv/kv_ring.h"
#include "support/tensors.h"

#include <stdint.h>

enum { ROWS = 3, WIDTH = 2, MOST = 64 };

static const mls_kernels *kernels(void)
{
    return mls_kernels_of(MLS_CPU_SCALAR);
}

/* A ring of ROWS x capacity x WIDTH, or with the sequence axis last. */
static bool make(mls_kv_ring *ring, size_t capacity, size_t sinks, int axis)
{
    const size_t middle[] = {ROWS, capacity, WIDTH}, last[] = {ROWS, WIDTH, capacity};
    const mls_tensor slots = tensor_of(NULL, MLS_I32, 3, axis == 1 ? middle : last);
    return mls_kv_ring_init(ring, &slots, axis, sinks, &status) == MLS_OK;
}

/* The element of a cache at a row, a position and a column. */
static int32_t *element(const mls_tensor *t, int axis, size_t row, size_t position,
                        size_t column)
{
    const int other = axis == 1 ? 2 : 1;
    unsigned char *at = t->data + (ptrdiff_t)row * t->strides[0] +
                        (ptrdiff_t)position * t->strides[axis] +
                        (ptrdiff_t)column * t->strides[other];
    return (int32_t *)(void *)at;
}

/* The value of a token; never zero. */
static int32_t value_of(size_t token, size_t row, size_t column)
{
    return (int32_t)(1 + token * ROWS * WIDTH + row * WIDTH + column);
}

/* Append tokens `first` .. `first + count - 1`. */
static mls_code append(mls_kv_ring *ring, size_t first, size_t count)
{
    static int32_t memory[ROWS * WIDTH * MOST];
    size_t shape[3] = {ROWS, WIDTH, WIDTH};
    shape[ring->axis] = count;
    const mls_tensor tokens = tensor_of(memory, MLS_I32, 3, shape);
    for (size_t i = 0; i < count * ROWS * WIDTH; i++) {
        const size_t token = i / WIDTH / ROWS, row = i / WIDTH % ROWS, column = i % WIDTH;
        *element(&tokens, ring->axis, row, token, column) =
            value_of(first + token, row, column);
    }
    return mls_kv_ring_append(ring, kernels(), &tokens, &status);
}

/* The definition: the tokens held and their positions, in order. */
typedef struct model {
    size_t capacity, sinks, length, next, evicted;
    size_t tokens[MOST], positions[MOST];
} model;

static void model_append(model *m, size_t token)
{
    if (m->length == m->capacity) {
        for (size_t i = m->sinks; i + 1 < m->length; i++) {
            m->tokens[i] = m->tokens[i + 1];
            m->positions[i] = m->positions[i + 1];
        }
        m->length--;
        m->evicted++;
    }
    m->tokens[m->length] = token;
    m->positions[m->length++] = m->next++;
}

static void model_trim(model *m, size_t count)
{
    for (; count > 0; count--) {
        m->next = m->positions[--m->length];
    }
}

/* Check the slots, the positions and the ordered copy against the model. */
static void check_ring(const mls_kv_ring *ring, const model *m)
{
    static int32_t memory[ROWS * WIDTH * MOST];
    int64_t positions[MOST], expected[MOST];
    size_t shape[3] = {ROWS, WIDTH, WIDTH};
    shape[ring->axis] = m->length;
    const mls_tensor dst = tensor_of(memory, MLS_I32, 3, shape);
    CHECK(mls_kv_ring_length(ring) == m->length && ring->evicted == m->evicted);
    CHECK(ring->next == m->next);
    mls_kv_ring_copy_ordered(ring, kernels(), &dst);
    mls_kv_ring_positions(ring, positions);
    for (size_t slot = 0; slot < m->capacity; slot++) {
        expected[slot] = -1;
    }
    for (size_t i = 0; i < m->length; i++) {
        const size_t p = m->positions[i];
        const size_t window = m->capacity - m->sinks;
        expected[p < m->sinks ? p : m->sinks + (p - m->sinks) % window] = (int64_t)p;
        for (size_t at = 0; at < ROWS * WIDTH; at++) {
            CHECK(*element(&dst, ring->axis, at / WIDTH, i, at % WIDTH) ==
                  value_of(m->tokens[i], at / WIDTH, at % WIDTH));
        }
    }
    for (size_t slot = 0; slot < m->capacity; slot++) {
        CHECK(positions[slot] == expected[slot]);
        const bool used = *element(&ring->slots, ring->axis, 1, slot, 1) != 0;
        CHECK(used == (expected[slot] >= 0));
    }
}

/* Every capacity and number of sinks, with steps chosen by a linear congruence. */
TEST(random_steps_agree_with_the_model)
{
    uint32_t seed = 1;
    for (size_t capacity = 1; capacity <= 9; capacity += EVERY(4)) {
        for (size_t sinks = 0; sinks < capacity; sinks++) {
            for (int axis = 1; axis <= 2; axis++) {
                mls_kv_ring ring = {0};
                model m = {.capacity = capacity, .sinks = sinks};
                REQUIRE(make(&ring, capacity, sinks, axis));
                size_t token = 0;
                for (int step = 0; step < 60; step++) {
                    seed = seed * 1664525 + 1013904223;
                    const size_t count = seed >> 24 & 31;
                    if ((seed >> 16 & 3) == 0) {
                        const size_t dropped = count % (m.length + 1);
                        CHECK(mls_kv_ring_trim(&ring, kernels(), dropped, &status) ==
                              MLS_OK);
                        model_trim(&m, dropped);
                    } else {
                        const size_t some = (seed >> 18 & 1) != 0 ? 1 : count;
                        CHECK(append(&ring, token, some) == MLS_OK);
                        for (size_t i = 0; i < some; i++) {
                            model_append(&m, token++);
                        }
                    }
                    check_ring(&ring, &m);
                }
                mls_kv_ring_fini(&ring);
            }
        }
    }
}

TEST(refused_requests_keep_the_ring)
{
    mls_kv_ring ring = {0};
    const size_t shape[] = {2, 4, 3}, huge[] = {SIZE_MAX / 8, 4, 3};
    const size_t long_shape[] = {1, 1, 1, 1, 1, 1, 1, 1, 4};
    mls_tensor slots = tensor_of(NULL, MLS_F16, 3, shape);
    CHECK(mls_kv_ring_init(&ring, &slots, 1, 4, &status) == MLS_E_CAPACITY);
    CHECK(strstr(status.text, "4 sinks leave no room") != NULL);
    slots.shape[1] = 0;
    CHECK(mls_kv_ring_init(&ring, &slots, 1, 0, &status) == MLS_E_CAPACITY);
    slots.rank = 1;
    CHECK(mls_kv_ring_init(&ring, &slots, 0, 0, &status) == MLS_E_SHAPE);
    slots = tensor_of(NULL, MLS_F16, 9, long_shape);
    CHECK(mls_kv_ring_init(&ring, &slots, 8, 0, &status) == MLS_E_SHAPE);
    memcpy(slots.shape, huge, sizeof huge);
    slots.rank = 3;
    CHECK(mls_kv_ring_init(&ring, &slots, 1, 0, &status) == MLS_E_SIZE);
    CHECK(ring.pages.data == NULL);

    REQUIRE(make(&ring, 4, 1, 1));
    REQUIRE(append(&ring, 0, 6) == MLS_OK);
    model m = {.capacity = 4, .sinks = 1};
    for (size_t token = 0; token < 6; token++) {
        model_append(&m, token);
    }
    CHECK(mls_kv_ring_trim(&ring, kernels(), 5, &status) == MLS_E_CAPACITY);
    CHECK_TEXT(status.text, "cannot drop 5 tokens: the cache holds 4");
    mls_tensor tokens = mls_tensor_slice(&ring.slots, 1, 0, 1);
    CHECK(mls_kv_ring_append(&ring, kernels(), &tokens, &status) == MLS_E_OVERLAP);
    tokens.dtype = MLS_F32;
    CHECK(mls_kv_ring_append(&ring, kernels(), &tokens, &status) == MLS_E_DTYPE);
    tokens.shape[2]++;
    CHECK(mls_kv_ring_append(&ring, kernels(), &tokens, &status) == MLS_E_SHAPE);
    tokens.rank = 2;
    CHECK(mls_kv_ring_append(&ring, kernels(), &tokens, &status) == MLS_E_SHAPE);
    check_ring(&ring, &m);
    mls_kv_ring_fini(&ring);
    mls_kv_ring_fini(&ring);
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
    CHECK(mls_kv_ring_append(&ring, kernels(), &slots, &status) == MLS_E_SIZE);
    slots.shape[1] = SIZE_MAX;
    CHECK(mls_kv_ring_append(&ring, kernels(), &slots, &status) == MLS_E_SIZE);
    CHECK(ring.next == INT64_MAX && mls_kv_ring_length(&ring) == 4);
    mls_kv_ring_fini(&ring);
}

/* Rows above and below the limit of short rows, packed and with gaps. */
TEST(long_rows_and_rows_with_gaps_are_copied)
{
    static int32_t memory[2][3][2048];
    for (size_t width = 1; width <= 1024; width *= 4) {
        for (size_t count = 1; count <= 3; count += 2) {
            for (size_t gap = 0; gap < 2; gap++) {
                mls_kv_ring ring = {0};
                const size_t shape[] = {2, 4, width}, some[] = {2, count, width + gap};
                const mls_tensor slots = tensor_of(NULL, MLS_I32, 3, shape);
                mls_tensor tokens = tensor_of(memory, MLS_I32, 3, some);
                REQUIRE(mls_kv_ring_init(&ring, &slots, 1, 0, &status) == MLS_OK);
                int32_t *flat = &memory[0][0][0];
                for (size_t i = 0; i < 2 * count * (width + gap); i++) {
                    flat[i] = (int32_t)i + 1;
                }
                tokens.shape[2] = width;
                CHECK(mls_kv_ring_append(&ring, kernels(), &tokens, &status) == MLS_OK);
                for (size_t i = 0; i < 2 * count * width; i++) {
                    const size_t row = i / width / count, token = i / width % count;
                    const int32_t *got = (const int32_t *)(const void *)ring.slots.data +
                                         (row * 4 + token) * width + i % width;
                    CHECK(*got == flat[i / width * (width + gap) + i % width]);
                }
                mls_kv_ring_fini(&ring);
            }
        }
    }
}

/* A shift rotates the slots after the sinks: the ring continues at any of them. */
TEST(borrowed_slots_may_be_rotated)
{
    static int32_t memory[7], ordered[7];
    const size_t shape[] = {1, 7, 1};
    const mls_tensor slots = tensor_of(memory, MLS_I32, 3, shape);
    for (size_t sinks = 0; sinks < 7; sinks += 2) {
        for (size_t length = 0; length <= 20; length++) {
            for (size_t shift = 0; shift <= 8; shift++) {
                const int64_t window = (int64_t)(7 - sinks);
                const size_t next =
                    sinks + (length + 7 * (7 - sinks) - sinks + shift) % (7 - sinks);
                int64_t got[7];
                mls_kv_ring ring;
                REQUIRE(mls_kv_ring_borrow(&ring, &slots, 1, sinks, length, shift,
                                           &status) == MLS_OK);
                mls_kv_ring_positions(&ring, got);
                for (int64_t slot = 0; slot < 7 && length >= sinks; slot++) {
                    const int64_t back = ((int64_t)next - 1 - slot + 2 * window) % window;
                    const int64_t position =
                        slot < (int64_t)sinks ? slot : (int64_t)length - 1 - back;
                    const bool is_held =
                        slot < (int64_t)sinks || position >= (int64_t)sinks;
                    CHECK(got[slot] == (is_held ? position : -1));
                    memory[slot] = (int32_t)got[slot];
                }
                size_t few[] = {1, mls_kv_ring_length(&ring), 1};
                const mls_tensor dst = tensor_of(ordered, MLS_I32, 3, few);
                mls_kv_ring_copy_ordered(&ring, kernels(), &dst);
                for (size_t i = 1; i < few[1] && length >= sinks; i++) {
                    CHECK(ordered[i - 1] < ordered[i]);
                }
            }
        }
    }
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
    CHECK(mls_kv_ring_fill(&copy, kernels(), &tokens, 2, 0, 0, &status) == MLS_E_SHAPE);
    CHECK(mls_kv_ring_fill(&copy, kernels(), &copy.slots, 2, 0, 0, &status) ==
          MLS_E_OVERLAP);
    CHECK(copy.oldest == 15 && copy.next == 17 && copy.evicted == 13);
    mls_kv_ring_fini(&ring);
    mls_kv_ring_fini(&copy);
}

/* A ring over the slots of another one has its positions, at every length. */
TEST(borrowed_slots_are_the_same_ring)
{
    static int32_t memory[20];
    const size_t shape[] = {1, 7, 1}, all[] = {1, 20, 1};
    mls_tensor slots = tensor_of(NULL, MLS_I32, 3, shape);
    mls_tensor tokens = tensor_of(memory, MLS_I32, 3, all);
    for (int32_t i = 0; i < 20; i++) {
        memory[i] = i;
    }
    for (size_t sinks = 0; sinks < 7; sinks += 2) {
        for (size_t length = 0; length <= 20; length++) {
            mls_kv_ring ring = {0}, borrowed;
            int64_t expected[7], got[7];
            REQUIRE(mls_kv_ring_init(&ring, &slots, 1, sinks, &status) == MLS_OK);
            tokens.shape[1] = length;
            CHECK(mls_kv_ring_append(&ring, kernels(), &tokens, &status) == MLS_OK);
            REQUIRE(mls_kv_ring_borrow(&borrowed, &ring.slots, 1, sinks, length, 0,
                                       &status) == MLS_OK);
            mls_kv_ring_positions(&ring, expected);
            mls_kv_ring_positions(&borrowed, got);
            CHECK(memcmp(expected, got, sizeof got) == 0);
            CHECK(borrowed.evicted == ring.evicted && borrowed.oldest == ring.oldest);
            CHECK(mls_kv_ring_length(&borrowed) == mls_kv_ring_length(&ring));
            mls_kv_ring_fini(&ring);
        }
    }
    mls_kv_ring empty = {0}, refused = {0};
    slots.shape[1] = 0;
    CHECK(mls_kv_ring_borrow(&empty, &slots, 1, 0, 3, 2, &status) == MLS_OK);
    CHECK(mls_kv_ring_length(&empty) == 0);
    slots.shape[1] = 7;
    CHECK(mls_kv_ring_borrow(&refused, &slots, 1, 7, 0, 0, &status) == MLS_E_CAPACITY);
    CHECK(refused.slots.rank == 0);
}
