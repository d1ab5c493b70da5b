/* CRC32C: known values, and every variant compared with the oracle. */
#include "crc32c/crc32c.h"
#include "crc32c/crc32c_constants.h"
#include "support/runner.h"

#include <stdbool.h>
#include <stdlib.h>

/* Pseudo-random, the same on every machine. */
static uint32_t next_noise(uint32_t *seed)
{
    *seed = *seed * 1664525U + 1013904223U;
    return *seed >> 8;
}

static void fill_noise(unsigned char *data, size_t bytes, uint32_t seed)
{
    for (size_t i = 0; i < bytes; i++) {
        data[i] = (unsigned char)(next_noise(&seed) >> 16);
    }
}

/* Every table that this machine can run, also those that mls_crc_of does not select. */
static size_t variants(const mls_crc_kernels *out[MLS_CPU_COUNT + 1])
{
    size_t count = 0;
#if defined(__x86_64__)
    if (mls_cpu_offers(MLS_CPU_AVX2)) {
        out[count++] = &mls_crc_x86;
        if (mls_crc_fold_offered()) {
            out[count++] = &mls_crc_avx2;
        }
    }
    if (mls_cpu_offers(MLS_CPU_AVX512) && mls_crc_fold_offered()) {
        out[count++] = &mls_crc_avx512;
    }
#elif defined(__aarch64__)
    if (mls_crc_arm_offered()) {
        out[count++] = &mls_crc_arm;
    }
#else
    (void)out;
#endif
    return count;
}

TEST(checksums_match_rfc_3720_vectors)
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
    const mls_crc_kernels *all[MLS_CPU_COUNT + 1];
    size_t count = variants(all);
    all[count++] = &mls_crc_scalar;
    for (size_t i = 0; i < count; i++) {
        const mls_crc_kernels *k = all[i];
        CHECK(k->update(0, "", 0) == 0);
        CHECK(k->update(0, "123456789", 9) == 0xE3069283U);
        CHECK(k->update(0, zeros, 32) == 0x8A9136AAU);
        CHECK(k->update(0, ones, 32) == 0x62A8AB43U);
        CHECK(k->update(0, up, 32) == 0x46DD794EU);
        CHECK(k->update(0, down, 32) == 0x113FDB5CU);
        CHECK(k->update(0, command, 48) == 0xD9963A56U);
    }
}

/* The table for a set is the oracle or one of those; a set never gets instructions that
 * it does not include. */
TEST(each_instruction_set_selects_a_supported_variant)
{
    const mls_crc_kernels *all[MLS_CPU_COUNT + 1];
    const size_t count = variants(all);
    CHECK(mls_crc_of(MLS_CPU_SCALAR) == &mls_crc_scalar);
    for (int cpu = 1; cpu < MLS_CPU_COUNT; cpu++) {
        if (!mls_cpu_offers((mls_cpu)cpu)) {
            continue;
        }
        const mls_crc_kernels *got = mls_crc_of((mls_cpu)cpu);
        bool is_listed = count == 0 && got == &mls_crc_scalar;
        for (size_t i = 0; i < count; i++) {
            is_listed = is_listed || got == all[i];
        }
        CHECK(is_listed);
#if defined(__x86_64__)
        CHECK(cpu == MLS_CPU_AVX512 || got != &mls_crc_avx512);
#endif
    }
}

enum {
    EDGE = 64,     /* guard bytes on either side of a copy */
    FULL = 512,    /* up to here, every length at every alignment */
    SHORT = 2048,  /* up to here, every length, each at some alignments */
    MIB = 1 << 20, /* up to here, some lengths */
    ROOM = 2 * MIB /* of a buffer */
};

/* One comparison: the checksum from `start`, computed alone and while copying; the copied
 * bytes, and the guard bytes. */
static bool agrees(const mls_crc_kernels *k, uint32_t start, const unsigned char *data,
                   size_t bytes, unsigned char *to, uint32_t expected, mls_store store)
{
    memset(to - EDGE, 0xA5, bytes + (size_t)2 * EDGE);
    bool good = k->update(start, data, bytes) == expected &&
                k->copy(start, to, data, bytes, store) == expected;
    good = memcmp(to, data, bytes) == 0 && good;
    for (size_t i = 0; i < EDGE; i++) {
        good = good && to[(ptrdiff_t)i - EDGE] == 0xA5 && to[bytes + i] == 0xA5;
    }
    return good;
}

/* All variants over one range, copied to another alignment. */
static void check_run(const unsigned char *data, unsigned char *copy, size_t bytes,
                      uint32_t start, uint32_t expected)
{
    const mls_crc_kernels *all[MLS_CPU_COUNT + 1];
    const size_t count = variants(all);
    unsigned char *to = copy + EDGE + ((uintptr_t)data * 7 + bytes) % EDGE;
    for (size_t i = 0; i < count; i++) {
        for (unsigned store = 0; store < MLS_STORES; store++) {
            CHECK(agrees(all[i], start, data, bytes, to, expected, (mls_store)store));
        }
    }
}

/* For each length the oracle continues with one more byte. */
TEST(short_buffers_match_scalar)
{
    unsigned char *data = malloc(SHORT + EDGE), *copy = malloc(SHORT + 4 * EDGE);
    REQUIRE(data != NULL && copy != NULL);
    fill_noise(data, SHORT + EDGE, 7);
    for (size_t shift = 0; shift < EDGE; shift++) {
        const uint32_t start = (uint32_t)(shift * 2654435761U);
        uint32_t expected = start;
        for (size_t bytes = 0; bytes <= SHORT; bytes++) {
            if (bytes <= FULL || (bytes + shift) % 7 == 0) {
                check_run(data + shift, copy, bytes, start, expected);
            }
            expected = mls_crc_scalar.update(expected, data + shift + bytes, 1);
        }
    }
    free(data);
    free(copy);
}

/* Lengths around the blocks of each variant: lanes, vectors and interleaved pages, which
 * start after one vector; then random lengths up to a MiB. */
static size_t longer(size_t i, uint32_t *seed)
{
    static const size_t blocks[] = {3072, 12288, 16384, 24576, 32768, 49152, 65536};
    static const size_t more[] = {0, 32, 64, 96, 128, 192, 256, 320, 1000, 13900};
    if (i < 210) {
        return blocks[i / 30] + more[i / 3 % 10] + i % 3 - 1;
    }
    return next_noise(seed) % MIB;
}
enum { LONGER = 240 };

TEST(long_buffers_match_scalar)
{
    unsigned char *data = malloc(ROOM), *copy = malloc(ROOM);
    REQUIRE(data != NULL && copy != NULL);
    fill_noise(data, ROOM, 17);
    uint32_t seed = 23;
    for (size_t i = 0; i < LONGER; i++) {
        const size_t bytes = longer(i, &seed);
        const unsigned char *from = data + i % EDGE;
        const uint32_t start = next_noise(&seed);
        const uint32_t expected = mls_crc_scalar.update(start, from, bytes);
        check_run(from, copy, bytes, start, expected);
    }
    free(data);
    free(copy);
}

/* A checksum continued over parts of any length: many short ones, some longer. */
TEST(incremental_checksums_match_scalar)
{
    const mls_crc_kernels *all[MLS_CPU_COUNT + 1];
    const size_t count = variants(all);
    unsigned char *data = malloc(MIB), *copy = malloc(MIB);
    REQUIRE(data != NULL && copy != NULL);
    fill_noise(data, MIB, 5);
    const uint32_t expected = mls_crc_scalar.update(0, data, MIB);
    uint32_t seed = 31;
    for (size_t k = 0; k < count; k++) {
        uint32_t crc = 0;
        memset(copy, 0, MIB);
        for (size_t at = 0, bytes; at < MIB; at += bytes) {
            const uint32_t limit = next_noise(&seed) % 8 == 0 ? 100000 : 1000;
            bytes = next_noise(&seed) % limit;
            bytes = bytes < MIB - at ? bytes : MIB - at;
            if (next_noise(&seed) % 2 == 0) {
                crc = all[k]->update(crc, data + at, bytes);
                memcpy(copy + at, data + at, bytes);
            } else {
                const unsigned store = next_noise(&seed) % MLS_STORES;
                crc = all[k]->copy(crc, copy + at, data + at, bytes, (mls_store)store);
            }
        }
        CHECK(crc == expected && memcmp(copy, data, MIB) == 0);
    }
    free(data);
    free(copy);
}

TEST(scalar_copies_while_checksumming)
{
    unsigned char data[100], copy[102] = {0};
    fill_noise(data, sizeof data, 3);
    CHECK(mls_crc_scalar.copy(5, copy + 1, data, 100, MLS_STORE_CACHED) ==
          mls_crc_scalar.update(5, data, 100));
    CHECK(memcmp(copy + 1, data, 100) == 0 && copy[0] == 0 && copy[101] == 0);
}

/* x to any power, in the bit order of mls_crc_multiply. */
static uint32_t power_of_x(uint64_t exponent)
{
    uint32_t power = 0x80000000U, square = 0x40000000U; /* x**0 and x**1 */
    for (; exponent != 0; exponent >>= 1) {
        power = (exponent & 1U) != 0 ? mls_crc_multiply(power, square) : power;
        square = mls_crc_multiply(square, square);
    }
    return power;
}

TEST(folding_constants_are_powers_of_x)
{
    for (int move = 0; move < MLS_CRC_MOVES; move++) {
        const mls_crc_power *p = &mls_crc_powers[move];
        CHECK(p->lower == power_of_x(8 * p->bytes + 64 - 33));
        CHECK(p->upper == power_of_x(8 * p->bytes - 33));
        CHECK(move == 0 || p->bytes > mls_crc_powers[move - 1].bytes);
    }
    CHECK(mls_crc_powers[MLS_CRC_BY_4096].bytes == 4096);
}

TEST(combined_part_checksums_equal_whole_checksum)
{
    unsigned char *data = malloc(MIB);
    REQUIRE(data != NULL);
    fill_noise(data, MIB, 11);
    const mls_crc_kernels *k = &mls_crc_scalar;
    uint32_t seed = 41;
    for (size_t i = 0; i < 340; i++) {
        const size_t bytes = i < 300 ? i : next_noise(&seed) % 100000;
        const uint32_t expected = k->update(0, data, bytes);
        for (size_t part = 0; part < 9; part++) {
            const size_t cut = bytes * part / 8;
            const uint32_t a = k->update(0, data, cut);
            const uint32_t b = k->update(0, data + cut, bytes - cut);
            CHECK(mls_crc_combine(a, b, bytes - cut) == expected);
            CHECK((mls_crc_append(a, mls_crc_zeros(bytes - cut)) ^ b) == expected);
            CHECK(k->update(a, data + cut, bytes - cut) == expected);
        }
    }
    free(data);
}

/* (a + b) + c = a + (b + c), with lengths larger than any memory. */
TEST(combining_is_associative_for_huge_lengths)
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
