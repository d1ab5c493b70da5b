/* gate: a number that grows, and threads that wait until it has.
 *
 * One thread makes things in their order and says now and then how many there are; others
 * use them meanwhile, each when the one that it needs has been made.  What was written
 * before mls_gate_open(g, n) is seen behind mls_gate_wait(g, n).
 */
#ifndef MLS_GATE_H
#define MLS_GATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

typedef struct mls_gate {
    atomic_size_t open; /* how many there are; never fewer than before */
    pthread_mutex_t lock;
    pthread_cond_t grown;
} mls_gate;

/* Of none.  End with mls_gate_fini, when nobody waits any more. */
void mls_gate_init(mls_gate *gate);
void mls_gate_fini(mls_gate *gate);

/* The first `count` are there; SIZE_MAX: nobody is to wait any more. */
void mls_gate_open(mls_gate *gate, size_t count);

/* Wait until the first `count` are there; returns at once where they are. */
void mls_gate_wait(mls_gate *gate, size_t count);

#endif
