/* digest_scalar: the inner loop of digests in plain C: the reference. */
#include "base/size.h"
#include "state/digest_kernels.h"

static void add_words(const mls_digest_keys *keys, size_t first,
                      const unsigned char *data, size_t words,
                      uint64_t sums[MLS_DIGEST_LANES])
{
    for (size_t i = 0; i < words; i++) {
        const uint64_t word = mls_load_le32(data + 4 * i);
        for (int lane = 0; lane < MLS_DIGEST_LANES; lane++) {
            sums[lane] += word * keys->of_word[lane][first + i];
        }
    }
}

const mls_digest_kernels mls_digest_scalar = {.add_words = add_words};
