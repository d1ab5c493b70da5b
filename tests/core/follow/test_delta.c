/* The checks of deltas: every way of being wrong is refused. */
#include "support/deltas.h"

/* Check one change of a valid delta. */
#define REFUSES(text, ...)                                                               \
    do {                                                                                 \
        mls_delta wrong = delta;                                                         \
        __VA_ARGS__;                                                                     \
        CHECK_FAILS(mls_delta_check(&wrong, &status), MLS_E_FORMAT, text);               \
    } while (0)
#define PAST(elements) "gaps of a delta pass the end of an array of " elements " elements"

TEST(wrong_streams_are_refused)
{
    static unsigned char gaps[] = {3, 255, 255, 4, 0}, values[6] = {0};
    const mls_delta delta = {.elements = 520,
                             .item_bytes = 2,
                             .changed = 3,
                             .gap_bytes = 1,
                             .gaps = gaps,
                             .values = values,
                             .gaps_bytes = 5,
                             .values_bytes = 6};
    CHECK(mls_delta_check(&delta, &status) == MLS_OK); /* numbers 3, 518, 519 */
    REFUSES(PAST("519"), wrong.elements = 519);
    CHECK(status.offset == 4);
    REFUSES("gaps of a delta end within a gap: the delta is cut", wrong.gaps_bytes = 3,
            wrong.changed = 1, wrong.values_bytes = 2);
    REFUSES("a delta has 3 gaps for 2 values", wrong.changed = 2, wrong.values_bytes = 4);
    REFUSES("3 changed elements of 2 bytes, but 5 bytes of values: the delta is cut",
            wrong.values_bytes = 5);
    REFUSES("5 bytes of gaps are not a multiple of 2: the delta is cut",
            wrong.gap_bytes = 2);
    REFUSES("gaps of a delta have 1 or 2 bytes, not 0", wrong.gap_bytes = 0);
    REFUSES("gaps of a delta have 1 or 2 bytes, not 3", wrong.gap_bytes = 3);
    REFUSES("elements of a delta have 1, 2, 4, 8 or 16 bytes, not 3",
            wrong.item_bytes = 3);
    REFUSES("9223372036854775809 changed elements of 2 bytes, but 6 bytes of values: the "
            "delta is cut",
            wrong.changed = SIZE_MAX / 2 + 2);
    REFUSES("an array of 18446744073709551615 elements exceeds the memory",
            wrong.elements = SIZE_MAX);
    REFUSES(PAST("0"), wrong.elements = 0);
}

/* Long streams are checked many units at a time; the first wrong unit is reported. */
TEST(a_number_out_of_range_is_reported_with_its_offset)
{
    static unsigned char gaps[5000];
    mls_delta delta = {.item_bytes = 1,
                       .changed = sizeof gaps,
                       .gap_bytes = 1,
                       .gaps = gaps,
                       .values = base,
                       .gaps_bytes = sizeof gaps,
                       .values_bytes = sizeof gaps};
    for (delta.elements = 0; delta.elements < sizeof gaps; delta.elements += 37) {
        CHECK(mls_delta_check(&delta, &status) == MLS_E_FORMAT);
        CHECK(status.has_offset && status.offset == delta.elements);
    }
    delta.elements = sizeof gaps;
    CHECK(mls_delta_check(&delta, &status) == MLS_OK);
}
