/* thread_pool: runs a function on many indices with a few threads; default number of
 * threads; pools after a fork.
 *
 * One atomic counter hands out the work: each thread takes the next index until none is
 * left, so a slow thread does not delay the rest. The calling thread works too.
 *
 * The only possible failure is a missing helper thread. The other threads then do its
 * work, so mls_pool_run needs no status. There are two locks, always taken in this order:
 * `busy` (one run at a time), then the `lock` of worker_threads (helpers that join and
 * leave).
 */
#include "runtime/thread_pool.h"

#include "base/memory.h"
#include "runtime/cpu_features.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

/* The helpers of a pool in one process, and their current round: one call of
 * run_with_workers. A forked child abandons its parent's, whose locks may be held by
 * threads that do not exist in the child, and makes its own. */
typedef struct worker_threads {
    pthread_mutex_t lock;
    pthread_cond_t wake;     /* a new round, or closing */
    pthread_cond_t finished; /* the last helper left the round */
    uint64_t round;          /* counts runs; a helper joins each round once */
    bool closing;
    size_t inside;      /* helpers that joined the round and have not left it */
    size_t open_places; /* helpers that may still join the round */
    mls_task task;
    void *context;
    size_t count;       /* indices of the round */
    atomic_size_t next; /* the next index to hand out */
    size_t started;     /* number of helpers */
    pthread_t helpers[MLS_POOL_MAX_THREADS];
} worker_threads;

/* The helpers are separate from the pool because fork copies the pool but not the
 * threads: a child replaces `worker_threads` only. */
struct mls_pool {
    pthread_mutex_t busy; /* held during a run or a resize */
    atomic_size_t threads;
    _Atomic(pid_t) owner; /* the process that `worker_threads` and `busy` belong to;
                             negative while that process takes over from its parent */
    worker_threads *worker_threads; /* NULL until a run needs helpers */
};

/* Run the task of the round for one index after the other until none is left. The counter
 * can be relaxed: every helper takes the lock before and after, which orders memory. */
static void take_indices(worker_threads *workers)
{
    for (;;) {
        const size_t i =
            atomic_fetch_add_explicit(&workers->next, 1, memory_order_relaxed);
        if (i >= workers->count) {
            return;
        }
        workers->task(workers->context, i);
    }
}

/* Main loop of a helper; `argument` is its worker_threads. Waits for a new round that
 * still accepts helpers, works, and signals the caller when the last helper leaves. Holds
 * the lock except while it works. Returns NULL once the helpers are closing. */
static void *helper_main(void *argument)
{
    worker_threads *workers = argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&workers->lock);
    while (!workers->closing) {
        if (workers->round == seen || workers->open_places == 0) {
            pthread_cond_wait(&workers->wake, &workers->lock);
            continue;
        }
        seen = workers->round;
        workers->open_places--;
        workers->inside++;
        pthread_mutex_unlock(&workers->lock);
        take_indices(workers);
        pthread_mutex_lock(&workers->lock);
        workers->inside--;
        if (workers->inside == 0) {
            pthread_cond_signal(&workers->finished);
        }
    }
    pthread_mutex_unlock(&workers->lock);
    return NULL;
}

/* Allocate the state of a pool's helpers, none of them started. Returns NULL if memory
 * runs out. */
static worker_threads *workers_new(void)
{
    worker_threads *workers = mls_alloc(1, sizeof *workers);
    if (workers == NULL) {
        return NULL;
    }
    pthread_mutex_init(&workers->lock, NULL);
    pthread_cond_init(&workers->wake, NULL);
    pthread_cond_init(&workers->finished, NULL);
    return workers;
}

/* Stop and join all helpers. Accepts NULL. */
static void workers_free(worker_threads *workers)
{
    if (workers == NULL) {
        return;
    }
    pthread_mutex_lock(&workers->lock);
    workers->closing = true;
    pthread_cond_broadcast(&workers->wake);
    pthread_mutex_unlock(&workers->lock);
    for (size_t i = 0; i < workers->started; i++) {
        pthread_join(workers->helpers[i], NULL);
    }
    pthread_cond_destroy(&workers->finished);
    pthread_cond_destroy(&workers->wake);
    pthread_mutex_destroy(&workers->lock);
    mls_free(workers);
}

/* Start helpers until there are `worker_count`, or fewer if the system refuses. */
static void start_workers(worker_threads *workers, size_t worker_count)
{
    while (workers->started < worker_count &&
           pthread_create(&workers->helpers[workers->started], NULL, helper_main,
                          workers) == 0) {
        workers->started++;
    }
}

/* One run of the pool. */
typedef struct work {
    void (*caller_task)(void *context); /* called first by the calling thread, or NULL */
    mls_task task;
    void *context;
    size_t count;
} work;

static void run_caller_task(const work *w)
{
    if (w->caller_task != NULL) {
        w->caller_task(w->context);
    }
}

/* Run one round with at most `helpers` helpers: publish the task, take part, and return
 * when no helper is inside the round. After that no other thread uses the context. */
static void run_with_workers(worker_threads *workers, const work *w, size_t helpers)
{
    pthread_mutex_lock(&workers->lock);
    workers->task = w->task;
    workers->context = w->context;
    workers->count = w->count;
    atomic_store_explicit(&workers->next, 0, memory_order_relaxed);
    workers->open_places = helpers;
    workers->round++;
    pthread_cond_broadcast(&workers->wake);
    pthread_mutex_unlock(&workers->lock);

    run_caller_task(w);
    take_indices(workers);

    pthread_mutex_lock(&workers->lock);
    workers->open_places = 0; /* a helper that joined now would find no work */
    while (workers->inside > 0) {
        pthread_cond_wait(&workers->finished, &workers->lock);
    }
    pthread_mutex_unlock(&workers->lock);
}

/* Return whether a pool may have `threads` threads. The calling thread counts, so at
 * least 1 is needed. */
static bool is_thread_count(size_t threads)
{
    return threads >= 1 && threads <= MLS_POOL_MAX_THREADS;
}

static mls_code fail_thread_count(size_t threads, mls_status *st)
{
    return mls_fail(st, MLS_E_VALUE, "%zu threads: choose 1 to %d", threads,
                    (int)MLS_POOL_MAX_THREADS);
}

/* Few threads are enough: the bandwidth of memory is the limit. */
size_t mls_pool_default_threads(void)
{
    enum { ENOUGH = 4 };
    const size_t processors = mls_cpu_count();
    return processors < ENOUGH ? processors : ENOUGH;
}

/* Create a pool. No thread is started yet: most small programs never need one. */
mls_code mls_pool_new(size_t threads, mls_pool **out, mls_status *st)
{
    if (!is_thread_count(threads)) {
        return fail_thread_count(threads, st);
    }
    mls_pool *pool = mls_alloc(1, sizeof *pool);
    if (pool == NULL) {
        return mls_fail(st, MLS_E_MEMORY, "no memory for a thread pool");
    }
    pthread_mutex_init(&pool->busy, NULL);
    atomic_store(&pool->threads, threads);
    atomic_store(&pool->owner, getpid());
    *out = pool;
    return MLS_OK;
}

/* Make the pool usable in a forked child: abandon the parent's helpers and reinitialise
 * the lock. Does nothing in the process that the pool belongs to. One thread does this,
 * which it claims by storing the negative process id; the other threads of the child wait
 * for it. */
static void adopt_after_fork(mls_pool *pool)
{
    const pid_t me = getpid();
    pid_t owner = atomic_load(&pool->owner);
    while (owner != me) {
        if (owner != -me && atomic_compare_exchange_weak(&pool->owner, &owner, -me)) {
            pthread_mutex_init(&pool->busy, NULL);
            pool->worker_threads = NULL;
            atomic_store(&pool->owner, me);
        }
        owner = atomic_load(&pool->owner);
    }
}

/* Stop the helpers and free a pool. A forked child adopts the pool first, because it
 * cannot join its parent's threads. */
void mls_pool_free(mls_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    adopt_after_fork(pool);
    workers_free(pool->worker_threads);
    pthread_mutex_destroy(&pool->busy);
    mls_free(pool);
}

/* The configured number; a run may use fewer. */
size_t mls_pool_threads(const mls_pool *pool)
{
    return atomic_load(&pool->threads);
}

/* Change the number of threads. For fewer threads all helpers are stopped, and the next
 * run starts those that it needs. More threads are only recorded, and started when a run
 * needs them. */
mls_code mls_pool_resize(mls_pool *pool, size_t threads, mls_status *st)
{
    if (!is_thread_count(threads)) {
        return fail_thread_count(threads, st);
    }
    adopt_after_fork(pool);
    pthread_mutex_lock(&pool->busy);
    if (threads - 1 <
        (pool->worker_threads == NULL ? 0 : pool->worker_threads->started)) {
        workers_free(pool->worker_threads);
        pool->worker_threads = NULL;
    }
    atomic_store(&pool->threads, threads);
    pthread_mutex_unlock(&pool->busy);
    return MLS_OK;
}

/* Run `w` with helpers; the caller holds `busy`. Returns false without running anything
 * if no helper can be started. */
static bool run_with_helpers(mls_pool *pool, const work *w)
{
    const size_t threads = atomic_load(&pool->threads);
    const size_t helpers = (threads < w->count ? threads : w->count) - 1;
    if (pool->worker_threads == NULL) {
        pool->worker_threads = workers_new();
    }
    if (pool->worker_threads == NULL) {
        return false;
    }
    start_workers(pool->worker_threads, helpers);
    if (pool->worker_threads->started == 0) {
        return false;
    }
    run_with_workers(pool->worker_threads, w, helpers);
    return true;
}

/* Run the task for each index; the calling thread first runs `caller_task`. Does not wait
 * for a busy pool: the calling thread then does all the work, so a task may use the pool
 * too. */
void mls_pool_run_helped(mls_pool *pool, void (*caller_task)(void *context),
                         mls_task task, void *context, size_t count)
{
    const work w = {caller_task, task, context, count};
    if (pool != NULL && count > 1 && atomic_load(&pool->threads) > 1) {
        adopt_after_fork(pool);
        if (pthread_mutex_trylock(&pool->busy) == 0) {
            const bool done = run_with_helpers(pool, &w);
            pthread_mutex_unlock(&pool->busy);
            if (done) {
                return;
            }
        }
    }
    run_caller_task(&w);
    for (size_t i = 0; i < count; i++) {
        task(context, i);
    }
}

void mls_pool_run(mls_pool *pool, mls_task task, void *context, size_t count)
{
    mls_pool_run_helped(pool, NULL, task, context, count);
}
