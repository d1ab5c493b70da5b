/* ready_counter: publishes a count that threads read without a lock, or sleep for until
 * it reaches their value. */
#include "runtime/ready_counter.h"

/* Default attributes cannot fail on systems with threads. */
void mls_ready_counter_init(mls_ready_counter *counter)
{
    atomic_init(&counter->produced, 0);
    pthread_mutex_init(&counter->lock, NULL);
    pthread_cond_init(&counter->grown, NULL);
}

void mls_ready_counter_fini(mls_ready_counter *counter)
{
    pthread_cond_destroy(&counter->grown);
    pthread_mutex_destroy(&counter->lock);
}

/* The store is made under the lock, so that no waiter reads the old value and sleeps
 * after the broadcast. */
void mls_ready_counter_advance(mls_ready_counter *counter, size_t count)
{
    pthread_mutex_lock(&counter->lock);
    atomic_store_explicit(&counter->produced, count, memory_order_release);
    pthread_cond_broadcast(&counter->grown);
    pthread_mutex_unlock(&counter->lock);
}

/* Wait until the counter has reached `count`. Usually the counter has already reached
 * `count`, and the lock is not needed. */
void mls_ready_counter_wait(mls_ready_counter *counter, size_t count)
{
    if (atomic_load_explicit(&counter->produced, memory_order_acquire) >= count) {
        return;
    }
    pthread_mutex_lock(&counter->lock);
    while (atomic_load_explicit(&counter->produced, memory_order_relaxed) < count) {
        pthread_cond_wait(&counter->grown, &counter->lock);
    }
    pthread_mutex_unlock(&counter->lock);
}
