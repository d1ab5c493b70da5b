/* copy_neon: convert with NEON, 16 bytes of destination at a time.
 *
 * Every arm64 processor has NEON, so no run-time check is needed. NEON converts float16.
 * Instructions for bfloat16 are an optional extension, so integer arithmetic converts it,
 * as in float_convert.h.
 *
 * The C library does plain copies, since it knows the best stores for each core. The
 * table has no variant that bypasses the cache.
 */
#include "array/copy/copy_kernels.h"

#if defined(__aarch64__)

#    include <arm_neon.h>
#    include <string.h>

enum { WIDTH = 16 }; /* bytes of a vector */

typedef uint8x16_t (*vector_function)(const unsigned char *src);

/* Load 8 items of 2 bytes, or 4 of 4 bytes, from any address. */
static inline uint16x8_t load_u16(const unsigned char *src)
{
    return vreinterpretq_u16_u8(vld1q_u8(src));
}

static inline uint32x4_t load_u32(const unsigned char *src)
{
    return vreinterpretq_u32_u8(vld1q_u8(src));
}

/* Round 4 floats to bfloat16, ties to even; NaN stays a quiet NaN. The function adds just
 * less than half a unit, and one more if the result would be odd, so that a carry reaches
 * the upper half exactly if the value rounds up. */
static inline uint16x4_t to_bf16(uint32x4_t bits)
{
    const uint32x4_t magnitude = vandq_u32(bits, vdupq_n_u32(0x7FFFFFFFU));
    const uint32x4_t nan = vcgtq_u32(magnitude, vdupq_n_u32(0x7F800000U));
    const uint32x4_t upper = vshrq_n_u32(bits, 16);
    const uint32x4_t odd = vandq_u32(upper, vdupq_n_u32(1));
    const uint32x4_t bias = vaddq_u32(odd, vdupq_n_u32(0x7FFFU));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, bias), 16);
    const uint32x4_t quiet = vorrq_u32(upper, vdupq_n_u32(0x40U));
    return vmovn_u32(vbslq_u32(nan, quiet, rounded));
}

/* Convert 4 floats to float16 in the thread's rounding mode: to nearest, unless changed.
 */
static inline uint16x4_t to_f16(uint32x4_t bits)
{
    return vreinterpret_u16_f16(vcvt_f16_f32(vreinterpretq_f32_u32(bits)));
}

/* Convert 4 float16 to the bits of floats; always exact. */
static inline uint32x4_t from_f16(uint16x4_t f16)
{
    return vreinterpretq_u32_f32(vcvt_f32_f16(vreinterpret_f16_u16(f16)));
}

/* Convert 4 bfloat16 to the bits of floats: each is the upper half of a float. */
static inline uint32x4_t from_bf16(uint16x4_t bf16)
{
    return vshll_n_u16(bf16, 16);
}

static inline uint8x16_t join_lanes(uint16x4_t low, uint16x4_t high)
{
    return vreinterpretq_u8_u16(vcombine_u16(low, high));
}

/* vector_A_B reads the A elements for one register of B and converts them: 4 elements if
 * 2-byte items become 4-byte items, else 8. */
static inline uint8x16_t vector_f32_f16(const unsigned char *src)
{
    return join_lanes(to_f16(load_u32(src)), to_f16(load_u32(src + 16)));
}

static inline uint8x16_t vector_f32_bf16(const unsigned char *src)
{
    return join_lanes(to_bf16(load_u32(src)), to_bf16(load_u32(src + 16)));
}

static inline uint8x16_t vector_f16_f32(const unsigned char *src)
{
    return vreinterpretq_u8_u32(from_f16(vreinterpret_u16_u8(vld1_u8(src))));
}

static inline uint8x16_t vector_bf16_f32(const unsigned char *src)
{
    return vreinterpretq_u8_u32(from_bf16(vreinterpret_u16_u8(vld1_u8(src))));
}

static inline uint8x16_t vector_f16_bf16(const unsigned char *src)
{
    const uint16x8_t f16 = load_u16(src);
    return join_lanes(to_bf16(from_f16(vget_low_u16(f16))),
                      to_bf16(from_f16(vget_high_u16(f16))));
}

static inline uint8x16_t vector_bf16_f16(const unsigned char *src)
{
    const uint16x8_t bf16 = load_u16(src);
    return join_lanes(to_f16(from_bf16(vget_low_u16(bf16))),
                      to_f16(from_bf16(vget_high_u16(bf16))));
}

/* Convert a run: whole vectors, then the scalar rest. Inlined into each conversion, so
 * that `vector` is not a function call. */
static inline __attribute__((always_inline)) void
convert_run(unsigned char *dst, const unsigned char *src, size_t count, size_t from_bytes,
            size_t to_bytes, vector_function vector, mls_convert_run scalar)
{
    const size_t lanes = WIDTH / to_bytes;
    for (; count >= lanes; count -= lanes) {
        vst1q_u8(dst, vector(src));
        dst += WIDTH, src += lanes * from_bytes;
    }
    scalar(dst, src, count, MLS_STORE_PLAIN);
}

#    define DEFINE_RUN(from, to, from_bytes, to_bytes)                                   \
        static void from##_##to(void *dst, const void *src, size_t count,                \
                                mls_store store)                                         \
        {                                                                                \
            (void)store;                                                                 \
            convert_run(dst, src, count, from_bytes, to_bytes, vector_##from##_##to,     \
                        mls_run_##from##_##to);                                          \
        }

DEFINE_RUN(f16, bf16, 2, 2)
DEFINE_RUN(f16, f32, 2, 4)
DEFINE_RUN(bf16, f16, 2, 2)
DEFINE_RUN(bf16, f32, 2, 4)
DEFINE_RUN(f32, f16, 4, 2)
DEFINE_RUN(f32, bf16, 4, 2)

static void copy_run(void *dst, const void *src, size_t bytes, mls_store store)
{
    (void)store;
    memcpy(dst, src, bytes);
}

/* Any alignment works: the size of a register is a multiple of the pattern's size. */
static void fill_run(void *dst, uint64_t pattern, size_t bytes, mls_store store)
{
    unsigned char *to = dst;
    if (mls_pattern_is_byte(pattern)) {
        memset(dst, (int)(pattern & 0xFFU), bytes);
        return;
    }
    const uint8x16_t vector = vreinterpretq_u8_u64(vdupq_n_u64(pattern));
    for (; bytes >= WIDTH; bytes -= WIDTH, to += WIDTH) {
        vst1q_u8(to, vector);
    }
    mls_kernels_scalar.fill(to, pattern, bytes, store);
}

const mls_kernels mls_kernels_neon = {
    .cpu = MLS_CPU_NEON,
    .copy_variants = MLS_STORE_BIT(MLS_STORE_PLAIN),
    .variants = MLS_STORE_BIT(MLS_STORE_PLAIN),
    .copy = copy_run,
    .fill = fill_run,
    .convert = MLS_CONVERT_TABLE,
};

#endif
