#include "kv/attention_mask.h"
#include "support/runner.h"

static const mls_mask_names names = {"length", "size", "row"};

static void numbers_are_checked(void)
{
    mls_status st;
    CHECK(mls_mask_check(4, 2, 0, &names, &st) == MLS_OK);
    CHECK(mls_mask_check(4, 2, 4, &names, &st) == MLS_OK);
    CHECK(mls_mask_check(4, 2, 5, &names, &st) == MLS_E_CAPACITY);
    CHECK_TEXT(st.expected, "0..4");
    CHECK(mls_mask_check(4, 2, -1, &names, &st) == MLS_E_CAPACITY);
    CHECK_TEXT(st.text, "row -1 is outside 0..4, the length");
    CHECK(mls_mask_check(-4, 2, 0, &names, &st) == MLS_E_CAPACITY);
    CHECK(mls_mask_check(4, -2, 0, &names, &st) == MLS_E_CAPACITY);
}

/* The formula of the source document. */
static float formula(size_t row, size_t column, size_t attention_size)
{
    const size_t start = row > attention_size ? row - attention_size : 0;
    return column >= start && column <= row ? 0.0F : -5.0F;
}

static void rows_follow_the_formula(void)
{
    enum { SIZE = 9 };
    float mask[SIZE][SIZE];
    mls_element fill;
    mls_status st;
    mls_tensor t = {0};
    const size_t shape[] = {SIZE, SIZE};
    REQUIRE(mls_tensor_init(&t, mask, MLS_F32, 2, shape, &st) == MLS_OK);
    REQUIRE(mls_element_encode(-5, &t, &fill, &st) == MLS_OK);
    for (size_t attention = 0; attention < 12; attention++) {
        memset(mask, 0x77, sizeof mask);
        mls_mask_rows(mls_kernels_of(MLS_CPU_SCALAR), &t, 0, attention, fill);
        for (size_t i = 0; i < SIZE; i++) {
            for (size_t j = 0; j < SIZE; j++) {
                const float want = formula(i, j, attention);
                CHECK(memcmp(&mask[i][j], &want, sizeof want) == 0);
            }
        }
    }
}

static void a_row_past_the_end_is_cut(void)
{
    float row[4];
    mls_element fill;
    mls_status st;
    mls_tensor t = {0};
    const size_t shape[] = {1, 4};
    REQUIRE(mls_tensor_init(&t, row, MLS_F32, 2, shape, &st) == MLS_OK);
    REQUIRE(mls_element_encode(-5, &t, &fill, &st) == MLS_OK);
    mls_mask_rows(mls_kernels_of(MLS_CPU_SCALAR), &t, 4, 2, fill);
    static const float two_seen[] = {-5, -5, 0, 0};
    CHECK(memcmp(row, two_seen, sizeof row) == 0);
    mls_mask_rows(mls_kernels_of(MLS_CPU_SCALAR), &t, 40, 2, fill);
    static const float none_seen[] = {-5, -5, -5, -5};
    CHECK(memcmp(row, none_seen, sizeof row) == 0);
}

static const test_case tests[] = {
    TEST(numbers_are_checked),
    TEST(rows_follow_the_formula),
    TEST(a_row_past_the_end_is_cut),
};

int main(void)
{
    return RUN_TESTS(tests);
}
