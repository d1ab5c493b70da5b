/* A second preloaded library: it fails allocations and thread creation of one shared
 * object. All other callers, Python included, are not affected, because the tests
 * examine how that one object reacts.
 *
 * The return address identifies the calling object.  The control functions have the
 * same names as in shim.c, so that one server can drive both libraries.  Settings:
 *   MLS_ALLOC_OBJECT  part of the path of the shared object
 *   MLS_FAULT         memory:N:ENOMEM or thread:N:EAGAIN; N+ for that one and all
 * later
 */
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define CALLER ((uintptr_t)__builtin_return_address(0))

enum { MEMORY, THREAD, KINDS };

static struct {
    atomic_bool armed;
    uintptr_t low, high; /* the address range of the object */
    int kind;            /* the kind that fails; KINDS: none */
    long at;
    bool onward;
    atomic_long counts[KINDS];
    atomic_long hits;
} shim = {.kind = KINDS};

static const char *const kinds[KINDS] = {"memory", "thread"};

/* The C library's own allocator, under the names it exports for interposing libraries. */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *block, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

/* ---- settings ---- */

/* A wrong setting would test nothing and pass, so it ends the process. */
static void refuse(const char *label, const char *value)
{
    fprintf(stderr, "alloc shim: %s: '%s'\n", label, value != NULL ? value : "");
    abort();
}

static int find_object(struct dl_phdr_info *info, size_t size, void *part)
{
    (void)size;
    if (strstr(info->dlpi_name, part) == NULL) {
        return 0;
    }
    shim.low = UINTPTR_MAX;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type == PT_LOAD) {
            const uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
            const uintptr_t end = start + info->dlpi_phdr[i].p_memsz;
            shim.low = start < shim.low ? start : shim.low;
            shim.high = end > shim.high ? end : shim.high;
        }
    }
    return 1;
}

static void understand_fault(const char *fault)
{
    shim.kind = KINDS;
    for (int i = 0; fault != NULL && i < KINDS; i++) {
        const size_t length = strlen(kinds[i]);
        char *end = NULL;
        if (strncmp(fault, kinds[i], length) == 0 && fault[length] == ':') {
            shim.at = strtol(fault + length + 1, &end, 10);
            shim.onward = *end == '+';
            shim.kind = end[shim.onward] == ':' && shim.at > 0 ? i : KINDS;
        }
    }
    if (shim.kind == KINDS && fault != NULL && fault[0] != '\0') {
        refuse("MLS_FAULT makes no sense", fault);
    }
}

EXPORT void mls_shim_arm(void)
{
    char *object = getenv("MLS_ALLOC_OBJECT");
    shim.low = shim.high = 0;
    if (object == NULL || dl_iterate_phdr(find_object, object) != 1) {
        refuse("no shared object is called so", object);
    }
    understand_fault(getenv("MLS_FAULT"));
    shim.counts[MEMORY] = shim.counts[THREAD] = shim.hits = 0;
    shim.armed = true;
}

EXPORT void mls_shim_disarm(void)
{
    shim.armed = false;
}

EXPORT long mls_shim_count(const char *name)
{
    for (int i = 0; i < KINDS; i++) {
        if (strcmp(kinds[i], name) == 0) {
            return shim.counts[i];
        }
    }
    return -1;
}

EXPORT long mls_shim_hits(void)
{
    return shim.hits;
}

EXPORT void mls_shim_note(const char *text)
{
    (void)text; /* this library keeps no log */
}

/* ---- allocations and threads ---- */

static bool fails(int kind, uintptr_t caller)
{
    if (!shim.armed || caller < shim.low || caller >= shim.high) {
        return false;
    }
    const long count = atomic_fetch_add(&shim.counts[kind], 1) + 1;
    const bool hit =
        shim.kind == kind && (count == shim.at || (shim.onward && count > shim.at));
    shim.hits += hit;
    return hit;
}

/* Returns NULL and sets errno. */
static void *no_memory(void)
{
    errno = ENOMEM;
    return NULL;
}

EXPORT void *malloc(size_t bytes)
{
    return fails(MEMORY, CALLER) ? no_memory() : __libc_malloc(bytes);
}

EXPORT void *calloc(size_t count, size_t bytes)
{
    return fails(MEMORY, CALLER) ? no_memory() : __libc_calloc(count, bytes);
}

EXPORT void *realloc(void *block, size_t bytes)
{
    return fails(MEMORY, CALLER) ? no_memory() : __libc_realloc(block, bytes);
}

EXPORT void *aligned_alloc(size_t alignment, size_t bytes)
{
    return fails(MEMORY, CALLER) ? no_memory() : __libc_memalign(alignment, bytes);
}

EXPORT int posix_memalign(void **out, size_t alignment, size_t bytes)
{
    void *block = fails(MEMORY, CALLER) ? NULL : __libc_memalign(alignment, bytes);
    if (block == NULL) {
        return ENOMEM;
    }
    *out = block;
    return 0;
}

/* Anonymous mappings count as memory. */
EXPORT void *mmap(void *where, size_t bytes, int access, int flags, int fd, off_t offset)
{
    if ((flags & MAP_ANONYMOUS) != 0 && fails(MEMORY, CALLER)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, where, bytes, access, flags, fd, offset);
}

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *argument)
{
    int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (fails(THREAD, CALLER)) {
        return EAGAIN;
    }
    void *address = dlsym(RTLD_NEXT, "pthread_create");
    memcpy(&next, &address, sizeof next); /* ISO C has no such cast */
    return next(thread, attributes, start, argument);
}
