/* The checks of deltas: every way of being wrong is refused. */
#include "support/deltas.h"

static bool refuses(mls_delta delta)
{
    return mls_delta_check(&delta, &status) == MLS_E_FORMAT;
}
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
    mls_delta wrong = delta;
    CHECK(mls_delta_check(&delta, &status) == MLS_OK); /* numbers 3, 518, 519 */
    wrong.elements = 519;
    CHECK(refuses(wrong) && (mls_delta_check(&wrong, &status), status.offset == 4));
    wrong = delta;
    wrong.gaps_bytes = 3; /* ends within a gap */
    wrong.changed = 1;
    wrong.values_bytes = 2;
    CHECK(refuses(wrong));
    wrong = delta;
    wrong.changed = 2;
    wrong.values_bytes = 4;
    CHECK(refuses(wrong));
    wrong = delta;
    wrong.values_bytes = 5;
    CHECK(refuses(wrong));
    wrong = delta;
    wrong.gap_bytes = 2; /* of 5 bytes */
    CHECK(refuses(wrong));
    for (size_t width = 0; width < 5; width += 3) {
        wrong = delta;
        wrong.gap_bytes = width;
        CHECK(refuses(wrong));
    }
    wrong = delta;
    wrong.item_bytes = 3;
    CHECK(refuses(wrong));
    wrong = delta;
    wrong.changed = SIZE_MAX / 2 + 2;
    CHECK(refuses(wrong));
    wrong = delta;
    wrong.elements = SIZE_MAX;
    CHECK(refuses(wrong));
    wrong = delta;
    wrong.elements = 0;
    CHECK(refuses(wrong));
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
