/* Composed and filtered deltas, compared with the changed arrays. */
#include "support/deltas.h"
#include "support/parts.h"

TEST(composed_deltas_have_the_effect_of_both)
{
    enum { COUNT = 9000 };
    static const size_t pairs[][2] = {{0, 10}, {10, 0}, {10, 10}, {1, 500}, {1000, 30}};
    static unsigned char middle[COUNT * 4];
    for (size_t p = 0; p < sizeof pairs / sizeof pairs[0]; p++) {
        mls_delta both = {0};
        fill_arrays(COUNT, 4, pairs[p][0]);
        const mls_tensor a = vector_of(base, MLS_I32, COUNT);
        const mls_tensor b = vector_of(changed, MLS_I32, COUNT);
        const mls_tensor t = vector_of(target, MLS_I32, COUNT);
        memcpy(target, base, COUNT * 4);
        mls_delta first = encode(best_cpu(), &a, &b, NULL);
        memcpy(middle, changed, COUNT * 4);
        for (size_t i = 0; i < COUNT; i++) {
            changed[i * 4] ^= below(1000) < pairs[p][1] ? 1 : 0;
        }
        const mls_tensor m = vector_of(middle, MLS_I32, COUNT);
        mls_delta second = encode(best_cpu(), &m, &b, NULL);
        CHECK(mls_delta_compose(&first, &second, &both, &status) == MLS_OK);
        CHECK(mls_delta_check(&both, &status) == MLS_OK);
        mls_delta_apply(&both, crc32c(), &t, undo, NULL);
        CHECK(memcmp(target, changed, COUNT * 4) == 0);
        second.elements++;
        CHECK(mls_delta_compose(&first, &second, &both, &status) == MLS_E_SHAPE);
        mls_delta_fini(&first);
        mls_delta_fini(&second);
        mls_delta_fini(&both);
    }
}

/* Copies the elements of a part of `from`, a tensor of 2-byte elements. */
static size_t take_part(const unsigned char *from, const mls_part *part,
                        const size_t *shape, unsigned char *out)
{
    static size_t numbers[LONGEST];
    const size_t count = elements_of(part, shape, numbers);
    for (size_t i = 0; i < count; i++) {
        memcpy(out + i * 2, from + numbers[i] * 2, 2);
    }
    return count;
}

/* Deltas of all parts of one layout, filtered to a part of another one. */
static void check_filter(const mls_layout *from, const mls_layout *to, size_t index,
                         const size_t *shape)
{
    static unsigned char before[ROOM], after[ROOM], expected[ROOM];
    const mls_part part = part_at(*to, 2, shape, index);
    const size_t count = take_part(base, &part, shape, target);
    const mls_tensor t = vector_of(target, MLS_BF16, count);
    (void)take_part(changed, &part, shape, expected);
    for (size_t i = 0; i < parts_of(*from); i++) {
        const mls_part source = part_at(*from, 2, shape, i);
        const size_t length = take_part(base, &source, shape, before);
        mls_delta filtered = {0};
        (void)take_part(changed, &source, shape, after);
        const mls_tensor a = vector_of(before, MLS_BF16, length);
        const mls_tensor b = vector_of(after, MLS_BF16, length);
        mls_delta delta = encode(best_cpu(), &a, &b, NULL);
        CHECK(mls_delta_filter(&delta, &source, &part, &filtered, &status) == MLS_OK);
        CHECK(mls_delta_check(&filtered, &status) == MLS_OK);
        CHECK(mls_delta_check_target(&filtered, &t, &status) == MLS_OK);
        mls_delta_apply(&filtered, crc32c(), &t, NULL, NULL);
        delta.elements++;
        CHECK(mls_delta_filter(&delta, &source, &part, &filtered, &status) ==
              MLS_E_SHAPE);
        mls_delta_fini(&delta);
        mls_delta_fini(&filtered);
    }
    CHECK(memcmp(target, expected, count * 2) == 0);
}
TEST(filtered_deltas_change_exactly_the_part)
{
    static const size_t shape[] = {61, 53};
    const mls_layout layouts[] = {{0},
                                  cut(0, 3),
                                  cut(1, 4),
                                  cut(MLS_LAYOUT_FLAT, 5),
                                  cut_twice(1, 2, 0, 3),
                                  cut_twice(1, 2, MLS_LAYOUT_FLAT, 3),
                                  cut(0, 64)};
    const size_t many = sizeof layouts / sizeof layouts[0];
    fill_arrays(shape[0] * shape[1], 2, 40);
    for (size_t from = 0; from < many; from++) {
        for (size_t to = 0; to < many; to++) {
            for (size_t i = 0; i < parts_of(layouts[to]); i++) {
                check_filter(&layouts[from], &layouts[to], i, shape);
            }
        }
    }
}
