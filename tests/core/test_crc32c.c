/* CRC32C: known answers, and every variant against the oracle. */
#include "crc32c.h"
#include "runner.h"

#include <stdlib.h>

/* Pseudo-random bytes, the same on every machine. */
static void fill_noise(unsigned char *data, size_t bytes, uint32_t seed)
{
    for (size_t i = 0; i < bytes; i++) {
        seed = seed * 1664525U + 1013904223U;
        data[i] = (unsigned char)(seed >> 24);
    }
}

static void known_answers_of_rfc_3720(void)
{
    unsigned char zeros[32] = {0}, ones[32], up[32], down[32];
    static const unsigned char command[48] = {
        0x01, 0xc0, 0, 0, 0, 0, 0,    0, 0, 0, 0, 0,    0, 0, 0, 0,
        0x14, 0,    0, 0, 0, 0, 0x04, 0, 0, 0, 0, 0x14, 0, 0, 0, 0x18,
        0x28, 0,    0, 0, 0, 0, 0,    0, 2, 0, 0, 0,    0, 0, 0, 0};
    for (int i = 0; i < 32; i++) {
        ones[i] = 0xFF;
        up[i] = (unsigned char)i;
        down[i] = (unsigned char)(31 - i);
    }
    for (int cpu = 0; cpu < MLS_CPU_COUNT; cpu++) {
        if (!mls_cpu_offers((mls_cpu)cpu)) {
            continue;
        }
        const mls_crc_kernels *k = mls_crc_of((mls_cpu)cpu);
        CHECK(k->update(0, "", 0) == 0);
        CHECK(k->update(0, "123456789", 9) == 0xE3069283U);
        CHECK(k->update(0, zeros, 32) == 0x8A9136AAU);
        CHECK(k->update(0, ones, 32) == 0x62A8AB43U);
        CHECK(k->update(0, up, 32) == 0x46DD794EU);
        CHECK(k->update(0, down, 32) == 0x113FDB5CU);
        CHECK(k->update(0, command, 48) == 0xD9963A56U);
    }
}

/* Lengths on both sides of every lane size besides the short ones. */
static size_t length_of(size_t i)
{
    static const size_t longer[] = {191,   192,   193,   1535,  1536,  1545,
                                    3000,  12287, 12288, 12289, 13900, 24575,
                                    24576, 24583, 49152, 49159, 50000};
    return i <= 300 ? i : longer[i - 301];
}
enum { LENGTHS = 301 + 17, ROOM = 50100 };

static void every_variant_agrees_with_the_oracle(void)
{
    unsigned char *data = malloc(ROOM), *copy = malloc(ROOM);
    REQUIRE(data != NULL && copy != NULL);
    fill_noise(data, ROOM, 7);
    for (int cpu = 1; cpu < MLS_CPU_COUNT; cpu++) {
        if (!mls_cpu_offers((mls_cpu)cpu)) {
            continue;
        }
        const mls_crc_kernels *k = mls_crc_of((mls_cpu)cpu);
        for (size_t i = 0; i < LENGTHS; i++) {
            const size_t bytes = length_of(i);
            for (size_t shift = 0; shift < (i <= 300 ? 16 : 3); shift++) {
                const uint32_t start = (uint32_t)(i * 2654435761U);
                const uint32_t wanted = mls_crc_scalar.update(start, data + shift, bytes);
                CHECK(k->update(start, data + shift, bytes) == wanted);
                memset(copy, 0xA5, ROOM);
                unsigned char *to = copy + (shift * 7) % 16 + 1;
                CHECK(k->copy(start, to, data + shift, bytes) == wanted);
                CHECK(memcmp(to, data + shift, bytes) == 0);
                CHECK(to[-1] == 0xA5 && to[bytes] == 0xA5);
            }
        }
    }
    free(data);
    free(copy);
}

static void the_oracle_copies_too(void)
{
    unsigned char data[100], copy[102] = {0};
    fill_noise(data, sizeof data, 3);
    CHECK(mls_crc_scalar.copy(5, copy + 1, data, 100) ==
          mls_crc_scalar.update(5, data, 100));
    CHECK(memcmp(copy + 1, data, 100) == 0 && copy[0] == 0 && copy[101] == 0);
}

static void checksums_of_parts_combine_to_that_of_the_whole(void)
{
    unsigned char *data = malloc(ROOM);
    REQUIRE(data != NULL);
    fill_noise(data, ROOM, 11);
    const mls_crc_kernels *k = &mls_crc_scalar;
    for (size_t i = 0; i < LENGTHS; i++) {
        const size_t bytes = length_of(i);
        const uint32_t whole = k->update(0, data, bytes);
        for (size_t part = 0; part < 9; part++) {
            const size_t cut = bytes * part / 8;
            const uint32_t a = k->update(0, data, cut);
            const uint32_t b = k->update(0, data + cut, bytes - cut);
            CHECK(mls_crc_combine(a, b, bytes - cut) == whole);
            CHECK(k->update(a, data + cut, bytes - cut) == whole);
        }
    }
    free(data);
}

/* (a + b) + c = a + (b + c), with lengths that no memory holds. */
static void combining_is_associative_for_huge_lengths(void)
{
    const uint32_t a = 0x12345678U, b = 0x9ABCDEF0U, c = 0x0F1E2D3CU;
    for (unsigned bits = 0; bits < 62; bits += 3) {
        const uint64_t bytes_b = ((uint64_t)1 << bits) + 5;
        const uint64_t bytes_c = ((uint64_t)3 << bits) / 2 + bits;
        const uint32_t left = mls_crc_combine(mls_crc_combine(a, b, bytes_b), c, bytes_c);
        const uint32_t right =
            mls_crc_combine(a, mls_crc_combine(b, c, bytes_c), bytes_b + bytes_c);
        CHECK(left == right);
    }
    CHECK(mls_crc_combine(a, 0, 0) == a);
    CHECK(mls_crc_combine(0, b, 1234567) == b);
}

static const test_case tests[] = {
    TEST(known_answers_of_rfc_3720),
    TEST(every_variant_agrees_with_the_oracle),
    TEST(the_oracle_copies_too),
    TEST(checksums_of_parts_combine_to_that_of_the_whole),
    TEST(combining_is_associative_for_huge_lengths),
};

int main(void)
{
    return RUN_TESTS(tests);
}
