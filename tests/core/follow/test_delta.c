/* The checks of deltas: every way of being wrong is refused. */
#include "support/deltas.h"

/* Check one change of a valid delta. */
#define REFUSES(...)                                                                     \
    do {                                                                                 \
        mls_delta wrong = delta;                                                         \
        __VA_ARGS__;                                                                     \
        CHECK(mls_delta_check(&wrong, &status) == MLS_E_FORMAT);                         \
    } while (0)

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
    REFUSES(wrong.elements = 519);
    CHECK(status.offset == 4);
    /* ends within a gap */
    REFUSES(wrong.gaps_bytes = 3, wrong.changed = 1, wrong.values_bytes = 2);
    REFUSES(wrong.changed = 2, wrong.values_bytes = 4);
    REFUSES(wrong.values_bytes = 5);
    REFUSES(wrong.gap_bytes = 2); /* of 5 bytes */
    REFUSES(wrong.gap_bytes = 0);
    REFUSES(wrong.gap_bytes = 3);
    REFUSES(wrong.item_bytes = 3);
    REFUSES(wrong.changed = SIZE_MAX / 2 + 2);
    REFUSES(wrong.elements = SIZE_MAX);
    REFUSES(wrong.elements = 0);
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
