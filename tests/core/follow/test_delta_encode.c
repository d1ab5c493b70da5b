/* Encoded deltas compared with the definition of delta.h: every element size, instruction
 * set and density. */
#include "follow/delta_kernels.h"
#include "support/deltas.h"

/* Writes the streams by their definition. Returns the number of changed elements. */
static size_t encode_by_definition(size_t count, size_t size, size_t width,
                                   unsigned char *gaps, size_t *gaps_bytes,
                                   unsigned char *values)
{
    const size_t most = width == 1 ? 255 : 65535;
    size_t gap = 0, differing = 0, at = 0;
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
        memcpy(values + differing * size, changed + i * size, size);
        differing++;
        gap = 0;
    }
    *gaps_bytes = at;
    return differing;
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
    size_t bytes[2], differing = 0;
    for (size_t w = 0; w < 2; w++) {
        differing = encode_by_definition(count, size, w + 1, gaps[w], &bytes[w], values);
    }
    const size_t w = bytes[1] < bytes[0];
    const mls_delta expected = {.elements = count,
                                .item_bytes = size,
                                .changed = differing,
                                .gap_bytes = w + 1,
                                .gaps = gaps[w],
                                .values = values,
                                .gaps_bytes = bytes[w],
                                .values_bytes = differing * size};
    return delta->elements == count && same_streams(delta, &expected);
}

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

/* No dtype has 16 bytes yet: the kernels are called directly. */
TEST(every_set_compares_elements_of_16_bytes)
{
    enum { COUNT = MLS_DELTA_BLOCK_BYTES / 16 };
    static uint16_t numbers[2 * COUNT + MLS_DELTA_SURE];
    for (size_t d = 0; d < sizeof densities / sizeof densities[0]; d++) {
        for (size_t count = COUNT - 40; count <= COUNT; count++) {
            fill_arrays(count, 16, densities[d]);
            if (densities[d] == 1000) { /* both halves of every element differ */
                for (size_t i = 0; i < count * 16; i++) {
                    changed[i] = (unsigned char)~base[i];
                }
            }
            EACH_CPU (cpu) {
                const size_t changes =
                    mls_delta_kernels_of(cpu)->compare[4](base, changed, count, numbers);
                size_t next = 0;
                for (size_t i = 0; i < count; i++) {
                    if (memcmp(base + i * 16, changed + i * 16, 16) != 0) {
                        CHECK(next < changes && numbers[next] == i);
                        next++;
                    }
                }
                CHECK(next == changes);
            }
        }
    }
}
