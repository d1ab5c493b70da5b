/* Tests of overlap.c: views of a few bytes, compared with a count of each byte's owners.
 */
#include "array/overlap.h"

#include "support/tensors.h"

#include <stdint.h>

enum { BYTES = 512 };

static unsigned char memory[BYTES];
static unsigned long long seed = 1;

static int below(int limit)
{
    seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
    return (int)((seed >> 33) % (unsigned)limit);
}

/* A view of random shape, often with the strides of a slice. */
static mls_tensor random_view(void)
{
    static const mls_dtype dtypes[] = {MLS_U8, MLS_U16, MLS_F32, MLS_F64};
    mls_tensor t = {.data = memory, .dtype = dtypes[below(4)], .rank = below(4)};
    int low = 0, reach = (int)mls_tensor_item_bytes(&t);
    const int item = reach, kind = below(3);
    for (int axis = 0; axis < t.rank; axis++) {
        t.shape[axis] = (size_t)(below(20) == 0 ? 0 : 1 + below(4));
        const int step = kind == 0 ? below(20) : kind == 1 ? item * below(6) : reach;
        t.strides[axis] = below(3) == 0 ? -step : step;
        const int way = t.shape[axis] == 0 ? 0 : (int)(t.shape[axis] - 1) * step;
        reach += way;
        low += t.strides[axis] < 0 ? way : 0;
    }
    if (reach > BYTES) {
        t.rank = 0;
        reach = item;
        low = 0;
    }
    t.data += low + below(BYTES - reach + 1 < 40 ? BYTES - reach + 1 : 40);
    return t;
}

/* Add 1 for each element to each of its bytes. */
static void count_owners(const mls_tensor *t, int *owners)
{
    size_t count = 0;
    CHECK(mls_tensor_count(t, &count));
    for (size_t i = 0; i < count; i++) {
        size_t rest = i;
        const unsigned char *at = t->data;
        for (int axis = t->rank - 1; axis >= 0; axis--) {
            at += (ptrdiff_t)(rest % t->shape[axis]) * t->strides[axis];
            rest /= t->shape[axis];
        }
        for (size_t b = 0; b < mls_tensor_item_bytes(t); b++) {
            owners[at - memory + (ptrdiff_t)b]++;
        }
    }
}

TEST(views_overlap_exactly_if_a_byte_has_two_owners)
{
    int together = 0, alone = 0;
    for (int round = 0; round < 20000; round++) {
        const mls_tensor a = random_view(), b = random_view();
        int left[BYTES] = {0}, right[BYTES] = {0};
        bool shares = false, repeats = false;
        count_owners(&a, left);
        count_owners(&b, right);
        for (int i = 0; i < BYTES; i++) {
            shares = shares || (left[i] > 0 && right[i] > 0);
            repeats = repeats || left[i] > 1;
        }
        CHECK(mls_tensor_overlap(&a, &b) == shares);
        CHECK(mls_tensor_overlaps_itself(&a) == repeats);
        together += shares;
        alone += repeats;
    }
    CHECK(together > 1000 && together < 19000 && alone > 1000 && alone < 19000);
}

/* An empty view has no bytes. */
TEST(empty_views_never_overlap)
{
    const size_t shape[] = {3, 0};
    const mls_tensor t = tensor_of(memory, MLS_F32, 2, shape);
    CHECK(!mls_tensor_overlap(&t, &t) && !mls_tensor_overlaps_itself(&t));
}

TEST(overlap_handles_negative_strides)
{
    const size_t shape[] = {4};
    mls_tensor a = tensor_of(memory, MLS_U8, 1, shape); /* bytes 0..3 */
    mls_tensor b = a;
    b.data = memory + 7;
    b.strides[0] = -1; /* bytes 7..4 */
    CHECK(!mls_tensor_overlap(&a, &b));
    b.data = memory + 6; /* bytes 6..3 */
    CHECK(mls_tensor_overlap(&a, &b));
    a.strides[0] = 0; /* byte 0 four times */
    CHECK(!mls_tensor_overlap(&a, &b));
    CHECK(mls_tensor_overlap(&a, &a));
}

/* Strides that are too irregular to decide count as overlapping, in bounded time. */
TEST(undecidable_views_count_as_overlapping)
{
    mls_tensor t = {.data = memory, .dtype = MLS_U8, .rank = 12};
    for (int axis = 0; axis < t.rank; axis++) {
        t.shape[axis] = 1000;
        t.strides[axis] = 1000003 + 7919 * axis * axis;
    }
    CHECK(mls_tensor_overlaps_itself(&t));
    t.strides[0] = PTRDIFF_MAX / 2;
    t.strides[1] = PTRDIFF_MAX / 3;
    CHECK(mls_tensor_overlaps_itself(&t));
}
