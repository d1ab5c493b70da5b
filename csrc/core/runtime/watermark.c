/* gate: a counter that is read without the lock; whoever comes too early sleeps. */
#include "runtime/watermark.h"

/* Default attributes cannot fail where threads exist. */
void mls_gate_init(mls_gate *gate)
{
    atomic_init(&gate->open, 0);
    pthread_mutex_init(&gate->lock, NULL);
    pthread_cond_init(&gate->grown, NULL);
}

void mls_gate_fini(mls_gate *gate)
{
    pthread_cond_destroy(&gate->grown);
    pthread_mutex_destroy(&gate->lock);
}

/* Under the lock, so that nobody looks at the old number and falls asleep after the
 * broadcast. */
void mls_gate_open(mls_gate *gate, size_t count)
{
    pthread_mutex_lock(&gate->lock);
    atomic_store_explicit(&gate->open, count, memory_order_release);
    pthread_cond_broadcast(&gate->grown);
    pthread_mutex_unlock(&gate->lock);
}

/* Mostly the things are there long since. */
void mls_gate_wait(mls_gate *gate, size_t count)
{
    if (atomic_load_explicit(&gate->open, memory_order_acquire) >= count) {
        return;
    }
    pthread_mutex_lock(&gate->lock);
    while (atomic_load_explicit(&gate->open, memory_order_relaxed) < count) {
        pthread_cond_wait(&gate->grown, &gate->lock);
    }
    pthread_mutex_unlock(&gate->lock);
}
