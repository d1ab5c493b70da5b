#include "kv/kv_transition.h"
#include "support/runner.h"

static const size_t shape[MLS_KV_RANK] = {2, 3, 8, 4};

static mls_code check(mls_kv_kind kind, int64_t target, int64_t position, mls_status *st)
{
    const mls_kv_request request = {
        .kind = kind, .target_length = target, .position = position};
    return mls_kv_check(MLS_KV_RANK, shape, request, st);
}

static void requests_that_cannot_work_are_refused(void)
{
    mls_status st;
    CHECK(check(MLS_KV_EXPAND, 8, 8, &st) == MLS_OK);
    CHECK(check(MLS_KV_EXPAND, 7, 2, &st) == MLS_E_CAPACITY);
    CHECK(strstr(st.text, "compact instead of expanding") != NULL);
    CHECK(check(MLS_KV_COMPACT, 7, 2, &st) == MLS_OK);
    CHECK(check(MLS_KV_COMPACT, 20, 8, &st) == MLS_OK);
    CHECK(check(MLS_KV_EXPAND, 10, -1, &st) == MLS_E_CAPACITY);
    CHECK(check(MLS_KV_EXPAND, 10, 9, &st) == MLS_E_CAPACITY);
    CHECK_TEXT(st.expected, "0..8");
    CHECK_TEXT(st.got, "9");
    CHECK(check(MLS_KV_COMPACT, 4, 5, &st) == MLS_E_CAPACITY);
    CHECK(strstr(st.text, "at least 5") != NULL);
    CHECK(check(MLS_KV_COMPACT, -4, 0, &st) == MLS_E_CAPACITY);
    CHECK(mls_kv_check(3, shape, (mls_kv_request){MLS_KV_EXPAND, 8, 8, NULL}, &st) ==
          MLS_E_SHAPE);
    CHECK_TEXT(st.got, "(2, 3, 8)");
}

static void shapes_of_two_models_must_agree(void)
{
    mls_status st;
    size_t other[MLS_KV_RANK + 1] = {2, 3, 16, 4, 1};
    CHECK(mls_kv_check_shapes(4, shape, 4, other, MLS_KV_EXPAND, &st) == MLS_OK);
    CHECK(mls_kv_check_shapes(4, other, 4, shape, MLS_KV_EXPAND, &st) == MLS_E_CAPACITY);
    CHECK(mls_kv_check_shapes(4, other, 4, shape, MLS_KV_COMPACT, &st) == MLS_OK);
    CHECK(mls_kv_check_shapes(3, other, 4, shape, MLS_KV_COMPACT, &st) == MLS_E_SHAPE);
    CHECK(mls_kv_check_shapes(4, shape, 5, other, MLS_KV_COMPACT, &st) == MLS_E_SHAPE);
    other[1] = 9;
    CHECK(mls_kv_check_shapes(4, shape, 4, other, MLS_KV_EXPAND, &st) == MLS_E_SHAPE);
    CHECK(strstr(st.text, "heads") == st.text);
}

enum { ITEMS = 2 * 3 * 8 * 4, MORE = 2 * 3 * 16 * 4 };

static void tokens_move_and_the_rest_is_padded(void)
{
    static uint16_t from[ITEMS], to[MORE];
    const size_t large[MLS_KV_RANK] = {2, 3, 16, 4};
    mls_tensor src = {0}, dst = {0};
    mls_element pad;
    mls_status st;
    for (int i = 0; i < ITEMS; i++) {
        from[i] = (uint16_t)(i + 1);
    }
    REQUIRE(mls_tensor_init(&src, from, MLS_U16, 4, shape, &st) == MLS_OK);
    REQUIRE(mls_tensor_init(&dst, to, MLS_U16, 4, large, &st) == MLS_OK);
    REQUIRE(mls_element_encode(9, &dst, &pad, &st) == MLS_OK);
    for (size_t position = 0; position <= 8; position++) {
        memset(to, 0xEE, sizeof to);
        mls_kv_move(mls_kernels_of(MLS_CPU_SCALAR), NULL, &dst, &src, position, &pad,
                    MLS_KV_TOUCHED);
        for (size_t row = 0; row < 6; row++) {
            for (size_t i = 0; i < (size_t)16 * 4; i++) {
                const uint16_t want = i < position * 4 ? from[row * 32 + i] : 9;
                CHECK(to[row * 64 + i] == want);
            }
        }
    }
    memset(to, 0xEE, sizeof to);
    mls_kv_move(mls_kernels_of(MLS_CPU_SCALAR), NULL, &dst, &src, 2, NULL, MLS_KV_SPARSE);
    CHECK(to[8] == 0xEEEE && to[7] == from[7]); /* no padding asked for */
}

static void threads_give_the_same_bytes(void)
{
    enum { LAYERS = 4, LARGE = LAYERS * 4 * 2048 * 128 };
    static uint16_t from[LARGE / 2], one[LARGE],
        many[LARGE]; /* over the streaming limit */
    const size_t small[MLS_KV_RANK] = {LAYERS, 4, 1024, 128};
    const size_t large[MLS_KV_RANK] = {LAYERS, 4, 2048, 128};
    mls_tensor src = {0}, dst = {0}, again = {0};
    mls_element pad = {.size = 2};
    mls_pool *pool = NULL;
    mls_status st;
    for (size_t i = 0; i < LARGE / 2; i++) {
        from[i] = (uint16_t)(i * 2654435761U >> 7);
    }
    REQUIRE(mls_tensor_init(&src, from, MLS_F16, 4, small, &st) == MLS_OK);
    REQUIRE(mls_tensor_init(&dst, one, MLS_F16, 4, large, &st) == MLS_OK);
    REQUIRE(mls_tensor_init(&again, many, MLS_F16, 4, large, &st) == MLS_OK);
    REQUIRE(mls_pool_new(3, &pool, &st) == MLS_OK);
    mls_cpu best = MLS_CPU_SCALAR;
    REQUIRE(mls_cpu_choose(NULL, &best, &st) == MLS_OK);
    memset(one, 1, sizeof one);
    memset(many, 2, sizeof many);
    mls_kv_move(mls_kernels_of(MLS_CPU_SCALAR), NULL, &dst, &src, 1000, &pad,
                MLS_KV_FRESH);
    mls_kv_move(mls_kernels_of(best), pool, &again, &src, 1000, &pad, MLS_KV_TOUCHED);
    CHECK(memcmp(one, many, sizeof one) == 0);
    mls_pool_free(pool);
}

static void targets_are_checked_before_anything_is_written(void)
{
    static uint16_t memory[MORE * 2];
    const size_t large[MLS_KV_RANK] = {2, 3, 16, 4};
    mls_kv_request request = {MLS_KV_EXPAND, 16, 8, NULL};
    mls_tensor src = {0}, dst = {0};
    mls_status st;
    REQUIRE(mls_tensor_init(&src, memory, MLS_U16, 4, shape, &st) == MLS_OK);
    REQUIRE(mls_tensor_init(&dst, memory + 1, MLS_U16, 4, large, &st) == MLS_OK);
    const mls_kv_names names = {.source = "from", .target = "to", .if_shared = "copy"};
    request.names = &names;
    CHECK(mls_kv_check_target(&dst, &src, request, &st) == MLS_E_OVERLAP);
    CHECK_TEXT(st.text, "to shares memory with from: copy");
    REQUIRE(mls_tensor_init(&dst, memory + ITEMS, MLS_U16, 4, large, &st) == MLS_OK);
    CHECK(mls_kv_check_target(&dst, &src, request, &st) == MLS_OK);
    dst.shape[2] = 15;
    CHECK(mls_kv_check_target(&dst, &src, request, &st) == MLS_E_SHAPE);
    CHECK_TEXT(st.expected, "(2, 3, 16, 4)");
    dst.shape[2] = 16;
    dst.dtype = MLS_F16;
    CHECK(mls_kv_check_target(&dst, &src, request, &st) == MLS_E_DTYPE);
}

static const test_case tests[] = {
    TEST(requests_that_cannot_work_are_refused),
    TEST(shapes_of_two_models_must_agree),
    TEST(tokens_move_and_the_rest_is_padded),
    TEST(threads_give_the_same_bytes),
    TEST(targets_are_checked_before_anything_is_written),
};

int main(void)
{
    return RUN_TESTS(tests);
}
