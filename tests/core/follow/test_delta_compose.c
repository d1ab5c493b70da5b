#include "follow/delta.h"
#include "support/runner.h"

TEST(deltas_of_different_arrays_do_not_compose)
{
    const mls_delta first = {.elements = 1, .item_bytes = 1, .gap_bytes = 1};
    mls_delta second = first, both = {0};
    second.elements = 2;
    CHECK_FAILS(
        mls_delta_compose(&first, &second, &both, &status), MLS_E_SHAPE,
        "deltas of 1 elements of 1 bytes and of 2 of 1 bytes belong to different arrays");
    second = first;
    second.item_bytes = 2;
    CHECK(mls_delta_compose(&first, &second, &both, &status) == MLS_E_SHAPE);
}
