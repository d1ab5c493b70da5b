/* footprint: how much memory this process uses, and how much it may use.
 *
 * The files of Linux are short texts.  They are read whole into small buffers; a line
 * that does not fit, or says what is not understood, counts as one that is not there.
 */
#include "runtime/process_memory.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__APPLE__)
#    include <mach/mach.h>
#    include <sys/sysctl.h>
#elif defined(__linux__)
#    include <unistd.h>
#endif

enum { PATH_BYTES = 4096, TEXT_BYTES = 8192 };

/* ---- limits of control groups ---- */

/* Read a file as text, cut to `room`; false where it cannot be read. */
static bool read_text(const char *path, char *text, size_t room)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        return false;
    }
    const size_t length = fread(text, 1, room - 1, file);
    const bool good = ferror(file) == 0;
    text[length] = '\0';
    fclose(file);
    return good;
}

/* The number that a file starts with; UINT64_MAX where there is none ("max" means that
 * there is no limit). */
static uint64_t number_in(const char *path)
{
    char text[64];
    if (!read_text(path, text, sizeof text) || text[0] < '0' || text[0] > '9') {
        return UINT64_MAX;
    }
    return strtoull(text, NULL, 10); /* ULLONG_MAX where it is too large */
}

/* The least limit of one group and its parents: `path` loses one part after the other.
 * Seen from inside a container the path may lead nowhere, and the root be the group. */
static uint64_t limit_of_group(const char *root, const char *mount, char *path,
                               const char *file)
{
    char name[PATH_BYTES + 256];
    uint64_t least = UINT64_MAX;
    for (;;) {
        const int length =
            snprintf(name, sizeof name, "%s%s%s/%s", root, mount, path, file);
        const uint64_t limit =
            length > 0 && (size_t)length < sizeof name ? number_in(name) : UINT64_MAX;
        least = limit < least ? limit : least;
        /* at last the path is empty, and the root itself was asked */
        char *slash = strrchr(path, '/');
        if (slash == NULL) {
            return least;
        }
        *slash = '\0';
    }
}

/* Whether `list`, names with commas between them, has "memory". */
static bool controls_memory(const char *list, size_t length)
{
    static const char wanted[] = "memory";
    const size_t size = sizeof wanted - 1;
    for (const char *at = list, *end = list + length; at < end;) {
        /* names that only begin with it ("memoryless") are other names */
        const char *comma = memchr(at, ',', (size_t)(end - at));
        const char *stop = comma == NULL ? end : comma;
        if ((size_t)(stop - at) == size && memcmp(at, wanted, size) == 0) {
            return true;
        }
        at = stop + 1;
    }
    return false;
}

/* The limit by one line, "number:controllers:path"; no controllers mean version 2. */
static uint64_t limit_by_line(const char *root, const char *line, size_t length)
{
    char path[PATH_BYTES];
    const char *first = memchr(line, ':', length);
    const char *second =
        first == NULL ? NULL
                      : memchr(first + 1, ':', length - (size_t)(first + 1 - line));
    if (second == NULL) {
        return UINT64_MAX;
    }
    const size_t named = (size_t)(second - first - 1);
    const size_t rest = length - (size_t)(second + 1 - line);
    if (rest >= sizeof path || (named > 0 && !controls_memory(first + 1, named))) {
        return UINT64_MAX;
    }
    /* cut apart by limit_of_group, so it is copied */
    memcpy(path, second + 1, rest);
    path[rest] = '\0';
    return named == 0 ? limit_of_group(root, "", path, "memory.max")
                      : limit_of_group(root, "/memory", path, "memory.limit_in_bytes");
}

/* Version 1 has a line for each controller, version 2 one line, mixed systems both. */
uint64_t mls_footprint_limit(const char *root, const char *memberships)
{
    uint64_t least = UINT64_MAX;
    for (const char *line = memberships; *line != '\0';) {
        const size_t length = strcspn(line, "\n");
        const uint64_t limit = limit_by_line(root, line, length);
        least = limit < least ? limit : least;
        line += length + (line[length] == '\n');
    }
    return least;
}

/* ---- the system's figures ---- */

#if defined(__linux__)

/* The kilobytes of a line such as "VmRSS:  1234 kB" as bytes; 0 where there is none. */
static uint64_t field_of(const char *text, const char *field)
{
    const char *line = strstr(text, field);
    return line == NULL ? 0 : strtoull(line + strlen(field), NULL, 10) * 1024;
}

/* Resident pages are the second number of statm, which is exact where the sums of
 * /proc/self/status lag behind; only the latter knows the peak. */
static bool read_system(mls_footprint *out)
{
    char text[TEXT_BYTES];
    const long page = sysconf(_SC_PAGESIZE), pages = sysconf(_SC_PHYS_PAGES);
    uint64_t resident = 0;
    if (page <= 0 || pages <= 0 || !read_text("/proc/self/statm", text, sizeof text) ||
        sscanf(text, "%*u %" SCNu64, &resident) != 1) {
        return false;
    }
    out->used = resident * (uint64_t)page;
    out->peak = read_text("/proc/self/status", text, sizeof text)
                    ? field_of(text, "\nVmHWM:")
                    : 0;
    out->total = (uint64_t)pages * (uint64_t)page;
    const uint64_t limit = read_text("/proc/self/cgroup", text, sizeof text)
                               ? mls_footprint_limit("/sys/fs/cgroup", text)
                               : UINT64_MAX;
    out->total = limit < out->total ? limit : out->total;
    return true;
}

#elif defined(__APPLE__)

/* What `footprint` and Activity Monitor call resident size. */
static bool read_system(mls_footprint *out)
{
    struct mach_task_basic_info info;
    mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
    uint64_t total = 0;
    size_t size = sizeof total;
    if (task_info(mach_task_self(), MACH_TASK_BASIC_INFO, (task_info_t)&info, &count) !=
            KERN_SUCCESS ||
        sysctlbyname("hw.memsize", &total, &size, NULL, 0) != 0) {
        return false;
    }
    *out = (mls_footprint){
        .used = info.resident_size, .peak = info.resident_size_max, .total = total};
    return true;
}

#else

/* Elsewhere: an honest refusal. */
static bool read_system(mls_footprint *out)
{
    (void)out;
    return false;
}

#endif

/* Nothing is cached: the numbers are of the moment of the call. */
mls_code mls_footprint_read(mls_footprint *out, mls_status *st)
{
    mls_footprint found = {0};
    if (!read_system(&found)) {
        return mls_fail_os(st, ENOSYS,
                           "the system does not tell how much memory is in use");
    }
    /* the two come from different files, and memory may have grown in between */
    found.peak = found.peak < found.used ? found.used : found.peak;
    *out = found;
    return MLS_OK;
}
