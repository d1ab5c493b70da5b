/* crc32c_armv8: CRC32C with the CRC extension of ARMv8.
 *
 * Lanes (crc32c_interleave.h) are joined by a plain multiplication, which needs no
 * further extension. It is slow, but there are only long lanes, so it is rare.
 */
#include "crc32c/crc32c.h"

#include "crc32c/crc32c_constants.h"

#if defined(__aarch64__)

#    include <stdbool.h>
#    include <string.h>

#    if defined(__linux__)
#        include <sys/auxv.h>
#    endif

#    if defined(__clang__)
#        define CRC "crc" /* clang accepts "+crc" from version 16 on only */
#    else
#        define CRC "+crc"
#    endif
#    define TARGET        __attribute__((target(CRC)))
#    define TARGET_INLINE static inline __attribute__((always_inline, target(CRC)))

typedef uint32_t crc_word;

/* A lane of `bytes` bytes, x**(8 * bytes) and x**(16 * bytes). */
typedef struct lane_size {
    size_t bytes;
    uint32_t past_one, past_two;
} lane_size;

static const lane_size sizes[] = {{8192, 0x28461564U, 0xbf455269U}};

/* Return whether the processor has the CRC extension. Asks the system, because user code
 * may not read the feature registers. */
bool mls_crc_arm_offered(void)
{
#    if defined(__linux__)
    enum { CRC_BIT = 1 << 7 }; /* HWCAP_CRC32; optional in the first version of ARMv8 */
    return (getauxval(AT_HWCAP) & CRC_BIT) != 0;
#    else
    return true; /* every Mac has it */
#    endif
}

/* Inline assembly, because compilers differ in the names of the intrinsics and their
 * header. The function's target attribute makes the assembler accept it. */
TARGET_INLINE crc_word add_word(crc_word crc, uint64_t word)
{
    uint32_t result;
    __asm__("crc32cx %w0, %w1, %x2" : "=r"(result) : "r"(crc), "r"(word));
    return result;
}

TARGET_INLINE crc_word add_byte(crc_word crc, unsigned char byte)
{
    uint32_t result;
    __asm__("crc32cb %w0, %w1, %w2" : "=r"(result) : "r"(crc), "r"((uint32_t)byte));
    return result;
}

/* Return `crc` moved past the bytes that `power` represents. */
TARGET_INLINE crc_word shift_checksum(crc_word crc, uint32_t power)
{
    return mls_crc_multiply(crc, power);
}

#    include "crc32c/crc32c_interleave.h"

const mls_crc_kernels mls_crc_arm = {.update = update_run,
                                     .copy = copy_run,
                                     .copy_variants = MLS_STORE_BIT(MLS_STORE_CACHED)};

#endif
