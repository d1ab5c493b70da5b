/* Deltas against the definition in delta.h, element by element: every element size,
 * instruction set, density and kind of array; and every way in which a delta is wrong. */
#include "follow/delta.h"
#include "support/cpus.h"
#include "support/parts.h"
#include "support/random_bytes.h"
#include "support/tensors.h"

#include <math.h>

enum { LONGEST = 30000, ROOM = LONGEST * 8 };

static unsigned char base[ROOM], changed[ROOM], target[ROOM], undo[ROOM];

static const mls_crc_kernels *crc32c(void)
{
    return mls_crc_of(best_cpu());
}

/* Fills `base`, and `changed` with about `per_thousand` different elements. */
static void fill_arrays(size_t count, size_t size, size_t per_thousand)
{
    fill_random(base, count * size, count + size + 1);
    memcpy(changed, base, count * size);
    for (size_t i = 0; i < count; i++) {
        if (below(1000) < per_thousand) {
            changed[i * size + below(size)] ^= (unsigned char)(1 + below(255));
        }
    }
}

/* Writes the streams by their definition. Returns the number of changed elements. */
static size_t encode_by_definition(size_t count, size_t size, size_t width,
                                   unsigned char *gaps, size_t *gaps_bytes,
                                   unsigned char *values)
{
    const size_t most = width == 1 ? 255 : 65535;
    size_t gap = 0, found = 0, at = 0;
    for (size_t i = 0; i < count; i++) {
        if (memcmp(base + i * size, changed + i * size, size) == 0) {
            gap++;
            continue;
        }
        for (; gap >= most; gap -= most) {
            for (size_t k = 0; k < width; k++) {
                gaps[at++] = 0xFF;
            }
        }
        for (size_t k = 0; k < width; k++) {
            gaps[at++] = (unsigned char)(gap >> (8 * k));
        }
        memcpy(values + found * size, changed + i * size, size);
        found++;
        gap = 0;
    }
    *gaps_bytes = at;
    return found;
}

static mls_delta encode(mls_cpu cpu, const mls_tensor *a, const mls_tensor *b,
                        uint32_t *crc)
{
    mls_delta delta = {0};
    CHECK(mls_delta_encode(mls_delta_kernels_of(cpu), crc32c(), a, b, &delta, crc,
                           &status) == MLS_OK);
    CHECK(mls_delta_check(&delta, &status) == MLS_OK);
    return delta;
}

static bool same_streams(const mls_delta *a, const mls_delta *b)
{
    return a->gap_bytes == b->gap_bytes && a->changed == b->changed &&
           a->gaps_bytes == b->gaps_bytes && a->values_bytes == b->values_bytes &&
           memcmp(a->gaps, b->gaps, a->gaps_bytes) == 0 &&
           memcmp(a->values, b->values, a->values_bytes) == 0;
}

/* Whether the delta is the shorter of the two by definition. */
static bool is_shortest(const mls_delta *delta, size_t count, size_t size)
{
    static unsigned char gaps[2][ROOM], values[ROOM];
    size_t bytes[2], found = 0;
    for (size_t w = 0; w < 2; w++) {
        found = encode_by_definition(count, size, w + 1, gaps[w], &bytes[w], values);
    }
    const size_t w = bytes[1] < bytes[0];
    const mls_delta expected = {.elements = count,
                                .item_bytes = size,
                                .changed = found,
                                .gap_bytes = w + 1,
                                .gaps = gaps[w],
                                .values = values,
                                .gaps_bytes = bytes[w],
                                .values_bytes = found * size};
    return delta->elements == count && same_streams(delta, &expected);
}

static const struct {
    mls_dtype dtype;
    size_t size;
} kinds[] = {{MLS_U8, 1}, {MLS_BF16, 2}, {MLS_F32, 4}, {MLS_F64, 8}, {MLS_C64, 8}};

static const size_t densities[] = {0, 1, 10, 30, 500, 1000};

TEST(every_set_encodes_by_the_definition)
{
    static const size_t counts[] = {0, 1, 31, 33, 255, 256, 257, 4097, LONGEST};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
            for (size_t d = 0; d < sizeof densities / sizeof densities[0]; d++) {
                const size_t count = counts[c], size = kinds[k].size;
                fill_arrays(count, size, densities[d]);
                const mls_tensor a = vector_of(base, kinds[k].dtype, count);
                const mls_tensor b = vector_of(changed, kinds[k].dtype, count);
                EACH_CPU (cpu) {
                    uint32_t crc = 1;
                    mls_delta delta = encode(cpu, &a, &b, &crc);
                    CHECK(is_shortest(&delta, count, size));
                    CHECK(crc == crc32c()->update(0, changed, count * size));
                    mls_delta_fini(&delta);
                }
            }
        }
    }
}

/* Applies a delta to a copy of the base, and undoes it by its log; in place too. */
TEST(applying_and_undoing_restores_every_byte)
{
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        for (size_t d = 0; d < sizeof densities / sizeof densities[0]; d++) {
            const size_t count = LONGEST, bytes = count * kinds[k].size;
            uint32_t crc = 0, expected = 0;
            fill_arrays(count, kinds[k].size, densities[d]);
            const mls_tensor a = vector_of(base, kinds[k].dtype, count);
            const mls_tensor b = vector_of(changed, kinds[k].dtype, count);
            const mls_tensor t = vector_of(target, kinds[k].dtype, count);
            mls_delta delta = encode(best_cpu(), &a, &b, &expected);
            memcpy(target, base, bytes);
            CHECK(mls_delta_check_target(&delta, &t, &status) == MLS_OK);
            mls_delta_apply(&delta, crc32c(), &t, undo, &crc);
            CHECK(memcmp(target, changed, bytes) == 0 && crc == expected);
            mls_delta back = delta;
            back.values = undo;
            mls_delta_apply(&back, crc32c(), &t, NULL, NULL);
            CHECK(memcmp(target, base, bytes) == 0);
            mls_delta_apply(&delta, crc32c(), &t, delta.values, NULL);
            CHECK(memcmp(target, changed, bytes) == 0);
            CHECK(memcmp(delta.values, undo, delta.values_bytes) == 0);
            mls_delta_apply(&delta, crc32c(), &t, delta.values, &crc);
            CHECK(memcmp(target, base, bytes) == 0);
            CHECK(crc == crc32c()->update(0, base, bytes));
            mls_delta_fini(&delta);
        }
    }
}

TEST(elements_of_strided_arrays_are_numbered_in_c_order)
{
    enum { ROWS = 130, COLUMNS = 97, COUNT = ROWS * COLUMNS };
    static uint32_t packed[COUNT];
    uint32_t crc = 0, of_target = 0;
    fill_arrays(COUNT, 4, 20);
    mls_tensor a = transposed_of(base, MLS_F32, ROWS, COLUMNS);
    mls_tensor b = transposed_of(changed, MLS_F32, ROWS, COLUMNS);
    mls_tensor t = transposed_of(target, MLS_F32, ROWS, COLUMNS);
    memcpy(target, base, COUNT * 4);
    for (size_t i = 0; i < COUNT; i++) {
        memcpy(&packed[i], changed + ((i % COLUMNS) * ROWS + i / COLUMNS) * 4, 4);
    }
    mls_delta delta = encode(best_cpu(), &a, &b, &crc);
    CHECK(crc == crc32c()->update(0, packed, sizeof packed));
    CHECK(crc == mls_tensor_crc(crc32c(), &b, 0));
    mls_delta_apply(&delta, crc32c(), &t, undo, &of_target);
    CHECK(memcmp(target, changed, COUNT * 4) == 0 && of_target == crc);
    mls_delta_fini(&delta);
}

TEST(equal_bits_are_equal_and_other_bits_differ)
{
    const float left[] = {0.0F, NAN, NAN, 1.0F}, right[] = {-0.0F, NAN, -NAN, 1.0F};
    mls_tensor a = vector_of(base, MLS_F32, 4), b = vector_of(changed, MLS_F32, 4);
    memcpy(base, left, sizeof left);
    memcpy(changed, right, sizeof right);
    mls_delta delta = encode(best_cpu(), &a, &b, NULL);
    CHECK(delta.changed == 2 && delta.gaps[0] == 0 && delta.gaps[1] == 1);
    mls_delta_fini(&delta);
}

TEST(arrays_that_do_not_belong_together_are_refused)
{
    mls_delta delta = {0};
    uint32_t crc = 7;
    const mls_delta_kernels *kernels = mls_delta_kernels_of(best_cpu());
    const mls_tensor a = vector_of(base, MLS_BF16, 8),
                     longer = vector_of(base, MLS_BF16, 9);
    const mls_tensor other = vector_of(base, MLS_F16, 8);
    mls_tensor swapped = a;
    swapped.swapped = true;
    CHECK(mls_delta_encode(kernels, crc32c(), &a, &longer, &delta, &crc, &status) ==
          MLS_E_SHAPE);
    CHECK(mls_delta_encode(kernels, crc32c(), &a, &other, &delta, &crc, &status) ==
          MLS_E_DTYPE);
    CHECK(mls_delta_encode(kernels, crc32c(), &a, &swapped, &delta, &crc, &status) ==
          MLS_E_DTYPE);
    CHECK(delta.gaps == NULL && crc == 7);
    delta = encode(best_cpu(), &a, &a, NULL);
    CHECK(mls_delta_check_target(&delta, &longer, &status) == MLS_E_SHAPE);
    CHECK(mls_delta_check_target(&delta, &swapped, &status) == MLS_E_DTYPE);
    const mls_tensor wide = vector_of(base, MLS_F32, 8);
    CHECK(mls_delta_check_target(&delta, &wide, &status) == MLS_E_DTYPE);
    mls_delta_fini(&delta);
}

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

/* A stream that changes after its check must not lead outside of the target. */
TEST(a_stream_that_changed_writes_inside_the_target)
{
    static unsigned char gaps[100], values[10], guarded[64];
    mls_delta delta = {.elements = 32,
                       .item_bytes = 1,
                       .changed = 10,
                       .gap_bytes = 1,
                       .gaps = gaps,
                       .values = values,
                       .gaps_bytes = sizeof gaps,
                       .values_bytes = sizeof values};
    const mls_tensor t = vector_of(guarded, MLS_U8, 32);
    for (size_t seed = 1; seed < 500; seed++) {
        fill_random(gaps, sizeof gaps, seed);
        fill_random(values, sizeof values, seed);
        mls_delta_apply(&delta, crc32c(), &t, undo, NULL);
        for (size_t i = 32; i < sizeof guarded; i++) {
            CHECK(guarded[i] == 0);
        }
    }
}

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
    static unsigned char before[ROOM], after[ROOM], wanted[ROOM];
    const mls_part part = part_at(*to, 2, shape, index);
    const size_t count = take_part(base, &part, shape, target);
    const mls_tensor t = vector_of(target, MLS_BF16, count);
    (void)take_part(changed, &part, shape, wanted);
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
    CHECK(memcmp(target, wanted, count * 2) == 0);
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
