#include "kv/attention_mask.h"
#include "support/tensors.h"

static const mls_mask_names names = {"length", "size", "sinks", "row", "rows"};

static mls_code check(mls_mask_request request)
{
    return mls_mask_check(&request, &names, &status);
}

TEST(numbers_are_checked)
{
    /* length, size, sinks, position, first and end row */
    CHECK(check((mls_mask_request){4, 2, 0, 0, 0, 4}) == MLS_OK);
    CHECK(check((mls_mask_request){4, 2, 9, 4, 4, 4}) == MLS_OK);
    CHECK(check((mls_mask_request){4, 2, 0, 5, 0, 4}) == MLS_E_CAPACITY);
    CHECK_TEXT(status.expected, "0..4");
    CHECK(check((mls_mask_request){4, 2, 0, -1, 0, 4}) == MLS_E_CAPACITY);
    CHECK_TEXT(status.text, "row -1 is outside 0..4, the length");
    CHECK(check((mls_mask_request){-4, 2, 0, 0, 0, 0}) == MLS_E_CAPACITY);
    CHECK(check((mls_mask_request){4, -2, 0, 0, 0, 4}) == MLS_E_CAPACITY);
    CHECK(check((mls_mask_request){4, 2, -1, 0, 0, 4}) == MLS_E_CAPACITY);
    CHECK_TEXT(status.text, "sinks -1 is negative");
}

TEST(rows_are_checked)
{
    static const int64_t bad[][2] = {{-1, 2}, {3, 2}, {0, 5}, {5, 5}, {INT64_MAX, 4}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const mls_mask_request request = {4, 2, 0, 0, bad[i][0], bad[i][1]};
        CHECK(check(request) == MLS_E_CAPACITY);
        CHECK_TEXT(status.expected, "0 <= start <= stop <= 4");
    }
    CHECK(check((mls_mask_request){4, 2, 0, 0, 3, 2}) == MLS_E_CAPACITY);
    CHECK_TEXT(status.text, "rows (3, 2) must be a start and a stop in 0..4, the length");
    CHECK_TEXT(status.got, "(3, 2)");
}

/* The formula of the source document, with sinks. */
static float formula(size_t row, size_t column, size_t attention_size, size_t sinks)
{
    const size_t start = row > attention_size ? row - attention_size : 0;
    return column <= row && (column >= start || column < sinks) ? 0.0F : -5.0F;
}

TEST(rows_follow_the_formula)
{
    enum { SIZE = 9 };
    float mask[SIZE][SIZE];
    mls_element fill;
    const mls_tensor t = matrix_of(mask, MLS_F32, SIZE, SIZE);
    REQUIRE(mls_element_encode(-5, &t, &fill, &status) == MLS_OK);
    for (size_t number = 0; number < (size_t)12 * 12; number++) {
        const size_t attention = number / 12, sinks = number % 12;
        memset(mask, 0x77, sizeof mask);
        mls_mask_rows(mls_kernels_of(MLS_CPU_SCALAR), &t, 0, attention, sinks, fill);
        for (size_t i = 0; i < SIZE; i++) {
            for (size_t j = 0; j < SIZE; j++) {
                const float want = formula(i, j, attention, sinks);
                CHECK(memcmp(&mask[i][j], &want, sizeof want) == 0);
            }
        }
    }
}

TEST(a_row_past_the_end_is_cut)
{
    float row[10]; /* the mask and what follows it */
    mls_element fill;
    const mls_tensor t = matrix_of(row, MLS_F32, 1, 4);
    REQUIRE(mls_element_encode(-5, &t, &fill, &status) == MLS_OK);
    mls_mask_rows(mls_kernels_of(MLS_CPU_SCALAR), &t, 4, 2, 0, fill);
    static const float two_seen[] = {-5, -5, 0, 0};
    CHECK(memcmp(row, two_seen, sizeof two_seen) == 0);
    mls_mask_rows(mls_kernels_of(MLS_CPU_SCALAR), &t, 40, 2, 1, fill);
    static const float sink_seen[] = {0, -5, -5, -5};
    CHECK(memcmp(row, sink_seen, sizeof sink_seen) == 0);
    row[4] = 7;
    mls_mask_rows(mls_kernels_of(MLS_CPU_SCALAR), &t, 40, 2, 9, fill);
    static const float sinks_seen[] = {0, 0, 0, 0, 7};
    CHECK(memcmp(row, sinks_seen, sizeof sinks_seen) == 0);
}
