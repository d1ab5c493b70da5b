/* process_memory: memory that this process uses, and the limit of its machine or
 * container: /proc, cgroups, macOS.
 *
 * Linux reports the figures in short text files, which are read whole into small buffers.
 * A line that does not fit or cannot be parsed is ignored.
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

/* Read a small file as text into `text`, cut off at `room` - 1 bytes. Returns false if it
 * cannot be read. */
static bool read_text(const char *path, char *text, size_t room)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        return false;
    }
    const size_t length = fread(text, 1, room - 1, file);
    const bool is_read = ferror(file) == 0;
    text[length] = '\0';
    fclose(file);
    return is_read;
}

/* Return the number at the start of a file; UINT64_MAX if the file is missing or has none
 * ("max" means no limit). */
static uint64_t read_number(const char *path)
{
    char text[64];
    if (!read_text(path, text, sizeof text) || text[0] < '0' || text[0] > '9') {
        return UINT64_MAX;
    }
    return strtoull(text, NULL, 10); /* ULLONG_MAX if it is too large */
}

/* Return the lowest limit, in bytes, of the group at `path` and its parents, by removing
 * the last name of `path` one after the other (`path` is changed). `file` is the name of
 * the file with the limit in each folder, under `root` and `mount`. Inside a container
 * the path may not exist, and the root is then the process's group. UINT64_MAX: none. */
static uint64_t read_group_limit(const char *root, const char *mount, char *path,
                                 const char *file)
{
    char name[PATH_BYTES + 256];
    uint64_t least = UINT64_MAX;
    for (;;) {
        const int length =
            snprintf(name, sizeof name, "%s%s%s/%s", root, mount, path, file);
        const uint64_t limit =
            length > 0 && (size_t)length < sizeof name ? read_number(name) : UINT64_MAX;
        least = limit < least ? limit : least;
        /* the last round has an empty path and reads the root itself */
        char *slash = strrchr(path, '/');
        if (slash == NULL) {
            return least;
        }
        *slash = '\0';
    }
}

/* Return whether the comma-separated `list` of `length` bytes contains the name
 * "memory". */
static bool controls_memory(const char *list, size_t length)
{
    static const char controller[] = "memory";
    const size_t size = sizeof controller - 1;
    for (const char *at = list, *end = list + length; at < end;) {
        /* compare whole names: "memoryless" is a different controller */
        const char *comma = memchr(at, ',', (size_t)(end - at));
        const char *stop = comma == NULL ? end : comma;
        if ((size_t)(stop - at) == size && memcmp(at, controller, size) == 0) {
            return true;
        }
        at = stop + 1;
    }
    return false;
}

/* Return the limit in bytes for one line of /proc/self/cgroup, "number:controllers:path",
 * of `length` bytes; UINT64_MAX: none. A line without controllers is version 2 of control
 * groups. `root` is the folder of the control groups. */
static uint64_t read_line_limit(const char *root, const char *line, size_t length)
{
    char path[PATH_BYTES];
    const char *first = memchr(line, ':', length); /* the colons around the controllers */
    const char *second =
        first == NULL ? NULL
                      : memchr(first + 1, ':', length - (size_t)(first + 1 - line));
    if (second == NULL) {
        return UINT64_MAX;
    }
    const size_t names_length = (size_t)(second - first - 1);
    const size_t path_length = length - (size_t)(second + 1 - line);
    if (path_length >= sizeof path ||
        (names_length > 0 && !controls_memory(first + 1, names_length))) {
        return UINT64_MAX;
    }
    /* a copy, because read_group_limit modifies the path */
    memcpy(path, second + 1, path_length);
    path[path_length] = '\0';
    return names_length == 0
               ? read_group_limit(root, "", path, "memory.max")
               : read_group_limit(root, "/memory", path, "memory.limit_in_bytes");
}

/* Return the lowest limit of the control groups in `memberships`. Version 1 of control
 * groups has a line for each controller, version 2 has one line, mixed systems have
 * both. */
uint64_t mls_process_memory_limit(const char *root, const char *memberships)
{
    uint64_t least = UINT64_MAX;
    for (const char *line = memberships; *line != '\0';) {
        const size_t length = strcspn(line, "\n");
        const uint64_t limit = read_line_limit(root, line, length);
        least = limit < least ? limit : least;
        line += length + (line[length] == '\n');
    }
    return least;
}

/* ---- figures of the system ---- */

#if defined(__linux__)

/* Return the bytes of the number of kilobytes that follows `field` in `text`; 0 without
 * the field. */
static uint64_t parse_kilobytes(const char *text, const char *field)
{
    const char *line = strstr(text, field);
    return line == NULL ? 0 : strtoull(line + strlen(field), NULL, 10) * 1024;
}

/* Read the figures of `*out` from /proc; false: not available. Resident pages are the
 * second number of statm, which is exact; the sums in /proc/self/status lag behind, but
 * only that file has the peak. */
static bool read_system(mls_process_memory *out)
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
                    ? parse_kilobytes(text, "\nVmHWM:")
                    : 0;
    out->total = (uint64_t)pages * (uint64_t)page;
    const uint64_t limit = read_text("/proc/self/cgroup", text, sizeof text)
                               ? mls_process_memory_limit("/sys/fs/cgroup", text)
                               : UINT64_MAX;
    out->total = limit < out->total ? limit : out->total;
    return true;
}

#elif defined(__APPLE__)

/* Read the figures of `*out`; false: not available. `used` is the same figure as the
 * resident size in the tool "footprint" and in Activity Monitor. */
static bool read_system(mls_process_memory *out)
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
    *out = (mls_process_memory){
        .used = info.resident_size, .peak = info.resident_size_max, .total = total};
    return true;
}

#else

static bool read_system(mls_process_memory *out)
{
    (void)out;
    return false;
}

#endif

/* Read the memory figures of this process. Nothing is cached: the figures are current. */
mls_code mls_process_memory_read(mls_process_memory *out, mls_status *st)
{
    mls_process_memory memory = {0};
    if (!read_system(&memory)) {
        return mls_fail_os(st, ENOSYS, "the system does not report the memory in use");
    }
    /* the two come from different files, and memory may have grown in between */
    memory.peak = memory.peak < memory.used ? memory.used : memory.peak;
    *out = memory;
    return MLS_OK;
}
