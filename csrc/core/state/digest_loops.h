/* digest_loops: the inner loop of digests for one instruction set.
 *
 * A file of kernels includes avx2.h, avx512.h or neon.h and defines `sums`, a register of
 * 64-bit integers, and add_products, which adds to its items the products of the pairs of
 * 32-bit words; then it includes this file and defines its table with `add_words`. The
 * machine is little-endian.
 */
#ifndef MLS_DIGEST_LOOPS_H
#define MLS_DIGEST_LOOPS_H

enum { WORDS = WIDTH / 4 };

MLS_INLINED words load_words(const void *from)
{
    words values;
    memcpy(&values, from, sizeof values);
    return values;
}

MLS_INLINED uint64_t total_of(sums values)
{
    uint64_t items[WIDTH / 8], total = 0;
    memcpy(items, &values, sizeof items);
    for (size_t i = 0; i < WIDTH / 8; i++) {
        total += items[i];
    }
    return total;
}

MLS_TARGET static void add_words(const mls_digest_keys *keys, size_t first,
                                 const unsigned char *data, size_t count,
                                 uint64_t totals[MLS_DIGEST_LANES])
{
    const uint32_t *const low = &keys->of_word[0][first];
    const uint32_t *const high = &keys->of_word[1][first];
    const size_t aligned = count / WORDS * WORDS;
    sums first_lane = {0}, second_lane = {0};
    for (size_t i = 0; i < aligned; i += WORDS) {
        const words values = load_words(data + 4 * i);
        first_lane = add_products(first_lane, values, load_words(low + i));
        second_lane = add_products(second_lane, values, load_words(high + i));
    }
    totals[0] += total_of(first_lane);
    totals[1] += total_of(second_lane);
    mls_digest_scalar.add_words(keys, first + aligned, data + 4 * aligned,
                                count - aligned, totals);
}

#endif
