/* watermark: a counter that is read without the lock; waiters sleep until it reaches
 * their value. */
#include "runtime/watermark.h"

/* Default attributes cannot fail on systems with threads. */
void mls_watermark_init(mls_watermark *gate)
{
    atomic_init(&gate->open, 0);
    pthread_mutex_init(&gate->lock, NULL);
    pthread_cond_init(&gate->grown, NULL);
}

void mls_watermark_fini(mls_watermark *gate)
{
    pthread_cond_destroy(&gate->grown);
    pthread_mutex_destroy(&gate->lock);
}

/* The store is made under the lock, so that no waiter reads the old value and sleeps
 * after the broadcast. */
void mls_watermark_advance(mls_watermark *gate, size_t count)
{
    pthread_mutex_lock(&gate->lock);
    atomic_store_explicit(&gate->open, count, memory_order_release);
    pthread_cond_broadcast(&gate->grown);
    pthread_mutex_unlock(&gate->lock);
}

/* Fast path: usually the counter has already reached `count`. */
void mls_watermark_wait(mls_watermark *gate, size_t count)
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
