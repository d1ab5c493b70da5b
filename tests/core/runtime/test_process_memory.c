#include "base/memory.h"
#include "runtime/process_memory.h"
#include "support/temporary_folder.h"

#include <sys/resource.h>
#include <sys/stat.h>

/* Write a file of the folder; creates the folders in between. */
static void put(const char *name, const char *text)
{
    char path[2 * PATH_ROOM];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    for (char *at = path + strlen(folder) + 1; *at != '\0'; at++) {
        if (*at == '/') {
            *at = '\0';
            mkdir(path, 0700);
            *at = '/';
        }
    }
    write_text(path, text);
}

TEST(cgroup_v2_limit_includes_parents)
{
    put("a/b/memory.max", "3000\n");
    put("a/memory.max", "2000\n");
    CHECK(mls_process_memory_limit(folder, "0::/a/b\n") == 2000);
    put("a/memory.max", "max\n");
    CHECK(mls_process_memory_limit(folder, "0::/a/b\n") == 3000);
    CHECK(mls_process_memory_limit(folder, "0::/a") == UINT64_MAX);
    CHECK(mls_process_memory_limit(folder, "0::/a/b/not/seen/from/here\n") == 3000);
    put("memory.max", "70");
    CHECK(mls_process_memory_limit(folder, "0::/\n") == 70);
}

TEST(cgroup_v1_reads_the_memory_controller)
{
    put("memory/job/memory.limit_in_bytes", "5000\n");
    put("memory/memory.limit_in_bytes", "9223372036854771712\n");
    CHECK(mls_process_memory_limit(folder, "9:name=x:/\n4:memory:/job\n0::/\n") == 5000);
    CHECK(mls_process_memory_limit(folder, "4:cpu,memory,pids:/job\n") == 5000);
    CHECK(mls_process_memory_limit(folder, "4:cpu,memoryless:/job\n") == UINT64_MAX);
    CHECK(mls_process_memory_limit(folder, "4:memory:/\n") ==
          UINT64_C(9223372036854771712));
}

TEST(malformed_cgroup_files_mean_unlimited)
{
    static char path[5000];
    static const char *const texts[] = {"", "\n\n", "0", "0:", "0::", ":memory", "::::"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        CHECK(mls_process_memory_limit(folder, texts[i]) == UINT64_MAX);
    }
    memset(path, 'a', sizeof path - 1);
    memcpy(path, "0::/", 4);
    CHECK(mls_process_memory_limit(folder, path) == UINT64_MAX);
    put("memory.max", "-5");
    CHECK(mls_process_memory_limit(folder, "0::/") == UINT64_MAX);
    put("memory.max", "");
    CHECK(mls_process_memory_limit(folder, "0::/") == UINT64_MAX);
}

TEST(memory_read_returns_plausible_numbers)
{
    enum { BYTES = 64 << 20 };
    mls_process_memory before, after;
#if defined(__linux__) || defined(__APPLE__)
    REQUIRE(mls_process_memory_read(&before, &status) == MLS_OK);
    CHECK(before.used > 0 && before.peak >= before.used && before.total > before.used);
    mls_pages pages = {0};
    REQUIRE(mls_pages_init(&pages, BYTES, &status) == MLS_OK);
    memset(pages.data, 1, BYTES);
    REQUIRE(mls_process_memory_read(&after, &status) == MLS_OK);
    CHECK(after.used >= before.used + BYTES / 8 * 7 && after.peak >= after.used);
    CHECK(after.total == before.total);
    mls_pages_fini(&pages);
    REQUIRE(mls_process_memory_read(&before, &status) == MLS_OK);
    CHECK(before.used < after.used - BYTES / 8 * 7);
    CHECK(before.peak >= after.used - BYTES / 8);
#else
    CHECK(mls_process_memory_read(&before, &status) == MLS_E_IO);
    (void)after;
#endif
}

#if defined(__linux__)
TEST(memory_is_unknown_without_descriptors)
{
    mls_process_memory memory;
    struct rlimit before;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
    const struct rlimit none = {.rlim_cur = 0, .rlim_max = before.rlim_max};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
    CHECK_FAILS(mls_process_memory_read(&memory, &status), MLS_E_IO,
                "the system does not report the memory in use: Function not implemented");
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
}
#endif
