/* shm_ranks: the same function on every rank of a group, in threads or in processes. */
#ifndef LOCAL_RANKS_H
#define LOCAL_RANKS_H

#include "collectives/shm_group.h"
#include "support/runner.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS_MOST = 6 };

/* The arguments of a rank; failures of a forked rank are passed by its exit status. */
typedef struct rank_case {
    mls_shm *g;
    size_t rank, world;
    void (*run)(struct rank_case *c);
    atomic_int failures;
    mls_status st; /* for its calls */
} rank_case;

/* CHECK is not thread-safe, so ranks count their own failures. */
#define EXPECT(c, condition)                                                             \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            printf("    %s:%d: rank %zu: %s\n", __FILE__, __LINE__, (c)->rank,           \
                   #condition);                                                          \
            atomic_fetch_add(&(c)->failures, 1);                                         \
        }                                                                                \
    } while (0)

static const mls_shm_call quick = {.timeout = 20};

static inline void *rank_main(void *argument)
{
    rank_case *c = argument;
    c->run(c);
    mls_shm_free(c->g);
    return NULL;
}

static inline void threads_with(mls_cpu cpu, mls_shm_shape shape,
                                void (*run)(rank_case *c))
{
    static rank_case cases[RANKS_MOST];
    mls_shm *groups[RANKS_MOST];
    pthread_t threads[RANKS_MOST];
    mls_status st;
    REQUIRE(mls_shm_threads(&shape, mls_kernels_of(cpu), groups, &st) == MLS_OK);
    for (size_t r = 0; r < shape.world; r++) {
        cases[r] =
            (rank_case){.g = groups[r], .rank = r, .world = shape.world, .run = run};
        REQUIRE(pthread_create(&threads[r], NULL, rank_main, &cases[r]) == 0);
    }
    for (size_t r = 0; r < shape.world; r++) {
        pthread_join(threads[r], NULL);
        CHECK(cases[r].failures == 0);
    }
}

static inline void in_threads(mls_shm_shape shape, void (*run)(rank_case *c))
{
    threads_with(MLS_CPU_SCALAR, shape, run);
}

/* An unlinked file of zeros; in memory if possible, as for the groups of the package:
 * with a busy disk, ranks would wait for it. */
static inline int shared_file(size_t bytes)
{
#if defined(__linux__)
    const int fd = memfd_create("mlstate-local", MFD_CLOEXEC);
#else
    char name[] = "/tmp/mlstate-local-XXXXXX";
    const int fd = mkstemp(name);
    if (fd >= 0) {
        unlink(name);
    }
#endif
    if (fd >= 0 && ftruncate(fd, (off_t)bytes) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

#if !defined(WITHOUT_FORK)
static inline void forked_rank(const mls_shm_shape *shape, size_t rank, int fd,
                               void (*run)(rank_case *c))
{
    rank_case c = {.rank = rank, .world = shape->world};
    alarm(60);
    if (mls_shm_join(shape, rank, fd, mls_kernels_of(MLS_CPU_SCALAR), &c.g, &c.st) !=
        MLS_OK) {
        printf("    rank %zu: %s\n", rank, c.st.text);
        fflush(stdout);
        _exit(99);
    }
    run(&c);
    mls_shm_free(c.g);
    fflush(stdout);
    _exit(c.failures == 0 ? 0 : 1);
}

/* `killed` is a rank that ends by SIGKILL, or -1. Nothing without fork. */
static inline void in_processes(mls_shm_shape shape, void (*run)(rank_case *c),
                                int killed)
{
    pid_t pids[RANKS_MOST];
    size_t bytes;
    mls_status st;
    REQUIRE(mls_shm_measure(&shape, &bytes, &st) == MLS_OK);
    const int fd = shared_file(bytes);
    REQUIRE(fd >= 0);
    fflush(stdout);
    for (size_t r = 0; r < shape.world; r++) {
        pids[r] = fork();
        REQUIRE(pids[r] >= 0);
        if (pids[r] == 0) {
            forked_rank(&shape, r, fd, run);
        }
    }
    for (size_t r = 0; r < shape.world; r++) {
        int ended = 0;
        waitpid(pids[r], &ended, 0);
        if ((int)r == killed) {
            CHECK(WIFSIGNALED(ended) && WTERMSIG(ended) == SIGKILL);
        } else {
            CHECK(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
        }
    }
    close(fd);
}
#else
static inline void in_processes(mls_shm_shape shape, void (*run)(rank_case *c),
                                int killed)
{
    (void)shape, (void)run, (void)killed;
}
#endif

/* Small slots, so that operations take many steps. */
static const mls_shm_shape shapes[] = {
    {.world = 1},
    {.world = 2, .slot_bytes = 4096, .depth = 2},
    {.world = 2},
    {.world = 3, .slot_bytes = 4096, .depth = 3},
    {.world = 5, .slot_bytes = 4096},
};

enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static inline void everywhere(void (*run)(rank_case *c))
{
    for (size_t i = 0; i < SHAPES; i++) {
        in_threads(shapes[i], run);
        in_processes(shapes[i], run, -1);
    }
}

#endif
