/* cpu_features: detects instruction sets, sizes of caches and the processors that a
 * process may use; MLSTATE_CPU.
 *
 * A set is offered only if the processor has the instructions, the operating system saves
 * their registers on a context switch, and the compiler targets the architecture. Each
 * set includes everything that its kernels use: the x86 sets also require the CRC and
 * carry-less multiplication instructions of crc32c_sse42.c.
 */
#include "runtime/cpu_features.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#    include <cpuid.h>
#endif
#if defined(__linux__)
#    include <sched.h>
#endif
#if defined(__APPLE__)
#    include <sys/sysctl.h>
#endif

/* Names as in MLSTATE_CPU. */
static const char *const names[MLS_CPU_COUNT] = {
    [MLS_CPU_SCALAR] = "scalar",
    [MLS_CPU_AVX2] = "avx2",
    [MLS_CPU_AVX512] = "avx512",
    [MLS_CPU_NEON] = "neon",
};

const char *mls_cpu_name(mls_cpu cpu)
{
    return names[cpu];
}

#if defined(__x86_64__)

/* Return the bits of the register sets that the operating system saves on a context
 * switch (XCR0). */
static unsigned saved_registers(void)
{
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    (void)high;
    return low;
}

enum {
    YMM_STATE = 0x6,  /* XMM and the upper halves of YMM */
    ZMM_STATE = 0xE6, /* XMM, YMM, the mask registers and all of ZMM */
    /* bits of CPUID leaf 1 (ecx) that both sets need, and of leaf 7 (ebx) */
    LEAF1_REQUIRED = bit_FMA | bit_F16C | bit_AVX | bit_POPCNT | bit_SSE4_2 | bit_PCLMUL,
    LEAF7_AVX512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512BW
};

/* Return whether this machine can run an instruction set. CPUID reports instructions,
 * XCR0 reports registers. xgetbv exists only if OSXSAVE is set, so OSXSAVE is tested
 * first. */
bool mls_cpu_offers(mls_cpu cpu)
{
    unsigned eax, ebx, ecx, edx;
    if (cpu == MLS_CPU_SCALAR) {
        return true;
    }
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & bit_OSXSAVE) == 0 ||
        (ecx & (unsigned)LEAF1_REQUIRED) != (unsigned)LEAF1_REQUIRED) {
        return false;
    }
    const unsigned saved = saved_registers();
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (ebx & bit_AVX2) == 0) {
        return false;
    }
    if (cpu == MLS_CPU_AVX2) {
        return (saved & YMM_STATE) == YMM_STATE;
    }
    return cpu == MLS_CPU_AVX512 && (saved & ZMM_STATE) == ZMM_STATE &&
           (ebx & (unsigned)LEAF7_AVX512) == (unsigned)LEAF7_AVX512 &&
           (ebx & bit_AVX512VL) != 0;
}

#elif defined(__aarch64__)

/* NEON is part of the architecture. */
bool mls_cpu_offers(mls_cpu cpu)
{
    return cpu == MLS_CPU_SCALAR || cpu == MLS_CPU_NEON;
}

#else

bool mls_cpu_offers(mls_cpu cpu)
{
    return cpu == MLS_CPU_SCALAR;
}

#endif

/* Return whether the processor prefetches sequential memory well (AMD). Use the value
 * that the compiler's runtime library stored at load time: CPUID takes microseconds under
 * a hypervisor, and every kernel calls this function. */
bool mls_cpu_follows_runs(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_is("amd") != 0;
#else
    return false;
#endif
}

/* Write the sets that this machine offers, such as "scalar, avx2", to `text`, cut off at
 * `room` bytes. */
static void list_offered(char *text, size_t room)
{
    size_t used = 0;
    for (int i = 0; i < MLS_CPU_COUNT; i++) {
        if (mls_cpu_offers((mls_cpu)i) && used < room) {
            used += (size_t)snprintf(text + used, room - used, "%s%s",
                                     used == 0 ? "" : ", ", names[i]);
        }
    }
}

/* Set `*out` to the instruction set of a name, or to the best one. The enum is ordered
 * from the simplest to the best set, so the search begins at its end. */
mls_code mls_cpu_choose(const char *name, mls_cpu *out, mls_status *st)
{
    const bool is_any_name = name == NULL || name[0] == '\0';
    for (int i = MLS_CPU_COUNT - 1; i >= 0; i--) {
        if ((is_any_name || strcmp(name, names[i]) == 0) && mls_cpu_offers((mls_cpu)i)) {
            *out = (mls_cpu)i;
            return MLS_OK;
        }
    }
    char offered[64];
    list_offered(offered, sizeof offered);
    return mls_fail(st, MLS_E_VALUE,
                    "instruction set '%.32s' is not offered here; choose one of: %s",
                    name, offered);
}

#if defined(__linux__)

/* Read the first line of the file `name` in the sysfs folder of cache number `index` into
 * `text`, which has `room` bytes. Returns false if it cannot be read. */
static bool read_cache_file(int index, const char *name, char *text, int room)
{
    char path[80];
    (void)snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s",
                   index, name);
    FILE *file = fopen(path, "re");
    const bool is_read = file != NULL && fgets(text, room, file) != NULL;
    if (file != NULL) {
        (void)fclose(file);
    }
    return is_read;
}

/* Return the size in bytes of a cache level (1 to 3) from /sys, which states it as
 * "32768K"; 0 if unknown. */
static size_t read_sys_cache_bytes(int level)
{
    enum { CACHES = 8 };
    char text[32];
    for (int index = 0; index < CACHES; index++) {
        const bool is_level = read_cache_file(index, "level", text, sizeof text) &&
                              text[0] == (char)('0' + level) &&
                              read_cache_file(index, "type", text, sizeof text) &&
                              text[0] != 'I'; /* skip instruction caches */
        if (is_level && read_cache_file(index, "size", text, sizeof text)) {
            return (size_t)strtoul(text, NULL, 10) << 10;
        }
    }
    return 0;
}

/* Return the size in bytes of a cache level (1 to 3) as the system reports it; 0 if
 * unknown. */
static size_t reported_cache_bytes(int level)
{
    const size_t bytes = read_sys_cache_bytes(level);
#    if defined(_SC_LEVEL1_DCACHE_SIZE)
    static const int levels[] = {_SC_LEVEL1_DCACHE_SIZE, _SC_LEVEL2_CACHE_SIZE,
                                 _SC_LEVEL3_CACHE_SIZE};
    if (bytes == 0) {
        const long cache_bytes = sysconf(levels[level - 1]);
        return cache_bytes > 0 ? (size_t)cache_bytes : 0;
    }
#    endif
    return bytes;
}

#elif defined(__APPLE__)

/* Return the size in bytes of a cache level (1 to 3); 0 if unknown. Asks for the fast
 * cores first: perflevel0. */
static size_t reported_cache_bytes(int level)
{
    static const char *const levels[][2] = {
        {"hw.perflevel0.l1dcachesize", "hw.l1dcachesize"},
        {"hw.perflevel0.l2cachesize", "hw.l2cachesize"},
        {"hw.perflevel0.l3cachesize", "hw.l3cachesize"}};
    uint64_t bytes = 0;
    for (int i = 0; i < 2 && bytes == 0; i++) {
        size_t room = sizeof bytes;
        if (sysctlbyname(levels[level - 1][i], &bytes, &room, NULL, 0) != 0) {
            bytes = 0;
        }
    }
    return (size_t)bytes;
}

#else

static size_t reported_cache_bytes(int level)
{
    (void)level;
    return 0;
}

#endif

/* Return the size of a cache in bytes. Use the level 2 cache as the last level without a
 * level 3 cache, and a usual size if the system reports none. */
size_t mls_cpu_cache_bytes(int level)
{
    static const size_t usual[] = {32 << 10, 1 << 20, 32 << 20};
    size_t bytes = reported_cache_bytes(level);
    if (bytes == 0 && level == 3) {
        bytes = reported_cache_bytes(2);
    }
    return bytes != 0 ? bytes : usual[level - 1];
}

/* Return the number of processors that this process may use. The process may use fewer
 * processors than the machine has, for example in containers and batch systems. */
size_t mls_cpu_count(void)
{
    long count = 1;
#if defined(__linux__)
    cpu_set_t allowed; /* the call fails with more processors than this holds */
    count = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed)
                                                                : CPU_SETSIZE;
#else
    count = sysconf(_SC_NPROCESSORS_ONLN);
#endif
    return count < 1 ? 1 : (size_t)count;
}
